"""Resuming with another dtype, with the optimizer sharded or whole, with other weights frozen.

`megaverl.config.resuming` refuses what fails here before any rank starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

RANKS = "tests.checkpoint.ranks:"
MEGATRON: dict[str, Any] = {"actor": {}}
FSDP: dict[str, Any] = {"actor": {"fsdp": {"sharding_strategy": "full_shard"}}}
WHOLE = {"ddp": {"use_distributed_optimizer": False}}


def resumed(
    launch: Launcher,
    path: Path,
    grids: dict[str, Any],
    before: dict[str, Any],
    now: dict[str, Any],
) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a run that was not stopped, and what the resumed run gives."""
    folder = make_tiny_folder(path / "model", "Qwen2ForCausalLM")
    given = {"folder": folder, "root": path / "checkpoints", "grids": grids}
    expected = launch.world(2, RANKS + "save_run", steps=[1, 2], **given, **before)[0]
    return expected, launch.world(2, RANKS + "resume_run", **given, **now)[0]


@pytest.mark.parametrize("grids", [MEGATRON, FSDP], ids=["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("before", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_another_dtype_goes_on_from_the_master_weights(
    launch: Launcher, tmp_path: Path, grids: dict[str, Any], before: str, now: str
) -> None:
    expected, found = resumed(
        launch, tmp_path, grids, {"dtype": before}, {"dtype": now}
    )
    assert found["losses"] == pytest.approx(expected, abs=4e-3)
    assert abs(expected[0] - expected[1]) > 0.1  # an update without moments would show


@pytest.mark.parametrize(
    ("grids", "before", "now"),
    [
        (MEGATRON, {}, WHOLE),
        (MEGATRON, WHOLE, {}),
        (FSDP, {"freeze": ["model.layers.0.*"]}, {}),
    ],
    ids=["sharded-to-whole", "whole-to-sharded", "unfrozen"],
)
def test_what_the_configuration_refuses_cannot_be_loaded(
    launch: Launcher,
    tmp_path: Path,
    grids: dict[str, Any],
    before: dict[str, Any],
    now: dict[str, Any],
) -> None:
    _, found = resumed(launch, tmp_path, grids, before, now)
    assert "error" in found


@pytest.mark.parametrize("grids", [MEGATRON, FSDP], ids=["megatron", "fsdp"])
def test_more_weights_can_be_frozen(
    launch: Launcher, tmp_path: Path, grids: dict[str, Any]
) -> None:
    expected, found = resumed(
        launch, tmp_path, grids, {}, {"freeze": ["model.layers.0.*"]}
    )
    assert found["losses"][0] == expected[0]
