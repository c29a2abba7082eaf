"""What a difference between the engine's log-probs and the actor's leads to: nothing, a warning, the end."""

from __future__ import annotations

import math

import pytest
import torch

from megaverl.config import load_config
from megaverl.errors import TrainingStopped
from megaverl.platform import platform
from megaverl.trainer.first_comparison import check_first_comparison
from megaverl.workers.log_prob_difference import DifferenceStats

ONE_TOKEN = DifferenceStats(0.011, 0.2, 3.0)  # a dense model in bfloat16, over millions of tokens
MIXTURE = DifferenceStats(0.064, 0.9, 8.0)
OTHER_MODEL = DifferenceStats(2.5, 9.0, 20.0)
BROKEN = DifferenceStats(math.inf, math.inf, math.inf)


def check(found: DifferenceStats, dtype: torch.dtype, *given: str) -> str | None:
    config = load_config(None, ["model.path=m", "data.train=t", "reward=exact_match", *given], check_paths=False)
    return check_first_comparison(found, config, dtype)


def test_sixteen_bits() -> None:
    assert check(ONE_TOKEN, torch.bfloat16) is None
    said = check(MIXTURE, torch.bfloat16)
    expected = "differ by 0.064 in the mean, for 99.9 % of the tokens by up to 0.9, at most by 8"
    assert said is not None and expected in said
    assert "usual are 0.031 in the mean and 0.5 for 99.9 %" in said and "have the same weights" in said
    said = check(MIXTURE, torch.bfloat16, "reshard.check_every=-1")
    assert said is not None and "may have other weights (reshard.check_every=-1 compares none)" in said
    assert check(DifferenceStats(0.011, 0.6, 1.0), torch.bfloat16) is not None, "too many tokens far off"
    assert check(ONE_TOKEN, torch.float16) is not None, "which has three digits more"
    for found in (OTHER_MODEL, BROKEN):
        with pytest.raises(TrainingStopped, match=r"allowed are 0.5 in the mean.*top_p.*rollout.logprob_tolerance"):
            check(found, torch.bfloat16)


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
