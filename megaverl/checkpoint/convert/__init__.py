"""Conversion of models between Hugging Face folders, Megatron's distributed checkpoints and GGUF files."""
