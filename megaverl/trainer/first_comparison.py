"""Whether the engine computes what the actor does, judged once after a start by the log-probs of the same tokens.

Fingerprints say whether the weights are the same; this sees what they cannot: another computation with them. In 16 bits
two right computations differ, at single tokens by any amount, so that mean and 99.9th percentile are looked at.
"""

from __future__ import annotations

import torch

from megaverl.config import Config
from megaverl.errors import TrainingStopped
from megaverl.platform import platform
from megaverl.workers.log_prob_difference import DifferenceStats

# Of float32 on a CPU, where rounding is all that differs: the suite's runs show 1e-5.
STRICT = 1e-3
# In 16 bits, in units of the dtype's last place at 1 (bfloat16: 0.0078). Reported for bfloat16 are means of 0.011
# (Qwen3-4B) and 0.064 (a mixture of experts, 30B-A3B): such a mixture is warned of and goes on.
MEAN_UNITS, P999_UNITS = 4.0, 64.0
# Nats, in any 16 bits: what another model would show.
ABSURD_MEAN = 0.5


def check_first_comparison(found: DifferenceStats, config: Config, dtype: torch.dtype) -> str | None:
    """A warning, where engine and actor differ more than the rounding of `dtype` explains; None where they do not.

    Raises:
        TrainingStopped: by more than `rollout.logprob_tolerance`; where that is null by more than `STRICT` in float32
            on a CPU, or by more than `ABSURD_MEAN` in the mean.
    """
    tolerance = config.rollout.logprob_tolerance
    if tolerance is None and dtype == torch.float32 and not platform.is_cuda:
        tolerance = STRICT
    if tolerance is not None:
        if found.largest <= tolerance:
            return None
        raise TrainingStopped(_said(found, config, f"allowed are {tolerance:.3g} for any token"))
    if not found.mean <= ABSURD_MEAN:
        raise TrainingStopped(_said(found, config, f"allowed are {ABSURD_MEAN:.3g} in the mean"))
    # on CUDA float32's products may be those of TF32, with float16's digits
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    if found.mean <= MEAN_UNITS * unit and found.p999 <= P999_UNITS * unit:
        return None
    usual = f"usual are {MEAN_UNITS * unit:.2g} in the mean and {P999_UNITS * unit:.2g} for 99.9 % of the tokens"
    return _said(found, config, f"{usual}; mixtures of experts show more")


def _said(found: DifferenceStats, config: Config, limit: str) -> str:
    compared = config.reshard.check_every >= 0
    weights = "have the same weights" if compared else "may have other weights (reshard.check_every=-1 compares none)"
    return (
        f"the log-probs that {config.rollout.engine} reports and those that Megatron computes for the same tokens "
        f"differ by {found.mean:.3g} in the mean, for 99.9 % of the tokens by up to {found.p999:.3g}, at most by "
        f"{found.largest:.3g}; {limit}. Both {weights}. Sampling fields such as top_p or penalties that only the "
        "engine applies do this, and an architecture that both compute differently. If the difference is only "
        "rounding, set rollout.logprob_tolerance to the largest that you allow."
    )
