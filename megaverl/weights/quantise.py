"""Floating-point matrices become 8-bit numbers and scales, as vLLM makes them when it loads a model.

Rules (vLLM 0.32): a block of 128 x 128 has the scale max|w| / 448 and the numbers w * (1 / scale), rounded to
float8_e4m3fn (`utils/deep_gemm.py`, `per_block_cast_to_fp8`; 448 is the largest such number); a whole matrix the same
(`layers/quantization/online/fp8.py`), where each rank goes by its own part of the matrix: a product needs no more,
and the scales are closer to the weights than with one for all ranks.
"""

from __future__ import annotations

import torch

from megaverl.sharding.vllm import QuantisedWeight

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# Of max|w| in a block, and in a whole matrix: zeros have a scale too. The first is vLLM's.
LEAST, LEAST_WHOLE = 1e-4, 1e-30
CHUNK = 1 << 22  # elements that are widened to float32 at a time


@torch.no_grad()
def quantise(matrix: torch.Tensor, into: QuantisedWeight, expert: int = 0) -> None:
    """Write a matrix [rows, columns] of any floating-point dtype into its place, a slice of rows at a time.

    Args:
        into: of the matrix's shape; or of several experts'.
        expert: which of these it is.
    """
    several = into.numbers.dim() > 2
    numbers = into.numbers[expert] if several else into.numbers
    scales = into.scales[expert] if several else into.scales
    rows, columns = matrix.shape
    step = max(1, CHUNK // max(1, columns))
    if into.block is not None:
        step = -(-step // into.block) * into.block
        for top in range(0, rows, step):
            part = slice(top, min(top + step, rows))
            of_part = scales[top // into.block : -(-part.stop // into.block)]
            _quantise_blocks(matrix[part], numbers[part], of_part, into.block, into.powers_of_two)
        return
    low, high = torch.aminmax(matrix)
    scale = _scale(torch.maximum(low.abs(), high.abs()).float().clamp(LEAST_WHOLE), powers_of_two=False)
    scales.copy_(scale.expand_as(scales))
    for top in range(0, rows, step):
        part = slice(top, min(top + step, rows))
        numbers[part].copy_((matrix[part].float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST))


def _quantise_blocks(
    matrix: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block: int, powers_of_two: bool
) -> None:
    down, across = scales.shape
    padded = torch.zeros(down * block, across * block, dtype=torch.float32, device=matrix.device)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.view(down, block, across, block)
    scale = _scale(blocks.abs().amax(dim=(1, 3)).clamp_(LEAST), powers_of_two)
    scales.copy_(scale)
    blocks.mul_((1.0 / scale)[:, None, :, None])
    numbers.copy_(padded[: matrix.shape[0], : matrix.shape[1]])


def _scale(largest: torch.Tensor, powers_of_two: bool) -> torch.Tensor:
    scale = largest / LARGEST
    return torch.exp2(torch.ceil(torch.log2(scale))) if powers_of_two else scale


def dequantise(weight: QuantisedWeight, expert: int = 0) -> torch.Tensor:
    """The matrix [rows, columns] in float32 that the numbers and scales stand for."""
    several = weight.numbers.dim() > 2
    numbers = (weight.numbers[expert] if several else weight.numbers).float()
    scales = weight.scales[expert] if several else weight.scales
    if weight.block is None:
        return numbers * scales
    by_row = scales.repeat_interleave(weight.block, 0)[: numbers.shape[0]]
    return numbers * by_row.repeat_interleave(weight.block, 1)[:, : numbers.shape[1]]
