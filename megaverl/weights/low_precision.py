"""Arithmetic of the formats with a scale for adjacent columns of a row: INT4, MXFP8 and NVFP4.

The reshard into an engine and fake quantisation in training call the same functions, so
that an actor trains exactly the weights that its engine samples with.

Definitions, for the elements x of a group and a = max|x|:

- INT4, symmetric: s = a / 7.5, q = round(clamp(x / s, -8, 7)), x' = q s. Asymmetric, with l = min(x, 0) and
  h = max(x, 0): s = (h - l) / 15, z = round(clamp(-8 - l / s, -8, 7)), q = round(clamp(x / s + z, -8, 7)),
  x' = (q - z) s. Scales are rounded to the dtype of activations first (compressed-tensors 0.17,
  `quantization/utils/helpers.py`, `calculate_qparams`).
- MXFP8: s = 2^ceil(log2(a / 448)), so that no element saturates, and x' = e4m3(x / s) s (OCP Microscaling Formats 1.0;
  vLLM 0.32, `quantization/utils/mxfp8_utils.py`).
- NVFP4, with A = max|x| over the whole matrix: g = 448 * 6 / A, s = e4m3(g a / 6), x' = e2m1(x g / s) s / g
  (compressed-tensors, `generate_gparam` and `calculate_qparams`).

Rounding is to nearest, ties to even. All products are in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megaverl.sharding.quantization import GroupFormat

E4M3 = torch.float8_e4m3fn
E4M3_LARGEST = torch.finfo(E4M3).max
# Magnitudes of E2M1, by their three bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LARGEST = E2M1[-1]
# Magnitudes above which the next of `E2M1` is nearer. In a tie the even one of two
# neighbours wins: 0.25 becomes 0, 0.75 becomes 1.
E2M1_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INT4_LEAST, INT4_MOST, INT4_STEPS = -8, 7, 15
# Scale of a group without any element above the format's least number: the spacing of
# the dtype at 1, as compressed-tensors has it.
E4M3_EPS = torch.finfo(E4M3).eps
E8M0_BIAS = 127
PER_INT32 = 8


class GroupNumbers(NamedTuple):
    """Quantised matrix, before it is packed.

    Attributes:
        numbers: float32 [rows, groups, group]: integers of int4, elements of E4M3 or E2M1.
        scales: float32 [rows, groups], as they are stored; powers of two for MXFP8.
        zero_points: float32 [rows, groups] integers. None: symmetric.
        global_scale: float32 [], the g of NVFP4. None: other formats.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def quantise_groups(
    matrix: torch.Tensor,
    form: GroupFormat,
    *,
    scale_dtype: torch.dtype,
    largest: torch.Tensor | None = None,
) -> GroupNumbers:
    """Quantise a matrix [rows, columns] of any floating-point dtype.

    Args:
        scale_dtype: dtype of int4 scales.
        largest: float32 [], max|x| of the matrix that shares a global scale (NVFP4). None: that of `matrix`.
    """
    rows, columns = matrix.shape
    x = matrix.detach().float().view(rows, columns // form.group, form.group)
    if form.kind == "int4":
        return _int4(x, form.symmetric, scale_dtype)
    peaks = x.abs().amax(-1)
    if form.kind == "mxfp8":
        scales = _power_of_two_above(peaks / E4M3_LARGEST)
        return GroupNumbers((x / scales[..., None]).to(E4M3).float(), scales)
    top = peaks.amax() if largest is None else largest
    top = torch.where(top == 0, torch.ones_like(top), top)
    global_scale = E4M3_LARGEST * E2M1_LARGEST / top
    scales = (global_scale * (peaks / E2M1_LARGEST)).clamp_(max=E4M3_LARGEST)
    scales = scales.to(E4M3).float()
    scales.masked_fill_(scales == 0, E4M3_EPS)
    numbers = _to_e2m1(x / (scales / global_scale)[..., None])
    return GroupNumbers(numbers, scales, global_scale=global_scale)


def _int4(x: torch.Tensor, symmetric: bool, scale_dtype: torch.dtype) -> GroupNumbers:
    low, high = x.aminmax(dim=-1)
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (span / INT4_STEPS).to(scale_dtype).float()
    scales.masked_fill_(scales == 0, torch.finfo(scale_dtype).eps)
    numbers, zero_points = x / scales[..., None], None
    if not symmetric:
        zero_points = INT4_LEAST - low / scales
        zero_points = zero_points.clamp_(INT4_LEAST, INT4_MOST).round_()
        numbers = numbers.add_(zero_points[..., None])
    numbers = numbers.clamp_(INT4_LEAST, INT4_MOST).round_()
    return GroupNumbers(numbers, scales, zero_points)


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that E8M0 has and that is not below x, without the rounding of a logarithm."""
    mantissa, exponent = torch.frexp(x)
    # x = mantissa * 2^exponent with a mantissa from 0.5 to 1, or 0.
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = torch.where(mantissa == 0, -E8M0_BIAS, exponent)
    exponent = exponent.clamp(-E8M0_BIAS, E8M0_BIAS)
    return torch.ldexp(torch.ones_like(x), exponent)


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    return _e2m1_values(x)[_e2m1_bits(x)].copysign(x)


def _e2m1_values(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1, dtype=torch.float32, device=like.device)


def _e2m1_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the three bits of the magnitude nearest to |x|."""
    borders = torch.tensor(E2M1_BORDERS, dtype=torch.float32, device=x.device)
    magnitude = x.abs().contiguous()
    bits = torch.bucketize(magnitude, borders)
    # bucketize rounds a tie down. Every second border is a tie that rounds up.
    rounds_up = torch.zeros_like(bits, dtype=torch.bool)
    for border in E2M1_BORDERS[1::2]:
        rounds_up |= magnitude == border
    return bits + rounds_up


def dequantise_groups(quantised: GroupNumbers) -> torch.Tensor:
    """Return the matrix [rows, columns] in float32 that an engine multiplies with."""
    numbers, scales, zero_points, global_scale = quantised
    if zero_points is not None:
        numbers = numbers - zero_points[..., None]
    if global_scale is not None:
        # vLLM keeps the reciprocal.
        scales = scales * (1.0 / global_scale)
    return (numbers * scales[..., None]).flatten(1)


def packed_tensors(
    quantised: GroupNumbers, form: GroupFormat, scale_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix by their names in a compressed-tensors folder.

    - int4: `weight_packed` int32 [rows, columns / 8], eight numbers + 8 from the lowest bits on; `weight_scale`
      [rows, groups]; `weight_zero_point` int32 [rows / 8, groups], eight rows in an element; `weight_shape` int64 [2].
    - mxfp8: `weight` float8_e4m3fn [rows, columns], `weight_scale` uint8 [rows, groups], exponents + 127.
    - nvfp4: `weight_packed` uint8 [rows, columns / 2], the even column in the low bits; `weight_scale` float8_e4m3fn
      [rows, groups]; `weight_global_scale` float32 [1], by which stored scales are to be divided.
    """
    numbers = quantised.numbers.flatten(1)
    if form.kind == "mxfp8":
        exponents = torch.frexp(quantised.scales)[1] - 1 + E8M0_BIAS
        return {"weight": numbers.to(E4M3), "weight_scale": exponents.to(torch.uint8)}
    if form.kind == "nvfp4":
        assert quantised.global_scale is not None
        sign = numbers.signbit().to(torch.uint8) << 3
        bits = _e2m1_bits(numbers).to(torch.uint8) | sign
        return {
            "weight_packed": bits[:, 0::2] | bits[:, 1::2] << 4,
            "weight_scale": quantised.scales.to(E4M3),
            "weight_global_scale": quantised.global_scale.reshape(1),
        }
    tensors = {
        "weight_packed": pack_int4(numbers),
        "weight_scale": quantised.scales.to(scale_dtype),
        "weight_shape": torch.tensor(numbers.shape, device=numbers.device),
    }
    if quantised.zero_points is not None:
        # Packed along the rows.
        tensors["weight_zero_point"] = pack_int4(quantised.zero_points.t()).t()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Pack integers from -8 to 7 along the last axis: int32 [..., ceil(n / 8)], the first number in the lowest bits.

    Numbers are stored plus 8, and missing ones as zero bits.
    """
    offset = (numbers - INT4_LEAST).to(torch.int32)
    missing = -numbers.shape[-1] % PER_INT32
    offset = torch.nn.functional.pad(offset, (0, missing)).unflatten(
        -1, (-1, PER_INT32)
    )
    packed = torch.zeros_like(offset[..., 0])
    for place in range(PER_INT32):
        packed |= offset[..., place] << 4 * place
    return packed


def fake_quantise(
    matrix: torch.Tensor,
    form: GroupFormat,
    *,
    scale_dtype: torch.dtype,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the matrix that an engine in this format multiplies with, in the dtype of `matrix`.

    The gradient is passed through unchanged (straight-through estimator, arXiv
    1308.3432): rounding and scales count as constants with derivative 1. No element
    is out of range, since scales come from the largest one, so nothing is clipped.

    Args:
        matrix: [rows, columns], in the dtype that a reshard sends.
        scale_dtype, largest: see `quantise_groups`.
    """
    rounded: torch.Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        matrix, form, scale_dtype, largest
    )
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        matrix: torch.Tensor,
        form: GroupFormat,
        scale_dtype: torch.dtype,
        largest: torch.Tensor | None,
    ) -> torch.Tensor:
        quantised = quantise_groups(
            matrix, form, scale_dtype=scale_dtype, largest=largest
        )
        return dequantise_groups(quantised).to(matrix.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None, None
