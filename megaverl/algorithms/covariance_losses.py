"""Policy losses that exclude the few tokens that cause entropy collapse: Clip-Cov and KL-Cov (arXiv 2505.22617).

Also the selection of high-entropy tokens, which alone may train. Both selections depend
on all tokens of the mini-batch. A selector therefore sees the whole mini-batch before
its update, and the loss gets the selection as one more input, split like the others. So
no split changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms.advantages import check_finite_tokens
from megaverl.algorithms.loss import LossOutput, bounded, moments
from megaverl.algorithms.policy_losses import (
    policy_losses,
    ppo_clip,
    ratio_metrics,
    tokens_of,
)
from megaverl.algorithms.registry import Registry, tensor_problem


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a user's selection, or None."""
    wrong = tensor_problem(result, inputs["response_mask"].shape)
    return wrong or (
        None if result.dtype == torch.bool else f"{result.dtype}; expected torch.bool"
    )


# Selectors are named after the loss that reads `selected`, bool [batch, response] of a
# whole mini-batch.
token_selectors: Registry[Tensor] = Registry("token selector", _problem)


def covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return each token's part in the covariance of log-prob and advantage, arXiv 2505.22617, eq. 10.

    (log_prob - mean log_prob) (A - mean A), with means over all tokens of the
    mini-batch. The paper uses log-probs of the policy being trained. Given those at the
    start of the update, the first update of a batch is the same.

    Args:
        log_probs, advantages: `[mini-batch, response]` float.
        response_mask: `[mini-batch, response]` bool.

    Returns:
        `[mini-batch, response]` float64, 0 outside the mask.

    Raises:
        DataError: a log-prob or advantage is not finite. It would decide which tokens have the largest covariance.
    """
    check_finite_tokens(response_mask, log_probs=log_probs, advantages=advantages)
    # Tokens of the whole mini-batch; 1 for a batch without any, instead of a division
    # by 0.
    count = response_mask.sum().clamp(min=1)

    def centered(values: Tensor) -> Tensor:
        # Masked before and after: padding counts neither in the mean nor in the
        # product. float64, because the sum may run over millions of tokens.
        kept = torch.where(response_mask, values.double(), 0.0)
        return torch.where(response_mask, kept - kept.sum() / count, 0.0)

    return centered(log_probs) * centered(advantages)


@token_selectors.register("kl_cov")
def largest_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    fraction: float = 0.002,
) -> Tensor:
    """Select the tokens with the largest covariance, KL-Cov's rule (arXiv 2505.22617, eq. 13).

    `fraction` of all tokens are selected, at least one. Arguments are those of
    `covariances`. Among equal tokens the first in the batch are selected.
    """
    # Flat indices of [mini-batch, response].
    candidates = response_mask.flatten().nonzero()[:, 0]
    count = min(max(int(fraction * len(candidates)), 1), len(candidates))
    order = (
        covariances(log_probs, advantages, response_mask)
        .flatten()[candidates]
        .argsort(descending=True, stable=True)
    )
    return _selection(candidates[order[:count]], response_mask)


@token_selectors.register("clip_cov")
def some_large_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    draws: Tensor,
    *,
    fraction: float = 0.0002,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Tensor:
    """Select random tokens among those with a large covariance, arXiv 2505.22617, eq. 11 (Clip-Cov).

    Candidates have a covariance between `covariance_low` and `covariance_high`. The
    candidates with the smallest `draws` are selected: `fraction` of all tokens, at least
    one.

    Args:
        log_probs, advantages, response_mask: as in `covariances`.
        draws: `[mini-batch, response]` float, uniform random numbers.
    """
    values = covariances(log_probs, advantages, response_mask)
    between = response_mask & (values > covariance_low) & (values < covariance_high)
    candidates = between.flatten().nonzero()[:, 0]
    count = min(max(int(fraction * int(response_mask.sum())), 1), len(candidates))
    # The smallest draws are a uniform sample, and every rank has the same draws.
    order = draws.flatten()[candidates].argsort(stable=True)
    return _selection(candidates[order[:count]], response_mask)


def highest_entropies(
    entropies: Tensor, response_mask: Tensor, *, fraction: float
) -> Tensor:
    """Select the tokens of highest entropy, arXiv 2506.01939 (equation number not checked), where only these train.

    `fraction` of all tokens of the mini-batch are selected, at least one; the paper
    uses 0.2. Among equal tokens the first in the batch are selected.

    Args:
        entropies: `[mini-batch, response]` float, of the policy. Only values under the mask are read.
        response_mask: `[mini-batch, response]` bool.

    Returns:
        `[mini-batch, response]` bool.

    Raises:
        DataError: an entropy is not finite. NaN would count as the highest.
    """
    check_finite_tokens(response_mask, entropies=entropies)
    candidates = response_mask.flatten().nonzero()[:, 0]
    count = min(max(int(fraction * len(candidates)), 1), len(candidates))
    order = entropies.flatten()[candidates].argsort(descending=True, stable=True)
    return _selection(candidates[order[:count]], response_mask)


@policy_losses.register("clip_cov")
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    selected: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
) -> LossOutput:
    """Compute Clip-Cov, arXiv 2505.22617, eq. 12: the surrogate r_t A_t, and 0 for the selected tokens.

    The paper's equation has no other clip. The authors' program also has PPO's clip,
    and so does this function, with wide defaults.

    Args:
        selected: bool, from `some_large_covariances`.
        For the others, see `ppo_clip`.

    Metrics: the metrics of `ppo_clip`, and `selected_fraction`.
    """
    # A product instead of torch.where: an advantage that is not finite must reach the
    # loss, selected or not.
    kept = advantages * ~selected
    result = ppo_clip(
        log_probs, old_log_probs, kept, weights, clip_low=clip_low, clip_high=clip_high
    )
    return LossOutput(
        result.loss,
        result.metrics | {"selected_fraction": moments(selected, weights != 0)},
    )


@policy_losses.register("kl_cov")
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    selected: Tensor,
    *,
    penalty: float = 1.0,
) -> LossOutput:
    """Compute KL-Cov, arXiv 2505.22617, eq. 14: the surrogate r_t A_t, with a KL penalty on the selected tokens.

    loss = - sum_t weight_t (r_t A_t - penalty [t selected] |log r_t|). The paper's KL(old || new) is estimated by the
    absolute log-ratio, as in the authors' program: a selected token is pulled back from any distance.

    Args:
        selected: bool, from `largest_covariances`.
        penalty: beta of the paper.
        For the others see `policy_losses`.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`, `selected_fraction`.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    # A selected token without a weight does not train at all.
    spared = selected & active
    surrogate = bounded(log_ratio).exp() * advantages - penalty * torch.where(
        spared, log_ratio.abs(), 0.0
    )
    metrics = ratio_metrics(log_ratio, active, torch.zeros_like(active))
    return LossOutput(
        -(weights * surrogate).sum(),
        metrics | {"selected_fraction": moments(spared, active)},
    )


def _selection(chosen: Tensor, response_mask: Tensor) -> Tensor:
    """Return a mask of the tokens with these flat indices."""
    flat = torch.zeros_like(response_mask).flatten()
    flat[chosen] = True
    return flat.view_as(response_mask)
