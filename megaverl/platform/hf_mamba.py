"""Corrections of transformers' Mamba-2 layers, which then compute what engines and Megatron's layers do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def correct_mamba(model: PreTrainedModel) -> None:
    """Correct the Mamba-2 layers of a model of transformers (5.19), if it has some.

    Nemotron-H: its layers raise time steps to `time_step_min` when they compute a whole
    sequence, but not token by token. NVIDIA's class and vLLM (0.32, `mamba_mixer2.py`)
    leave them as they are, and so do these layers now.

    Falcon-H1: its norm returns a single token's output [b, 1, width] as [b, width].
    The residual sum then adds every row's output to every row.
    """
    model_type = model.config.model_type
    module: Any
    for module in model.modules():
        if model_type == "nemotron_h" and hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
        elif type(module).__name__ == "FalconH1RMSNormGated":
            module.register_forward_hook(_keep_axes)


def _keep_axes(
    norm: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """Return a norm's output in the shape of its input."""
    return output.view(args[0].shape)
