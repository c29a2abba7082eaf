"""Configuration classes of models that transformers has none of, so that config.json is read without the model's code.

The folders of these models come with Python files (`auto_map` in config.json). Megatron
and vLLM need only the numbers. megaverl reads them with the classes below, and
registers a class with transformers before vLLM reads the same file. The defaults are
those of the models' own classes, whose names these classes share, so that code of a
folder that is trusted accepts them.
"""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


@strict
class InternLM3Config(LlamaConfig):  # type: ignore[misc]  # transformers exports it without a type
    """Configuration of InternLM 3: Llama with optional biases on queries, keys and values."""

    model_type = "internlm3"

    vocab_size: int = 128512
    max_position_embeddings: int = 32768
    qkv_bias: bool = False
    bias: bool = False


@strict
class MiMoConfig(Qwen2Config):  # type: ignore[misc]  # as above
    """Configuration of MiMo: Qwen2, whose folders also hold layers for multi-token prediction."""

    model_type = "mimo"

    num_nextn_predict_layers: int = 0


# Architecture -> class that reads its config.json.
OWN_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "InternLM3ForCausalLM": InternLM3Config,
    "MiMoForCausalLM": MiMoConfig,
}


def config_class_of(model_type: str) -> type[PreTrainedConfig] | None:
    """Return megaverl's configuration class for a model type, or None if it has none."""
    found = (kind for kind in OWN_CONFIGS.values() if kind.model_type == model_type)
    return next(found, None)


def register_config(architecture: str) -> None:
    """Let transformers, and so vLLM, read an architecture's config.json with megaverl's class, if it has one.

    Only the architecture at hand is registered, because other architectures may share
    its `model_type`. Safe to repeat.
    """
    if kind := OWN_CONFIGS.get(architecture):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
