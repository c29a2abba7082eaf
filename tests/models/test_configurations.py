"""Megatron-core's logits equal transformers' whatever a config.json leaves out or sets otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megaverl.models.tiny import TINY, TINY_MORE
from megaverl.sharding.model_config import HEADS_FILL_HIDDEN, WITH_DELTA_NET
from megaverl.sharding.model_spec import ARCHITECTURES
from tests.launcher import Launcher
from tests.sharding.specs import NEMOTRON_EXPERTS, make_spec

TOKENS = torch.randint(
    0, 100, (2, 40), generator=torch.Generator().manual_seed(5)
).tolist()
# Defaults too large for a test.
KEPT = {
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "pad_token_id",
}
# Keys whose defaults fit each other alone, and what a tiny model needs to be large
# enough for them.
HEADS = {"num_attention_heads", "num_key_value_heads"}
# Keys without which transformers itself cannot build a tiny model.
CHOICE = {"n_group", "topk_group", "num_experts_per_tok"}
NEEDED = {
    "MinistralForCausalLM": {"head_dim"},
    "HunYuanDenseV1ForCausalLM": {"head_dim"},
    "CwmForCausalLM": HEADS,
    "Ernie4_5_MoeForCausalLM": {*HEADS, "moe_k"},
    "NemotronForCausalLM": HEADS,
    # The default has layers with experts, and time steps that transformers alone raises.
    "NemotronHForCausalLM": {"layers_block_type", "time_step_min"},
    # Sizes that fit each other, and a norm before the gate.
    "FalconH1ForCausalLM": {
        "mamba_d_ssm",
        "mamba_n_heads",
        "mamba_norm_before_gate",
    },
    "OlmoeForCausalLM": HEADS,
    "MiMoForCausalLM": HEADS,
    "Qwen2ForCausalLM": HEADS,
    "Qwen2MoeForCausalLM": HEADS,
    # Two layers would both be gated delta nets. 16 key heads share no 8 value heads.
    **dict.fromkeys(
        WITH_DELTA_NET, {"full_attention_interval", "linear_num_key_heads"}
    ),
    "GraniteMoeForCausalLM": HEADS,
    # torch multiplies by no matrix of the default's odd width on a CPU.
    "DeepseekV2ForCausalLM": {*CHOICE, "moe_intermediate_size"},
}
LARGE_ENOUGH = {
    frozenset(CHOICE): dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts"), 16
    ),
    frozenset({"first_k_dense_replace"}): {"num_hidden_layers": 4},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Llama 4's bounds are equal.
LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
# Of every architecture: changes that are computed.
ANY: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"rms_norm_eps": 1e-2},
    {"rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mscale": 2.0}},
    {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_scaling": YARN | {"beta_fast": 10, "beta_slow": 2}},
    {"rope_scaling": {"type": "yarn", "factor": 2.0}},  # of max_position_embeddings
    # ignored by transformers in all classes but the one that has the key
    {"use_qk_norm": True},
    {"norm_topk_prob": True},
    {"n_group": 2, "topk_group": 2},
    {"output_router_logits": True, "router_aux_loss_coef": 0.5},
]
PLAIN: list[dict[str, Any]] = [
    {"num_key_value_heads": 1},
    {"head_dim": 16},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": YARN | {"attention_factor": 0.7}},
    {"rope_scaling": YARN | {"truncate": False}},
    {"rope_scaling": YARN | {"mscale": 0.7}},
    {"rope_scaling": YARN | {"mscale_all_dim": 0.7}},
]
MORE: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"hidden_act": "swish"},
        {"rope_scaling": LLAMA4_ROPE | {"high_freq_factor": 4.0}},
        {"rope_scaling": LLAMA4_ROPE | {"low_freq_factor": 0.5}},
    ],
    "Qwen2ForCausalLM": [
        {"use_sliding_window": True, "sliding_window": 8},  # from layer 28 on
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"attention_bias": False},  # which its class does not read
    ],
    "Qwen3ForCausalLM": [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ],
    "MistralForCausalLM": [
        {"sliding_window": 4096},
        {"sliding_window": 8},
        {"sliding_window": 1},
    ],
    "GemmaForCausalLM": [{"hidden_act": "gelu"}],
    "Llama4ForCausalLM": [
        {"use_qk_norm": False},
        {"attn_temperature_tuning": False},
        {"floor_scale": 1, "attn_scale": 2.0},
        {"floor_scale": 257},
        {"attention_chunk_size": 1},
        {"attention_chunk_size": 7},
        {"attention_chunk_size": 8192},
        {"no_rope_layers": [0, 1]},
        {"no_rope_layers": [0, 0]},
        {"no_rope_layers": [1, 1]},
        {"no_rope_layers": []},  # as a published folder writes it
        {"interleave_moe_layer_step": 1},
        {"interleave_moe_layer_step": 3},  # no experts in two layers
        {"moe_layers": [1]},
        {"layer_types": ["chunked_attention", "full_attention"]},
        {"rope_scaling": LLAMA4_ROPE},
        {"rope_scaling": LLAMA4_ROPE | {"high_freq_factor": 3.5}},
        {"hidden_act": "swish"},
    ],
    "MixtralForCausalLM": [
        {"norm_topk_prob": False},
        {"sliding_window": 8},
        {"num_experts_per_tok": 4},
    ],
    "Qwen3MoeForCausalLM": [
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"mlp_only_layers": None},
        {"use_sliding_window": True, "sliding_window": 8},
    ],
    "DeepseekV3ForCausalLM": [
        {"q_lora_rank": None},
        {
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"mscale": 1.0}},
    ],
    "Glm4MoeForCausalLM": [
        {"partial_rotary_factor": 0.25},
        {"attention_bias": False, "use_qk_norm": False},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
    "GptOssForCausalLM": [{"sliding_window": 256}, {"norm_topk_prob": False}],
    "SeedOssForCausalLM": [{"attention_bias": False}, {"residual_dropout": 0.1}],
    "Phi3ForCausalLM": [
        {"partial_rotary_factor": 1.0},
        {"sliding_window": 8},
        {"num_key_value_heads": None},
    ],
    "Glm4ForCausalLM": [{"partial_rotary_factor": 1.0}, {"attention_bias": False}],
    "CwmForCausalLM": [
        {"sliding_window": 8},  # in all layers but every fourth, from the first on
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    "SmolLM3ForCausalLM": [
        {"no_rope_layers": [0, 1]},
        {"no_rope_layers": [1, 0, 1]},  # longer than the model
        {"no_rope_layers": [1, 1]},
        {"sliding_window": 8},
    ],
    "MinistralForCausalLM": [
        {"sliding_window": 8},
        {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ],
    "GraniteForCausalLM": [{"num_key_value_heads": None}, {"logits_scaling": 8}],
    "GraniteMoeForCausalLM": [
        {"num_key_value_heads": None},
        {"logits_scaling": 8},
        {"num_experts_per_tok": 3},
    ],
    "NemotronForCausalLM": [{"partial_rotary_factor": 1.0}, {"norm_eps": 1e-2}],
    "NemotronHForCausalLM": [
        # As the published folders write it.
        {"layers_block_type": None, "hybrid_override_pattern": "M*-M"},
        {"use_conv_bias": False},
        {"conv_kernel": 2},
        {"n_groups": 1, "chunk_size": 7},
        {"mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 3, "ssm_state_size": 3},
        {"mamba_hidden_act": "swish", "layer_norm_epsilon": 1e-2},
        NEMOTRON_EXPERTS,
        NEMOTRON_EXPERTS
        | {"layers_block_type": None, "hybrid_override_pattern": "E-*E"}
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
        NEMOTRON_EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {
            "layers_block_type": ["full_attention", "linear_attention"],
            "vocab_size": 131,
            "num_key_value_heads": 1,
        },
    ],
    "FalconH1ForCausalLM": [
        # As the published folders write it.
        {
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "rope_parameters": None,
            "rope_theta": 1e11,
        },
        {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_expand": 3},
        {"mamba_conv_bias": False},
        {"mamba_d_conv": 2},
        {"mamba_n_groups": 1, "mamba_chunk_size": 7},
        {
            "mamba_n_heads": 6,
            "mamba_d_head": 5,
            "mamba_d_ssm": 30,
            "mamba_n_groups": 3,
            "mamba_d_state": 3,
        },
        {"mlp_multipliers": None, "ssm_multipliers": None},
        {"num_key_value_heads": None},
        {"attn_rotary_emb": 8},
    ],
    "Starcoder2ForCausalLM": [
        {"use_bias": False},
        {"sliding_window": 8},
        {"norm_epsilon": 1e-2},
        {"residual_dropout": 0.1},
    ],
    "Exaone4ForCausalLM": [
        # Rotary embeddings in all layers.
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
    "Gemma2ForCausalLM": [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0},
        {"query_pre_attn_scalar": 100},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
    "Gemma3ForCausalLM": [
        {"rope_local_base_freq": 300.0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"sliding_window": 256},
    ],
    "Cohere2ForCausalLM": [
        {"sliding_window": 8},
        {"logit_scale": 2.0},
        {"layer_norm_eps": 1e-2},
    ],
    "OlmoeForCausalLM": [{"num_experts_per_tok": 1}, {"num_experts_per_tok": 4}],
    "MiniMaxM2ForCausalLM": [{"num_experts_per_tok": 3}],
    "Ernie4_5_MoeForCausalLM": [
        {"moe_k": 3},
        {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        {"moe_layer_end_index": 29},
    ],
    "HunYuanDenseV1ForCausalLM": [
        # As the published folders write it.
        {
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
        },
        {"rope_parameters": None, "num_key_value_heads": None},
    ],
    "BailingMoeV2ForCausalLM": [
        {"use_qk_norm": False},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"num_shared_experts": 2, "first_k_dense_replace": 0},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        # As the published folders write it.
        {"moe_shared_expert_intermediate_size": 32, "rotary_dim": 4},
    ],
    "MiMoForCausalLM": [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"attention_bias": True, "head_dim": 8, "use_mrope": False},  # as published
        {"num_nextn_predict_layers": 1},
    ],
    "InternLM3ForCausalLM": [
        {"qkv_bias": False},
        {"num_key_value_heads": None, "head_dim": None},
        # As the published folders write it.
        {
            "rope_parameters": None,
            "rope_theta": 5e7,
            "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        },
    ],
    "DeepseekV2ForCausalLM": [
        {"q_lora_rank": None},
        {"num_experts_per_tok": 1},
        {"rope_scaling": YARN},
        {"topk_group": None, "n_group": None},
    ],
    "Glm4MoeLiteForCausalLM": [
        {"mlp_layer_types": ["sparse", "sparse"], "first_k_dense_replace": 0},
        {"q_lora_rank": None},
    ],
    "Qwen3NextForCausalLM": [
        {"partial_rotary_factor": 1.0},
        {"norm_topk_prob": False},
        {"mlp_only_layers": None},
        {"full_attention_interval": 1},
        {"layer_types": ["full_attention", "linear_attention"]},
        # One value head for each key head; heads of other sizes; fewer taps.
        {"linear_num_value_heads": 4},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_key_head_dim": 5, "linear_value_head_dim": 12},
        {"linear_conv_kernel_dim": 2},
        {"hidden_act": "swish"},
    ],
    "Qwen3_5ForCausalLM": [
        # As the published folders write it.
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            }
        },
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
    ],
    "Qwen3_5MoeForCausalLM": [{"linear_num_value_heads": 4}],
    "Qwen2MoeForCausalLM": [
        {"qkv_bias": False},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"use_sliding_window": False, "sliding_window": 8},
    ],
}


def tiny(architecture: str) -> dict[str, Any]:
    base = {
        **TINY,
        **TINY_MORE.get(architecture, {}),
        "architectures": [architecture],
        "num_hidden_layers": 2,
    }
    return (
        base
        | {"tie_word_embeddings": False}
        | ({} if make_spec(architecture).mla else {"head_dim": 8})
    )


def without_a_key(architecture: str) -> list[dict[str, Any]]:
    base, configs = tiny(architecture), []
    for key in base.keys() - KEPT - NEEDED.get(architecture, set()):
        left_out = next((keys for keys in (HEADS, CHOICE) if key in keys), {key})
        larger = LARGE_ENOUGH.get(frozenset(left_out), {})
        configs.append(
            {k: larger.get(k, value) for k, value in base.items() if k not in left_out}
        )
    return configs


def changed(architecture: str) -> list[dict[str, Any]]:
    changes = [
        *ANY,
        *([] if make_spec(architecture).mla else PLAIN),
        *MORE.get(architecture, []),
    ]
    return [
        tiny(architecture) | change
        for change in changes
        if not is_refused(architecture, change)
    ]


def is_refused(architecture: str, change: dict[str, Any]) -> bool:
    """Return whether tests/sharding/test_model_spec.py has this change among those that are refused."""
    rope = change.get("rope_scaling", {})
    # transformers' class knows none of these scalings. The other model has no rotary
    # embeddings.
    if architecture in ("Phi3ForCausalLM", "NemotronHForCausalLM"):
        return bool(rope)
    # megatron-core's YaRN does not rotate pairs.
    if architecture.startswith(("Ernie4_5", "Glm4For", "Llama4")):
        return "yarn" in rope.values()
    if architecture == "Cohere2ForCausalLM":
        # vLLM reads two keys that transformers ignores.
        unread = {"use_qk_norm", "rms_norm_eps"}
        return "yarn" in rope.values() or bool(unread & change.keys())
    if architecture == "Gemma3ForCausalLM":  # has a dictionary for each type of layers
        return "yarn" in rope.values() or "rope_parameters" in change
    # vLLM does not read it.
    if architecture in HEADS_FILL_HIDDEN and change == {"head_dim": 16}:
        return True
    if architecture in ("OlmoeForCausalLM", "DeepseekV2ForCausalLM"):
        refused = {"norm_topk_prob", "head_dim"}
        if architecture == "OlmoeForCausalLM":  # vLLM does not read it
            refused.add("rms_norm_eps")
        return change.keys() <= refused or change == {"n_group": 2, "topk_group": 2}
    if architecture == "GptOssForCausalLM":  # vLLM reads neither
        return "rms_norm_eps" in change or bool(
            {"mscale", "mscale_all_dim", "attention_factor"} & rope.keys()
        )
    # Of half of each head.
    half = (
        "Glm4MoeForCausalLM",
        "NemotronForCausalLM",
        "MiniMaxM2ForCausalLM",
        "BailingMoeV2ForCausalLM",
        *WITH_DELTA_NET,
    )
    return architecture in half and "yarn" in rope.values()


@pytest.mark.parametrize("variants", [without_a_key, changed])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(
    launch: Launcher, architecture: str, variants: Callable[[str], list[dict[str, Any]]]
) -> None:
    configs = variants(architecture)
    (found,) = launch.world(
        1, "tests.models.ranks:differences", configs=configs, tokens=TOKENS
    )
    assert len(found) == len(configs)
    assert max(found) < 2e-4, configs[found.index(max(found))]
