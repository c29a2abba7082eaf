"""Log-probabilities and entropies over a vocabulary that is cut over a group, a few tokens at a time.

Logits are the largest tensors of a step. So nothing of their size is made beside them but their gradient: the forward
pass keeps three numbers per token and refers to the logits, and the backward pass computes probabilities anew. Made of
hidden states and an output layer's weight, logits are never whole: only tokens whose log-probs are wanted get any, and
each chunk's are computed once forward and, as in activation checkpointing, once more backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Elements of whole logits that are worked on at once: a 128th of them, within these bounds. Each intermediate result is
# then 1 to 16 MiB of float32, and three of them are a twentieth of 16-bit logits.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 18, 1 << 22
CHUNK_BYTES = 32 * 2**20  # of logits that are made of hidden states, at a time
# In place of -inf, so that differences and products with 0 stay numbers: e^-10000 is 0 in float32.
LOWEST, NEGLIGIBLE = -1e30, -1e4


class Drawn(NamedTuple):
    """Of n tokens.

    Attributes:
        temperature: logits are divided by it; [n] float32 where tokens differ.
        top_k: [n] int64, so many of the likeliest tokens could be drawn, 0: all. None: all, for every token.
        floor: [n], the least logit, over the temperature, that could be drawn; found out of `top_k` by the first pass
            over the logits.
    """

    temperature: float | torch.Tensor = 1.0
    top_k: torch.Tensor | None = None
    floor: torch.Tensor | None = None

    def of(self, part: slice) -> Drawn:
        """Of these tokens alone."""
        temperature, top_k, floor = self
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[part]
        return Drawn(temperature, None if top_k is None else top_k[part], None if floor is None else floor[part])

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """A float32 copy of the rows, over the temperature."""
        return rows.to(torch.float32, copy=True).div_(self.divisor)

    @property
    def divisor(self) -> float | torch.Tensor:
        """What a row of logits is divided by."""
        return self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature

    def cut(self, z: torch.Tensor, local: torch.Tensor, here: torch.Tensor, lowest: float) -> torch.Tensor:
        """`z` [m, columns] in place, with `lowest` for what could not be drawn.

        A target stays, though it be below the floor: it was drawn, from weights that may have been others.

        Args:
            local, here: [m, 1], the target's column, and whether it is in this shard.
        """
        if self.floor is None:
            return z
        out = z < self.floor[:, None]
        out.scatter_(1, local, out.gather(1, local) & ~here)
        return z.masked_fill_(out, lowest)


class Shard(NamedTuple):
    """This rank's columns. first: the token id of column 0. valid: columns before it are no padding."""

    first: int
    valid: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(width: int, vocab_size: int, group: dist.ProcessGroup | None) -> Shard:
        sharded = group is not None and dist.get_world_size(group) > 1
        first = dist.get_rank(group) * width if sharded else 0
        return Shard(first, min(max(vocab_size - first, 0), width), group if sharded else None)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """[n, k] -> [n, k * ranks]; the same on every rank."""
        if self.group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


def parts_of(count: int, step: int) -> Iterator[slice]:
    """0 to `count`, at most `step` at a time."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


@dataclass(frozen=True)
class Distributions:
    """n distributions, as logits or as what they are made of.

    rows: [..., padded_vocab / tp] logits; with a weight [..., hidden] hidden states.
    index: [n] int64, no two the same: which of the rows. None: all, in order.
    weight: [padded_vocab / tp, hidden], this rank's part of an output layer.
    """

    rows: torch.Tensor
    index: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Of logits."""
        return self.rows.shape[-1] if self.weight is None else self.weight.shape[0]

    def __len__(self) -> int:
        return self.rows.shape[:-1].numel() if self.index is None else len(self.index)

    def of(self, part: slice) -> torch.Tensor:
        """[m, columns or hidden]: the rows of some of them."""
        flat = self.rows.reshape(-1, self.rows.shape[-1])
        return flat[part] if self.index is None else flat.index_select(0, self.index[part])

    def logits(self, part: slice, valid: int) -> torch.Tensor:
        """[m, valid] of some of them."""
        rows = self.of(part)
        return rows[:, :valid] if self.weight is None else rows @ self.weight[:valid].t()

    def parts(self) -> Iterator[slice]:
        """Those that are worked on at once."""
        if self.weight is not None:
            return parts_of(len(self), max(16, CHUNK_BYTES // (self.columns * self.weight.element_size())))
        width = max(self.columns, 1)
        return parts_of(len(self), max(1, min(max(len(self) // 128, SMALLEST_CHUNK // width), LARGEST_CHUNK // width)))

    def chunks(self, valid: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """(some of them, their logits [m, valid]), all in turn; nothing where this rank has padding alone."""
        for part in self.parts() if valid else ():
            yield part, self.logits(part, self.columns)[:, :valid]


class Gradients:
    """Of the rows of distributions and, if it is wanted, of their weight, put together chunk by chunk.

    A weight's is a sum over chunks, in float32 as one matrix product would have it.
    """

    def __init__(self, of: Distributions, valid: int, *, with_weight: bool) -> None:
        self._of, self._valid = of, valid
        self.rows = torch.zeros_like(of.rows, memory_format=torch.contiguous_format)
        self._weight = None
        if of.weight is not None and with_weight:
            self._weight = torch.zeros_like(of.weight, dtype=torch.float32)

    @property
    def weight(self) -> torch.Tensor | None:
        return None if self._weight is None or self._of.weight is None else self._weight.to(self._of.weight.dtype)

    def put(self, part: slice, by_logits: torch.Tensor) -> None:
        """`by_logits` [m, valid]: the gradient of these logits."""
        weight, index, flat = self._of.weight, self._of.index, self.rows.view(-1, self.rows.shape[-1])
        grad = by_logits.to(self.rows.dtype)
        if weight is None:
            out = flat[:, : self._valid]
        else:
            out, by_rows = flat, grad @ weight[: self._valid]
            if self._weight is not None:
                self._weight[: self._valid] += grad.t() @ self._of.of(part)
            grad = by_rows
        if index is None:
            out[part] = grad
        else:
            out.index_copy_(0, index[part], grad)


class _Sums(NamedTuple):
    """[n] each, over the whole vocabulary, of z = logits / temperature and p = softmax(z)."""

    log_total: torch.Tensor  # log sum e^z
    at_target: torch.Tensor  # z of the target
    mean: torch.Tensor  # sum p z, 0 unless asked for
    squares: torch.Tensor  # sum p^2, 0 unless asked for


def _with_floor(of: Distributions, shard: Shard, drawn: Drawn) -> Drawn:
    """`drawn` with its floor, where it cuts any token's distribution; every rank of the group takes part."""
    if drawn.top_k is None or not bool(drawn.top_k.any()):
        return drawn
    most = int(drawn.top_k.max())
    highest = torch.full((len(drawn.top_k), most), LOWEST, device=of.rows.device)
    for part, logits in of.chunks(shard.valid):
        found = drawn.of(part).scaled(logits).topk(min(most, logits.shape[1])).values
        highest[part, : found.shape[1]] = found
    highest = shard.all_gather(highest).topk(most).values
    floor = highest.gather(1, (drawn.top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return drawn._replace(floor=floor.masked_fill(drawn.top_k == 0, LOWEST))


def _logit_sums(
    of: Distributions,
    targets: torch.Tensor,
    shard: Shard,
    drawn: Drawn,
    *,
    with_mean: bool = False,
    with_squares: bool = False,
) -> _Sums:
    """One pass over the logits; every rank of the group takes part with its columns."""
    count = len(targets)
    top = torch.full((count,), LOWEST, device=of.rows.device)
    sums = torch.zeros(4, count, device=of.rows.device)  # of e^(z - top), (z - top) e^(z - top), its square; the target
    local = targets - shard.first
    here = (local >= 0) & (local < shard.valid)
    local = local.clamp(0, max(shard.valid - 1, 0))
    for part, logits in of.chunks(shard.valid):
        some = drawn.of(part)
        z = some.cut(some.scaled(logits), local[part, None], here[part, None], LOWEST)
        sums[3, part] = z.gather(1, local[part, None])[:, 0].masked_fill_(~here[part], 0.0)
        top[part] = z.amax(dim=-1).clamp_(min=LOWEST)
        e = z.sub_(top[part, None]).clamp_(min=NEGLIGIBLE).exp()
        sums[0, part] = e.sum(dim=-1)
        if with_mean:
            sums[1, part] = z.mul_(e).sum(dim=-1)
        if with_squares:
            sums[2, part] = e.square_().sum(dim=-1)
    # from sums relative to this shard's largest logit to sums relative to the vocabulary's
    whole_top = shard.all_reduce(top.clone(), dist.ReduceOp.MAX)
    gap = top - whole_top
    sums[1] += gap * sums[0]
    sums[:2] *= gap.exp()
    sums[2] *= (2 * gap).exp()
    total, weighted, squares, at_target = shard.all_reduce(sums, dist.ReduceOp.SUM)
    mean = whole_top + weighted / total if with_mean else weighted
    return _Sums(total.log() + whole_top, at_target, mean, squares / total.square())


class _LogProbs(torch.autograd.Function):
    """log p(target) and entropy of p = softmax(z): d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H)."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of = Distributions(rows, index, weight)
        drawn = _with_floor(of, shard, drawn)
        sums = _logit_sums(of, targets, shard, drawn, with_mean=with_entropy)
        entropy = sums.log_total - sums.mean if with_entropy else sums.mean
        ctx.save_for_backward(rows, weight, index, targets, sums.log_total, entropy)
        ctx.options = shard, drawn, with_entropy
        return sums.at_target - sums.log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        rows, weight, index, targets, log_total, entropy = ctx.saved_tensors
        shard, drawn, with_entropy = ctx.options
        of = Distributions(rows, index, weight)
        gradients = Gradients(of, shard.valid, with_weight=ctx.needs_input_grad[1])
        local = targets - shard.first
        here = (local >= 0) & (local < shard.valid)
        local = local.clamp(0, max(shard.valid - 1, 0))
        for part in of.parts() if shard.valid else ():
            by = grad_log_probs[part, None], grad_entropy[part, None] if with_entropy else None
            sums, where = (log_total[part, None], entropy[part, None]), (local[part, None], here[part, None])
            logits = of.logits(part, shard.valid)
            gradients.put(part, _logit_gradient(logits, *where, by, sums, drawn.of(part)))
        return gradients.rows, gradients.weight, None, None, None, None, None


def _logit_gradient(
    rows: torch.Tensor,
    local: torch.Tensor,
    here: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    sums: tuple[torch.Tensor, torch.Tensor],
    drawn: Drawn,
) -> torch.Tensor:
    """[m, valid] float32: the gradient of these tokens' logits.

    Args:
        rows: [m, valid], the logits.
        local, here: [m, 1], the target's column in this shard, and whether it is in it.
        grads: [m, 1], of the log-probs and, if it is asked for, of the entropy.
        sums: [m, 1], log sum e^z and the entropy.
        drawn: of these tokens, with its floor.
    """
    by_log_prob, by_entropy = grads
    log_total, entropy = sums
    log_p = drawn.cut(drawn.scaled(rows), local, here, LOWEST).sub_(log_total).clamp_(min=NEGLIGIBLE)
    p = log_p.exp()
    if by_entropy is not None:
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, in float32.

    Args:
        rows: [..., padded_vocab / tp] logits, this rank's part of the vocabulary, any floating dtype; with a weight
            [..., hidden] hidden states, the same on every rank of the group. Their gradient is then this rank's part
            of it: see `HiddenHead`.
        targets: [n] token ids in the whole vocabulary.
        vocab_size: columns beyond it are padding and get probability zero.
        weight: [padded_vocab / tp, hidden], this rank's part of the output layer.
        temperature: logits are divided by it, as the sampler's were; [n] where tokens differ.
        top_k: [n] int64, how many of the likeliest tokens the sampler drew from, 0: from all. None: from all.
        with_entropy: else the second result is zeros.
        group: the ranks that share the vocabulary, in order.
        index: [n] int64, no two the same: which of the rows predict the targets. None: all.

    Returns:
        (log_probs [n], entropy [n]), equal on every rank of the group.
    """
    shard = Shard.of(Distributions(rows, index, weight).columns, vocab_size, group)
    return _LogProbs.apply(rows, weight, index, targets, shard, Drawn(temperature, top_k), with_entropy)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs [n], sum over the vocabulary of p^2 [n]), float32, without a gradient; see above."""
    of = Distributions(rows, index, weight)
    shard = Shard.of(of.columns, vocab_size, group)
    drawn = _with_floor(of, shard, Drawn(temperature, top_k))
    sums = _logit_sums(of, targets, shard, drawn, with_squares=True)
    return sums.at_target - sums.log_total, sums.squares
