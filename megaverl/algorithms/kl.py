"""Per-token estimates of KL(policy || reference) from samples of the policy, and the coefficient of its penalty.

Source of k1, k2, k3: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, with
r = reference / policy probability of the sampled token.

In the reward, where an estimate weighs the score function and has no gradient of its own, k1 alone has the gradient of
KL(policy || reference) on average (arXiv 2203.02155, eq. 2; arXiv 2510.01555); as a loss see `kl_loss`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megaverl.algorithms.loss import MAX_LOG_RATIO, LossOutput
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry, tensor_problem
from megaverl.errors import CheckpointError, ConfigError, TrainingStopped

kl_estimators: Registry[Tensor] = Registry(
    "KL estimator", lambda result, inputs: tensor_problem(result, inputs["log_probs"].shape)
)


@kl_estimators.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """-log r = log_prob - ref_log_prob: unbiased, of either sign. Shapes: any, all the same."""
    return log_probs - ref_log_probs


@kl_estimators.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, of low variance; its gradient is unbiased. Shapes: any, all the same."""
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimators.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased and never negative. Shapes: any, all the same.

    log r is held below 20, so that r stays finite: a token that the reference finds e^20 times likelier than
    the policy that sampled it counts as such, and has no gradient.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


@kl_estimators.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log r|: biased upwards, never negative, and linear where k2 and k3 grow fast. Shapes: any, all the same."""
    return (log_probs - ref_log_probs).abs()


@kl_estimators.register("low_variance")
def low_variance(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k3 held below 10, so that a single token cannot rule a step. Shapes: any, all the same.

    As verl's "low_var_kl"; a token at the limit has no gradient.
    """
    return k3(log_probs, ref_log_probs).clamp(max=10.0)


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, *, kind: str = "k3", straight_through: bool = False
) -> LossOutput:
    """sum_t weight_t KL_t: the KL penalty as a loss, arXiv 2402.03300, eq. 3 and 4 (there with k3).

    An estimator that is unbiased in value is not so in gradient: on samples of the policy itself, the gradient of k1
    is 0 on average and that of k3 is the one of KL(reference || policy) near the reference, while that of k2 is exactly
    that of KL(policy || reference). `straight_through` keeps the value of `kind` and takes the gradient of k2
    (arXiv 2510.01555, which compares the two places of the penalty; verl's "k3+").

    Args (all `[batch, response]`):
        log_probs: float, of the policy; the gradient flows here. ref_log_probs: float, of the reference.
        weights: float, from `aggregation`; where 0 the other inputs may be anything, NaN included.
        kind: name of an estimator, or `module:function`. Use k1 in a loss only with `straight_through`.

    Metrics: `kl_loss`, the token mean of the estimate.

    Raises:
        ConfigError: unknown `kind`.
    """
    active = weights != 0
    policy, reference = torch.where(active, log_probs, 0.0), torch.where(active, ref_log_probs, 0.0)
    estimate = kl_estimators.get(kind)({"log_probs": policy, "ref_log_probs": reference})
    if straight_through:
        square = k2(policy, reference)
        estimate = estimate.detach() + (square - square.detach())
    return LossOutput((weights * estimate).sum(), {"kl_loss": moments(estimate, active)})


class KLController(Protocol):
    """Holds `coef`; told the measured KL once per step; its state goes into the checkpoint (plain JSON)."""

    coef: float

    def update(self, kl: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKL:
    """A coefficient that stays as it is."""

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ConfigError(f"the KL coefficient must not be negative, found {coef}")
        self.coef = coef

    def update(self, kl: float) -> None:
        """Nothing to learn from the measured KL; it must still be a number."""
        _check_kl(kl)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only checks the kind: a fixed coefficient is the configuration's, also of a run that is resumed."""
        _check_kind(state, "fixed")


class AdaptiveKL:
    """The log-space proportional controller of arXiv 1909.08593, section 2.2.

    error = clip(KL / target - 1, -0.2, 0.2), coef <- coef (1 + gain error), once per step.

    Args:
        coef: where it starts. target: the KL to hold, in nats, in the unit of the KL given to `update` (per
        token or per response: the caller's choice, but the same). gain: K_beta of the paper, there 0.1.
    """

    def __init__(self, coef: float, target: float, gain: float = 0.1) -> None:
        for name, number in (("coefficient", coef), ("target", target), ("gain", gain)):
            if not number > 0:
                raise ConfigError(f"the {name} of an adaptive KL penalty must be above 0, found {number}")
        self.coef, self.target, self.gain = coef, target, gain

    def update(self, kl: float) -> None:
        """Take one step towards the target.

        Raises:
            TrainingStopped: the measured KL is NaN or infinite.
        """
        _check_kl(kl)
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self.gain * error

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the coefficient; target and gain are the configuration's."""
        _check_kind(state, "adaptive")
        self.coef = float(state["coef"])


def _check_kl(kl: float) -> None:
    if not math.isfinite(kl):
        raise TrainingStopped(f"the measured KL is {kl}: log-probs of the policy or of the reference are not finite")


def _check_kind(state: dict[str, Any], expected: str) -> None:
    if state.get("kind") != expected:
        raise CheckpointError(
            f"the checkpoint holds a KL controller of kind {state.get('kind')!r}, the configuration asks for "
            f"{expected!r}; set algorithm.kl as in the run that was saved, or start without resuming"
        )
