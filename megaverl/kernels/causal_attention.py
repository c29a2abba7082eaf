"""Causal attention of packed bfloat16 rows, on processors with AVX512-BF16, best with AMX: `causal_attention.cpp`.

PyTorch's kernel multiplies blocks of scores through a library made for large matrices, and its backward pass takes up
to four times as long in bfloat16 as in float32.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megaverl.kernels.extension import has_tiles, in_threads, library

HEAD_DIM_MULTIPLE = 16


class _Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tiles", "head_dim", "heads", "kv_heads", "tokens")),
        ("scale", ctypes.c_float),
        *((name, _Matrix) for name in ("query", "key", "value", "output", "output_grad", "query_grad")),
        *((name, ctypes.c_void_p) for name in ("statistics", "key_grad", "value_grad")),
    ]


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor) -> bool:
    """Whether `packed_causal_attention` computes these, with work for at least half of PyTorch's threads."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-1] % HEAD_DIM_MULTIPLE == 0
        and 2 * key.shape[1] * len(_clusters(segments)) >= torch.get_num_threads()
        and library() is not None
    )


def packed_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """softmax(q k^T * scale) v within sequences (arXiv 1706.03762, eq. 1); FlashAttention (arXiv 2205.14135).

    Scores and sums are float32; weights and the gradients of scores are rounded to bfloat16 before they are
    multiplied, as FlashAttention does on GPUs. The same numbers for any number of threads.

    Args:
        query: [t, heads, d] bfloat16, on a CPU. key, value: [t, kv_heads, d]; d a multiple of 16.
        segments: [n, 4] int64, contiguous: (beginning, common, start, count). The tokens [start, start + count) of the
            row follow the `common` tokens at `beginning`, which they see, and see those of their own up to themselves.
            A shared beginning is a segment of its own (its `common` is 0), just before those that share it.
        scale: of the scores. None: 1 / sqrt(d).

    Returns:
        [t, heads, d] bfloat16; zero where a token is of no segment.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: torch.Tensor = _PackedCausalAttention.apply(query, key, value, segments, scale)
    return result


class _PackedCausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float
    ) -> torch.Tensor:
        query, key, value = (_with_whole_rows(x) for x in (query, key, value))
        tokens, heads, head_dim = query.shape
        output = torch.zeros(tokens, heads, head_dim, dtype=query.dtype)
        statistics = torch.empty(2, heads, tokens)
        _run(_job(query, key, value, output, statistics, scale), segments, backwards=False)
        ctx.save_for_backward(query, key, value, output, statistics, segments)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, statistics, segments = ctx.saved_tensors
        grad = _with_whole_rows(grad)
        query_grad = torch.zeros_like(output)
        key_grad, value_grad = torch.zeros(key.shape), torch.zeros(value.shape)  # sequences add to what they share
        job = _job(query, key, value, output, statistics, ctx.scale)
        job.output_grad, job.query_grad = _matrix(grad), _matrix(query_grad)
        job.key_grad, job.value_grad = key_grad.data_ptr(), value_grad.data_ptr()
        _run(job, segments, backwards=True)
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _matrix(x: torch.Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), x.stride(0), x.stride(1))


def _job(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
) -> _Job:
    tokens, heads, head_dim = query.shape
    job = _Job(tiles=has_tiles(), head_dim=head_dim, heads=heads, kv_heads=key.shape[1], tokens=tokens, scale=scale)
    job.query, job.key, job.value, job.output = (_matrix(x) for x in (query, key, value, output))
    job.statistics = statistics.data_ptr()
    return job


def _clusters(segments: torch.Tensor) -> list[int]:
    """The first segment of each cluster that has no token in common with others."""
    return (segments[:, 1] == 0).nonzero()[:, 0].tolist()


def _run(job: _Job, segments: torch.Tensor, *, backwards: bool) -> None:
    """All segments and heads, on as many threads as PyTorch has; each output is one thread's."""
    threads = torch.get_num_threads()
    starts = _clusters(segments)
    chunks = [starts[at] for at in range(0, len(starts), max(1, len(starts) // (4 * threads)))] if threads > 1 else [0]
    row_bytes = segments.stride(0) * segments.element_size()
    function = library().causal_attention  # type: ignore[union-attr]  # `fits` was asked
    function.restype = None

    def attend(kv_head: int, first: int, end: int) -> None:
        place = ctypes.c_void_p(segments.data_ptr() + first * row_bytes)
        function(ctypes.byref(job), place, ctypes.c_int64(end - first), ctypes.c_int64(kv_head), int(backwards))

    in_threads(
        functools.partial(attend, kv_head, first, end)
        for first, end in zip(chunks, [*chunks[1:], len(segments)], strict=True)
        for kv_head in range(job.kv_heads)
    )
