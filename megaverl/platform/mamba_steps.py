"""Time steps of transformers' Mamba-2 layers, in the range of engines and of Megatron's layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Types of models whose layers raise time steps to `time_step_min` when they compute a
# whole sequence, but not token by token (transformers 5.19). NVIDIA's class and vLLM
# (0.32, `mamba_mixer2.py`) leave them as they are.
RAISING = ("nemotron_h",)


def leave_steps(model: PreTrainedModel) -> None:
    """Let the Mamba-2 layers of a model of transformers take time steps of any length."""
    if model.config.model_type not in RAISING:
        return
    module: Any
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
