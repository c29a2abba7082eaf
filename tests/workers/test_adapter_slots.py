"""Several sets of adapters on one model: trained side by side, they have the bits of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM", tie_embeddings=True
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "ddp"),
    [
        ({"tp": 2, "pp": 2}, "bfloat16", {}),
        ({"dp": 4}, "float32", {"use_distributed_optimizer": True}),
        ({"dp": 4}, "bfloat16", {"use_distributed_optimizer": True}),
    ],
)
def test_sets_that_are_trained_side_by_side_have_the_bits_of_each_alone(
    launch: Launcher, folder: Path, shape: dict[str, int], dtype: str, ddp: Any
) -> None:
    """With bfloat16 the master weights are separate; a distributed optimizer has a part of them."""
    for found in launch.world(
        4,
        "tests.workers.slot_ranks:side_by_side",
        folder=folder,
        shape=shape,
        dtype=dtype,
        ddp=ddp,
    ):
        assert found["equal"] and found["differ"]
        assert found["steps"] == 3 and all(norm > 0 for norm in found["norms"])
        assert "c was not created" in found["refused"]
