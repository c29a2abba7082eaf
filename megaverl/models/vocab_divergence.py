"""Divergence between student and teacher over a vocabulary that is split over tensor-parallel ranks.

It is computed in chunks of tokens. The teacher is given by hidden states and the weight
of its output layer, so its logits never exist as a whole, and neither do the student's
log-probs. No chunk is kept: it is computed once in the forward pass and once more in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megaverl.models.vocab_parallel import (
    CHUNK_BYTES,
    LOWEST,
    Distributions,
    Gradients,
    Shard,
    parts_of,
)

# Function of the log-probs [m, v] of student and teacher -> [m]. It must be a sum over
# v of terms that depend on one entry each.
Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Divergences(torch.autograd.Function):
    """Autograd function of D_t = sum_v f(log p_v, log q_v).

    With g = df / dlog p the gradient is dD_t / dz = (g - p sum_v g) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        index: torch.Tensor,
        softcap: float | None,
        teacher: Distributions,
        divergence: Divergence,
        shard: Shard,
        temperature: float,
        top_k: int | None,
    ) -> torch.Tensor:
        student = Distributions(rows, index, weight, softcap)
        count = len(index)
        # [2, n]: log sum e^z of student and teacher.
        totals = torch.zeros(2, count, device=rows.device)
        # The smallest of the teacher's logits that counts.
        floors = torch.full((count,), LOWEST, device=rows.device)
        # The divergence, and the sum of its slopes.
        sums = torch.zeros(2, count, device=rows.device)
        for part in _parts(student):
            both = [
                _scaled(model.logits(part, shard.valid), temperature)
                for model in (student, teacher)
            ]
            if top_k is not None:
                floors[part] = _kth_largest(both[1], top_k, shard)
                # Both distributions lose the same tokens, and are normalized over what
                # is left.
                _cut(both, floors[part])
            totals[:, part] = _log_totals(both, shard)
            # In place, because a chunk's logits are the largest tensors here.
            log_p, log_q = (
                z.sub_(total[:, None])
                for z, total in zip(both, totals[:, part], strict=True)
            )
            values, slopes = _with_slopes(divergence, log_p, log_q)
            sums[0, part], sums[1, part] = values, slopes.sum(dim=-1)
        # One all-reduce for all chunks. Collective over the ranks that share the
        # vocabulary.
        sums = shard.all_reduce(sums, dist.ReduceOp.SUM)
        # Probabilities are computed again in the backward pass, from the saved totals.
        ctx.save_for_backward(
            rows,
            weight,
            index,
            teacher.rows,
            teacher.index,
            teacher.weight,
            totals,
            sums[1],
            floors,
        )
        ctx.softcaps = softcap, teacher.softcap
        ctx.options = divergence, shard, temperature, top_k
        return sums[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, index, *of_teacher, totals, slope_sums, floors = ctx.saved_tensors
        teacher_rows, teacher_index, teacher_weight = of_teacher
        divergence, shard, temperature, top_k = ctx.options
        student_softcap, teacher_softcap = ctx.softcaps
        student = Distributions(rows, index, weight, student_softcap)
        teacher = Distributions(
            teacher_rows, teacher_index, teacher_weight, teacher_softcap
        )
        gradients = Gradients(student, shard.valid, with_weight=ctx.needs_input_grad[1])
        # A rank with padding only has no gradient to add, and takes part in no
        # collective here.
        for part in _parts(student) if shard.valid else ():
            logits = student.logits(part, shard.valid)
            both = [
                _scaled(each, temperature)
                for each in (logits, teacher.logits(part, shard.valid))
            ]
            if top_k is not None:
                _cut(both, floors[part])
            log_p, log_q = (
                z.sub_(total[:, None])
                for z, total in zip(both, totals[:, part], strict=True)
            )
            _, slopes = _with_slopes(divergence, log_p, log_q)
            # The slopes' sum belongs to the normalization: dD/dz = g - p sum g.
            grad = slopes - log_p.exp_().mul_(slope_sums[part, None])
            gradients.put(part, grad.mul_(grads[0][part, None] / temperature), logits)
        return gradients.rows, gradients.weight, *(None,) * 7


def vocab_parallel_divergence(
    student: Distributions,
    teacher: Distributions,
    divergence: Divergence,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the divergence of the student's from the teacher's distribution per token, [n] float32.

    Equal on every rank of the group.

    Args:
        student: n distributions, as logits or hidden states. Gradients flow to its rows and its weight.
        teacher: n distributions.
        divergence: function of log-probs; see `megaverl.algorithms.model_rewards`.
        vocab_size: columns from this one on are padding.
        temperature: logits of both are divided by it.
        top_k: restrict both distributions to the teacher's k likeliest tokens and renormalize them. None: all tokens.
        group: ranks that share the vocabulary, in order. Collective over them.
    """
    shard = Shard.of(student.columns, vocab_size, group)
    divergences: torch.Tensor = _Divergences.apply(  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
        student.rows,
        student.weight,
        student.index,
        student.softcap,
        teacher,
        divergence,
        shard,
        temperature,
        top_k,
    )
    return divergences


def _parts(of: Distributions) -> Iterator[slice]:
    """Yield chunks of tokens.

    The chunks are equal on every rank of the group, including ranks that hold padding
    columns only.
    """
    return parts_of(len(of), max(16, CHUNK_BYTES // (4 * max(of.columns, 1))))


def _kth_largest(z: torch.Tensor, k: int, shard: Shard) -> torch.Tensor:
    """Return the k-th largest logit over the whole vocabulary, [m]; the smallest one if there are fewer than k."""
    highest = z.new_full((len(z), k), LOWEST)
    # Each rank contributes its k largest. Collective over the group.
    here = z.topk(min(k, z.shape[1])).values
    highest[:, : here.shape[1]] = here
    return shard.all_gather(highest).topk(k).values[:, -1]


def _cut(both: list[torch.Tensor], floors: torch.Tensor) -> None:
    """Set logits of student and teacher to `LOWEST` in place where the teacher's logit is below its floor."""
    outside = both[1] < floors[:, None]
    for z in both:
        z.masked_fill_(outside, LOWEST)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return a float32 copy of the logits, divided by the temperature."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _log_totals(both: list[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return log sum e^z over the whole vocabulary for student and teacher, [2, m]."""
    # Subtracting the maximum over all ranks keeps the exponentials from overflowing.
    if shard.valid:
        local_top = torch.stack([z.amax(dim=-1) for z in both])
    else:
        # This rank's part of the vocabulary is padding only.
        local_top = torch.stack([z.new_full((len(z),), LOWEST) for z in both])
    # Collective over the group: the maximum first, then the sum relative to it.
    top = shard.all_reduce(local_top, dist.ReduceOp.MAX)
    local_sums = [
        (z - most[:, None]).exp_().sum(dim=-1)
        for z, most in zip(both, top, strict=True)
    ]
    sums = torch.stack(local_sums)
    return shard.all_reduce(sums, dist.ReduceOp.SUM).log() + top


def _with_slopes(
    divergence: Divergence, log_p: torch.Tensor, log_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence D [m] and its derivatives by log p, [m, v]."""
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        # The gradient of a sum over tokens is each token's own gradient.
        values = divergence(leaf, log_q)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes
