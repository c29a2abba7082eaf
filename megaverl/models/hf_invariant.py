"""Layers of transformers' models that compute as an engine with `rollout.batch_invariant` does, on a CPU.

Attention does so by itself (`models/attention.py`), and residual sums and rotary embeddings need no change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from megaverl.models.layers import rms_norm
from megaverl.platform.float32_linear import float32_linear
from megaverl.platform.megatron_cpu import GatedSilu

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute_by_row(model: PreTrainedModel) -> None:
    """Replace the forward passes of linear layers, RMSNorms and gated MLPs inside, of a model in `BATCH_INVARIANT`.

    They are invariant inside `batch_invariant`. Products of 16-bit matrices are computed in float32 and rounded once.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _multiply_by_row(module)
        elif type(module).__name__.endswith("RMSNorm"):
            _norm_by_row(module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "act_fn")):
            _gate_by_row(module)


def _multiply_by_row(layer: nn.Linear) -> None:
    def forward(input: torch.Tensor) -> torch.Tensor:
        # The parameters are read in every pass, because FSDP replaces them.
        product = float32_linear(input, layer.weight).to(input.dtype)
        return product if layer.bias is None else product + layer.bias

    layer.forward = forward  # type: ignore[method-assign]  # of this layer alone


def _norm_by_row(norm: nn.Module) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = norm.weight  # type: ignore[assignment]  # a parameter
        return rms_norm(x, weight, float(norm.variance_epsilon))  # type: ignore[arg-type]  # a number

    norm.forward = forward


def _gate_by_row(mlp: nn.Module) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)  # type: ignore[operator]  # modules
        out: torch.Tensor = mlp.down_proj(GatedSilu.apply(joined))  # type: ignore[operator,no-untyped-call]  # a module; torch leaves `apply` untyped
        return out

    mlp.forward = forward
