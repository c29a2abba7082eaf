"""Translate a model's dimensions to megatron-core's `TransformerConfig`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megaverl.config.field_needs import FieldMachine, why_not_there
from megaverl.config.passthrough import coerce, recompute_fields
from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError
from megaverl.platform import flash_attention, platform
from megaverl.sharding.model_config import yarn_attention_factor
from megaverl.sharding.model_spec import MLASpec, ModelSpec, MoESpec, misfits

platform.adapt_megatron()

from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)  # noqa: E402

# These kernels and fusions exist on CUDA only.
CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}

# Values of `ModelSpec.activation` with a fused kernel in megatron-core. The tanh
# approximation of gelu has none.
FUSED_ACTIVATIONS = ("silu", "clamped_swiglu")


def fused_options(spec: ModelSpec, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return megatron-core's fusions that a model supports on a GPU. megatron-core's own default is off.

    - SwiGLU in one kernel, unless Transformer Engine's activation is requested instead.
    - The residual addition in one kernel, unless linear layers have biases, which megatron-core's experts refuse.
    - Rotary embeddings in Transformer Engine's kernel, if it computes what the model needs.
    """
    # Transformer Engine's activation replaces the function that the fusion would fuse.
    own_activation = bool(overrides.get("use_te_activation_func"))
    return {
        # Fused only if megatron-core has a kernel for it.
        "bias_activation_fusion": spec.activation in FUSED_ACTIVATIONS
        and spec.gate_scale == 1.0
        and not own_activation,
        "bias_dropout_fusion": not spec.linear_bias,
        "apply_rope_fusion": (
            uses_transformer_engine()
            and spec.mla is None
            and yarn_factor(spec) == 1.0
            and not spec.rotary_pairs
            and not spec.rope_axes
        ),
    }


def yarn_factor(spec: ModelSpec) -> float:
    """Return the factor by which YaRN multiplies queries and keys of plain attention; 1 without YaRN.

    Latent attention scales its softmax instead.
    """
    scaling = spec.rope_scaling or {}
    if spec.mla is not None or scaling.get("rope_type") != "yarn":
        return 1.0
    return yarn_attention_factor(dict(scaling))


def check_fused_rope(spec: ModelSpec, options: Mapping[str, Any]) -> None:
    """Refuse the fused rotary embedding for models that it would compute wrongly.

    megatron-core 0.16 to 0.19 (models/common/embeddings/rope_utils.py,
    `apply_rotary_pos_emb`) passes neither a factor nor the order of a head's dimensions
    to Transformer Engine's kernel for packed rows. YaRN's factor would be lost
    silently, and other dimensions would be rotated together. The kernel also takes one
    table of angles for all samples, and in a model with images each sample has its own.

    Raises:
        ModelError: the model has such a factor, order or table.
    """
    factor = yarn_factor(spec)
    if options.get("apply_rope_fusion") and spec.rope_axes:
        raise ModelError(
            f"megatron.apply_rope_fusion=true: {spec.architecture} rotates by positions in time, height and width, "
            "which differ between samples, and Transformer Engine's fused rotary embedding takes one table for all. "
            "Leave the key out."
        )
    if options.get("apply_rope_fusion") and spec.rotary_pairs:
        raise ModelError(
            f"megatron.apply_rope_fusion=true: {spec.architecture} rotates pairs of neighbouring dimensions, and "
            "Transformer Engine's fused rotary embedding does not for packed rows. Leave the key out."
        )
    if options.get("apply_rope_fusion") and factor != 1.0:
        raise ModelError(
            f"megatron.apply_rope_fusion=true: YaRN multiplies this model's queries and keys by {factor:.4g}, which "
            "Transformer Engine's fused rotary embedding leaves out. Leave the key out."
        )


# Parts of a layer that CUDA graphs capture. An empty list means all of it. That is the
# default too, but megatron-core warns about the default on every rank (0.16 to 0.19,
# under two names).
GRAPHED = (
    "cuda_graph_modules"
    if hasattr(TransformerConfig, "cuda_graph_modules")
    else "cuda_graph_scope"
)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of the Gaussian error linear unit."""
    return F.gelu(x, approximate="tanh")


def scaled_silu(scale: float, x: torch.Tensor) -> torch.Tensor:
    """Return SiLU of x * scale."""
    return F.silu(x * scale)


# `ModelSpec.activation` -> fields of TransformerConfig.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation_func": F.silu},
    # megatron-core has a fused kernel only for the exact gelu.
    "gelu_tanh": {"activation_func": gelu_tanh, "bias_activation_fusion": False},
    "squared_relu": {
        "activation_func": squared_relu,
        "bias_activation_fusion": False,
    },
    "clamped_swiglu": {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    },
}


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the embedding's number of rows after padding, divisible by `tp_size`.

    The multiple is vLLM's 64, so at equal TP both sides split the vocabulary alike.
    """
    multiple = math.lcm(64, tp_size)
    return -(-vocab_size // multiple) * multiple


def uses_transformer_engine() -> bool:
    """Return whether Transformer Engine's layers are used: it is installed and there is a GPU."""
    return (
        platform.is_cuda and importlib.util.find_spec("transformer_engine") is not None
    )


def check_divides(spec: ModelSpec, shape: GridShape, role: str) -> None:
    """Check that the grid divides the model's dimensions.

    Raises:
        ModelError: lists every dimension that `shape` does not divide.
    """
    misfitting = misfits(spec, tp=shape.tp, etp=shape.expert_tp, ep=shape.ep)
    mistakes = [f"{role}.{misfit}" for misfit in misfitting]
    if spec.moe is None and shape.ep > 1:
        mistakes.append(
            f"{role}.ep={shape.ep}, but the model has no experts; leave ep at 1"
        )
    stages = shape.pp * (shape.vpp or 1)
    if spec.num_layers < stages:
        mistakes.append(
            f"{role}.pp={shape.pp} x vpp={shape.vpp or 1} is more than the {spec.num_layers} layers"
        )
    if mistakes:
        raise ModelError("\n".join(mistakes))


def _described_options(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that describe the model's attention, MLP and norms."""
    activation = ACTIVATIONS[spec.activation]
    if spec.gate_scale != 1.0:
        assert spec.activation == "silu", "the only activation of scaled gates"
        activation = {
            "activation_func": partial(scaled_silu, spec.gate_scale),
            "bias_activation_fusion": False,
        }
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm" if spec.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": spec.is_gated,
        "softmax_scale": spec.softmax_scale,
        "attention_output_gate": spec.output_gate,
        "layernorm_zero_centered_gamma": spec.norm_plus_one,
        # megatron-core's window excludes the query's own position, and Hugging Face's
        # includes it.
        "window_size": None
        if spec.sliding_window is None
        else (spec.sliding_window - 1, 0),
        # Per layer: 1 attends within the window, 0 to all tokens.
        "window_attn_skip_freq": [
            int(has_window) for has_window in spec.windowed_layers
        ]
        or None,
        "rotary_interleaved": spec.rotary_pairs,
        # Per layer: 1 has no rotary embeddings.
        "no_rope_freq": [int(has_none) for has_none in spec.layers_without_rope]
        or None,
        # Layers of different kinds have different keys in a checkpoint.
        "hetereogenous_dist_checkpoint": bool(spec.layer_kinds),
        "softmax_type": "learnable" if spec.attention_sinks else "vanilla",
        "add_bias_linear": spec.linear_bias,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        **activation,
    }


def transformer_config(
    spec: ModelSpec,
    shape: GridShape,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return megatron-core's configuration of `spec` on the grid `shape`.

    Args:
        overrides: the user's `megatron.*` fields.

    Raises:
        ModelError: megatron-core refuses the combination. Its reason is included.
    """
    config_class = TransformerConfig if spec.mla is None else MLATransformerConfig
    options: dict[str, Any] = _described_options(spec) | {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Micro-batches are cut to their longest sample, so stages must send each other
        # the shape.
        "variable_seq_lengths": shape.pp > 1,
        # The allgather dispatcher needs micro-batches of equal length.
        "moe_token_dispatcher_type": "alltoall",
        # The default synchronizes the host after every exchange between stages, to work around a bug of PyTorch before
        # 2.0.
        "batch_p2p_sync": False,
        # Losses are already normalized over the global batch, so gradients must be
        # summed and never averaged.
        "calculate_per_token_loss": True,
        GRAPHED: [],
    }
    # With virtual stages the two directions overlap.
    if shape.vpp and shape.pp == 2:
        # With two stages both neighbours are the same rank, so messages of the two
        # directions must not share a batch.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if spec.moe is not None:
        options |= expert_options(spec, spec.moe, shape)
    if spec.mla is not None:
        options |= latent_attention_options(spec, spec.mla)
    # The user's fields, with values converted to the types of megatron-core's fields.
    settings = coerce(config_class, overrides or {}, "megatron")
    check_fused_rope(spec, settings)
    _check_needs(overrides or {})
    options |= fused_options(spec, settings) if platform.is_cuda else CPU_OPTIONS
    # Later entries win: model, then machine, then user, then grid.
    options |= settings
    options |= {
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "virtual_pipeline_model_parallel_size": shape.vpp,
        "context_parallel_size": shape.cp,
        "expert_model_parallel_size": shape.ep,
        "expert_tensor_parallel_size": shape.etp,
    }
    _check_for_model(spec, options)
    if shape.tp == 1 and options.get("sequence_parallel"):
        # A sequence split over one rank is whole. Roles inherit the actor's fields, and
        # may have a smaller tp.
        options["sequence_parallel"] = False
    # Only experts depend on combinations that megatron-core checks late.
    if spec.moe is not None:
        _check_expert_options(options, shape, spec.moe)
    _check_attention_backend(options.get("attention_backend", AttnBackend.auto))
    if options.get("fp8"):
        options.setdefault("fp8_recipe", "tensorwise")
    try:
        # megatron-core checks combinations when the object is created.
        config = config_class(**options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"megatron-core's TransformerConfig refuses these options: {error}"
        ) from error
    # GPTModel reads these attributes, though they are no fields of the configuration.
    for name, value in yarn_options(spec).items():
        setattr(config, name, value)
    # `models/attention.py` reads these.
    config.attention_softcap = spec.attention_softcap
    config.attention_chunks = tuple(
        spec.attention_chunk if spec.rotates(layer) else None
        for layer in range(spec.num_layers)
    )
    return config


def _check_for_model(spec: ModelSpec, options: Mapping[str, Any]) -> None:
    """Refuse options that the model's layers do not follow."""
    if spec.parallel_layers:
        _check_parallel_layers(options)
    if spec.attention_softcap is not None or spec.attention_chunk is not None:
        _check_our_attention(spec, options)
    if spec.is_recurrent:
        _check_recurrent(options)
    if spec.mamba is not None:
        _check_mamba(options, spec)


def _check_needs(overrides: Mapping[str, Any]) -> None:
    """Refuse fields that need a GPU or a package that this process lacks.

    Users of the Python API have no earlier check.
    """
    machine = FieldMachine(
        platform.is_cuda, lambda name: importlib.util.find_spec(name) is not None
    )
    for name, value in overrides.items():
        if reason := why_not_there("megatron", name, value, machine):
            raise ModelError(f"megatron.{name}={value} {reason}")


def _check_parallel_layers(options: Mapping[str, Any]) -> None:
    """Refuse options under which megatron-core frees the norm's output, which attention and MLP share, too early."""
    if {"attn_norm", "mlp_norm"} & set(options.get("offload_modules") or ()):
        raise ModelError(
            "megatron.offload_modules: attn_norm and mlp_norm cannot be offloaded in this model, because attention and "
            "MLP read the same norm's output. Leave both out."
        )
    if options.get("recompute_granularity") == "selective" and "layernorm" in (
        options.get("recompute_modules") or ()
    ):
        raise ModelError(
            "megatron.recompute_modules: layernorm cannot be recomputed in this model, because attention and MLP read "
            "the same norm's output. Leave layernorm out, or use activation_checkpointing: full."
        )


def _check_our_attention(spec: ModelSpec, options: Mapping[str, Any]) -> None:
    """Refuse options that only megatron-core's or Transformer Engine's attention has.

    These have neither a soft cap nor chunks.
    """
    window = options.get("window_size")
    wrong = [
        *(["attention_dropout"] if options["attention_dropout"] else []),
        *(["window_size"] if window is not None and window[1] != 0 else []),
    ]
    if wrong:
        needs = (
            "attends within chunks"
            if spec.attention_softcap is None
            else "caps attention's scores"
        )
        raise ModelError(
            f"megatron.{', megatron.'.join(wrong)}: this model {needs}, and only megaverl's attention, "
            "which has no dropout and no window that looks ahead, computes that. Leave it out."
        )


def _check_recurrent(options: Mapping[str, Any]) -> None:
    """Refuse 8-bit and 4-bit products, which would reach only the layers of Transformer Engine."""
    for name in ("fp8", "fp4"):
        if options.get(name):
            raise ModelError(
                f"megatron.{name}={options[name]}: the projections of layers with a state are multiplied in "
                "model.dtype. Leave it out."
            )


def _check_mamba(options: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse options that Mamba layers do not follow."""
    if spec.layer_kinds and not options["hetereogenous_dist_checkpoint"]:
        raise ModelError(
            "megatron.hetereogenous_dist_checkpoint=false: layers of this model have different weights, which a "
            "checkpoint cannot store in one array. Leave it out."
        )
    if options.get("attention_dropout") or options.get("hidden_dropout"):
        raise ModelError(
            "megatron.attention_dropout, megatron.hidden_dropout: models with Mamba layers are trained without dropout "
            "only. Leave them out."
        )


def _check_attention_backend(backend: AttnBackend) -> None:
    """Refuse FlashAttention under Transformer Engine if it cannot run. Otherwise the first batch would fail."""
    if (
        backend is not AttnBackend.flash
        or importlib.util.find_spec("flash_attn_3") is not None
    ):
        return
    if reason := flash_attention.why_not():
        raise ModelError(
            f"megatron.attention_backend={backend.name}: {reason}. Leave it at auto."
        )


def token_multiple(config: TransformerConfig, shape: GridShape) -> int:
    """Return the multiple that rows of tokens are padded to, so that kernels support every rank's part.

    Context parallelism cuts a row into 2 cp chunks, two for each rank. 8-bit matrix
    products need rows of 16 tokens, or 32 under the recipe mxfp8 (megatron-core 0.16 to
    0.19, `fp8_utils.py`, `get_fp8_align_size`), both before and after a sequence is
    split over ranks.
    """
    cut = shape.tp if config.sequence_parallel else 1
    if not config.fp8:
        # Chunks of context-parallel ranks are even, and each must divide over
        # sequence-parallel ranks.
        return cut if shape.cp == 1 else shape.cp * math.lcm(2, cut)
    return cut * shape.cp * (32 if config.fp8_recipe == "mxfp8" else 16)


def recompute_options(kind: str, spec: ModelSpec) -> dict[str, Any]:
    """Return TransformerConfig's fields for `activation_checkpointing` of this model."""
    dense = spec.moe is None or bool(spec.count_layers("mlp"))
    # `CausalAttention` computes capped scores again by itself.
    fused = uses_transformer_engine() or spec.attention_softcap is not None
    return recompute_fields(
        kind, dense=dense, experts=spec.moe is not None, fused_attention=fused
    )


def expert_options(spec: ModelSpec, moe: MoESpec, shape: GridShape) -> dict[str, Any]:
    """Return TransformerConfig's fields for routed and shared experts. No token is ever dropped."""
    options: dict[str, Any] = {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        # Per layer: 1 has experts.
        "moe_layer_freq": [int(is_routed) for is_routed in spec.routed_layers],
        "moe_router_topk": moe.experts_per_token,
        "moe_router_score_function": moe.router,
        # The softmax over the chosen experts' scores equals the softmax over all
        # experts, divided by its sum over the chosen ones.
        "moe_router_pre_softmax": moe.router == "softmax" and not moe.normalize_weights,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1.0 else None,
        "moe_apply_probs_on_input": moe.scales_input,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": uses_transformer_engine(),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": moe.aux_loss_coef,
        # megatron-core's experts take their tokens from sequence-parallel ranks.
        "sequence_parallel": shape.tp > 1,
    }
    # If a token may choose experts from all groups, groups have no effect.
    if moe.groups_per_token < moe.num_groups:
        options |= {
            "moe_router_num_groups": moe.num_groups,
            "moe_router_group_topk": moe.groups_per_token,
        }
    if moe.shared_ffn_hidden_size:
        options["moe_shared_expert_intermediate_size"] = moe.shared_ffn_hidden_size
        options["moe_shared_expert_gate"] = moe.shared_gate
    return options


def _check_expert_options(
    options: Mapping[str, Any], shape: GridShape, moe: MoESpec
) -> None:
    """Refuse expert settings that change the policy, or that megatron-core would refuse only in the first batch."""
    if shape.tp > 1 and not options["sequence_parallel"]:
        raise ModelError(
            "megatron.sequence_parallel=false: experts with tp above 1 need it. Leave it out, or tp=1."
        )
    if options.get("moe_expert_capacity_factor") is not None:
        raise ModelError(
            "megatron.moe_expert_capacity_factor: dropped tokens would make the trained policy another one than the "
            "sampled. Leave it out."
        )
    if options.get("moe_router_fusion") and moe.router_bias and moe.router == "softmax":
        raise ModelError(
            "megatron.moe_router_fusion: this model's router adds a bias to softmax scores, and the fused kernel only "
            "to sigmoid scores. Leave it out."
        )
    if options.get("moe_router_enable_expert_bias"):
        raise ModelError(
            "megatron.moe_router_enable_expert_bias: a router's bias stays as it was loaded. Leave it out; "
            "megatron.moe_aux_loss_coeff balances the load."
        )


def latent_attention_options(spec: ModelSpec, mla: MLASpec) -> dict[str, Any]:
    """Return MLATransformerConfig's fields. `sharding/model_config.py` refuses scalings other than YaRN."""
    options: dict[str, Any] = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Both latent vectors are normalized.
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": spec.rope_theta,
        "rotary_scaling_factor": 1.0,
    }
    scaling = spec.rope_scaling
    if scaling is None:
        return options
    return options | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": int(
            scaling["original_max_position_embeddings"]
        ),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scaling.get("mscale") or 1.0),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0.0),
    }


def rope_options(spec: ModelSpec) -> dict[str, Any]:
    """Return `GPTModel`'s arguments for the rotary embedding. `sharding/model_config.py` refuses other scalings."""
    if not spec.has_rope:
        return {"position_embedding_type": "none"}
    options: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": spec.rope_theta,
    }
    if spec.rotary_fraction != 1.0:
        options["rotary_percent"] = spec.rotary_fraction
    scaling = spec.rope_scaling
    # Latent attention creates its own rotary embedding.
    if scaling is None or spec.mla is not None:
        return options
    kind = scaling["rope_type"]
    if kind == "linear":
        return options | {"seq_len_interpolation_factor": float(scaling["factor"])}
    # `models/build.py` scales these frequencies: megatron-core (0.16 to 0.19) has fixed
    # most of the scaling's numbers.
    if kind == "llama3":
        return options
    assert kind == "yarn", f"model_config.py lets {kind} pass"
    return options | {"position_embedding_type": "yarn"}


def yarn_options(spec: ModelSpec) -> dict[str, Any]:
    """Return attributes of megatron-core's configuration for YaRN (arXiv 2309.00071) in plain attention."""
    scaling = spec.rope_scaling or {}
    if spec.mla is not None or scaling.get("rope_type") != "yarn":
        return {}
    factor = float(scaling["factor"])
    mscale = scaling.get("mscale")
    mscale_all_dim = scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is not None and factor > 1:
        # megatron-core multiplies queries and keys by (0.1 mscale ln factor + 1) / (0.1
        # mscale_all_dim ln factor + 1).
        mscale = (scaling["attention_factor"] - 1.0) / (0.1 * math.log(factor))
        mscale_all_dim = 0.0
    # transformers reads these two only if both are set.
    elif not (mscale and mscale_all_dim):
        mscale = mscale_all_dim = None
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(
            scaling["original_max_position_embeddings"]
        ),
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
        "yarn_mscale": None if mscale is None else float(mscale),
        "yarn_mscale_all_dim": None
        if mscale_all_dim is None
        else float(mscale_all_dim),
    }
