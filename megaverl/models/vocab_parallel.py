"""Log-probs and entropies over a vocabulary that is split over a group, computed in chunks of tokens.

Logits are the largest tensors of a step, so nothing of their size is created besides
their gradient. The forward pass keeps three numbers per token and a reference to the
logits, and the backward pass recomputes probabilities. If hidden states and an output
layer's weight are given, logits never exist as a whole: they are computed only for
tokens whose log-probs are wanted, chunk by chunk, once forward and once more backward,
as in activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaverl.platform.batch_invariant import is_batch_invariant, linear, sum_rows

# Elements of whole logits that are processed at once: a 128th of them, within these
# bounds. An intermediate result then takes 1 to 16 MiB in float32, and three of them a
# twentieth of 16-bit logits.
SMALLEST_CHUNK = 1 << 18
LARGEST_CHUNK = 1 << 22
# Bytes of logits that are computed from hidden states at a time.
CHUNK_BYTES = 32 * 2**20
# Used instead of -inf, so that differences and products with 0 stay finite: e^-10000 is
# 0 in float32.
LOWEST = -1e30
NEGLIGIBLE = -1e4


class Drawn(NamedTuple):
    """Sampling settings of n tokens, which decide the distribution they were drawn from.

    Attributes:
        temperature: divisor of the logits; [n] float32 if tokens differ.
        top_k: [n] int64, number of likeliest tokens that could be drawn, 0 for all. None: all, for every token.
        floor: [n], smallest logit over temperature that could be drawn. Derived from `top_k` by a first pass over the
            logits.
    """

    temperature: float | torch.Tensor = 1.0
    top_k: torch.Tensor | None = None
    floor: torch.Tensor | None = None

    def select(self, part: slice) -> Drawn:
        """Return the settings of the tokens in `part`."""
        temperature, top_k, floor = self
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[part]
        return Drawn(
            temperature,
            None if top_k is None else top_k[part],
            None if floor is None else floor[part],
        )

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the rows, divided by the temperature."""
        return rows.to(torch.float32, copy=True).div_(self.divisor)

    @property
    def divisor(self) -> float | torch.Tensor:
        """Divisor of a row of logits."""
        return (
            self.temperature[:, None]
            if isinstance(self.temperature, torch.Tensor)
            else self.temperature
        )

    def cut(
        self, z: torch.Tensor, local: torch.Tensor, here: torch.Tensor, lowest: float
    ) -> torch.Tensor:
        """Set logits that could not be drawn to `lowest`, in place, and return them.

        A target is kept even below the floor: it was drawn, possibly from slightly
        different weights.

        Args:
            z: [m, columns].
            local: [m, 1], the target's column.
            here: [m, 1], whether the target is in this shard.
        """
        if self.floor is None:
            return z
        # [m, columns] bool: tokens that the sampler could not have drawn.
        out = z < self.floor[:, None]
        # Only where the target is in this shard. Elsewhere `local` points to some other
        # token.
        out.scatter_(1, local, out.gather(1, local) & ~here)
        return z.masked_fill_(out, lowest)


class Shard(NamedTuple):
    """This rank's columns of the vocabulary.

    Attributes:
        first: token id of column 0.
        valid: number of columns that are no padding.
        group: ranks that share the vocabulary. None: this rank has all of it.
    """

    first: int
    valid: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(width: int, vocab_size: int, group: dist.ProcessGroup | None) -> Shard:
        """Return the shard of this rank, which has `width` columns."""
        sharded = group is not None and dist.get_world_size(group) > 1
        first = dist.get_rank(group) * width if sharded else 0
        return Shard(
            first, min(max(vocab_size - first, 0), width), group if sharded else None
        )

    def all_reduce(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> torch.Tensor:
        """Reduce `values` over the group in place, and return them."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather [n, k] of every rank to [n, k * ranks], equal on every rank."""
        if self.group is None:
            return values
        parts = [
            torch.empty_like(values) for _ in range(dist.get_world_size(self.group))
        ]
        # Every rank gathers equal shapes, since shards are padded to equal widths.
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return softcap * tanh(logits / softcap) in float32 (arXiv 2408.00118, section 2), or the logits without a cap."""
    if softcap is None:
        return logits
    # In place on one copy: a chunk's logits are the largest tensors here.
    return logits.to(torch.float32, copy=True).div_(softcap).tanh_().mul_(softcap)


def parts_of(count: int, step: int) -> Iterator[slice]:
    """Yield slices that cover 0 to `count`, at most `step` long."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


@dataclass(frozen=True)
class Distributions:
    """n distributions over the vocabulary, as logits or as hidden states with an output layer.

    Hidden states in float32 are multiplied in float32, also with a weight of 16 bits.

    Attributes:
        rows: [..., padded_vocab / tp] logits, or with `weight` [..., hidden] hidden states.
        index: [n] int64 without duplicates, selected rows. None: all, in order.
        weight: [padded_vocab / tp, hidden], this rank's part of an output layer.
        softcap: soft cap that is applied to `rows`, or to their products with `weight`. None: no cap.
    """

    rows: torch.Tensor
    index: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    softcap: float | None = None

    @property
    def columns(self) -> int:
        """Number of logits per row on this rank."""
        return self.rows.shape[-1] if self.weight is None else self.weight.shape[0]

    def __len__(self) -> int:
        return self.rows.shape[:-1].numel() if self.index is None else len(self.index)

    def select_rows(self, part: slice) -> torch.Tensor:
        """Return the rows of the distributions in `part`, [m, columns or hidden]."""
        flat = self.rows.reshape(-1, self.rows.shape[-1])
        # A copy of selected rows, or a view of adjacent ones.
        return (
            flat[part] if self.index is None else flat.index_select(0, self.index[part])
        )

    def logits(self, part: slice, valid: int) -> torch.Tensor:
        """Return the logits of the distributions in `part`, [m, valid]."""
        rows = self.select_rows(part)
        if self.weight is None:
            return capped(rows[:, :valid], self.softcap)
        weight = self.multiplied[:valid]
        if is_batch_invariant() and rows.device.type == "cpu":
            return capped(linear(rows, weight), self.softcap)
        return capped(rows @ weight.t(), self.softcap)

    @cached_property
    def multiplied(self) -> torch.Tensor:
        """The weight in the dtype of the rows, which is that of the products."""
        assert self.weight is not None, "logits have no output layer"
        # A copy for all chunks: converting the weight takes longer than multiplying it
        # by the rows of one chunk.
        return self.weight.to(self.rows.dtype)

    def parts(self) -> Iterator[slice]:
        """Yield slices of distributions to process at once."""
        if self.weight is not None:
            return parts_of(
                len(self),
                max(16, CHUNK_BYTES // (self.columns * self.rows.element_size())),
            )
        width = max(self.columns, 1)
        return parts_of(
            len(self),
            max(
                1,
                min(
                    max(len(self) // 128, SMALLEST_CHUNK // width),
                    LARGEST_CHUNK // width,
                ),
            ),
        )

    def chunks(self, valid: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (slice, logits [m, valid]) over all distributions.

        Yields nothing on a rank that has padding columns only.
        """
        for part in self.parts() if valid else ():
            yield part, self.logits(part, self.columns)[:, :valid]


class Gradients:
    """Gradients of distributions' rows and optionally of their weight, assembled chunk by chunk.

    The weight's gradient is a sum over chunks, accumulated in float32 like a single
    matrix product.
    """

    def __init__(
        self, distributions: Distributions, valid: int, *, with_weight: bool
    ) -> None:
        self._distributions = distributions
        self._valid = valid
        self.rows = torch.zeros_like(
            distributions.rows, memory_format=torch.contiguous_format
        )
        self._weight = None
        if distributions.weight is not None and with_weight:
            self._weight = torch.zeros_like(distributions.weight, dtype=torch.float32)

    @property
    def weight(self) -> torch.Tensor | None:
        """Gradient of the weight in its dtype, or None."""
        return (
            None
            if self._weight is None or self._distributions.weight is None
            else self._weight.to(self._distributions.weight.dtype)
        )

    def put(self, part: slice, by_logits: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the chunk `part`, given its logits [m, valid] and their gradient, which may be overwritten."""
        weight = self._distributions.weight
        if (softcap := self._distributions.softcap) is not None:
            # y = c tanh(x / c) has the slope 1 - (y / c)^2.
            by_logits.mul_((logits / softcap).square_().neg_().add_(1.0))
        index = self._distributions.index
        flat = self.rows.view(-1, self.rows.shape[-1])
        # The product with the weight runs in the dtype of the rows; its sum over
        # chunks is kept in float32.
        grad = by_logits.to(self.rows.dtype)
        if weight is None:
            out = flat[:, : self._valid]
        else:
            out = flat
            # Through the output layer back to the hidden states.
            by_rows = grad @ self._distributions.multiplied[: self._valid]
            if self._weight is not None:
                self._weight[: self._valid] += (
                    grad.t() @ self._distributions.select_rows(part)
                )
            grad = by_rows
        if index is None:
            out[part] = grad
        else:
            out.index_copy_(0, index[part], grad)


class _Sums(NamedTuple):
    """Sums over the whole vocabulary, [n] each, of z = logits / temperature and p = softmax(z)."""

    log_total: torch.Tensor  # log sum e^z
    at_target: torch.Tensor  # z of the target
    mean: torch.Tensor  # sum p z, 0 unless asked for
    squares: torch.Tensor  # sum p^2, 0 unless asked for


def _with_floor(distributions: Distributions, shard: Shard, drawn: Drawn) -> Drawn:
    """Return `drawn` with its floor, if top-k restricts any token. Collective over the group."""
    if drawn.top_k is None or not bool(drawn.top_k.any()):
        return drawn
    most = int(drawn.top_k.max())
    highest = torch.full(
        (len(drawn.top_k), most), LOWEST, device=distributions.rows.device
    )
    # Ranks without valid columns run no chunk, and meet the others in the collective
    # below.
    for part, logits in distributions.chunks(shard.valid):
        highest_of_part = (
            drawn.select(part).scaled(logits).topk(min(most, logits.shape[1])).values
        )
        highest[part, : highest_of_part.shape[1]] = highest_of_part
    # The k largest of the whole vocabulary are among the k largest of each shard.
    # Collective over the group.
    highest = shard.all_gather(highest).topk(most).values
    floor = highest.gather(1, (drawn.top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return drawn._replace(floor=floor.masked_fill(drawn.top_k == 0, LOWEST))


def _logit_sums(
    distributions: Distributions,
    targets: torch.Tensor,
    shard: Shard,
    drawn: Drawn,
    *,
    with_mean: bool = False,
    with_squares: bool = False,
) -> _Sums:
    """Compute the sums in one pass over the logits. Collective over the group."""
    count = len(targets)
    top = torch.full((count,), LOWEST, device=distributions.rows.device)
    # Sums of e^(z - top), of (z - top) e^(z - top), and of its square, and the target's
    # logit.
    sums = torch.zeros(4, count, device=distributions.rows.device)
    # The target's column on the one rank that has it. Elsewhere the value is masked
    # out.
    local = targets - shard.first
    here = (local >= 0) & (local < shard.valid)
    local = local.clamp(0, max(shard.valid - 1, 0))
    for part, logits in distributions.chunks(shard.valid):
        drawn_part = drawn.select(part)
        z = drawn_part.cut(
            drawn_part.scaled(logits), local[part, None], here[part, None], LOWEST
        )
        sums[3, part] = z.gather(1, local[part, None])[:, 0].masked_fill_(
            ~here[part], 0.0
        )
        top[part] = z.amax(dim=-1).clamp_(min=LOWEST)
        # In place: a copy of a chunk would be the largest tensor here.
        e = z.sub_(top[part, None]).clamp_(min=NEGLIGIBLE).exp()
        sums[0, part] = sum_rows(e)
        if with_mean:
            sums[1, part] = z.mul_(e).sum(dim=-1)
        if with_squares:
            sums[2, part] = e.square_().sum(dim=-1)
    # Convert sums relative to this shard's largest logit to sums relative to that of
    # the whole vocabulary.
    whole_top = shard.all_reduce(top.clone(), dist.ReduceOp.MAX)
    # Not positive: exponentials of it never overflow.
    gap = top - whole_top
    sums[1] += gap * sums[0]
    sums[:2] *= gap.exp()
    sums[2] *= (2 * gap).exp()
    # Collective over the group: one all-reduce for all four sums.
    total, weighted, squares, at_target = shard.all_reduce(sums, dist.ReduceOp.SUM)
    mean = whole_top + weighted / total if with_mean else weighted
    return _Sums(total.log() + whole_top, at_target, mean, squares / total.square())


class _LogProbs(torch.autograd.Function):
    """Autograd function of log p(target) and of the entropy of p = softmax(z).

    d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        index: torch.Tensor | None,
        targets: torch.Tensor,
        shard: Shard,
        drawn: Drawn,
        with_entropy: bool,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        distributions = Distributions(rows, index, weight, softcap)
        # The floor needs a pass of its own, before probabilities are known.
        drawn = _with_floor(distributions, shard, drawn)
        sums = _logit_sums(distributions, targets, shard, drawn, with_mean=with_entropy)
        entropy = sums.log_total - sums.mean if with_entropy else sums.mean
        # Three numbers per token are kept, and no logits.
        ctx.save_for_backward(rows, weight, index, targets, sums.log_total, entropy)
        ctx.options = shard, drawn, with_entropy, softcap
        return sums.at_target - sums.log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        rows, weight, index, targets, log_total, entropy = ctx.saved_tensors
        shard, drawn, with_entropy, softcap = ctx.options
        distributions = Distributions(rows, index, weight, softcap)
        gradients = Gradients(
            distributions, shard.valid, with_weight=ctx.needs_input_grad[1]
        )
        local = targets - shard.first
        here = (local >= 0) & (local < shard.valid)
        local = local.clamp(0, max(shard.valid - 1, 0))
        for part in distributions.parts() if shard.valid else ():
            # [m, 1] each, so that they broadcast over the columns.
            by = (
                grad_log_probs[part, None],
                grad_entropy[part, None] if with_entropy else None,
            )
            sums = (log_total[part, None], entropy[part, None])
            where = (local[part, None], here[part, None])
            # Computed again rather than saved. Saving them would take as much memory as
            # all logits.
            logits = distributions.logits(part, shard.valid)
            gradients.put(
                part,
                _logit_gradient(logits, *where, by, sums, drawn.select(part)),
                logits,
            )
        return gradients.rows, gradients.weight, *(None,) * 6


def _logit_gradient(
    rows: torch.Tensor,
    local: torch.Tensor,
    here: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    sums: tuple[torch.Tensor, torch.Tensor],
    drawn: Drawn,
) -> torch.Tensor:
    """Return the gradient of a chunk's logits, [m, valid] float32.

    Args:
        rows: [m, valid], the logits.
        local: [m, 1], the target's column in this shard.
        here: [m, 1], whether the target is in this shard.
        grads: [m, 1], of the log-probs and, if requested, of the entropy.
        sums: [m, 1], log sum e^z and the entropy.
        drawn: settings of these tokens, with their floor.
    """
    by_log_prob, by_entropy = grads
    log_total, entropy = sums
    log_p = (
        drawn.cut(drawn.scaled(rows), local, here, LOWEST)
        .sub_(log_total)
        .clamp_(min=NEGLIGIBLE)
    )
    p = log_p.exp()
    if by_entropy is not None:
        # d entropy / dz = -p (log p + entropy), and d log_prob / dz = onehot - p.
        grad = log_p.add_(entropy).mul_(-by_entropy).sub_(by_log_prob).mul_(p)
    else:
        grad = p.mul_(-by_log_prob)
    return grad.scatter_add_(1, local, by_log_prob * here).div_(drawn.divisor)


def vocab_parallel_log_probs(
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    weight: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    index: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, in float32.

    Args:
        rows: [..., padded_vocab / tp] logits, this rank's part of the vocabulary, in any floating dtype. With `weight`,
            [..., hidden] hidden states that are equal on every rank of the group. Their gradient is then this rank's
            part of the sum; see `HiddenHead`.
        targets: [n] token ids in the whole vocabulary.
        vocab_size: columns from this one on are padding and get probability zero.
        weight: [padded_vocab / tp, hidden], this rank's part of the output layer.
        temperature: divisor of the logits, as in sampling; [n] if tokens differ.
        top_k: [n] int64, number of likeliest tokens that were sampled from, 0 for all. None: all.
        with_entropy: False returns zeros for the entropy.
        group: ranks that share the vocabulary, in order. Collective over them.
        index: [n] int64 without duplicates, rows that predict the targets. None: all.
        softcap: soft cap to apply to the logits, before the temperature. None: no cap, or logits that have it already.

    Returns:
        (log_probs [n], entropy [n]), equal on every rank of the group.
    """
    shard = Shard.of(Distributions(rows, index, weight).columns, vocab_size, group)
    drawn = Drawn(temperature, top_k)
    result: tuple[torch.Tensor, torch.Tensor] = _LogProbs.apply(  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
        rows, weight, index, targets, shard, drawn, with_entropy, softcap
    )
    return result


@torch.no_grad()
def vocab_parallel_squared_probs(
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    weight: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    index: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log_probs [n] and sum of p^2 over the vocabulary [n], in float32 without gradient.

    For arguments, see `vocab_parallel_log_probs`.
    """
    distributions = Distributions(rows, index, weight, softcap)
    shard = Shard.of(distributions.columns, vocab_size, group)
    drawn = _with_floor(distributions, shard, Drawn(temperature, top_k))
    sums = _logit_sums(distributions, targets, shard, drawn, with_squares=True)
    return sums.at_target - sums.log_total, sums.squares
