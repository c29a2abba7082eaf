"""Prompts with images in a real vLLM, against transformers and against vLLM's own processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.config import RolloutConfig
from megaverl.errors import RolloutError
from megaverl.models.tiny import make_tiny_vision_folder
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.server_engine import ServerEngine
from megaverl.rollout.server_pool import PublishedWeights
from megaverl.rollout.vllm_images import image_places, prepare_images
from tests.launcher import Launcher, free_port
from tests.published import stack_experts
from tests.rollout.image_ranks import (
    SCALED,
    log_prob_error,
    pictures,
    written,
)
from tests.rollout.vllm_serve import vllm_servers


# vLLM's CPU build computes gated delta nets in bfloat16 only.
@pytest.mark.parametrize(
    ("family", "tp", "dtype", "tolerance"),
    [
        ("qwen2_vl", 2, "float32", 2e-5),
        ("qwen3_vl", 1, "float32", 2e-5),
        ("qwen3_5", 2, "bfloat16", 0.02),
        ("qwen3_5_moe", 1, "bfloat16", 0.02),
    ],
)
def test_the_engine_sees_what_transformers_sees(
    launch: Launcher,
    tmp_path: Path,
    family: str,
    tp: int,
    dtype: str,
    tolerance: float,
) -> None:
    folder = make_tiny_vision_folder(tmp_path / "model", family, dtype=dtype)
    if family == "qwen3_5_moe":
        stack_experts(folder)
    for found in launch.world(
        tp,
        "tests.rollout.image_ranks:answers",
        folder=str(folder),
        tp=tp,
        dtype=dtype,
    ):
        assert found["error"] < tolerance
        assert found["after"] < tolerance, (
            "what was made of images with the old weights is forgotten"
        )
        assert found["changed"] == [True, True, True, False]
        assert found["as_fresh"] == [True] * 4, "weights from an actor on Megatron-core"
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


# --- images in requests to a server --------------------------------------------------------------------------------

LENGTH = 128
SERVE = "--kv-cache-memory-bytes 20000000 --block-size 32 --max-model-len 128 --disable-log-stats --max-num-seqs 8"
TOKENS = (10, 11, 12, 13, 14, 15)


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """Run a real `vllm serve` of a model, as `megaverl serve rollout` starts it; yields its URL."""
    port = str(free_port())
    with vllm_servers(folder, model, [port], arguments=SERVE):
        yield f"http://127.0.0.1:{port}"


def weights(folder: Path, model: Any, name: str) -> PublishedWeights:
    """Return a version of the weights, with transformers' log-probs of a text."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    log_probs = tuple(
        float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)
    )
    return PublishedWeights(str(folder), name, TOKENS, log_probs, 1e-4)


def test_a_server_sees_what_transformers_sees(tmp_path: Path) -> None:
    """Before and after its vision tower changed. What it made of images with the old weights is forgotten."""
    from transformers import AutoModelForImageTextToText

    folder = make_tiny_vision_folder(tmp_path / "model", "qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    newer = make_tiny_vision_folder(tmp_path / "newer", "qwen2_5_vl")
    changed = load_file(newer / "model.safetensors")
    # Folders name the tower as vLLM does.
    scaled = SCALED["qwen2_5_vl"]
    [name] = [name for name in changed if name.endswith(scaled)]
    changed[name] *= 3.0
    save_file(changed, newer / "model.safetensors", {"format": "pt"})
    prompts = written(str(folder), pictures())
    tokens, images = [prompt for prompt, _ in prompts], [own for _, own in prompts]
    sampling, seeds = SamplingOptions(max_tokens=12), [7, 7, 7, 7]
    with served(folder, tmp_path) as url:
        servers = {"urls": [url], "poll_seconds": 0.1, "wait_seconds": 60}
        config = RolloutConfig.model_validate({"engine": "server", "servers": servers})
        engine = ServerEngine(
            folder,
            config,
            run_dir=tmp_path,
            max_model_len=LENGTH,
            stop_token_ids=[2],
            image_token=model.config.image_token_id,
        )
        try:
            engine.use(weights(folder, model, "first"))
            first = engine.generate(tokens, sampling, seeds, images=images)
            assert log_prob_error(model, prompts, first) < 2e-5
            with torch.no_grad():
                model.get_parameter(f"model.{scaled}").mul_(3.0)
            engine.use(weights(newer, model, "second"))
            second = engine.generate(tokens, sampling, seeds, images=images)
            assert log_prob_error(model, prompts, second) < 2e-5
            for before, after in list(zip(first, second, strict=True))[:3]:
                assert before.log_probs != pytest.approx(after.log_probs, abs=1e-4)
            with pytest.raises(RolloutError, match="1 places for its 2 images"):
                engine.generate(tokens[:1], sampling, seeds[:1], images=images[2:3])
        finally:
            engine.close()
