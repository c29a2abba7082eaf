"""Process groups on four real ranks: those that megatron-core would make, each made once."""

from __future__ import annotations

import pytest

from megaverl.distributed.grid import GridShape
from megaverl.platform import platform
from tests.launcher import Launcher

platform.adapt_megatron()

from megatron.core.parallel_state import RankGenerator  # noqa: E402

RANKS = "tests.distributed.group_ranks:"
ORDER = "tp-cp-ep-dp-pp"  # megatron-core's default

# Field -> the dimensions in megatron-core's words, of its dense and of its expert rank
# generator.
DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "dp_cp": "dp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "intra_dp_cp": "dp-cp",
    "intra_dist_opt": "tp-cp-dp-pp",
}
EXPERT = {
    "expt_tp": "tp",
    "ep": "ep",
    "expt_dp": "dp",
    "tp_ep": "tp-ep",
    "tp_ep_pp": "tp-ep-pp",
    "intra_expt_dp": "dp",
}
SHAPES = [
    {"tp": 2, "pp": 2},
    {"tp": 4},
    {"pp": 2, "dp": 2},
    {"pp": 4},
    {"dp": 4},
    {"cp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "etp": 1, "ep": 2},
    {"tp": 2, "cp": 2, "etp": 1, "ep": 4},
]


def expected_groups(sizes: dict[str, int]) -> list[dict[str, list[int] | None]]:
    """Every rank's groups as megatron-core enumerates them."""
    shape = GridShape(**sizes)
    dense = RankGenerator(
        tp=shape.tp, ep=1, dp=shape.dp, pp=shape.pp, cp=shape.cp, order=ORDER
    )
    expert = RankGenerator(
        tp=shape.expert_tp,
        ep=shape.ep,
        dp=shape.expert_dp,
        pp=shape.pp,
        cp=1,
        order=ORDER,
    )

    def of(rank: int, groups: list[list[int]]) -> list[int]:
        return next(sorted(group) for group in groups if rank in group)

    found = []
    for rank in range(shape.world_size):
        groups: dict[str, list[int] | None] = {
            field: of(rank, dense.get_ranks(dims)) for field, dims in DENSE.items()
        }
        groups |= {
            field: of(rank, expert.get_ranks(dims)) for field, dims in EXPERT.items()
        }
        stages = of(rank, dense.get_ranks("pp"))
        ends = sorted({stages[0], stages[-1]})
        groups["embd"] = ends if rank in ends else None
        groups["pos_embd"] = [rank] if rank == stages[0] else None
        groups["inter_dist_opt"] = [rank]
        found.append(groups)
    return found


@pytest.mark.parametrize(
    "sizes", SHAPES, ids=lambda sizes: " ".join(f"{k}{v}" for k, v in sizes.items())
)
def test_every_field_holds_the_ranks_that_megatron_core_would_put_there(
    launch: Launcher, sizes: dict[str, int]
) -> None:
    assert launch.world(4, RANKS + "group_ranks", sizes=sizes) == expected_groups(sizes)


@pytest.mark.parametrize(
    ("first", "second", "num_new"),
    [
        ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}, 0),
        # tp4 is the world, dp1 each rank alone: both are there already.
        ({"tp": 2, "pp": 2}, {"tp": 4}, 0),
        # The pairs lie alike, one across stages, the other across dp.
        ({"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, 0),
        ({"tp": 4}, {"pp": 2, "dp": 2}, 2),
    ],
)
def test_two_grids_share_every_group_over_the_same_ranks(
    launch: Launcher, first: dict[str, int], second: dict[str, int], num_new: int
) -> None:
    for found in launch.world(4, RANKS + "two_grids", first=first, second=second):
        assert found["every_group_is_one_object"]
        assert found["world_is_the_default_group"]
        assert found["after_both"] == len(found["distinct"])
        assert found["after_both"] - found["after_first"] == num_new
        assert found["sum_over_tp"] == second.get("tp", 1)


def test_a_grid_after_a_deep_pipeline(launch: Launcher) -> None:
    """Its ranks have made different numbers of groups, by which torch names the next ones."""
    found = launch.world(4, RANKS + "deep_pipeline_then", second={"tp": 2, "pp": 2})
    pairs = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    stages = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    for rank, sums in enumerate(found):
        assert sums == [
            sum(2**r for r in ranks) for ranks in (pairs[rank], stages[rank], [rank])
        ]


def test_a_grid_that_does_not_fill_the_world(launch: Launcher) -> None:
    for text in launch.world(4, RANKS + "too_small_a_grid"):
        assert text.startswith("grid tp2 pp1 dp1 has 2 ranks, and the world 4.")
