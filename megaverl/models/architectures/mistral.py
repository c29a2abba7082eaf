"""Mistral: Llama's weights (where its sliding window is not felt, Llama altogether)."""

from megaverl.models.architectures import llama

LAYERS = llama.LAYERS
