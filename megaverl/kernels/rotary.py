"""Rotary embeddings in one pass over memory, forward and backward, where the extension can be used."""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megaverl.kernels.extension import TYPE_NAMES, in_threads, kernel, library

CHUNK_TOKENS = 256  # of a thread at a time


class _Job(ctypes.Structure):
    _fields_ = [
        (name, c_int64) for name in ("tokens", "per_angle", "heads", "dim", "rotated", "token_stride", "head_stride")
    ]


def fits(x: torch.Tensor, angles: torch.Tensor) -> bool:
    """Whether `rotate` takes these: one angle per position and pair of dimensions, the same for all rows and heads."""
    return (
        x.device.type == "cpu"
        and x.dtype in TYPE_NAMES
        and x.ndim == angles.ndim == 4
        and angles.shape[:3] == (x.shape[0], 1, 1)
        and angles.shape[3] % 2 == 0
        and angles.shape[3] <= x.shape[3]
        and library() is not None
    )


def rotate(x: torch.Tensor, angles: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """RoFormer's rotary embedding (arXiv 2104.09864, eq. 34), of the dimensions n and n + rotated / 2 as pairs.

    Cosines and sines are rounded to the dtype of `x`, as in Hugging Face's and vLLM's; products are float32.

    Args:
        x: [s, b, heads, dim], float32 or bfloat16.
        angles: [s, 1, 1, rotated] float32 radians; dimensions beyond `rotated` stay as they are.
        scale: of cosines and sines (YaRN's, arXiv 2309.00071).

    Returns:
        The shape and dtype of `x`.
    """
    cosines, sines = _table(angles, x.dtype, scale)
    result: torch.Tensor = _Rotated.apply(x, cosines, sines)
    return result


class _Rotated(torch.autograd.Function):
    """The gradient of a rotation is turned back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _turned(grad, *ctx.saved_tensors, back=True), None, None


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, back: bool) -> torch.Tensor:
    length, batch, heads, dim = x.shape
    if x.stride(3) != 1 or (batch > 1 and x.stride(0) != batch * x.stride(1)):
        x = x.contiguous()
    output = torch.empty(x.shape, dtype=x.dtype)
    function = kernel(f"rotate_{TYPE_NAMES[x.dtype]}", *[c_void_p] * 5, c_int)
    row_bytes = x.stride(0) * x.element_size()

    def run(first: int) -> None:
        count = min(CHUNK_TOKENS, length - first)
        job = _Job(count * batch, batch, heads, dim, cosines.shape[1], x.stride(1 if batch > 1 else 0), x.stride(2))
        angles = first * cosines.shape[1] * x.element_size()
        function(
            ctypes.addressof(job),
            x.data_ptr() + first * row_bytes,
            *(table.data_ptr() + angles for table in (cosines, sines)),
            output.data_ptr() + first * output.stride(0) * x.element_size(),
            back,
        )

    in_threads(functools.partial(run, first) for first in range(0, length, CHUNK_TOKENS))
    return output


def _table(angles: torch.Tensor, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [s, rotated]; every layer of a model asks for the same."""
    global _last
    key = (angles._version, dtype, scale)
    of, known, table = _last
    if of() is not angles or known != key:
        flat = angles.detach().flatten(1)
        table = (torch.cos(flat) * scale).to(dtype), (torch.sin(flat) * scale).to(dtype)
        _last = weakref.ref(angles), key, table
    return table


_Known = tuple[int, torch.dtype, float]
_last: tuple[Any, _Known | None, Any] = (lambda: None, None, None)
