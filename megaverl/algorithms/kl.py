"""Estimates of KL(policy || reference) per token from the policy's samples, and the coefficient of the penalty.

Source of k1, k2, k3: J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html, with r = reference / policy probability of the
sampled token.

In the reward an estimate weights the score function and has no gradient of its own. There only k1 has the gradient of
KL(policy || reference) on average (arXiv 2203.02155, eq. 2; arXiv 2510.01555). For the loss see `kl_loss`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms.loss import MAX_LOG_RATIO, LossOutput, bounded, moments
from megaverl.algorithms.registry import Registry, tensor_problem
from megaverl.errors import CheckpointError, ConfigError, TrainingStopped

kl_estimators: Registry[Tensor] = Registry(
    "KL estimator",
    lambda result, inputs: tensor_problem(result, inputs["log_probs"].shape),
)


@kl_estimators.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return -log r = log_prob - ref_log_prob, which is unbiased and may be negative. Any shape."""
    return log_probs - ref_log_probs


@kl_estimators.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (log r)^2 / 2, which is biased with low variance; its gradient is unbiased. Any shape."""
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimators.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (r - 1) - log r, which is unbiased and never negative. Any shape.

    log r is limited to 20, so r stays finite. A token that the reference finds e^20
    times likelier than the policy that sampled it counts with that limit, and has no
    gradient.
    """
    # Only the upper side can overflow: exp() of a large negative number is 0.
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


@kl_estimators.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return |log r|, which is biased upwards, never negative, and linear where k2 and k3 grow fast. Any shape."""
    return (log_probs - ref_log_probs).abs()


@kl_estimators.register("low_variance")
def low_variance(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return k3, limited to 10, so that a single token cannot dominate a step. Any shape.

    verl computes this for both "low_var_kl" and "k3". A token at the limit has no
    gradient.
    """
    return k3(log_probs, ref_log_probs).clamp(max=10.0)


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    weights: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    kind: str = "k3",
    gradient: str = "value",
) -> LossOutput:
    """Compute the KL penalty as a loss, sum_t weight_t KL_t, arXiv 2402.03300, eq. 3 and 4 (there with k3).

    An estimator that is unbiased in value is not unbiased in gradient. On samples of the policy itself, the gradient of
    k1 is 0 on average, the gradient of k3 is that of KL(reference || policy) near the reference, and the gradient of k2
    is exactly that of KL(policy || reference) at each token. `kind` chooses the value, and `gradient` the gradient:

    - value: the gradient of the estimate itself.
    - straight_through: the gradient of k2 (arXiv 2510.01555, which compares the penalty in the reward and in the loss;
      verl's "k3+").
    - importance: the gradient of r_t x the estimate, r_t = pi(t) / pi_old(t), which also becomes the value. Unbiased
      with k1 and k3, for samples of the old policy as well (DeepSeek-V3.2, arXiv 2512.02556; equation number not
      checked).
    - score: the gradient of sum_t log pi(t) stop_gradient(sum over s >= t of weight_s x estimate_s), for k1 only. This
      is the policy gradient of the KL of whole responses: a token is also credited with the tokens after it (arXiv
      2506.09477, from memory).

    Args:
        log_probs: `[batch, response]` float, of the policy. Gets the gradient.
        ref_log_probs: `[batch, response]` float, of the reference.
        weights: `[batch, response]` float, from an aggregation. Where 0, the other inputs may be anything, NaN
            included.
        old_log_probs: `[batch, response]` float, of the policy that sampled, for importance.
        kind: name of an estimator, or `module:function`. Not k1 with the gradient `value`.

    Metrics: `kl_loss`, the token mean of the estimate.

    Raises:
        ConfigError: `kind` is unknown.
    """
    active = weights != 0
    policy = torch.where(active, log_probs, 0.0)
    reference = torch.where(active, ref_log_probs, 0.0)
    estimate = kl_estimators.get(kind)(
        {"log_probs": policy, "ref_log_probs": reference}
    )
    metrics = {"kl_loss": moments(estimate, active)}
    if gradient == "importance":
        assert old_log_probs is not None
        ratio = bounded(torch.where(active, log_probs - old_log_probs, 0.0)).exp()
        return LossOutput((weights * ratio * estimate).sum(), metrics)
    if gradient == "value":
        return LossOutput((weights * estimate).sum(), metrics)
    value = (weights * estimate).sum().detach()
    if gradient == "straight_through":
        # k2's gradient is that of the KL. The value stays that of the configured
        # estimate.
        slope = (weights * k2(policy, reference)).sum()
    else:
        # REINFORCE with the KL as cost: a token's choice is charged with the estimates
        # from it to the end.
        shares = torch.where(active, weights * estimate, 0.0).detach()
        slope = (policy * shares.flip(1).cumsum(dim=1).flip(1)).sum()
    # The second term is 0, and contributes only the gradient.
    return LossOutput(value + (slope - slope.detach()), metrics)


class FixedKL:
    """Constant coefficient of the KL penalty."""

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ConfigError(f"the KL coefficient must not be negative, found {coef}")
        self.coef = coef

    def update(self, kl: float) -> None:
        """Check that the measured KL is finite. The coefficient does not change."""
        _check_kl(kl)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"kind": "fixed", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the controller's kind. The coefficient always comes from the configuration, also in a resumed run."""
        _check_kind(state, "fixed")


class AdaptiveKL:
    """Log-space proportional controller of the KL coefficient, arXiv 1909.08593, section 2.2.

    error = clip(KL / target - 1, -0.2, 0.2), coef <- coef (1 + gain error), once per
    step.

    Args:
        coef: initial coefficient.
        target: desired KL in nats, in the unit of the KL given to `update` (per token or per response).
        gain: K_beta of the paper, there 0.1.
    """

    def __init__(self, coef: float, target: float, gain: float = 0.1) -> None:
        for name, number in (("coefficient", coef), ("target", target), ("gain", gain)):
            if not number > 0:
                raise ConfigError(
                    f"the {name} of an adaptive KL penalty must be above 0, found {number}"
                )
        self.coef = coef
        self.target = target
        self.gain = gain

    def update(self, kl: float) -> None:
        """Take one step towards the target.

        Raises:
            TrainingStopped: the measured KL is NaN or infinite.
        """
        _check_kl(kl)
        # The clip keeps one unusual step from moving the coefficient far.
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self.gain * error

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient. Target and gain come from the configuration."""
        _check_kind(state, "adaptive")
        self.coef = float(state["coef"])


# Holds `coef`, gets the measured KL once per step, and saves its state in the
# checkpoint as JSON values.
KLController = FixedKL | AdaptiveKL


class AdaptiveEntropy:
    """Adaptive entropy control of Skywork-OR1, arXiv 2505.22312 (from memory).

    The coefficient of the entropy bonus rises by `step` while the policy's entropy is
    below the target, else it falls by `step`, but never below 0. It is applied only
    while the entropy is at or below the target.

    Args:
        coef: initial coefficient.
        target: entropy in nats per token.
        step: change per training step.
    """

    def __init__(self, coef: float, target: float, step: float) -> None:
        self.coef = coef
        self.target = target
        self.step = step
        self.is_low = True

    @property
    def weight(self) -> float:
        """Coefficient that the next step applies."""
        return self.coef if self.is_low else 0.0

    def update(self, entropy: float) -> float:
        """Take one step towards the target. Returns the weight that was applied before it.

        Raises:
            TrainingStopped: the measured entropy is NaN or infinite.
        """
        if not math.isfinite(entropy):
            raise TrainingStopped(
                f"the measured entropy is {entropy}: the policy's logits are not finite"
            )
        applied = self.weight
        self.is_low = entropy <= self.target
        self.coef = max(
            self.coef + (self.step if entropy < self.target else -self.step), 0.0
        )
        return applied

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"entropy_coef": self.coef, "entropy_is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. A checkpoint without one keeps the initial values."""
        self.coef, self.is_low = (
            state.get("entropy_coef", self.coef),
            state.get("entropy_is_low", self.is_low),
        )


def _check_kl(kl: float) -> None:
    """Raise TrainingStopped if the measured KL is not finite."""
    if not math.isfinite(kl):
        raise TrainingStopped(
            f"the measured KL is {kl}: log-probs of the policy or of the reference are not finite"
        )


def _check_kind(state: dict[str, Any], expected: str) -> None:
    """Raise CheckpointError if a checkpoint holds another kind of controller."""
    if state.get("kind") != expected:
        raise CheckpointError(
            f"the checkpoint holds a KL controller of kind {state.get('kind')!r}, the configuration asks for "
            f"{expected!r}; set algorithm.kl as in the run that was saved, or start without resuming"
        )
