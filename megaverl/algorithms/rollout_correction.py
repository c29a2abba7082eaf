"""Corrections for samples of another policy than the trained one: the engine's rounding, or older weights.

With rho_t = pi_old(t) / pi_rollout(t), old being Megatron's log-probs at the start of the update and rollout those
that the engine reported, each function returns a factor per token; the factor multiplies the token's advantage. A
log-prob that is NaN makes NaN of the factors that depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import MetricSums, bounded, moments
from megaverl.algorithms.registry import Registry, tensor_problem


class Correction(NamedTuple):
    """factors: `[batch, response]` float, no gradient, 0 outside the mask.

    metrics: `mismatch_ratio` (mean rho_t), `mismatch_kl` (k3 of rollout against old), `correction_factor`, and
        `correction_fraction`, the tokens that a limit touched.
    """

    factors: Tensor
    metrics: MetricSums


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
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
    """Truncated importance sampling per token: min(rho_t, high), and at least `low`, a floor of this project's users.

    Source: Espeholt et al., arXiv 1802.01561, section 4.1 (rho-bar); for engine against trainer Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl).

    Args (all `[batch, response]`): old_log_probs, rollout_log_probs: float; read under the mask only.
        response_mask: bool. high: C of the source.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho).exp()
    return _correction(log_rho, response_mask, rho.clamp(low, high), (rho < low) | (rho > high))


@corrections.register("token_mask")
def token_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Correction:
    """rho_t where low <= rho_t <= high, else 0: IcePop, arXiv 2510.18855. Arguments as `token_truncate`."""
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho).exp()
    outside = (rho < low) | (rho > high)
    return _correction(log_rho, response_mask, torch.where(outside, 0.0, rho), outside)


@corrections.register("sequence_truncate")
def sequence_truncate(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, *, high: float = 2.0
) -> Correction:
    """Truncated importance sampling of whole responses: min(prod_t rho_t, high) at every token.

    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
    mismatch" (richardli.xyz/rl-collapse). Arguments as `token_truncate`.
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
    """prod_t rho_t at every token where it lies within low..high, else 0: the whole response is left out.

    Source: masked importance sampling, as `sequence_truncate`. Arguments as `token_truncate`.
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
    """1 at every token of a response whose geometric mean of rho_t lies within low..high, else 0.

    Rejection alone, and fair to long responses: the product over a thousand tokens leaves every window. Source: Liu
    and Li 2025, as `sequence_truncate`, its length-normalised form. Arguments as `token_truncate`.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    count = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = bounded(log_rho.sum(dim=1, keepdim=True) / count).exp().expand_as(log_rho)
    outside = (mean < low) | (mean > high)
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
    """1 where an estimate of KL(rollout || old) lies within low..high, in nats, else 0: rejection alone.

    k1 = - log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho of each token; of tokens one by one, or their sum, mean
    or maximum over a response, which is then kept or left out as a whole. k1 by sum limits the ratio of responses, by
    mean its geometric mean. Source: Schulman's estimators, see `kl`, as limits for whole responses by Liu and Li 2025,
    as `geometric_mask`.

    Args: as `token_truncate`. low: None: no lower limit; k1 may be negative.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    held = bounded(log_rho)
    values = {"k1": -log_rho, "k2": 0.5 * log_rho.square(), "k3": torch.expm1(held) - held}[estimator]
    count = response_mask.sum(dim=1, keepdim=True)
    if over == "max":
        values = torch.where(response_mask, values, -torch.inf).amax(dim=1, keepdim=True).where(count > 0, 0.0)
    elif over != "token":
        values = values.sum(dim=1, keepdim=True) / (count.clamp(min=1) if over == "mean" else 1)
    values = values.expand_as(log_rho)
    outside = (values > high) | ((values < low) if low is not None else False)
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
    """Off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556 (equation number not checked): 0 at tokens with a
    negative advantage of a response that the policy has left, 1/|y| sum_t log(pi_rollout(t) / pi(t)) > high, else 1.

    Args (all `[batch, response]`): log_probs: float, of the policy as it is now, no gradient is taken.
        rollout_log_probs, response_mask: as `token_truncate`. advantages: float. high: delta, in nats per token.
    """
    log_rho = _log_rho(log_probs, rollout_log_probs, response_mask)
    left = -log_rho.sum(dim=1, keepdim=True) / response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    masked, kept = (left > high) & (advantages < 0), torch.where(left.isnan(), left, 1.0)
    return _correction(log_rho, response_mask, torch.where(masked, 0.0, kept), masked)


def combined(parts: Sequence[Correction], response_mask: Tensor) -> Correction:
    """The product of several: a token that one rejects is rejected, what is left has the others' weights.

    Metrics: the first one's, with the `correction_factor` of the product, and `rejected_fraction`, its zeros.
    """
    factors = torch.stack([part.factors for part in parts]).prod(dim=0)
    metrics = {
        **parts[0].metrics,
        "correction_factor": moments(factors, response_mask),
        "rejected_fraction": moments(factors == 0, response_mask),
    }
    return Correction(factors, metrics)


def _log_rho(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, old_log_probs.detach() - rollout_log_probs.detach(), 0.0)


def _correction(log_rho: Tensor, mask: Tensor, factors: Tensor, touched: Tensor) -> Correction:
    factors, log_rho = torch.where(mask, factors, 0.0), bounded(log_rho)
    metrics = {
        "mismatch_ratio": moments(log_rho.exp(), mask),
        "mismatch_kl": moments(torch.expm1(log_rho) - log_rho, mask),
        "correction_factor": moments(factors, mask),
        "correction_fraction": moments(touched, mask),
    }
    return Correction(factors, metrics)
