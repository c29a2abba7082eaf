"""Causal convolution of each channel with a few taps, in front of layers that carry a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.models.layers import widened
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.layers import (  # noqa: E402
    set_tensor_model_parallel_attributes,
)


class CausalConvolution(nn.Module):
    """Causal convolution of this rank's channels, followed by SiLU, computed in float32.

    The weight is [channels, 1, taps], as in `torch.nn.Conv1d`, files and engines. The
    last tap is that of the token itself. Tensor-parallel ranks divide the channels.

    Args:
        num_channels: number of channels on this rank.
        num_taps: tokens that an output depends on.
        bias: whether each channel has a bias.
    """

    bias: torch.Tensor | None

    def __init__(
        self, num_channels: int, num_taps: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        weight = torch.zeros(num_channels, 1, num_taps, dtype=dtype)
        # An untrained convolution returns each token's own channels.
        weight[..., -1] = 1.0
        self.weight = nn.Parameter(weight)
        offset = nn.Parameter(torch.zeros(num_channels, dtype=dtype)) if bias else None
        self.register_parameter("bias", offset)
        for parameter in self.parameters():
            # The gradient norm counts the parts of all ranks.
            set_tensor_model_parallel_attributes(
                parameter, is_parallel=True, dim=0, stride=1
            )

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        channels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convolve [b, s, channels]. The result has the same shape and dtype.

        Args:
            positions: [s] int64: position of each token in its sequence. None: each row is one sequence.
            channels: [n] int64: numbers of the channels of `x` [b, s, n]. None: all of them.
        """
        weight, bias = self.weight[:, 0], self.bias
        if channels is not None:
            weight = weight[channels]
            bias = None if bias is None else bias[channels]
        wide, taps = widened(x), widened(weight)
        last = taps.shape[1] - 1
        total = wide * taps[:, last]
        if bias is not None:
            total = total + widened(bias)
        # Views of one padded copy: x[t - back] of every token.
        padded = F.pad(wide, (0, 0, last, 0))
        for back in range(1, taps.shape[1]):
            earlier = padded[:, last - back : padded.shape[1] - back]
            if positions is not None:
                # In front of its first token a sequence has zeros, not the sequence
                # that lies before it in the row.
                earlier = earlier.where((positions >= back)[:, None], 0.0)
            total = total + earlier * taps[:, last - back]
        return F.silu(total).to(x.dtype)
