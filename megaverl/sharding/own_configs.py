"""Configuration classes of models that transformers has none of, so that config.json is read without the model's code.

The folders of these models come with Python files (`auto_map` in config.json). Megatron
and vLLM need only the numbers. megaverl reads them with the classes below, and
registers a class with transformers before vLLM reads the same file. The defaults are
those of the models' own classes, whose names these classes share, so that code of a
folder that is trusted accepts them.
"""

from __future__ import annotations

from typing import Any

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


@strict
class BailingMoeV2Config(PreTrainedConfig):  # type: ignore[misc]  # as above
    """Configuration of BailingMoE-V2 (Ling 2.0).

    `partial_rotary_factor` is a field of its own, besides its entry in
    `rope_parameters`, because vLLM reads it there.
    """

    model_type = "bailing_moe"
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    embedding_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    output_dropout: float | int = 0.0
    first_k_dense_replace: int = 1
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int | None = None
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    router_dtype: str | None = "fp32"
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    pad_token_id: int | None = 156892
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 156892

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in sizes that others follow from, and read the rotary embedding in both of its spellings."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moe_shared_expert_intermediate_size is None:
            self.moe_shared_expert_intermediate_size = self.moe_intermediate_size
        super().__post_init__(**kwargs)
        rope = self.rope_parameters or {}
        self.partial_rotary_factor = rope["partial_rotary_factor"]


# Architecture -> class that reads its config.json.
OWN_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "InternLM3ForCausalLM": InternLM3Config,
    "MiMoForCausalLM": MiMoConfig,
    "BailingMoeV2ForCausalLM": BailingMoeV2Config,
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
