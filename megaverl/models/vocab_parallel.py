"""Log-probabilities and entropies over a vocabulary that is cut over a group, a few tokens at a time.

Logits are the largest tensors of a step. So nothing of their size is made beside them but their gradient: the forward
pass keeps three numbers per token and refers to the logits, and the backward pass computes probabilities anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Elements of the logits that are worked on at once: a 128th of them, within these bounds. Each intermediate result is
# then 1 to 16 MiB of float32, and three of them are a twentieth of 16-bit logits.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 18, 1 << 22
# In place of -inf, so that differences and products with 0 stay numbers: e^-10000 is 0 in float32.
LOWEST, NEGLIGIBLE = -1e30, -1e4


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

    def all_reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
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


def _chunks(flat: torch.Tensor, index: torch.Tensor | None, valid: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(which of the n tokens, their logits [m, valid] in the dtype of `flat`), over all n tokens."""
    count = len(flat) if index is None else len(index)
    width = max(flat.shape[1], 1)
    step = max(1, min(max(count // 128, SMALLEST_CHUNK // width), LARGEST_CHUNK // width))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        rows = flat[part] if index is None else flat.index_select(0, index[part])
        yield part, rows[:, :valid]


class _Sums(NamedTuple):
    """[n] each, over the whole vocabulary, of z = logits / temperature and p = softmax(z)."""

    log_total: torch.Tensor  # log sum e^z
    at_target: torch.Tensor  # z of the target
    mean: torch.Tensor  # sum p z, 0 unless asked for
    squares: torch.Tensor  # sum p^2, 0 unless asked for


def with_floor(flat: torch.Tensor, index: torch.Tensor | None, shard: Shard, drawn: Drawn) -> Drawn:
    """`drawn` with its floor, where it cuts any token's distribution; every rank of the group takes part."""
    if drawn.top_k is None or not bool(drawn.top_k.any()):
        return drawn
    most = int(drawn.top_k.max())
    highest = torch.full((len(drawn.top_k), most), LOWEST, device=flat.device)
    for part, rows in _chunks(flat, index, shard.valid) if shard.valid else ():
        found = drawn.of(part).scaled(rows).topk(min(most, rows.shape[1])).values
        highest[part, : found.shape[1]] = found
    highest = shard.all_gather(highest).topk(most).values
    floor = highest.gather(1, (drawn.top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return drawn._replace(floor=floor.masked_fill(drawn.top_k == 0, LOWEST))


def logit_sums(
    flat: torch.Tensor,
    index: torch.Tensor | None,
    targets: torch.Tensor,
    shard: Shard,
    drawn: Drawn,
    *,
    with_mean: bool = False,
    with_squares: bool = False,
) -> _Sums:
    """One pass over the logits; every rank of the group takes part with its columns."""
    count = len(targets)
    top = torch.full((count,), LOWEST, device=flat.device)
    sums = torch.zeros(4, count, device=flat.device)  # of e^(z - top), (z - top) e^(z - top), its square; the target
    local = targets - shard.first
    here = (local >= 0) & (local < shard.valid)
    if shard.valid:
        local = local.clamp(0, shard.valid - 1)
        for part, rows in _chunks(flat, index, shard.valid):
            some = drawn.of(part)
            z = some.cut(some.scaled(rows), local[part, None], here[part, None], LOWEST)
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
        logits: torch.Tensor,
        targets: torch.Tensor,
        index: torch.Tensor | None,
        shard: Shard,
        drawn: Drawn,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = logits.reshape(-1, logits.shape[-1])
        drawn = with_floor(flat, index, shard, drawn)
        sums = logit_sums(flat, index, targets, shard, drawn, with_mean=with_entropy)
        entropy = sums.log_total - sums.mean if with_entropy else sums.mean
        ctx.save_for_backward(logits, targets, index, sums.log_total, entropy)
        ctx.options = shard, drawn, with_entropy
        return sums.at_target - sums.log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        grad_log_probs, grad_entropy = grads
        logits, targets, index, log_total, entropy = ctx.saved_tensors
        shard, drawn, with_entropy = ctx.options
        result = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        flat, out = logits.reshape(-1, logits.shape[-1]), result.view(-1, logits.shape[-1])[:, : shard.valid]
        local = targets - shard.first
        here = (local >= 0) & (local < shard.valid)
        local = local.clamp(0, max(shard.valid - 1, 0))
        for part, rows in _chunks(flat, index, shard.valid) if shard.valid else ():
            by = grad_log_probs[part, None], grad_entropy[part, None] if with_entropy else None
            sums = log_total[part, None], entropy[part, None]
            grad = logit_gradient(rows, local[part, None], here[part, None], by, sums, drawn.of(part)).to(out.dtype)
            if index is None:
                out[part] = grad
            else:
                out.index_copy_(0, index[part], grad)
        return result, None, None, None, None, None


def logit_gradient(
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
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, in float32.

    Args:
        logits: [..., padded_vocab / tp], this rank's part of the vocabulary, any floating dtype.
        targets: [n] token ids in the whole vocabulary.
        vocab_size: columns beyond it are padding and get probability zero.
        temperature: logits are divided by it, as the sampler's were; [n] where tokens differ.
        top_k: [n] int64, how many of the likeliest tokens the sampler drew from, 0: from all. None: from all.
        with_entropy: else the second result is zeros.
        group: the ranks that share the vocabulary, in order.
        index: [n] int64, no two the same: which rows of `logits.reshape(-1, ...)` predict the targets. None: all.

    Returns:
        (log_probs [n], entropy [n]), equal on every rank of the group.
    """
    shard = Shard.of(logits.shape[-1], vocab_size, group)
    return _LogProbs.apply(logits, targets, index, shard, Drawn(temperature, top_k), with_entropy)


@torch.no_grad()
def vocab_parallel_squared_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs [n], sum over the vocabulary of p^2 [n]), float32, without a gradient; see above."""
    shard = Shard.of(logits.shape[-1], vocab_size, group)
    flat = logits.reshape(-1, logits.shape[-1])
    drawn = with_floor(flat, index, shard, Drawn(temperature, top_k))
    sums = logit_sums(flat, index, targets, shard, drawn, with_squares=True)
    return sums.at_target - sums.log_total, sums.squares


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
