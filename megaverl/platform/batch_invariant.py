"""Arithmetic whose result for a token does not depend on the other tokens of a batch, on a CPU.

Libraries of matrix products choose kernels by the number of rows and columns, and kernels add products in different
orders. Attention splits keys by the length of the longest sequence. SiLU of PyTorch has one polynomial for full vectors
and another one for the rest of a tensor. A token's log-prob therefore depends on its batch, and an engine and a trainer
disagree about it. Inside `batch_invariant` both compute with the functions here, which need no kernel of their own:

- A matrix product is a loop over tiles of one shape (`TILE_ROWS` x `TILE_COLUMNS`), padded with zeros. The library then
  always takes the same kernel. `check_products` tests that its rows and columns do not depend on their position.
- Attention multiplies tiles of queries by blocks of `KEY_BLOCK` keys, and adds the blocks in the order of the keys. A
  block beyond a query adds zeros, which changes no bit.
- Exponentials, logarithms and sums over the last dimension are PyTorch's, which are invariant. SiLU is made of them.

Defeating nondeterminism by fixed reduction orders is the idea of He et al. (Thinking Machines Lab, 2025, "Defeating
Nondeterminism in LLM Inference").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megaverl.errors import ModelError

TILE_ROWS = 16
TILE_COLUMNS = 64
# Keys of a block of attention. Both sides count blocks from the first token of a sequence.
KEY_BLOCK = 64
# Elements of keys that attention copies at once, 16 MiB in float32.
LARGEST_COPIES = 1 << 22

# Used instead of -inf, so that differences stay finite.
UNSEEN = -1e30

_is_on: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(is_on: bool) -> Iterator[None]:
    """Compute with the functions of this module inside, if `is_on`.

    Example:
        with batch_invariant(config.rollout.batch_invariant):
            engine.generate(...)
    """
    token = _is_on.set(is_on or _is_on.get())
    try:
        yield
    finally:
        _is_on.reset(token)


def is_batch_invariant() -> bool:
    """Return whether the calling thread is inside `batch_invariant`."""
    return _is_on.get()


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x weight^T + bias, without a gradient.

    Products of 16-bit matrices are computed in float32 and rounded once: kernels for 16 bits differ between CPUs.

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n], added to the finished product.

    Returns:
        [..., n].
    """
    rows, width = x.reshape(-1, x.shape[-1]), weight.shape[0]
    count, inner = rows.shape
    check_products(inner)
    padded = torch.zeros(count + -count % TILE_ROWS, inner)
    padded[:count] = rows
    weight = _as_columns(weight).float()
    out = padded.new_empty(len(padded), len(weight))
    num_tiles = len(weight) // TILE_COLUMNS
    # [tiles, k, columns of a tile]
    tiles = weight[: num_tiles * TILE_COLUMNS].view(num_tiles, TILE_COLUMNS, inner)
    tiles = tiles.transpose(1, 2)
    # The last tile begins early enough to be whole. It computes some columns again, to the same bits.
    last = weight[-TILE_COLUMNS:].t() if len(weight) % TILE_COLUMNS else None
    for row in range(0, len(padded), TILE_ROWS):
        part = slice(row, row + TILE_ROWS)
        products = torch.bmm(padded[part].expand(num_tiles, -1, -1), tiles)
        by_tile = out[part, : num_tiles * TILE_COLUMNS].unflatten(1, (num_tiles, -1))
        by_tile.copy_(products.transpose(0, 1))
        if last is not None:
            torch.mm(padded[part], last, out=out[part, -TILE_COLUMNS:])
    # Collectives over tensor-parallel ranks need contiguous parts.
    result = out[:count, :width].to(x.dtype).contiguous()
    result = result.view(*x.shape[:-1], width)
    return result if bias is None else result + bias


def _as_columns(weight: torch.Tensor) -> torch.Tensor:
    """Return a contiguous weight with at least `TILE_COLUMNS` rows, padded with zeros."""
    missing = TILE_COLUMNS - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing > 0 else weight.contiguous()


@functools.cache
def check_products(inner: int) -> None:
    """Check that a tile's rows and columns do not depend on their position, for an inner dimension.

    Raises:
        ModelError: they do, with this machine's matrix library.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TILE_ROWS, inner, generator=generator)
    weight = torch.randn(TILE_COLUMNS, inner, generator=generator)
    expected = torch.mm(x, weight.t())
    for shift in (1, 3, 7, 8, TILE_ROWS - 1):
        by_rows = torch.mm(x.roll(shift, 0), weight.t()).roll(-shift, 0)
        by_columns = torch.mm(x, weight.roll(shift, 0).t()).roll(-shift, 1)
        # One row by itself, beside zeros, with the weight at an odd address.
        lone = torch.zeros_like(x)
        lone[shift] = x[0]
        moved = torch.empty(weight.numel() + shift)[shift:]
        moved = moved.view_as(weight).copy_(weight)
        by_itself = torch.mm(lone, moved.t())[shift]
        # The same tile among others, as one of `shift` matrices.
        among_others = torch.bmm(
            x.expand(shift, -1, -1), weight.expand(shift, -1, -1).transpose(1, 2)
        )
        if not (
            torch.equal(among_others, expected.expand(shift, -1, -1))
            and torch.equal(by_rows, expected)
            and torch.equal(by_columns, expected)
            and torch.equal(by_itself, expected[0])
        ):
            raise ModelError(
                f"rollout.batch_invariant: on this CPU, rows of a matrix product of {TILE_ROWS} x {inner} x "
                f"{TILE_COLUMNS} depend on their position. Set MKL_CBWR=COMPATIBLE, or rollout.batch_invariant=false."
            )


class InvariantProducts(TorchFunctionMode):
    """Context in which `torch.matmul` with a transposed matrix is `linear`.

    It is meant for the forward pass of an autograd function, where no gradients are recorded.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.matmul and not torch.is_grad_enabled():
            x, transposed = args
            return linear(x, transposed.t())
        return func(*args, **(kwargs or {}))


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + e^-x), computed in float32, without a gradient."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dimension: [..., width] -> [..., 1] of `dtype`.

    Sums of squares are accumulated in `dtype`, in one pass.
    """
    rows = x.contiguous() if is_batch_invariant() else x
    inverse: torch.Tensor = torch.linalg.vector_norm(
        rows, dim=-1, keepdim=True, dtype=dtype
    )
    return inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension, [m, n] -> [m].

    PyTorch splits the sum of a single row over its threads, so that row gets a companion.
    """
    return x.expand(2, -1).sum(dim=-1)[:1] if len(x) == 1 else x.sum(dim=-1)


def log_softmax(
    logits: torch.Tensor, lowest: float, num_shards: int = 1
) -> torch.Tensor:
    """Return log-probs by the operations of `models/vocab_parallel.py`, [m, n] float32.

    Args:
        logits: [m, n], divided by the temperature; -inf where a token could not be drawn.
        lowest: smallest difference from the largest logit that counts.
        num_shards: tensor-parallel ranks of the trainer. Each adds up its own part of the vocabulary, which is padded
            to a multiple of 64 (`models/options.py:padded_vocab_size`).
    """
    z = logits.to(torch.float32)
    multiple = math.lcm(64, num_shards)
    width = -(-z.shape[1] // multiple) * multiple // num_shards
    parts = z.split(width, dim=1)
    tops = torch.stack([part.amax(dim=-1).clamp_(min=UNSEEN) for part in parts])
    top = tops.amax(dim=0)
    total = torch.zeros_like(top)
    for part, part_top in zip(parts, tops, strict=True):
        sums = sum_rows((part - part_top[:, None]).clamp_(min=lowest).exp_())
        total += sums * (part_top - top).exp_()
    return z - (total.log() + top)[:, None]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v of queries that see at least one key each, without a gradient.

    Key 0 must be the first token of its sequence: blocks of keys are counted from it.

    Args:
        q: [n, heads, q, d].
        k, v: [n, kv_heads, k, d].
        look: [n or 1, 1, q, k] bool, True where a query may look.
        scale: factor on the scores. None: 1 / sqrt(d).

    Returns:
        [n, heads, q, d of the values], dtype of `q`. Scores and sums are float32.
    """
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    check_products(q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    missing = -k.shape[2] % KEY_BLOCK
    k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
    look = F.pad(look.expand(len(q), 1, -1, -1), (0, missing))
    # [n, kv_heads, blocks, keys of a block, d]
    k, v = (x.unflatten(2, (-1, KEY_BLOCK)) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    # Queries at once. Each of their tiles takes a copy of every block of keys, which is the largest tensor here.
    copies = len(q) * q.shape[1] * look.shape[-1] * -(-q.shape[-1] // TILE_ROWS)
    step = max(TILE_ROWS, LARGEST_COPIES // copies)
    outputs = [
        _attend_part(part * scale, k, v, seen, group)
        for part, seen in zip(q.split(step, 2), look.split(step, 2), strict=True)
    ]
    return torch.cat(outputs, dim=2).to(dtype)


def _attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: torch.Tensor, group: int
) -> torch.Tensor:
    """Compute `attend` for some queries.

    Args:
        q: [n, kv_heads * group, q, d], scaled.
        k, v: [n, kv_heads, blocks, keys of a block, d].
        look: [n, 1, q, blocks * keys of a block].
        group: query heads per key head.
    """
    num, heads, count, dim = q.shape
    kv_heads, blocks = k.shape[1:3]
    # Queries of the heads that share a key head are rows of one matrix: [n, kv_heads, tiles, rows of a tile, d].
    rows = q.reshape(num, kv_heads, group * count, dim)
    missing = -rows.shape[2] % TILE_ROWS
    rows = F.pad(rows, (0, 0, 0, missing)).unflatten(2, (-1, TILE_ROWS))
    tiles = rows.shape[2]
    seen = look.expand(-1, group, -1, -1).reshape(num, 1, group * count, -1)
    # Rows of padding see all keys, so that they stay finite.
    seen = F.pad(seen, (0, 0, 0, missing), value=True)
    # [n, kv_heads, tiles, blocks, rows, keys]: every tile meets every block in a product of one shape.
    scores = _products(rows[:, :, :, None], k[:, :, None].transpose(-1, -2))
    hidden = ~seen.view(num, 1, tiles, TILE_ROWS, blocks, KEY_BLOCK).transpose(3, 4)
    # Not -inf: a padded query may see no key, and its output must stay finite.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    # The largest score is exact whatever the order.
    top = scores.amax(dim=(3, 5), keepdim=True)
    weights = scores.sub_(top).exp_()
    values = _products(weights, v[:, :, None])
    totals = weights.sum(dim=-1)
    # Blocks are added one after another, in the order of the keys.
    total, value = totals[:, :, :, 0], values[:, :, :, 0]
    for block in range(1, blocks):
        total = total + totals[:, :, :, block]
        value = value + values[:, :, :, block]
    out = (value / total[..., None]).flatten(2, 3)[:, :, : group * count]
    return out.reshape(num, heads, count, -1)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the products of matrices with broadcast leading dimensions, each by the kernel of its shape."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = a.expand(*lead, -1, -1).reshape(-1, *a.shape[-2:])
    right = b.expand(*lead, -1, -1).reshape(-1, *b.shape[-2:])
    return torch.bmm(left, right).view(*lead, a.shape[-2], b.shape[-1])
