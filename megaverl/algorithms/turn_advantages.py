"""Credit for the turns of an episode: a turn is one action, and its tokens share what it is credited with.

Shapes in both:
    token_rewards: `[batch, response]` float; a turn's reward is the sum over its tokens. Read under the mask only.
    turn_ids: `[batch, response]` int64, rising from 0 within a response; read under the mask only. What the
        environment wrote lies outside the mask.
    response_mask: `[batch, response]` bool, the model's own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators, gae, suffix_scan
from megaverl.algorithms.groups import group_stats
from megaverl.errors import DataError


@advantage_estimators.register("turn_gae")
def turn_gae(
    token_rewards: Tensor,
    values: Tensor,
    turn_ids: Tensor,
    response_mask: Tensor,
    last_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) with turns for steps, as in arXiv 2402.19446, where
    the utterance is the action.

    delta_k = R_k + gamma V_{k+1} - V_k, with V_k the value at the turn's first token, and after the last turn 0, or
    `last_values`, where an episode was cut off. Advantages and returns of a turn stand at all of its tokens.

    Args: see the module. values: `[batch, response]` float, V of the state in which each token was chosen.
        last_values: `[batch]` float, the value after each response's last token; 0 if not given.

    Returns: advantages and returns `[batch, response]` in the dtype of `values`, 0 outside the mask.
    """
    turns = _Turns(turn_ids, response_mask)
    result = gae(turns.sums(token_rewards), turns.firsts(values), turns.exist, last_values, gamma=gamma, lam=lam)
    assert result.returns is not None  # GAE has them
    return Advantages(turns.spread(result.advantages), turns.spread(result.returns))


@advantage_estimators.register("turn_grpo")
def turn_grpo(
    token_rewards: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Advantages:
    """Group-relative credit per turn: each turn against the others' same turn.

    In the spirit of MT-GRPO (arXiv 2505.11821; equation number not checked), which normalises each turn's rewards and
    the outcome's apart and then adds them up; here discounted sums of rewards are what is normalised.

    G_k = sum_{j >= k} gamma^(j - k) R_j; A_k = (G_k - mean) / (std + eps) over those responses of the group that have a
    turn k. With one turn it is GRPO.

    Args: see the module, and `group_advantages`.

    Returns: advantages `[batch, response]` in the dtype of `token_rewards`, 0 outside the mask; no returns.
    """
    turns = _Turns(turn_ids, response_mask)
    rewards = turns.sums(token_rewards)
    gains = suffix_scan(rewards, torch.full_like(rewards, gamma))
    advantages = torch.zeros_like(gains)
    for k in range(gains.shape[1]):
        rows = turns.exist[:, k].nonzero()[:, 0]
        stats = group_stats(gains[rows, k], group_ids[rows])
        scaled = stats.centered / (stats.std + eps) if normalize_std else stats.centered
        advantages[rows, k] = scaled.to(gains.dtype)
    return Advantages(turns.spread(advantages), None)


class _Turns:
    """Between tokens `[batch, response]` and turns `[batch, most turns]`."""

    def __init__(self, turn_ids: Tensor, mask: Tensor) -> None:
        ids = torch.where(mask, turn_ids, 0)
        before = torch.where(mask, turn_ids, -1).cummax(dim=1).values
        if bool((ids < 0).any()) or bool((mask & (turn_ids < before)).any()):
            raise DataError("turn_ids must not be negative, and must not fall within a response")
        count = int(ids.max()) + 1 if ids.numel() else 0
        self.ids, self.mask = ids, mask
        self.exist = torch.zeros(len(mask), count, dtype=torch.int64, device=mask.device)
        self.exist = self.exist.scatter_add(1, ids, mask.long()) > 0

    def sums(self, per_token: Tensor) -> Tensor:
        """The sum over each turn's tokens; 0 for a turn that is not there."""
        kept = torch.where(self.mask, per_token, 0.0)
        return kept.new_zeros(self.exist.shape).scatter_add(1, self.ids, kept)

    def firsts(self, per_token: Tensor) -> Tensor:
        """The value at each turn's first token; 0 for a turn that is not there."""
        length = self.mask.shape[1]
        columns = torch.where(self.mask, torch.arange(length, device=self.mask.device), length)
        first = torch.full(self.exist.shape, length, device=self.mask.device)
        first = first.scatter_reduce(1, self.ids, columns, "amin")
        kept = torch.where(self.mask, per_token, 0.0)
        return torch.cat([kept, kept.new_zeros(len(kept), 1)], dim=1).gather(1, first)

    def spread(self, per_turn: Tensor) -> Tensor:
        """Each turn's value at all of its tokens, 0 outside the mask."""
        return torch.where(self.mask, per_turn.gather(1, self.ids), 0.0) if per_turn.shape[1] else self.mask * 0.0
