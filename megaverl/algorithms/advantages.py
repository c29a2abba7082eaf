"""Advantage estimators: what each generated token is credited with. Here the registry, GAE and whitening."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.registry import Registry, tensor_problem


class Advantages(NamedTuple):
    """advantages: `[batch, response]`, 0 outside the mask. returns: targets of the critic, if any."""

    advantages: Tensor
    returns: Tensor | None


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    if not isinstance(result, Advantages):
        return f"{type(result).__name__}; expected Advantages(advantages, returns or None)"
    shape = inputs["response_mask"].shape
    wrong = tensor_problem(result.advantages, shape, "as advantages ")
    return wrong or (tensor_problem(result.returns, shape, "as returns ") if result.returns is not None else None)


advantage_estimators: Registry[Advantages] = Registry("advantage estimator", _problem)


@advantage_estimators.register("gae")
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    last_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Advantages:
    """Generalised advantage estimation, arXiv 1506.02438, eq. 16 (with delta as defined before eq. 10).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_l (gamma lam)^l delta_{t+l}, returns = A + V.
    The value after a response's last token is 0 (the episode is over), or `last_values`, where a response
    was cut off and its rest should be bootstrapped. Tokens outside the mask are stepped over: the token
    before a hole is followed by the one after it.

    Args:
        token_rewards: `[batch, response]` float; read under the mask only.
        values: `[batch, response]` float, V of the state in which the token was chosen; read under the mask
            only.
        response_mask: `[batch, response]` bool.
        last_values: `[batch]` float, the value after each response's last token; 0 if not given.
        gamma: discount per token. lam: lambda of GAE; 1 gives returns minus values, 0 gives delta.

    Returns: advantages and returns `[batch, response]` in the dtype of `values`, 0 outside the mask.
    """
    rewards = torch.where(response_mask, token_rewards.to(values.dtype), 0.0)
    values = torch.where(response_mask, values, 0.0)
    after = values.new_zeros(len(values)) if last_values is None else last_values.to(values.dtype)
    deltas = rewards + gamma * _next_under_mask(values, response_mask, after) - values
    # A hole in the mask passes on, undiminished, what comes after it.
    decay = torch.ones_like(values).masked_fill(response_mask, gamma * lam)
    advantages = suffix_scan(torch.where(response_mask, deltas, 0.0), decay)
    advantages = torch.where(response_mask, advantages, 0.0)
    return Advantages(advantages, advantages + values)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Values under the mask scaled to variance 1 and, if `shift_mean`, shifted to mean 0; 0 outside the mask.

    Mean and population variance are taken over the whole mask in float64, so give the whole (mini-)batch.
    A constant becomes 0 with `shift_mean`, and an empty mask gives zeros.
    Source: the advantage normalisation usual with PPO, studied in arXiv 2006.05990.

    Args:
        values: `[batch, response]` float. mask: bool, the same shape. eps: added to the variance.
    """
    kept = torch.where(mask, values.double(), 0.0)
    count = mask.sum().clamp(min=1)
    mean = kept.sum() / count
    centered = torch.where(mask, kept - mean, 0.0)
    scale = (centered.square().sum() / count + eps).rsqrt()
    return ((centered if shift_mean else kept) * scale).to(values.dtype)


def rewards_to_go(token_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = sum_{s >= t} gamma^(s - t) r_s over the tokens under the mask (holes are stepped over).

    Args: `[batch, response]`; rewards are read under the mask only.

    Returns: `[batch, response]` in the dtype of the rewards, 0 outside the mask.
    """
    rewards = torch.where(response_mask, token_rewards, 0.0)
    decay = torch.ones_like(rewards).masked_fill(response_mask, gamma)
    return torch.where(response_mask, suffix_scan(rewards, decay), 0.0)


def _next_under_mask(values: Tensor, mask: Tensor, after: Tensor) -> Tensor:
    """For each position the value at the next one under the mask, or `after` `[batch]` where none follows."""
    length = values.shape[1]
    columns = torch.arange(length, device=values.device).expand_as(mask)
    at_or_after = torch.where(mask, columns, length).flip(1).cummin(1).values.flip(1)  # `length` means none
    beyond = torch.full_like(at_or_after[:, :1], length)
    following = torch.cat([at_or_after[:, 1:], beyond], dim=1)[:, :length]
    return torch.cat([values, after.unsqueeze(1)], dim=1).gather(1, following)


def suffix_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """x_t = terms_t + decay_t x_{t+1} along dim 1, by doubling: log2(length) passes, no loop over tokens."""
    total, factor, step = terms, decay, 1
    while step < terms.shape[1]:
        # total_t covers `step` terms from t on, factor_t is the product of their decays.
        total = torch.cat([total[:, :-step] + factor[:, :-step] * total[:, step:], total[:, -step:]], dim=1)
        factor = torch.cat([factor[:, :-step] * factor[:, step:], torch.zeros_like(factor[:, -step:])], dim=1)
        step *= 2
    return total
