"""Corrections for samples from another policy than the trained one, due to the engine's rounding or older weights.

Let rho_t = pi_old(t) / pi_rollout(t), where old are Megatron's log-probs at the start
of the update and rollout those that the engine reported. Each function returns a factor
per token, which multiplies the token's advantage. A log-prob of NaN makes the factors
that depend on it NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import MetricSums, bounded, moments
from megaverl.algorithms.registry import Registry, tensor_problem


class Correction(NamedTuple):
    """Result of a correction.

    Attributes:
        factors: `[batch, response]` float without gradient, 0 outside the mask.
        metrics: `mismatch_ratio` (mean rho_t), `mismatch_kl` (k3 of rollout against old), `correction_factor`, and
            `correction_fraction`, the share of tokens that a limit changed.
    """

    factors: Tensor
    metrics: MetricSums


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a user's correction, or None."""
    if not isinstance(result, Correction):
        return f"{type(result).__name__}; expected Correction(factors, metrics)"
    return tensor_problem(result.factors, inputs["response_mask"].shape, "as factors ")


corrections: Registry[Correction] = Registry("rollout correction", _problem)


@corrections.register("token_truncate")
def token_truncate(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Compute truncated importance sampling per token: min(rho_t, high), and at least `low`, which is an addition.

    Source: Espeholt et al., arXiv 1802.01561, section 4.1 (rho-bar); for engine against
    trainer Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training" (fengyao.notion.site/off-policy-rl).

    Args:
        old_log_probs, rollout_log_probs: `[batch, response]` float. Only values under the mask are read.
        response_mask: `[batch, response]` bool.
        low: smallest factor.
        high: C of the source.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho).exp()
    return _correction(
        log_rho, response_mask, rho.clamp(low, high), (rho < low) | (rho > high)
    )


@corrections.register("token_mask")
def token_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Correction:
    """Return rho_t where low <= rho_t <= high, else 0: IcePop, arXiv 2510.18855. Arguments as `token_truncate`."""
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho).exp()
    outside = (rho < low) | (rho > high)
    return _correction(log_rho, response_mask, torch.where(outside, 0.0, rho), outside)


@corrections.register("sequence_truncate")
def sequence_truncate(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    high: float = 2.0,
) -> Correction:
    """Compute truncated importance sampling of whole responses: min(prod_t rho_t, high) at every token.

    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from
    the training-inference mismatch" (richardli.xyz/rl-collapse). Arguments as
    `token_truncate`.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho.sum(dim=1, keepdim=True)).exp().expand_as(log_rho)
    return _correction(log_rho, response_mask, rho.clamp(max=high), rho > high)


@corrections.register("sequence_mask")
def sequence_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Return prod_t rho_t at every token if it is within low..high, else 0, which leaves out the whole response.

    Source: masked importance sampling, as `sequence_truncate`. Arguments as
    `token_truncate`.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho.sum(dim=1, keepdim=True)).exp().expand_as(log_rho)
    outside = (rho < low) | (rho > high)
    return _correction(log_rho, response_mask, torch.where(outside, 0.0, rho), outside)


@corrections.register("geometric_mask")
def geometric_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
) -> Correction:
    """Return 1 at every token of a response whose geometric mean of rho_t is within low..high, else 0.

    It only rejects, and is fair to long responses: the product over a thousand tokens
    leaves every window. Source: Liu and Li 2025, as `sequence_truncate`, its
    length-normalized form. Arguments as `token_truncate`.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    count = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = bounded(log_rho.sum(dim=1, keepdim=True) / count).exp().expand_as(log_rho)
    outside = (mean < low) | (mean > high)
    # NaN must not become a weight of 1: it goes on into the loss, where it is noticed.
    kept = torch.where(mean.isnan(), mean, 1.0)
    return _correction(log_rho, response_mask, torch.where(outside, 0.0, kept), outside)


@corrections.register("reject")
def reject(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    over: Literal["token", "sum", "mean", "max"] = "mean",
    low: float | None = None,
    high: float,
) -> Correction:
    """Return 1 where an estimate of KL(rollout || old), in nats, is within low..high, else 0. It only rejects.

    k1 = - log rho, k2 = (log rho)^2 / 2 and k3 = rho - 1 - log rho are estimates per
    token. They are compared one by one, or as their sum, mean or maximum over a
    response, which is then kept or rejected as a whole. k1 by sum limits the ratio of
    responses, by mean its geometric mean. Source: Schulman's estimators, see `kl`, as
    limits for whole responses by Liu and Li 2025, as `geometric_mask`.

    Args:
        old_log_probs, rollout_log_probs, response_mask: as in `token_truncate`.
        low: lower limit, since k1 may be negative. None: no limit.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    log_ratio = bounded(log_rho)
    values = {
        "k1": -log_rho,
        "k2": 0.5 * log_rho.square(),
        "k3": torch.expm1(log_ratio) - log_ratio,
    }[estimator]
    count = response_mask.sum(dim=1, keepdim=True)
    if over == "max":
        masked = torch.where(response_mask, values, -torch.inf)
        # An empty response has no largest value. It has no tokens to drop either.
        values = masked.amax(dim=1, keepdim=True).where(count > 0, 0.0)
    elif over != "token":
        values = values.sum(dim=1, keepdim=True) / (
            count.clamp(min=1) if over == "mean" else 1
        )
    values = values.expand_as(log_rho)
    outside = (values > high) | ((values < low) if low is not None else False)
    # NaN must not become a weight of 1: it goes on into the loss, where it is noticed.
    kept = torch.where(values.isnan(), values, 1.0)
    return _correction(log_rho, response_mask, torch.where(outside, 0.0, kept), outside)


@corrections.register("off_policy_mask")
def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    high: float = 0.5,
) -> Correction:
    """Compute off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556 (equation number not checked).

    The factor is 0 at tokens with a negative advantage in a response from which the policy has moved away, 1/|y| sum_t
    log(pi_rollout(t) / pi(t)) > high, else 1.

    Args:
        log_probs: `[batch, response]` float, of the current policy. It gets no gradient.
        rollout_log_probs, response_mask: as in `token_truncate`.
        advantages: `[batch, response]` float.
        high: delta of the source, in nats per token.
    """
    log_rho = _log_rho(log_probs, rollout_log_probs, response_mask)
    num_tokens = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    left = -log_rho.sum(dim=1, keepdim=True) / num_tokens
    # Samples with a positive advantage pull the policy towards themselves, so they
    # stay, however far off they are.
    masked = (left > high) & (advantages < 0)
    # NaN must not become a weight of 1: it goes on into the loss, where it is noticed.
    kept = torch.where(left.isnan(), left, 1.0)
    return _correction(log_rho, response_mask, torch.where(masked, 0.0, kept), masked)


def combined(parts: Sequence[Correction], response_mask: Tensor) -> Correction:
    """Return the product of several corrections. A token rejected by one is rejected; others have all weights.

    Metrics: the metrics of the first correction, with the `correction_factor` of the product,
    and `rejected_fraction`, its share of zeros.
    """
    factors = torch.stack([part.factors for part in parts]).prod(dim=0)
    metrics = {
        **parts[0].metrics,
        "correction_factor": moments(factors, response_mask),
        "rejected_fraction": moments(factors == 0, response_mask),
    }
    return Correction(factors, metrics)


def _log_rho(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log rho_t, 0 outside the mask, without gradient."""
    return torch.where(mask, old_log_probs.detach() - rollout_log_probs.detach(), 0.0)


def _correction(
    log_rho: Tensor, mask: Tensor, factors: Tensor, touched: Tensor
) -> Correction:
    """Return factors with their metrics."""
    factors = torch.where(mask, factors, 0.0)
    log_rho = bounded(log_rho)
    metrics = {
        "mismatch_ratio": moments(log_rho.exp(), mask),
        "mismatch_kl": moments(torch.expm1(log_rho) - log_rho, mask),
        "correction_factor": moments(factors, mask),
        "correction_fraction": moments(touched, mask),
    }
    return Correction(factors, metrics)
