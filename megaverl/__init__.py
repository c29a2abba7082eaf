"""megaverl: reinforcement-learning post-training of language models on Megatron-core and vLLM."""

from megaverl.version import __version__

__all__ = ["__version__"]
