"""Corrections for samples of another policy than the trained one: the engine's rounding, or older weights.

With rho_t = pi_old(t) / pi_rollout(t), old being Megatron's log-probs at the start of the update and rollout those
that the engine reported, each function returns a factor per token; the factor multiplies the token's advantage. A
log-prob that is NaN makes NaN of the factors that depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import bounded
from megaverl.algorithms.metrics import MetricSums, moments
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
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, *, high: float = 2.0
) -> Correction:
    """Truncated importance sampling per token: min(rho_t, high).

    Source: Espeholt et al., arXiv 1802.01561, section 4.1 (rho-bar); for engine against trainer Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl).

    Args (all `[batch, response]`): old_log_probs, rollout_log_probs: float; read under the mask only.
        response_mask: bool. high: C of the source.
    """
    log_rho = _log_rho(old_log_probs, rollout_log_probs, response_mask)
    rho = bounded(log_rho).exp()
    return _correction(log_rho, response_mask, rho.clamp(max=high), rho > high)


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
