"""Policy losses that spare the few tokens by which entropy collapses: Clip-Cov and KL-Cov (arXiv 2505.22617); and the
tokens of highest entropy, which alone may train.

Which tokens those are depends on all tokens of the mini-batch: a selector looks at the whole mini-batch before its
update, and the loss gets the selection as one more input, cut like the others. So no split changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms.advantages import check_finite_tokens
from megaverl.algorithms.loss import LossOutput, bounded, moments
from megaverl.algorithms.policy_losses import policy_losses, ppo_clip, ratio_metrics, tokens_of
from megaverl.algorithms.registry import Registry, tensor_problem


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    wrong = tensor_problem(result, inputs["response_mask"].shape)
    return wrong or (None if result.dtype == torch.bool else f"{result.dtype}; expected torch.bool")


# Under the name of the loss that reads the selection: bool [batch, response] of a whole mini-batch.
token_selectors: Registry[Tensor] = Registry("token selector", _problem)


def covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Each token's part in the covariance of log-prob and advantage, arXiv 2505.22617, eq. 10.

    (log_prob - mean log_prob) (A - mean A), means over all tokens of the mini-batch. The paper takes the log-probs of
    the policy being trained; given those at the start of the update, the first update of a batch sees the same.

    Args (all `[mini-batch, response]`): log_probs, advantages: float. response_mask: bool.

    Returns: `[mini-batch, response]` float64, 0 outside the mask.

    Raises:
        DataError: a log-prob or an advantage that is not finite: it would decide which tokens are the largest.
    """
    check_finite_tokens(response_mask, log_probs=log_probs, advantages=advantages)
    count = response_mask.sum().clamp(min=1)

    def centered(values: Tensor) -> Tensor:
        kept = torch.where(response_mask, values.double(), 0.0)
        return torch.where(response_mask, kept - kept.sum() / count, 0.0)

    return centered(log_probs) * centered(advantages)


@token_selectors.register("kl_cov")
def largest_covariances(
    log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, fraction: float = 0.002
) -> Tensor:
    """The tokens with the largest covariance, arXiv 2505.22617, eq. 13 (KL-Cov): `fraction` of all, at least one.

    Arguments as in `covariances`. Of equal ones the first in the batch are taken.
    """
    candidates = response_mask.flatten().nonzero()[:, 0]
    count = min(max(int(fraction * len(candidates)), 1), len(candidates))
    order = (
        covariances(log_probs, advantages, response_mask).flatten()[candidates].argsort(descending=True, stable=True)
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
    """Tokens drawn from those with a large covariance, arXiv 2505.22617, eq. 11 (Clip-Cov).

    Arguments as in `covariances`. draws: `[mini-batch, response]` float, uniform random numbers: of the tokens whose
    covariance lies between `covariance_low` and `covariance_high`, those with the smallest are taken, as many as
    `fraction` of all tokens, at least one.
    """
    values = covariances(log_probs, advantages, response_mask)
    between = response_mask & (values > covariance_low) & (values < covariance_high)
    candidates = between.flatten().nonzero()[:, 0]
    count = min(max(int(fraction * int(response_mask.sum())), 1), len(candidates))
    order = draws.flatten()[candidates].argsort(stable=True)
    return _selection(candidates[order[:count]], response_mask)


def highest_entropies(entropies: Tensor, response_mask: Tensor, *, fraction: float) -> Tensor:
    """The tokens of highest entropy, `fraction` of all of the mini-batch, at least one: those that alone train in
    arXiv 2506.01939 (equation number not checked), where it is 0.2. Of equal ones the first in the batch are taken.

    Args (`[mini-batch, response]`): entropies: float, of the policy; read under the mask only. response_mask: bool.

    Returns: `[mini-batch, response]` bool.

    Raises:
        DataError: an entropy that is not finite: NaN would count as the highest.
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

    The paper's equation has no clip beside it; the authors' program has PPO's, and so does this one, wide by default.

    Args: as `ppo_clip`; selected: bool, from `some_large_covariances`.

    Metrics: those of `ppo_clip`, and `selected_fraction`.
    """
    # A product and no torch.where: an advantage that is not finite must reach the loss, selected or not.
    kept = advantages * ~selected
    result = ppo_clip(log_probs, old_log_probs, kept, weights, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(result.loss, result.metrics | {"selected_fraction": moments(selected, weights != 0)})


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
    """KL-Cov, arXiv 2505.22617, eq. 14: the surrogate r_t A_t, with a KL penalty on the selected tokens.

    loss = - sum_t weight_t (r_t A_t - penalty [t selected] |log r_t|). The paper's KL(old || new) is estimated, as in
    the authors' program, by the size of the log-ratio: a selected token is pulled back from any distance.

    Args: see `policy_losses`; selected: bool, from `largest_covariances`. penalty: beta.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`, `selected_fraction`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    spared = selected & active
    surrogate = bounded(log_ratio).exp() * advantages - penalty * torch.where(spared, log_ratio.abs(), 0.0)
    metrics = ratio_metrics(log_ratio, active, torch.zeros_like(active))
    return LossOutput(-(weights * surrogate).sum(), metrics | {"selected_fraction": moments(spared, active)})


def _selection(chosen: Tensor, response_mask: Tensor) -> Tensor:
    flat = torch.zeros_like(response_mask).flatten()
    flat[chosen] = True
    return flat.view_as(response_mask)
