"""Products of a few rows with a weight, as decoding has them, on processors with AMX: `linear.cpp`.

Such a product takes as long as its weight takes to be read. Libraries made for large matrices read a packed copy, which
has to be made anew whenever a weight is written; this kernel reads the weight as it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F

from megaverl.kernels.extension import has_tiles, kernel

INNER_MULTIPLE, OUTPUTS_MULTIPLE = 32, 16  # of the weight's dimensions
MANY_ROWS = 256  # from here on packing a weight for each product pays


def fits(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `linear` multiplies by this weight. It does so on one thread, and is not for ranks that have more."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.ndim == 2
        and weight.is_contiguous()
        and weight.shape[0] % OUTPUTS_MULTIPLE == weight.shape[1] % INNER_MULTIPLE == 0
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
        and torch.get_num_threads() == 1
        and has_tiles()
    )


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input weight^T + bias, as `torch.nn.functional.linear`, without a gradient. Sums are float32.

    Args:
        input: [..., inner] bfloat16.
        weight: [outputs, inner] bfloat16, one that `fits`. bias: [outputs] bfloat16.

    Returns:
        [..., outputs] bfloat16.
    """
    outputs, inner = weight.shape
    rows = input if input.ndim == 2 else input.reshape(-1, inner)
    if rows.shape[0] > MANY_ROWS:
        return F.linear(input, weight, bias)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    output = torch.empty(rows.shape[0], outputs, dtype=weight.dtype)
    places = rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), output.data_ptr()
    _kernel()(*places, rows.shape[0], inner, outputs, rows.stride(0))
    return output if input.ndim == 2 else output.view(*input.shape[:-1], outputs)


@functools.cache  # found quickly: a step of decoding has hundreds of products
def _kernel() -> Callable[..., None]:
    return kernel("linear", *[c_void_p] * 4, *[c_int64] * 4)
