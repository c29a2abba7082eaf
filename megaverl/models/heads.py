"""What stands on top of the backbone: log-probabilities over a sharded vocabulary, and the value head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ValueHead(nn.Module):
    """A linear map from hidden states to one value per position, in place of GPTModel's output layer.

    Its weight [1, hidden] is the same on every tensor-parallel rank and is computed in float32.
    """

    def __init__(self, config: Any, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        # Zero: before any training the critic predicts nothing, whatever the backbone's scale.
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, None]:
        """[s, b, hidden] -> ([s, b, 1] float32, no bias), the signature of ColumnParallelLinear."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class _VocabParallelLogProbs(torch.autograd.Function):
    """log p(target) and entropy of softmax(logits), with the vocabulary cut over a group.

    With p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p * (log p + H).
    Only the probabilities are kept, in the buffer that held the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sharded = group is not None and dist.get_world_size(group) > 1
        width = logits.shape[-1]
        first = dist.get_rank(group) * width if sharded else 0
        padding = first + width - vocab_size
        z = logits
        if padding > 0:
            z[:, max(width - padding, 0) :] = -torch.inf
        top = z.amax(dim=-1, keepdim=True)
        if sharded:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z.sub_(top)
        local = targets - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        at_target = z.gather(1, local[:, None])[:, 0].masked_fill_(~here, 0.0)
        weighted = torch.zeros_like(at_target)
        p = torch.exp(z)
        if with_entropy:
            weighted = (p * z.masked_fill(z == -torch.inf, 0.0)).sum(dim=-1)
        sums = torch.stack((p.sum(dim=-1), at_target, weighted))
        if sharded:
            dist.all_reduce(sums, group=group)
        total, at_target, weighted = sums
        log_total = total.log()
        log_probs = at_target - log_total
        entropy = log_total - weighted / total if with_entropy else weighted
        p.div_(total[:, None])
        ctx.save_for_backward(p, local, here, entropy)
        ctx.with_entropy = with_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        grad_log_probs, grad_entropy = grads
        p, local, here, entropy = ctx.saved_tensors
        grad = p * -grad_log_probs[:, None]
        grad.scatter_add_(1, local[:, None], (grad_log_probs * here)[:, None])
        if ctx.with_entropy:
            grad += grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])
        return grad, None, None, None, None


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, in float32.

    Args:
        logits: [n, padded_vocab / tp], this rank's part of the vocabulary, any floating dtype.
        targets: [n] token ids in the whole vocabulary.
        vocab_size: columns beyond it are padding and get probability zero.
        temperature: logits are divided by it, as the sampler's were.
        with_entropy: else the second result is zeros.
        group: the ranks that share the vocabulary, in order.

    Returns:
        (log_probs [n], entropy [n]), equal on every rank of the group.
    """
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()
    return _VocabParallelLogProbs.apply(scaled, targets, vocab_size, with_entropy, group)
