"""RMSNorm for megatron-core's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv 1910.07467, eq. 4).

    megatron-core's own wrapper refuses sequence parallelism; this one marks its weight, so that
    `finalize_model_grads` sums the gradient over the tensor-parallel ranks, each of which saw its part of
    the sequence. With `layernorm_zero_centered_gamma` (Gemma) the factor is 1 + weight, added in float32: the
    weight holds the small difference, which 16 bits beside a one would lose.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.hidden_size = (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape and dtype."""
        factor = 1.0 + self.weight.float() if self.zero_centred else self.weight
        if hidden.device.type == "cpu":
            return rms_norm(hidden, factor, self.eps)
        if self.zero_centred:
            return F.rms_norm(hidden.float(), self.hidden_size, factor, self.eps).to(hidden.dtype)
        return F.rms_norm(hidden, self.hidden_size, factor, self.eps)
