"""From a model's dimensions to megatron-core's `TransformerConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megaverl.config import realise
from megaverl.errors import ModelError
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# Kernels and fusions that exist on CUDA only.
CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}

# Llama 3's rotary scaling, whose other constants megatron-core fixes.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding after padding, divisible by `tp_size`.

    The multiple is vLLM's 64, so that at an equal TP both sides cut the vocabulary alike.
    """
    multiple = math.lcm(64, tp_size)
    return -(-vocab_size // multiple) * multiple


def check_divides(spec: ModelSpec, shape: GridShape, role: str) -> None:
    """Raise one ModelError that lists every dimension of `spec` which `shape` does not divide."""
    mistakes = []
    sizes = {
        "attention heads": spec.num_heads,
        "KV heads": spec.num_kv_heads,
        "feed-forward width": spec.ffn_hidden_size,
    }
    common = math.gcd(*sizes.values())
    fitting = [d for d in range(1, common + 1) if common % d == 0]
    for name, size in sizes.items():
        if size % shape.tp:
            mistakes.append(f"{role}.tp={shape.tp} does not divide the {size} {name}; tp can be one of {fitting}")
    stages = shape.pp * (shape.vpp or 1)
    if spec.num_layers < stages:
        mistakes.append(f"{role}.pp={shape.pp} x vpp={shape.vpp or 1} is more than the {spec.num_layers} layers")
    if mistakes:
        raise ModelError("\n".join(mistakes))


def transformer_config(
    spec: ModelSpec,
    shape: GridShape,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """megatron-core's configuration of `spec` on `shape`; `overrides` are the user's `megatron.*` fields.

    Raises:
        ModelError: megatron-core refuses the combination; its reason is passed on.
    """
    options: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # micro-batches are cut to their longest sample, so stages tell each other the shape
        "variable_seq_lengths": shape.pp > 1,
        "moe_token_dispatcher_type": "alltoall",  # the other dispatcher wants equal lengths
        # losses come normalised over the global batch: gradients are summed, never averaged
        "calculate_per_token_loss": True,
    }
    if shape.vpp and shape.pp == 2:
        # Both neighbours are the same rank: messages of the two directions must not share a batch.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if not platform.is_cuda:
        options |= CPU_OPTIONS
    options |= realise(TransformerConfig, overrides or {}, "megatron")
    options |= {
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "virtual_pipeline_model_parallel_size": shape.vpp,
        "context_parallel_size": shape.cp,
        "expert_model_parallel_size": shape.ep,
        "expert_tensor_parallel_size": shape.etp,
    }
    try:
        return TransformerConfig(**options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ModelError(f"megatron-core's TransformerConfig refuses these options: {error}") from error


def rope_options(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of `GPTModel` for the rotary embedding of `spec`.

    Raises:
        ModelError: a scaling that megatron-core's GPTModel cannot express.
    """
    options: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": spec.rope_theta}
    scaling = spec.rope_scaling
    if scaling is None:
        return options
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return options | {"seq_len_interpolation_factor": float(scaling["factor"])}
    if kind == "llama3" and all(scaling.get(key, value) == value for key, value in LLAMA3_ROPE.items()):
        return options | {"rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    raise ModelError(
        f"rope_scaling {scaling} cannot be computed by megatron-core's GPTModel. "
        f"Supported: none, linear, and llama3 with {LLAMA3_ROPE}."
    )
