"""Who is slower than others at the same work, however long all of them waited for it."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest

from megaverl.errors import ConfigError
from megaverl.monitoring import stragglers
from megaverl.monitoring.stragglers import KERNELS, KernelMeter, Slow, slowness
from tests.launcher import Launcher

OFTEN = 5.0


def of(**seconds: float) -> dict[str, dict[str, tuple[float, float]]]:
    return {stage: {"": (each, 1.0)} for stage, each in seconds.items()}


def test_a_rank_is_compared_with_ranks_like_it() -> None:
    works = [
        of(update=2.0, rollout=1.0),
        of(update=2.1, rollout=1.0),
        of(update=6.0, rollout=1.0),
        of(update=9.0),
    ]
    first, *others = slowness(["a", "a", "a", "b"], works)
    assert first == Slow(2, pytest.approx(2.1 / 6), "update", 6.0, 2.1)
    assert [(each.rank, each.score) for each in others] == [(0, 1.0), (1, 1.0)], (
        "3 is like no other"
    )


def test_of_two_ranks_the_slower_one_is_found() -> None:
    assert slowness(["a", "a"], [of(update=1.5), of(update=1.0)])[0].rank == 0


def test_what_is_a_small_part_of_the_work_accuses_nobody() -> None:
    works = [of(update=10.0, log=0.1), of(update=10.0, log=0.4)]
    assert {each.score for each in slowness(["a", "a"], works)} == {1.0}


def test_more_of_the_same_is_not_slower() -> None:
    """Kernels are compared by what each takes; another rank's batch had more of them."""
    works = [
        {KERNELS: {"gemm": (1e-3, 100.0)}},
        {KERNELS: {"gemm": (1e-3, 300.0), "alone": (9.0, 1.0)}},
    ]
    assert {each.score for each in slowness(["a", "a"], works)} == {1.0}
    works[1] = {KERNELS: {"gemm": (2e-3, 100.0)}}
    assert slowness(["a", "a"], works)[0] == Slow(1, 0.5, KERNELS, 0.2, 0.1)


def test_ranks_without_work_are_not_slow() -> None:
    assert [
        each.score for each in slowness(["a", "a"], [of(update=0.0), of(update=0.0)])
    ] == [1.0, 1.0]
    assert slowness(["a", "a"], [{}, {}]) == []


def test_a_rank_that_works_more_in_a_stage_is_named_though_all_wait_for_it(
    launch: Launcher,
) -> None:
    for metrics, said in launch.world(
        4, "tests.monitoring.straggler_ranks:steps", slow=2
    ):
        assert metrics[0] == {}, "it is not due"
        assert metrics[1]["stragglers/count"] >= 1.0
        assert metrics[1]["stragglers/slowest_rank"] == 2.0
        assert metrics[1]["stragglers/slowest_score"] < stragglers.SCORE
        assert said[0].startswith("rank 2 is slow: actor_update has taken ")


class Cupti:
    """As nvidia-resiliency-ext 0.4.1 has it (straggler/cupti.py), with its kernels' numbers in microseconds."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    def get_results(self) -> dict[str, Any]:
        kernel = types.SimpleNamespace(median=20.0, num_calls=int(OFTEN))
        return {
            "gemm_blk_128_1_1_grid_8_8_1": kernel,
            "ncclDevKernel_AllReduce_blk_1": kernel,
        }


def test_kernels_are_taken_from_cupti_without_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package: Any = types.ModuleType(stragglers.CUPTI[1])
    package.CuptiManager = Cupti
    monkeypatch.setitem(sys.modules, stragglers.CUPTI[0], None)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(stragglers.torch.cuda, "synchronize", lambda: None)
    meter = KernelMeter()
    meter.begin()
    meter.begin()
    [[seconds, often]] = meter.take()[KERNELS].values()
    assert math.isclose(seconds, 20e-6) and often == OFTEN
    assert meter._cupti.calls == [
        "initialize",
        "reset_results",
        "start_profiling",
        "stop_profiling",
    ]


def test_without_the_package_the_key_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in stragglers.CUPTI:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=r"run\.stragglers_every: .*megaverl\[resiliency\].*set 0"
    ):
        KernelMeter()
