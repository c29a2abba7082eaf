"""Qwen3-MoE: Qwen3 with routed experts in the place of every MLP."""

from megaverl.models.architectures import experts, llama, qwen3
from megaverl.models.architectures.table import Layers

LAYERS = Layers(routed=llama.ATTENTION + qwen3.QK_NORMS + experts.routed())
