"""From per-token losses to one number: per-token weights that are divided by GLOBAL denominators.

Each function returns weights `[batch, response]`: the mask, times what the mode gives a token, over the
denominators of the whole mini-batch. Then `sum(weights * per_token_loss)`, added over any split into
micro-batches and ranks, is the loss of the mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.registry import Registry, tensor_problem

aggregations: Registry[Tensor] = Registry(
    "loss aggregation", lambda result, inputs: tensor_problem(result, inputs["response_mask"].shape)
)


class Denominators(NamedTuple):
    """Counts over a whole mini-batch, all ranks and micro-batches together."""

    num_tokens: int  # tokens under the mask
    num_sequences: int  # responses with at least one such token: empty ones and padding rows do not count


def count_denominators(response_mask: Tensor) -> Denominators:
    """Count tokens and non-empty responses in the mask `[mini-batch, response]` of the WHOLE mini-batch."""
    per_sequence = response_mask.sum(dim=1)
    return Denominators(int(per_sequence.sum()), int((per_sequence > 0).sum()))


@aggregations.register("token_mean")
def token_mean(response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every token weighs the same: 1 / (tokens in the mini-batch).

    Source: DAPO, arXiv 2503.14476, eq. 12 ("token-level loss"); PPO's own mean over time steps.

    Args:
        response_mask: bool `[batch, response]`.
        denominators: of the whole mini-batch.

    Returns: weights `[batch, response]`, all 0 where the mini-batch holds no token at all.
    """
    return response_mask.to(dtype) / max(denominators.num_tokens, 1)


@aggregations.register("seq_mean_token_mean")
def seq_mean_token_mean(
    response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every response weighs the same, its tokens share it: 1 / (responses x tokens in this response).

    Source: GRPO, arXiv 2402.03300, eq. 3 (1/G sum over outputs of 1/|o_i| sum over tokens).
    Arguments and result as in `token_mean`.
    """
    mask = response_mask.to(dtype)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)  # an empty response has no token to weigh
    return mask / lengths / max(denominators.num_sequences, 1)


@aggregations.register("seq_mean_token_sum")
def seq_mean_token_sum(
    response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean over responses of the sum over tokens: 1 / (responses).

    Source: the policy gradient of a whole trajectory, mean over trajectories (Sutton et al. 1999);
    Dr. GRPO, arXiv 2503.20783, section 3.2, up to its constant. Arguments and result as in `token_mean`.
    """
    return response_mask.to(dtype) / max(denominators.num_sequences, 1)


@aggregations.register("token_sum")
def token_sum(response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every token weighs 1: the sum, whose size grows with the batch. Arguments and result as in `token_mean`."""
    return response_mask.to(dtype)


@aggregations.register("fixed_length")
def fixed_length(
    response_mask: Tensor, denominators: Denominators, *, max_tokens: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every token weighs 1 / (responses x max_tokens), however long its response is.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2 and its listing 1 (the sum over tokens over a constant, the largest
    number of generated tokens). Arguments and result as in `token_mean`; max_tokens: that constant.
    """
    return response_mask.to(dtype) / (max(denominators.num_sequences, 1) * max_tokens)
