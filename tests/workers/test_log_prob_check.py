"""Mean, 99.9th percentile and largest of log-prob differences, and the check of a run's first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.config import load_config
from megaverl.errors import TrainingStopped
from megaverl.platform import platform
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.log_prob_check import (
    DifferenceStats,
    LogProbDifference,
    check_first_comparison,
)
from tests.algorithms.strategies import PROPERTY
from tests.launcher import Launcher
from tests.sharding.specs import make_spec


def of_parts(parts: list[list[float]]) -> DifferenceStats:
    difference = LogProbDifference()
    for part in parts:
        values = torch.tensor([part])
        mask = torch.cat(
            [torch.ones_like(values), torch.zeros_like(values)], dim=1
        ).bool()
        difference.add(torch.cat([values, values + math.nan], dim=1), mask)
    return difference.stats()


@PROPERTY
@given(
    st.lists(st.floats(-200.0, 200.0, width=32), min_size=1, max_size=50),
    st.integers(0, 2),
    st.integers(0, 3000),
)
def test_as_of_all_of_them_sorted(
    values: list[float], num_parts: int, num_small: int
) -> None:
    """The percentile to 2.2 % from above; in any parts, of tokens under the mask alone."""
    values = [*values, *[2.0**-10] * num_small]
    parts = [values[part :: num_parts + 1] for part in range(num_parts + 1)]
    found, apart = of_parts(parts), sorted(abs(value) for value in values)
    assert (
        found.mean == pytest.approx(sum(apart) / len(apart), rel=1e-6)
        and found.largest == apart[-1]
    )
    percentile = apart[math.ceil(0.999 * len(apart)) - 1]
    assert (
        percentile * (1 - 1e-9)
        <= found.p999
        <= max(percentile * 2 ** (1 / 32), 2.0**-39)
    )


def test_no_tokens_and_no_numbers() -> None:
    assert of_parts([[]]) == DifferenceStats(0.0, 0.0, 0.0)
    assert (
        of_parts([[0.0, math.nan]]).mean == math.inf
        and of_parts([[-math.inf, 0.0]]).largest == math.inf
    )


def test_of_all_ranks(launch: Launcher) -> None:
    own = [[0.5, 0.25], [2.0, 0.125, 0.0, 0.125]]
    for found in launch.world(
        2, "tests.workers.algorithm_ranks:log_prob_difference", own=own
    ):
        assert found == [0.5, 2.0, 2.0]


# A dense model in bfloat16, over millions of tokens.
ONE_TOKEN = DifferenceStats(0.011, 0.2, 3.0)
MIXTURE = DifferenceStats(0.064, 0.9, 8.0)
OTHER_MODEL = DifferenceStats(0.18, 1.5, 4.0)  # such as one with another rotary base
BROKEN = DifferenceStats(math.inf, math.inf, math.inf)


DENSE_SPEC, MIXTURE_SPEC = (
    make_spec("Qwen3ForCausalLM"),
    make_spec("Qwen3MoeForCausalLM"),
)


def check(
    found: DifferenceStats,
    dtype: torch.dtype,
    *given: str,
    spec: ModelSpec = DENSE_SPEC,
) -> str | None:
    config = load_config(
        None,
        ["model.path=m", "data.train=t", "reward=exact_match", *given],
        check_paths=False,
    )
    return check_first_comparison(found, config, dtype, spec)


def test_sixteen_bits() -> None:
    assert check(ONE_TOKEN, torch.bfloat16) is None
    said = check(MIXTURE, torch.bfloat16)
    expected = "differ by 0.064 in the mean, for 99.9 % of the tokens by up to 0.9, at most by 8"
    assert said is not None and expected in said
    assert (
        "ROUNDING DOES NOT EXPLAIN THIS: the engine samples from another policy" in said
    )
    assert (
        "rounding in bfloat16 explains 0.039 in the mean and 0.5 for 99.9 %" in said
        and "have the same weights" in said
    )
    assert check(MIXTURE, torch.bfloat16, spec=MIXTURE_SPEC) is None
    said = check(MIXTURE, torch.bfloat16, "reshard.check_every=-1")
    assert (
        said is not None
        and "may have other weights (reshard.check_every=-1 compares none)" in said
    )
    assert check(DifferenceStats(0.011, 0.6, 1.0), torch.bfloat16) is not None, (
        "too many tokens far off"
    )
    assert check(ONE_TOKEN, torch.float16) is not None, "which has three digits more"
    for found in (OTHER_MODEL, BROKEN):
        with pytest.raises(
            TrainingStopped,
            match=r"allowed are 0.12 in the mean.*top_p.*rollout.logprob_tolerance",
        ):
            check(found, torch.bfloat16)
    assert check(OTHER_MODEL, torch.bfloat16, spec=MIXTURE_SPEC) is not None, (
        "experts do not explain it"
    )
    assert (
        check(OTHER_MODEL, torch.bfloat16, spec=replace(DENSE_SPEC, is_tabled=False))
        is not None
    )
    for spec in (MIXTURE_SPEC, replace(DENSE_SPEC, is_tabled=False)):
        with pytest.raises(TrainingStopped, match=r"allowed are 0.25 in the mean"):
            check(DifferenceStats(0.26, 1.5, 4.0), torch.bfloat16, spec=spec)
    with pytest.raises(
        TrainingStopped, match=r"allowed are 0.016 in the mean, for rounding in float16"
    ):
        check(DifferenceStats(0.02, 0.05, 1.0), torch.float16)


def test_an_engine_in_8_bits_rounds_more() -> None:
    found = DifferenceStats(0.2, 1.5, 4.0)
    for field in (
        "rollout.vllm.quantization=fp8_per_block",
        "rollout.vllm.kv_cache_dtype=fp8",
    ):
        assert check(found, torch.bfloat16, field) is None
        with pytest.raises(
            TrainingStopped, match="allowed are 0.5 in the mean.*8-bit weights or cache"
        ):
            check(DifferenceStats(0.51, 1.5, 4.0), torch.bfloat16, field)


@pytest.mark.skipif(platform.is_cuda, reason="there products may be TF32's")
def test_float32_on_a_cpu_is_strict() -> None:
    assert check(DifferenceStats(1e-6, 1e-5, 9e-4), torch.float32) is None
    with pytest.raises(TrainingStopped, match="allowed are 0.001 for any token"):
        check(DifferenceStats(1e-6, 1e-5, 2e-3), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tolerance_of_one_s_own(dtype: torch.dtype) -> None:
    assert check(MIXTURE, dtype, "rollout.logprob_tolerance=8.5") is None
    for found in (MIXTURE, BROKEN):
        with pytest.raises(TrainingStopped, match="allowed are 7.5 for any token"):
            check(found, dtype, "rollout.logprob_tolerance=7.5")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_runs_have_no_difference(dtype: torch.dtype) -> None:
    switch = "rollout.batch_invariant=true"
    assert check(DifferenceStats(0.0, 0.0, 0.0), dtype, switch) is None
    smallest = DifferenceStats(1e-9, 1e-9, 1e-7)
    with pytest.raises(TrainingStopped, match="allowed are 0 for any token"):
        check(smallest, dtype, switch)
    assert check(smallest, dtype, switch, "rollout.logprob_tolerance=1e-6") is None
