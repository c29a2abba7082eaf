"""Gemma (the first): Llama's weights; its norms hold weight - 1, as Megatron's zero-centered ones and vLLM's do."""

from megaverl.models.architectures import llama

LAYERS = llama.LAYERS
