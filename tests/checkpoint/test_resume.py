"""Resuming is exact on the same grid, and right on any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

RANKS = "tests.checkpoint.ranks:"
Grids = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"),
        "Qwen3ForCausalLM",
        tie_embeddings=request.param,
    )


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("tied"), "Qwen2ForCausalLM", tie_embeddings=True
    )


def check_exact(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["at_load"] == []
        assert found["at_end"] == []
        assert found["losses"][0] == found["losses"][1]


@pytest.mark.parametrize(
    "grids",
    [
        {"actor": {"tp": 2, "pp": 2}, "critic": {"tp": 1, "pp": 1}},
        {"actor": {"tp": 1, "pp": 2}, "critic": {"tp": 2, "pp": 1}},
    ],
    ids=["tp2pp2+dp4", "pp2dp2+tp2dp2"],
)
def test_a_resumed_run_ends_with_the_same_bits(
    launch: Launcher, folder: Path, tmp_path: Path, grids: Grids
) -> None:
    results = launch.world(
        4, RANKS + "interrupted_run", folder=folder, root=tmp_path, grids=grids
    )
    assert [found["state"] for found in results] == [{"next_step": 2}] * 4
    check_exact(results)


PLAIN = {"ddp": {"use_distributed_optimizer": False}}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {}),
        ({"cp": 2}, {}),
        ({"tp": 2}, {"in_background": True}),
        ({}, {"in_background": True, "dtype": "bfloat16"}),
        ({}, {"updates_of_resumed": 0}),
        ({}, {"updates_before": 0}),
        ({}, {"dtype": "bfloat16"}),
        ({"tp": 2}, PLAIN),
        ({}, PLAIN | {"updates_before": 0, "dtype": "bfloat16"}),
    ],
    ids=[
        "tp2",
        "cp2",
        "tp2-background",
        "dp2-background",
        "dp2",
        "before-the-first-update",
        "bfloat16",
        "plain-optimizer",
        "plain-bfloat16-before",
    ],
)
def test_two_ranks_resume_exactly(
    launch: Launcher,
    tied: Path,
    tmp_path: Path,
    sizes: dict[str, int],
    options: dict[str, Any],
) -> None:
    grids = {"actor": sizes, "critic": {"pp": 2}}
    check_exact(
        launch.world(
            2,
            RANKS + "interrupted_run",
            folder=tied,
            root=tmp_path,
            grids=grids,
            **options,
        )
    )


def test_another_grid_continues_with_the_same_losses(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    saved_on = {"actor": {"tp": 2, "pp": 1}, "critic": {"tp": 1, "pp": 2}}
    expected = launch.world(
        4, RANKS + "save_run", folder=folder, root=tmp_path, grids=saved_on, steps=[2]
    )[0]
    others: list[Grids] = [
        {"actor": {"tp": 1, "pp": 2}, "critic": {"tp": 2, "pp": 2}},
        {"actor": {"tp": 1, "pp": 1}, "critic": {"tp": 1, "pp": 1}},
        {"actor": {"cp": 2}, "critic": {"cp": 2, "tp": 2}},
    ]
    for grids in others:
        for found in launch.world(
            4, RANKS + "resume_run", folder=folder, root=tmp_path, grids=grids
        ):
            assert found["losses"] == pytest.approx(expected, abs=1e-5)
    moved = tmp_path / "moved"
    virtual = {
        "actor": {"tp": 2, "pp": 2, "vpp": 2},
        "critic": {"tp": 1, "pp": 2, "vpp": 2},
    }
    launch.world(
        4, RANKS + "move", folder=folder, root=tmp_path, to=moved, grids=virtual
    )
    for found in launch.world(
        4, RANKS + "resume_run", folder=folder, root=moved, grids=saved_on
    ):
        # To virtual stages and back: not a bit has changed.
        assert found["losses"] == expected
    for found in launch.world(
        2,
        RANKS + "resume_run",
        folder=folder,
        root=tmp_path,
        grids={"actor": {"pp": 2}},
    ):
        assert found["losses"] == pytest.approx(expected[0::2], abs=1e-5)


OTHER = {
    "optimizer": {
        "lr": 3e-2,
        "min_lr": 1e-3,
        "weight_decay": 0.2,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-6,
    },
    "scheduler": {
        "lr_warmup_steps": 3,
        "lr_decay_style": "linear",
        "start_wd": 0.0,
        "end_wd": 0.2,
        "wd_incr_style": "linear",
    },
    "total_updates": 16,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, PLAIN],
    ids=["distributed", "bfloat16", "plain"],
)
def test_a_resume_follows_the_new_schedule_and_optimizer(
    launch: Launcher, tied: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """More updates, another peak, shape and warm-up, betas, eps and weight decay; under both engines."""
    grids: dict[str, Any] = {"actor": {}, "critic": {"fsdp": {}}}
    saved, resumed = {"grids": grids, **options}, {"grids": grids, **options, **OTHER}
    for found, expected in launch.world(
        1,
        RANKS + "resume_with",
        folder=tied,
        root=tmp_path,
        saved=saved,
        resumed=resumed,
    ):
        assert found == expected
        assert {role: place for role, (place, _) in found.items()} == {
            "actor": 4,
            "critic": 4,
        }
        rates = [float(group["lr"]) for _, groups in found.values() for group in groups]
        assert rates == pytest.approx(
            [1e-3 + (3e-2 - 1e-3) * (1 - (4 - 3) / (16 - 3))] * len(rates)
        )


def test_random_generators_go_on_where_they_were(
    launch: Launcher, tied: Path, tmp_path: Path
) -> None:
    for after_save, after_load in launch.world(
        2, RANKS + "random_draws", folder=tied, root=tmp_path
    ):
        assert after_save == after_load
