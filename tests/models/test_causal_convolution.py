"""The convolution in front of layers that carry a state, compared with torch's on each sample alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.models.causal_convolution import CausalConvolution

CHANNELS = 5
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, size=st.integers(1, 5), bias=st.booleans())
def test_it_reads_no_token_of_another_sample(
    lengths: list[int], size: int, bias: bool
) -> None:
    convolution = CausalConvolution(CHANNELS, size, torch.float64, bias=bias)
    for parameter in convolution.parameters():
        parameter.data.normal_()
    row = torch.randn(1, sum(lengths), CHANNELS, dtype=torch.float64).requires_grad_()

    def by_torch(sample: Tensor) -> Tensor:
        padded = F.pad(sample.transpose(1, 2), (size - 1, 0))
        out = F.conv1d(padded, convolution.weight, convolution.bias, groups=CHANNELS)
        return F.silu(out).transpose(1, 2)

    positions = torch.cat([torch.arange(length) for length in lengths])
    found = convolution(row, positions)
    expected = torch.cat([by_torch(x) for x in row.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(convolution(row, None), by_torch(row))
    weights = torch.randn_like(expected)
    gradients = (
        torch.autograd.grad((out * weights).sum(), (row, *convolution.parameters()))
        for out in (found, expected)
    )
    for ours, right in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, right)
