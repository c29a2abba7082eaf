"""FSDP2's state: exact on the same ranks, right on others and under the other engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.checkpoint.test_resume import check_exact
from tests.launcher import Launcher

RANKS = "tests.checkpoint.ranks:"
FULL: dict[str, Any] = {"fsdp": {}}
HYBRID: dict[str, Any] = {
    "fsdp": {"sharding_strategy": "hybrid_shard", "shard_size": 2}
}
TENSOR: dict[str, Any] = {"fsdp": {}, "tp": 2}
WHOLE: dict[str, Any] = {"fsdp": {"sharding_strategy": "no_shard"}}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("tied"), "Qwen2ForCausalLM", tie_embeddings=True
    )


@pytest.mark.parametrize(
    "options", [{}, {"in_background": True}, {"updates_before": 0}, {"actor": TENSOR}]
)
def test_resumes_exactly(
    launch: Launcher, tied: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    actor, more = (
        options.get("actor", FULL),
        {name: value for name, value in options.items() if name != "actor"},
    )
    grids = {"actor": actor, "critic": WHOLE}
    check_exact(
        launch.world(
            2,
            RANKS + "interrupted_run",
            folder=tied,
            root=tmp_path,
            grids=grids,
            **more,
        )
    )


def test_resumes_exactly_where_ranks_hold_no_row_of_some_parameters(
    launch: Launcher, tmp_path: Path
) -> None:
    """Qwen2-MoE gates its shared expert by a weight of one row."""
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
    }
    folder = make_tiny_folder(
        tmp_path / "model",
        "Qwen2MoeForCausalLM",
        shared_expert_intermediate_size=16,
        **sizes,
    )
    check_exact(
        launch.world(
            2,
            RANKS + "interrupted_run",
            folder=folder,
            root=tmp_path,
            grids={"actor": FULL},
        )
    )


def test_replicas_resume_exactly_and_other_ranks_go_on(
    launch: Launcher, tied: Path, tmp_path: Path
) -> None:
    saved = {"actor": HYBRID, "critic": FULL}
    expected = launch.world(
        4, RANKS + "save_run", folder=tied, root=tmp_path, grids=saved, steps=[2]
    )[0]
    tensor = {"actor": TENSOR, "critic": HYBRID}
    for world, grids in (
        (4, saved),
        (4, tensor),
        (2, {"actor": FULL, "critic": WHOLE}),
        (1, {"actor": FULL, "critic": FULL}),
    ):
        for found in launch.world(
            world, RANKS + "resume_run", folder=tied, root=tmp_path, grids=grids
        ):
            assert found["losses"] == (
                expected if grids is saved else pytest.approx(expected, abs=1e-5)
            )


MEGATRON: list[dict[str, Any]] = [
    {"actor": {"tp": 2}, "critic": {"pp": 2}},
    {"actor": {}, "critic": {"tp": 2}},
]


def test_from_megatron_and_back(launch: Launcher, tied: Path, tmp_path: Path) -> None:
    """Each engine goes on from the other's checkpoint with its losses; moved there and back not a bit has changed."""
    fsdp, back = tmp_path / "fsdp", tmp_path / "back"
    expected = launch.world(
        2, RANKS + "save_run", folder=tied, root=tmp_path, grids=MEGATRON[0], steps=[2]
    )[0]
    both = {"actor": FULL, "critic": MEGATRON[1]["critic"]}
    for grids in ({"actor": FULL, "critic": WHOLE}, both):
        for found in launch.world(
            2, RANKS + "resume_run", folder=tied, root=tmp_path, grids=grids
        ):
            assert found["losses"] == pytest.approx(expected, abs=1e-5)
    launch.world(
        2,
        RANKS + "move",
        folder=tied,
        root=tmp_path,
        to=fsdp,
        grids={"actor": FULL, "critic": FULL},
    )
    for found in launch.world(
        2, RANKS + "resume_run", folder=tied, root=fsdp, grids=MEGATRON[1]
    ):
        assert found["losses"] == pytest.approx(expected, abs=1e-5)
    launch.world(2, RANKS + "move", folder=tied, root=fsdp, to=back, grids=MEGATRON[1])
    for found in launch.world(
        2, RANKS + "resume_run", folder=tied, root=back, grids=MEGATRON[0]
    ):
        assert found["losses"] == expected


def test_from_half_precision(launch: Launcher, tied: Path, tmp_path: Path) -> None:
    """Megatron's float32 copies are what is resumed, and become them again."""
    kinds: dict[str, Any] = {
        "folder": tied,
        "grids": {"actor": {}},
        "dtype": "bfloat16",
    }
    expected = launch.world(2, RANKS + "save_run", root=tmp_path, steps=[2], **kinds)[0]
    launch.world(
        2,
        RANKS + "move",
        root=tmp_path,
        to=tmp_path / "fsdp",
        **{**kinds, "grids": {"actor": FULL}},
    )
    launch.world(
        2, RANKS + "move", root=tmp_path / "fsdp", to=tmp_path / "back", **kinds
    )
    for found in launch.world(2, RANKS + "resume_run", root=tmp_path / "back", **kinds):
        assert found["losses"] == expected
