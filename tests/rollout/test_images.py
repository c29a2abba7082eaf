"""Prompts with images in a real vLLM, against transformers and against vLLM's own processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.errors import RolloutError
from megaverl.models.tiny import make_tiny_vision_folder
from megaverl.rollout.vllm_requests import image_places, prepare_images
from tests.launcher import Launcher


@pytest.mark.parametrize(("family", "tp"), [("qwen2_vl", 2), ("qwen3_vl", 1)])
def test_the_engine_sees_what_transformers_sees(
    launch: Launcher, tmp_path: Path, family: str, tp: int
) -> None:
    folder = make_tiny_vision_folder(tmp_path / "model", family)
    for found in launch.world(
        tp, "tests.rollout.image_ranks:answers", folder=str(folder), tp=tp
    ):
        assert found["error"] < 2e-5
        assert found["after"] < 2e-5, (
            "what was made of images with the old weights is forgotten"
        )
        assert found["changed"] == [True, True, True, False]
        assert found["log_probs"][0] != found["log_probs"][1], (
            "one prompt, one seed, and another image"
        )
        assert found["expanded"] and found["same_pixels"] == [True, True], (
            "as vLLM's own processor has them"
        )
        assert found["refused"] == [
            "prompt 0: its tokens have 1 places for its 2 images.",
            "prompt 0: its tokens have 0 places for its 1 images.",
        ]


def test_images_are_placed_by_their_sizes() -> None:
    assert list(image_places([1, 7, 7, 2, 7, 7, 7, 7, 3], 7, [2, 1, 3])) == [
        (1, 2),
        (4, 1),
        (5, 3),
    ]
    assert list(image_places([7, 7, 7, 1], 7, [2])) == [(0, 2)]


def test_images_that_this_machine_computes_otherwise_are_refused() -> None:
    with pytest.raises(
        RolloutError, match="attends causally over the tokens of an image"
    ):
        prepare_images("Gemma3ForConditionalGeneration")
