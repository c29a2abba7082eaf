"""Muon against a float64 reference, on every kind of grid, and resumed. Needs emerging-optimizers (Python 3.12)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

RANKS = "tests.workers.muon_ranks:"
WHOLE = {"use_distributed_optimizer": False}
pytestmark = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None,
    reason="emerging-optimizers is not installed: it needs Python 3.12",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", tie_embeddings=True
    )


@pytest.mark.parametrize("ddp", [{}, WHOLE], ids=["sharded", "whole"])
def test_three_updates_follow_the_paper(
    launch: Launcher, folder: Path, ddp: dict[str, Any]
) -> None:
    """Newton-Schulz as in Jordan 2024, in float64; Adam for embeddings, output layer and norms."""
    [found] = launch.world(
        1, RANKS + "against_reference", folder=folder, dtype="float32", **ddp
    )
    assert set(found) == {"matrix", "rest"}
    for error, change in found.values():
        assert error < 1e-4 * change


def test_a_checkpoint_goes_on_with_the_same_losses_on_other_grids(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Losses after an update on each grid: tensor-parallel ranks orthogonalise whole matrices."""
    both = ("actor", "critic")
    grids = [{"pp": 2}, {}, {"tp": 2, "pp": 2, "vpp": 2}, {"cp": 2}]
    cases: list[dict[str, Any]] = [
        {"grids": dict.fromkeys(both, sizes)} for sizes in grids
    ]
    overlap = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    cases.append({"ddp": overlap | {"bucket_size": 5000}})
    distributed = {"optimizer": {"muon_tp_mode": "distributed"}}
    blockwise = {"optimizer": {"muon_tp_mode": "blockwise"}}
    found = launch.world(
        4,
        RANKS + "figures_of_grids",
        folder=folder,
        root=tmp_path,
        grids=dict.fromkeys(both, {"tp": 2}),
        cases=[*cases, distributed, blockwise],
    )
    for expected, *same, apart in found:
        assert len(same) == len(grids) + 2
        for figures in same:
            assert figures == pytest.approx(expected, rel=1e-5, abs=1e-5)
        # The key reaches megatron-core: parts of matrices give another update.
        assert max(abs(a - b) for a, b in zip(apart, expected, strict=True)) > 1e-3


def test_experts_are_trained_alike_on_expert_parallel_ranks(
    launch: Launcher, tmp_path: Path
) -> None:
    model = make_tiny_folder(tmp_path / "model", "Qwen3MoeForCausalLM")
    grids = [{}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}]
    for expected, *others in launch.world(
        4,
        RANKS + "figures_of_grids",
        folder=model,
        root=tmp_path / "run",
        grids={"actor": {"ep": 2}},
        cases=[{"grids": {"actor": sizes}} for sizes in grids],
    ):
        for figures in others:
            assert figures == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_biases_of_experts_are_trained_where_state_is_not_sharded(
    launch: Launcher, tmp_path: Path
) -> None:
    model = make_tiny_folder(tmp_path / "model", "GptOssForCausalLM")
    refused, losses = launch.world(2, RANKS + "experts_with_biases", folder=model)[0]
    assert "Set actor.ddp.use_distributed_optimizer: false, or actor.ep: 1." in refused
    assert losses[0] - losses[-1] > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}},
        {"ddp": WHOLE, "dtype": "bfloat16"},
        {"in_background": True},
        {"updates_before": 0, "updates_of_resumed": 0},
    ],
    ids=[
        "sharded",
        "bfloat16",
        "overlapped",
        "whole",
        "background",
        "before-the-first-update",
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(
    launch: Launcher, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    for found in launch.world(
        2,
        RANKS + "interrupted",
        folder=folder,
        root=tmp_path,
        grids={"actor": {}, "critic": {"tp": 2}},
        **options,
    ):
        assert found["at_load"] == []
        assert found["at_end"] == []
        assert found["losses"][0] == found["losses"][1]


def test_momentum_is_divided_over_data_parallel_ranks(
    launch: Launcher, folder: Path
) -> None:
    *held, matrices = launch.world(2, RANKS + "state_bytes", folder=folder)[0]
    assert sum(held) == matrices
    assert max(held) < 0.7 * matrices
    *held, matrices = launch.world(2, RANKS + "state_bytes", folder=folder, ddp=WHOLE)[
        0
    ]
    assert held == [matrices] * 2


def test_adapters_are_trained_alike_on_every_grid(
    launch: Launcher, folder: Path
) -> None:
    shapes = {"tp1": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
    found = launch.world(2, RANKS + "adapter_losses", folder=folder, shapes=shapes)[0]
    first, last = found["tp1"][0], found["tp1"][-1]
    assert first - last > 1e-3
    for losses in found.values():
        assert losses == pytest.approx(found["tp1"], abs=1e-5)
