"""The output layer and the log-probs in one, some tokens at a time: logits [tokens, vocab] are never whole.

Only tokens whose log-probs are wanted get logits at all: none of a prompt's do. Forward, each chunk's logits are
summed up and dropped; backward they are computed again, as in activation checkpointing, and their gradient goes at once
into those of the hidden states and of the output layer's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megaverl.models.layers import sum_gradients
from megaverl.models.vocab_parallel import LOWEST, Drawn, Shard, logit_gradient, logit_sums, with_floor
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402

CHUNK_BYTES = 32 * 2**20  # of logits, at a time


class HiddenHead:
    """In the place of an output layer's `forward`: gives the hidden states on, and keeps the weight for later.

    Backward, their gradient is summed over the tensor-parallel ranks, as the layer itself would.
    """

    def __init__(self, layer: Any, group: dist.ProcessGroup) -> None:
        self._layer, self._group = layer, group
        self._tied: torch.Tensor | None = None
        layer.forward = self

    @property
    def weight(self) -> torch.Tensor:
        """[padded_vocab / tp, hidden], as of the last forward pass."""
        weight: torch.Tensor = self._layer.weight if self._tied is None else self._tied
        return weight

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, hidden] -> (the same of the whole sequence, no bias), the signature of ColumnParallelLinear."""
        self._tied = weight
        if self._layer.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self._group)
        else:
            whole = sum_gradients(hidden, self._group)
        return whole, None


def _parts(count: int, weight: torch.Tensor) -> Iterator[slice]:
    step = max(16, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class _HeadLogProbs(torch.autograd.Function):
    """log p(target) and entropy of p = softmax(h W^T / temperature) for rows of the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        index: torch.Tensor,
        shard: Shard,
        drawn: Drawn,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        log_total, at_target, mean, floor = torch.zeros(4, len(targets), device=hidden.device)
        for part in _parts(len(targets), weight):
            logits = flat.index_select(0, index[part]) @ weight.t()
            some = with_floor(logits, None, shard, drawn.of(part))
            sums = logit_sums(logits, None, targets[part], shard, some, with_mean=with_entropy)
            floor[part] = LOWEST if some.floor is None else some.floor
            log_total[part], at_target[part], mean[part] = sums.log_total, sums.at_target, sums.mean
        entropy = log_total - mean if with_entropy else mean
        ctx.save_for_backward(hidden, weight, targets, index, log_total, entropy)
        ctx.options = shard, drawn if drawn.top_k is None else drawn._replace(floor=floor), with_entropy
        return at_target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, targets, index, log_total, entropy = ctx.saved_tensors
        shard, drawn, with_entropy = ctx.options
        flat = hidden.reshape(-1, hidden.shape[-1])
        valid = weight[: shard.valid]
        grad_hidden = torch.zeros_like(flat)
        # sums of many chunks, in float32 as one matrix product would have them
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        local = targets - shard.first
        here = (local >= 0) & (local < shard.valid)
        local = local.clamp(0, max(shard.valid - 1, 0))
        for part in _parts(len(targets), weight) if shard.valid else ():
            rows = flat.index_select(0, index[part])
            by = grad_log_probs[part, None], grad_entropy[part, None] if with_entropy else None
            sums = log_total[part, None], entropy[part, None]
            logits = rows @ valid.t()
            some = drawn.of(part)
            grad = logit_gradient(logits, local[part, None], here[part, None], by, sums, some).to(rows.dtype)
            del logits
            grad_hidden.index_copy_(0, index[part], grad @ valid)
            if grad_weight is not None:
                grad_weight[: shard.valid] += grad.t() @ rows
        given = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden.view_as(hidden), given, None, None, None, None, None


def head_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    index: torch.Tensor,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vocab_parallel_log_probs` of the logits `hidden @ weight.T`, which are never whole.

    Args:
        hidden: [..., hidden], the same on every rank of the group.
        weight: [padded_vocab / tp, hidden], this rank's part of the vocabulary.
        targets, index: [n]; which rows of `hidden.reshape(-1, hidden)` predict which tokens.

    Returns:
        (log_probs [n], entropy [n]), float32. The gradient of `hidden` is this rank's part of it: see `HiddenHead`.
    """
    shard = Shard.of(weight.shape[0], vocab_size, group)
    return _HeadLogProbs.apply(hidden, weight, targets, index, shard, Drawn(temperature, top_k), with_entropy)


@torch.no_grad()
def head_squared_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    index: torch.Tensor,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs [n], sum over the vocabulary of p^2 [n]), float32, without a gradient; see above."""
    shard = Shard.of(weight.shape[0], vocab_size, group)
    flat = hidden.reshape(-1, hidden.shape[-1])
    log_probs, squares = torch.zeros(2, len(targets), device=hidden.device)
    for part in _parts(len(targets), weight):
        logits = flat.index_select(0, index[part]) @ weight.t()
        drawn = with_floor(logits, None, shard, Drawn(temperature, top_k).of(part))
        sums = logit_sums(logits, None, targets[part], shard, drawn, with_squares=True)
        log_probs[part], squares[part] = sums.at_target - sums.log_total, sums.squares
    return log_probs, squares
