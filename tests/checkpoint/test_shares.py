"""All ranks write, each what it holds or an equal share of what all hold; nothing is gathered for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.models.tiny import make_tiny_folder
from megaverl.platform import platform
from tests.launcher import Launcher

platform.adapt_megatron()

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from megaverl.checkpoint import rank_shards  # noqa: E402
from megaverl.checkpoint.rank_shards import boxes_of, shares_of  # noqa: E402

RANKS = "tests.checkpoint.ranks:"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for its state to outweigh what a save says of it."""
    return make_tiny_folder(
        tmp_path_factory.mktemp("wide"),
        "Qwen3ForCausalLM",
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=512,
    )


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {}, {"ddp": {"use_distributed_optimizer": False}}],
    ids=["bfloat16", "float32", "plain-optimizer"],
)
def test_both_of_two_replicas_write_half(
    launch: Launcher, wide: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    for found in launch.world(
        2,
        RANKS + "measured_save",
        folder=wide,
        root=tmp_path,
        grids={"actor": {}},
        **options,
    ):
        assert found["written"] == pytest.approx(found["state"] / 2, rel=0.1)
        assert found["sent"] < found["state"] / 10
        assert found["taken"] < found["state"] / 10


def test_experts_are_shared_by_the_ranks_that_hold_them(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(
        tmp_path / "model",
        "Qwen3MoeForCausalLM",
        num_hidden_layers=2,
        moe_intermediate_size=256,
    )
    grids: dict[str, Any] = {"actor": {"ep": 2}}
    save = {"folder": folder, "root": tmp_path / "saves"}
    for found in launch.world(4, RANKS + "measured_save", grids=grids, **save):
        assert found["written"] == pytest.approx(found["state"] / 4, rel=0.15)
    [expected, *_] = launch.world(4, RANKS + "resume_run", grids=grids, **save)
    for sizes in ({"ep": 4}, {"pp": 2, "ep": 2}):
        for found in launch.world(
            4, RANKS + "resume_run", grids={"actor": sizes}, **save
        ):
            assert found.get("losses") == pytest.approx(expected["losses"], abs=1e-4), (
                found
            )


@pytest.mark.parametrize(
    "architecture", ["NemotronHForCausalLM", "FalconH1ForCausalLM"]
)
def test_parts_of_mamba_layers_resume_on_other_grids(
    architecture: str, launch: Launcher, tmp_path: Path
) -> None:
    """Rows of a rank's parameter belong to several arrays of the checkpoint, also with their moments.

    The second model's layers are stacked, and four ranks share its two groups.
    """
    folder = make_tiny_folder(tmp_path / "model", architecture)
    save = {"folder": folder, "root": tmp_path / "saves"}
    grids: dict[str, Any] = {"actor": {"tp": 2}}
    launch.world(4, RANKS + "measured_save", grids=grids, **save)
    [expected, *_] = launch.world(4, RANKS + "resume_run", grids=grids, **save)
    for sizes in ({"pp": 2}, {"tp": 4}):
        for found in launch.world(
            4, RANKS + "resume_run", grids={"actor": sizes}, **save
        ):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)


@pytest.mark.parametrize("grid", [{}, {"tp": 2}], ids=["dp2", "tp2"])
def test_what_megatron_core_has_gathered_is_read(
    launch: Launcher, wide: Path, tmp_path: Path, grid: dict[str, int]
) -> None:
    options = {"grids": {"actor": grid, "critic": {"pp": 2}}, "dtype": "bfloat16"}
    for changed in launch.world(
        2, RANKS + "gathered_save", folder=wide, root=tmp_path, **options
    ):
        assert changed == []


@pytest.mark.parametrize("largest", [rank_shards.CHUNK_BYTES, 8], ids=["whole", "cut"])
def test_flat_ranges_of_a_stacked_layer_are_boxes_of_the_stack(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_shards, "CHUNK_BYTES", largest)
    of = ShardedTensor.from_rank_offsets(
        "weight",
        torch.zeros(4, 3),
        (0, 1, 5),
        (1, 1, 2),
        replica_id=(0, 0, 3),
        prepend_axis_num=1,
    )
    flat = torch.arange(2.0, 10.0)
    stack = torch.full((5, 8, 3), -1.0)
    for box in boxes_of(of, flat, 2, "state.", 0):
        assert (box.key, box.global_shape, box.replica_id) == (
            "state.weight",
            (5, 8, 3),
            (0, 0, 0),
        )
        assert box.data.nbytes <= largest
        stack[box.global_slice()] = box.data
    assert stack[1, 4:].reshape(-1).tolist() == [-1, -1, *range(2, 10), -1, -1]
    assert int((stack >= 0).sum()) == 8


def test_shares_are_disjoint_and_even() -> None:
    shapes = [(10, 4), (3,), (), (7, 2, 2), (1, 5)]
    written: list[list[torch.Tensor]] = [
        [torch.zeros(shape) for shape in shapes] for _ in range(3)
    ]
    for rank, found in enumerate(written):
        replica = (0, 0, rank)
        tensors = [
            ShardedTensor.from_rank_offsets(
                str(number), torch.ones(shape), replica_id=replica
            )
            for number, shape in enumerate(shapes)
        ]
        for share in (
            box
            for boxes in shares_of(tensors, 3)
            for box in boxes
            if isinstance(box, ShardedTensor)
        ):
            assert share.replica_id == (0, 0, 0)
            found[int(share.key)][share.global_slice()] += share.data
    for each in zip(*written, strict=True):
        assert torch.equal(sum(each), torch.ones_like(each[0]))
    sizes = [sum(int(t.sum()) for t in found) for found in written]
    assert max(sizes) - min(sizes) <= 2 * 5
