"""What a model is, read from config.json as transformers 4 and 5 write it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaverl.errors import ModelError
from megaverl.sharding.model_config import MAMBA_LAYERS, NORM_EPS, WITH_DELTA_NET
from megaverl.sharding.model_spec import (
    ARCHITECTURES,
    DeltaNetSpec,
    LayerKind,
    MambaSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QueryScaling,
    misfits,
    why_not_batch_invariant,
    why_not_in_vllm,
    why_not_quantised,
    why_rows_not_cut,
)
from tests.references import model_class_of
from tests.sharding.specs import LATENT

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


# as openai/gpt-oss-20b's, made smaller
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "rms_norm_eps": 1e-5,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}


def spec(without: str = "", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(
        {key: value for key, value in (CONFIG | changes).items() if key != without}
    )


def test_dimensions_are_carried_over() -> None:
    found = spec()
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (3, 48, 96)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 2, 8)
    assert (found.vocab_size, found.max_positions, found.norm_eps) == (101, 512, 1e-6)


def test_gpt_oss() -> None:
    found = spec(**GPT_OSS)
    assert (found.sliding_window, found.windowed_layers[:3], found.activation) == (
        128,
        (True, False, True),
        "clamped_swiglu",
    )
    assert found.linear_bias and found.qkv_bias and found.attention_sinks
    assert (
        found.rope_theta == 150000.0
        and found.rope_scaling is not None
        and not found.rope_scaling["truncate"]
    )
    assert found.moe == MoESpec(32, 4, 96, normalize_weights=True)


def test_what_may_be_left_out() -> None:
    found = spec(without="num_key_value_heads")  # of Llama: as many as heads
    assert (
        found.num_kv_heads,
        found.tie_embeddings,
        found.rope_theta,
        found.rope_scaling,
    ) == (6, False, 10000.0, None)
    assert spec(num_key_value_heads=None, head_dim=None).head_dim == 8
    assert spec(head_dim=32).head_dim == 32
    assert spec(tie_word_embeddings=True).tie_embeddings


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False),
        ("Qwen2ForCausalLM", True, False),
        ("Qwen3ForCausalLM", False, True),
    ],
)
def test_what_the_architecture_decides(
    architecture: str, qkv_bias: bool, qk_norm: bool
) -> None:
    found = spec(architectures=[architecture])
    assert (found.qkv_bias, found.qk_norm) == (qkv_bias, qk_norm)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),  # transformers 4
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        # Transformers 5.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            5e5,
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3),
        # transformers prefers the old key where a file has both
        (
            {
                "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            1e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
        # YaRN without the length before it was scaled
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            5e5,
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 512,
            },
        ),
    ],
)
def test_rotary_settings_of_either_transformers(
    written: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    found = spec(**written)
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_the_installed_transformers_is_read_back() -> None:
    for architecture in ARCHITECTURES:
        by_layer = architecture == "Gemma3ForCausalLM"
        rope = {"rope_type": "default", "rope_theta": 1e6}
        both = dict.fromkeys(("full_attention", "sliding_attention"), rope)
        norm_eps = NORM_EPS.get(architecture, "rms_norm_eps")
        fixed = architecture in ("GptOssForCausalLM", "OlmoeForCausalLM")
        needed: dict[str, Any] = {"head_dim": 8}
        if architecture in LATENT:
            needed = {"num_experts_per_tok": 8, "first_k_dense_replace": 1}
        elif architecture in WITH_DELTA_NET:
            # By default every fourth of these three layers has attention.
            needed["full_attention_interval"] = 3
        elif architecture in MAMBA_LAYERS:
            # The default has layers with experts.
            needed["layers_block_type"] = ["linear_attention", "mlp"]
        config = model_class_of(architecture).config_class(
            **{
                key: value
                for key, value in CONFIG.items()
                if key not in ("architectures", "rms_norm_eps")
            },
            architectures=[architecture],
            rope_parameters=both if by_layer else rope,
            **{norm_eps: 1e-5 if fixed else 1e-6},
            **needed,
        )
        found = ModelSpec.from_config(config.to_dict())
        assert (found.architecture, found.rope_theta, found.rope_scaling) == (
            architecture,
            1e6 if found.has_rope else 1e4,
            None,
        )
        assert found.norm_eps == getattr(config, norm_eps)
        if found.mla is None:
            assert (found.head_dim, found.num_kv_heads) == (8, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported. `megaverl models` lists those that are",
        ),
        (
            {"architectures": ["DeepseekV32ForCausalLM"]},
            "'DeepseekV32ForCausalLM' is not supported by Megatron: megatron-core's sparse attention (0.16 to 0.19)",
        ),
        ({"architectures": None}, "None is not supported"),
        ({"architectures": []}, "None is not supported"),
        ({"hidden_size": "48"}, "hidden_size is '48'; expected a whole number above 0"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1,000,000,000; expected at most 10,000",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        (
            {"rms_norm_eps": "small"},
            "rms_norm_eps is 'small'; expected a number above 0",
        ),
        (
            GPT_OSS | {"rms_norm_eps": 1e-6},
            "rms_norm_eps is 1e-06; only 1e-05 is computed",
        ),
        (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0 is computed"),
        (
            GPT_OSS | {"layer_types": ["full_attention"] * 3},
            "windows are computed in every other layer",
        ),
        (
            GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
            "Write its weights in bfloat16 once, and name that folder",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is computed"),
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
            "a window of 128 tokens",
        ),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert said in str(caught.value)


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 24,
}
# the keys of deepseek-ai/DeepSeek-V3's config.json, with smaller numbers
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
# the keys of zai-org/GLM-4.5's config.json, with smaller numbers
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "rope_scaling": None,
    "rope_theta": 1000000,
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2, QWEN3 = (
    {"architectures": [f"{name}ForCausalLM"], "num_key_value_heads": None}
    for name in ("Qwen2", "Qwen3")
)
WINDOW = {"use_sliding_window": True, "sliding_window": 128}


def test_experts_of_mixtral() -> None:
    assert spec(**MIXTRAL).moe == MoESpec(8, 2, 96, normalize_weights=True)
    with_loss = spec(
        **MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.02
    ).moe
    assert with_loss is not None and with_loss.aux_loss_coef == 0.02


def test_experts_of_qwen3_moe() -> None:
    found = spec(**QWEN3_MOE, norm_topk_prob=True, router_aux_loss_coef=0.001)
    assert (found.moe, found.qk_norm) == (
        MoESpec(128, 8, 24, normalize_weights=True),
        True,
    )
    # as transformers 5 writes it, and its default of norm_topk_prob
    renamed = {
        key: value for key, value in QWEN3_MOE.items() if key != "num_experts"
    } | {"num_local_experts": 128}
    assert spec(**renamed).moe == MoESpec(128, 8, 24, normalize_weights=False)


def test_experts_and_latent_attention_of_deepseek() -> None:
    found = spec(**DEEPSEEK)
    assert found.mla == MLASpec(20, 16, 12, 4, 10)
    assert (found.head_dim, found.num_kv_heads) == (16, found.num_heads)
    assert found.moe == MoESpec(
        16,
        4,
        24,
        normalize_weights=True,
        num_dense_layers=1,
        shared_ffn_hidden_size=48,
        router="sigmoid",
        router_bias=True,
        num_groups=4,
        groups_per_token=2,
        scaling=2.5,
    )
    without = spec(**DEEPSEEK | {"q_lora_rank": None})
    assert without.mla is not None and without.mla.q_lora_rank is None


def test_glm_as_its_folders_write_it() -> None:
    found = spec(**GLM)
    assert (found.qkv_bias, found.qk_norm, found.head_dim, found.rotary_fraction) == (
        True,
        True,
        16,
        0.5,
    )
    assert found.moe == MoESpec(
        16,
        4,
        24,
        normalize_weights=True,
        num_dense_layers=2,
        shared_ffn_hidden_size=24,
        router="sigmoid",
        router_bias=True,
        scaling=2.5,
    )
    air = spec(**GLM | {"use_qk_norm": False})
    assert not air.qk_norm and air.rotary_fraction == 0.5
    as_transformers_writes = {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}
    }
    assert spec(**GLM | as_transformers_writes).rotary_fraction == 0.25


@pytest.mark.parametrize(
    "written", [{}, {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}]
)
def test_gemma_as_its_folders_write_it(written: dict[str, Any]) -> None:
    found = spec(**GEMMA | written)
    assert (found.activation, found.norm_plus_one, found.embedding_scale) == (
        "gelu_tanh",
        True,
        found.hidden_size**0.5,
    )
    assert (found.tie_embeddings, found.head_dim) == (True, 16)


SEED_OSS, SMOLLM3, ERNIE, QWEN2_MOE, PHI3, GLM4, MINISTRAL = (
    {"architectures": [name]}
    for name in (
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Phi3ForCausalLM",
        "Glm4ForCausalLM",
        "MinistralForCausalLM",
    )
)
ERNIE_MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 16,
    "moe_k": 4,
    "moe_intermediate_size": 12,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
# Like Qwen/Qwen3-Next-80B-A3B-Instruct, made smaller.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1, 0, 1]}
HUNYUAN = {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16}
INTERNLM3 = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
BAILING = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 12,
    "partial_rotary_factor": 0.5,
}
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
ALPHA = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
GRANITE, ARCEE, NEMOTRON, STARCODER2, EXAONE4, GEMMA2, GEMMA3, COHERE2, OLMOE = (
    {"architectures": [f"{name}ForCausalLM"]}
    | ({"rms_norm_eps": None} if name == "Cohere2" else {})
    for name in (
        "Granite",
        "Arcee",
        "Nemotron",
        "Starcoder2",
        "Exaone4",
        "Gemma2",
        "Gemma3",
        "Cohere2",
        "Olmoe",
    )
)
# As nvidia/Nemotron-H-8B-Base-8K's, made smaller.
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M*-",
    "num_hidden_layers": 5,
    "head_dim": 16,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 12,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 32,
    "time_step_limit": [0.0, float("inf")],
}
# As tiiuae/Falcon-H1-0.5B-Base's, made smaller.
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 8,
    "key_multiplier": 0.25,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 96,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 12,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "projectors_bias": False,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.5, 0.75, 0.3125],
    "ssm_out_multiplier": 0.23570226039551587,
}
GRANITE_MOE = {
    **GRANITE,
    "architectures": ["GraniteMoeForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 8,
    "num_local_experts": 8,
}
GLM_LITE = {
    **DEEPSEEK,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_key_value_heads": 6,
}
DEEPSEEK_V2 = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
MINISTRAL |= {"sliding_window": 128, "head_dim": 8}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_what_scales_layers() -> None:
    granite = spec(
        **GRANITE,
        embedding_multiplier=12,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=16,
    )
    assert (granite.embedding_scale, granite.softmax_scale) == (12.0, 0.0078125)
    assert (granite.attention_out_scale, granite.mlp_out_scale) == (0.22, 0.22)
    assert granite.logit_scale == 1 / 16
    # As ibm-granite/granite-3.1-1b-a400m-instruct's.
    routed = spec(
        **GRANITE_MOE,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=6.0,
    )
    assert (routed.embedding_scale, routed.softmax_scale) == (12.0, 0.015625)
    assert (routed.attention_out_scale, routed.mlp_out_scale) == (0.22, 0.22)
    assert routed.logit_scale == 1 / 6
    assert routed.moe == MoESpec(8, 2, 96, normalize_weights=True)
    cohere = spec(**COHERE2, logit_scale=0.25)
    assert (cohere.logit_scale, cohere.norm, cohere.parallel_layers) == (
        0.25,
        "centred",
        True,
    )


def test_gemma_2_as_its_folders_write_it() -> None:
    """As transformers 4 wrote google/gemma-2-2b-it's."""
    written = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 128,
    }
    found = spec(**GEMMA2, **written)
    assert (found.attention_softcap, found.logit_softcap) == (50.0, 30.0)
    assert (found.softmax_scale, found.embedding_scale) == (1 / 16, 48**0.5)
    assert found.windowed_layers == (True, False, True)
    assert found.norms_after and found.norm_plus_one and not found.qk_norm
    without = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    plain = spec(**GEMMA2, **written | without)
    assert plain.attention_softcap is None and plain.logit_softcap is None


def test_ernie_with_experts() -> None:
    found = spec(**ERNIE_MOE)
    assert found.rotary_pairs and found.moe == MoESpec(
        num_experts=16,
        experts_per_token=4,
        ffn_hidden_size=12,
        normalize_weights=True,
        num_dense_layers=1,
        shared_ffn_hidden_size=24,
        router_bias=True,
    )


def test_internlm_3_as_its_folders_write_it() -> None:
    """As internlm/internlm3-8b-instruct's: frequencies change only behind the longest sample of a run."""
    found = spec(
        **INTERNLM3,
        bias=False,
        qkv_bias=False,
        head_dim=16,
        rope_theta=5e7,
        rope_scaling={"factor": 6.0, "rope_type": "dynamic"},
        auto_map={"AutoConfig": "configuration_internlm3.InternLM3Config"},
    )
    assert (found.rope_theta, found.rope_scaling, found.head_dim) == (5e7, None, 16)
    assert not found.qkv_bias and spec(**INTERNLM3, qkv_bias=True).qkv_bias
    assert spec(**INTERNLM3, num_key_value_heads=None).num_kv_heads == found.num_heads


def test_mimo_as_its_folders_write_it() -> None:
    """As XiaomiMiMo/MiMo-7B-RL's, whose layers for multi-token prediction a policy does not use."""
    more = {"use_mrope": False, "attention_bias": True, "use_sliding_window": False}
    more |= {"num_nextn_predict_layers": 1, "max_window_layers": 36}
    found = spec(**MIMO, **more, rope_theta=640000)
    qwen2 = spec(architectures=["Qwen2ForCausalLM"], rope_theta=640000)
    assert found == replace(qwen2, architecture="MiMoForCausalLM") and found.qkv_bias
    window = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}
    assert "no sliding window in some layers" in why_not_in_vllm(spec(**MIMO, **window))


def test_ling_2_as_its_folders_write_it() -> None:
    """As inclusionAI/Ling-mini-2.0's, and with what this config.json leaves out."""
    more = {
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 12,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "rope_theta": 600000,
        "rope_scaling": None,
    }
    found = spec(**BAILING, **more)
    assert found.qk_norm and found.rotary_fraction == 0.5 and found.rope_theta == 6e5
    assert not found.rotary_pairs and not found.qkv_bias and found.head_dim == 16
    assert found.moe == MoESpec(
        num_experts=16,
        experts_per_token=8,
        ffn_hidden_size=12,
        normalize_weights=True,
        num_dense_layers=1,
        shared_ffn_hidden_size=12,
        router="sigmoid",
        router_bias=True,
        num_groups=8,
        groups_per_token=4,
        scaling=2.5,
    )
    left_out = spec(**BAILING)
    scale = replace(found.moe, scaling=1.0)
    assert left_out == replace(found, moe=scale)


def test_qwen3_next() -> None:
    found = spec(**QWEN3_NEXT)
    assert found.delta_net == DeltaNetSpec(4, 8, 16, 12, 4, (True, True, False))
    kinds: tuple[LayerKind, ...] = ("attention", "mlp", "moe", "mamba")
    assert [found.count_layers(kind) for kind in kinds] == [1, 0, 3, 0]
    assert found.output_gate and found.norm_plus_one and found.qk_norm
    assert found.rotary_fraction == 0.25
    assert found.moe == MoESpec(
        num_experts=16,
        experts_per_token=4,
        ffn_hidden_size=12,
        normalize_weights=True,
        shared_ffn_hidden_size=24,
        shared_gate=True,
    )
    [misfit] = misfits(found, tp=6)
    assert misfit.parts[-1] == "4 key heads of gated delta nets"


def test_what_gated_delta_nets_rule_out() -> None:
    found = spec(**QWEN3_NEXT)
    assert not why_rows_not_cut(found, cp=4, tp=1)
    assert not why_rows_not_cut(found, cp=2, tp=2)
    assert why_rows_not_cut(found, cp=4, tp=2) == (
        "it does not divide the 2 key heads of gated delta nets that each of tp=2 ranks has. Sizes that fit: 1, 2"
    )
    assert "in different chunks" in why_not_batch_invariant(found)


def test_llama_4_as_its_folders_write_it() -> None:
    """As the text part of meta-llama/Llama-4-Scout-17B-16E-Instruct, and of Maverick."""
    rope = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}
    more = {
        "intermediate_size": 96,
        "intermediate_size_mlp": 192,
        "num_local_experts": 16,
        "max_position_embeddings": 1 << 20,
        "num_hidden_layers": 4,
        "no_rope_layers": [],
        "rope_scaling": rope,
    }
    scout = spec(**LLAMA4 | more)
    assert scout.layers_without_rope == (False, False, False, True)
    assert scout.attention_chunk == 8192 and scout.qk_l2_norm and not scout.qk_norm
    assert scout.query_scaling == QueryScaling(8192.0, 0.1)
    assert scout.rope_scaling == rope and scout.rotary_pairs
    assert scout.ffn_hidden_size == 192 and scout.routed_layers == (True,) * 4
    assert scout.moe == MoESpec(
        16,
        1,
        96,
        normalize_weights=False,
        shared_ffn_hidden_size=96,
        router="sigmoid",
        scales_input=True,
    )
    change = {"interleave_moe_layer_step": 2, "use_qk_norm": False}
    maverick = spec(**LLAMA4 | more | change | {"rope_scaling": None})
    assert not maverick.qk_l2_norm and maverick.rope_scaling is None
    assert maverick.routed_layers == (False, True, False, True)
    # What no position reaches changes nothing.
    short = spec(
        **LLAMA4 | more | {"max_position_embeddings": 8192, "floor_scale": 8193}
    )
    assert short.attention_chunk is None and short.query_scaling is None
    dense = spec(**LLAMA4 | more | {"interleave_moe_layer_step": 5})
    assert dense.moe is None and dense.routed_layers == (False,) * 4


def test_hunyuan_as_its_folders_write_it() -> None:
    """As tencent/Hunyuan-7B-Instruct's, whose frequencies depend on `alpha` alone."""
    more = {"use_qk_norm": True, "use_cla": False, "rope_theta": 1e4}
    found = spec(**HUNYUAN | more | {"rope_scaling": ALPHA})
    assert found.qk_norm and found.qk_norm_after_rope and found.rope_scaling is None
    assert found.rope_theta == pytest.approx(1e4 * 1000 ** (16 / 14))
    assert spec(**HUNYUAN, rope_theta=1e4).rope_theta == 1e4


def test_nemotron_h_as_its_folders_write_it(tmp_path: Path) -> None:
    found = spec(**NEMOTRON_H)
    assert found.layer_kinds == ("mamba", "mlp", "mamba", "attention", "mlp")
    assert [found.count_layers(kind) for kind in ("mamba", "attention", "mlp")] == [
        2,
        1,
        2,
    ]
    assert found.num_layers == 5 and found.is_recurrent and not found.has_rope
    assert found.mamba == MambaSpec(12, 8, 4, 16, 4, True, 32)
    assert (found.mamba.in_rows, found.mamba.conv_rows) == (332, 224)
    assert (found.activation, found.is_gated, found.norm) == (
        "squared_relu",
        False,
        "rms",
    )
    # Both transformers' and vLLM's class ignore the key.
    assert not spec(**NEMOTRON_H, tie_word_embeddings=True).tie_embeddings
    # transformers writes infinity in this way. The folders have it as Python writes it.
    written = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert spec(**NEMOTRON_H | written) == found
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | NEMOTRON_H))
    source = str(tmp_path / "config.json")
    assert ModelSpec.from_folder(tmp_path) == replace(found, source=source)


def test_nemotron_3_nano_as_its_folders_write_it() -> None:
    """As nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B's, made smaller."""
    routed = {
        "hybrid_override_pattern": "MEM*E",
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 80,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    found = spec(**NEMOTRON_H | routed)
    assert found.layer_kinds == ("mamba", "moe", "mamba", "attention", "moe")
    assert found.routed_layers == (False, True, False, False, True)
    assert (found.count_layers("mlp"), found.count_layers("moe")) == (0, 2)
    assert found.moe == MoESpec(
        16,
        6,
        40,
        normalize_weights=True,
        shared_ffn_hidden_size=80,
        router="sigmoid",
        router_bias=True,
        scaling=2.5,
    )
    # No layer has a plain MLP, whose width would have to be divided.
    assert not misfits(replace(found, ffn_hidden_size=97), tp=2, ep=4)
    assert spec(**NEMOTRON_H).moe is None


def test_falcon_h1_as_its_folders_write_it() -> None:
    found = spec(**FALCON_H1)
    assert found.mamba == MambaSpec(
        num_heads=12,
        head_dim=8,
        num_groups=1,
        state_size=16,
        conv_size=4,
        conv_bias=True,
        chunk_size=128,
        has_norm=False,
        in_scale=1.25,
        out_scale=0.23570226039551587,
        part_scales=(0.3535533905932738, 0.25, 0.5, 0.75, 0.3125),
    )
    assert found.softmax_scale == pytest.approx(1.5**2 * 0.25 / 8**0.5)
    assert (found.attention_out_scale, found.gate_scale, found.mlp_out_scale) == (
        1.5 * 0.9375,
        0.8838834764831844,
        0.5859375,
    )
    assert (found.embedding_scale, found.logit_scale) == (5.656854249492381, 0.0390625)
    assert (found.rope_theta, found.rope_scaling) == (1e11, None)
    assert found.has_mamba_beside_attention and not found.layer_kinds
    kinds: tuple[LayerKind, ...] = ("mamba", "attention", "mlp")
    assert [found.count_layers(kind) for kind in kinds] == [3, 3, 3]
    # The layer's width by itself, and that of its heads.
    wide = {"mamba_d_ssm": None, "mamba_d_head": "auto"}
    assert spec(**FALCON_H1 | wide).mamba == replace(found.mamba, head_dim=8)


def test_how_tensor_parallel_ranks_share_a_falcons_groups() -> None:
    found = spec(**FALCON_H1 | {"mamba_n_heads": 24, "mamba_d_ssm": 192})
    assert not misfits(found, tp=2) and not misfits(found, tp=2, engine=True)
    # Ranks of Megatron divide the 15 rows of B.
    odd = spec(**FALCON_H1 | {"mamba_d_state": 15})
    assert misfits(odd, tp=2)[0].parts == ["1 Mamba group"]
    assert not misfits(odd, tp=2, engine=True)
    no_bias = spec(**FALCON_H1 | {"mamba_conv_bias": False})
    assert not misfits(no_bias, tp=2)
    [misfit] = misfits(no_bias, tp=2, engine=True)
    assert "copies only with a bias of the convolution" in misfit.reason
    # Megatron's ranks share several groups, and vLLM's do not.
    several = spec(
        **FALCON_H1
        | {"mamba_n_groups": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    )
    assert not misfits(several, tp=4)
    assert misfits(several, tp=4, engine=True)[0].parts == ["2 Mamba groups"]
    assert misfits(several, tp=3)[0].parts == [
        "4 attention heads",
        "2 Mamba groups",
        "4 key-value heads",
    ]


def test_what_models_with_mamba_layers_cannot_do() -> None:
    found = spec(**NEMOTRON_H)
    [misfit] = misfits(found, tp=3)
    assert misfit.parts == ["4 Mamba groups", "2 key-value heads"]
    assert misfit.fitting == [1, 2]
    one_group = spec(**NEMOTRON_H | {"n_groups": 1})
    assert not misfits(one_group, tp=2) and not misfits(one_group, tp=2, engine=True)
    assert why_rows_not_cut(found, cp=3, tp=1) == (
        "it does not divide the 12 Mamba heads in 4 groups that each of tp=1 ranks has. Sizes that fit: 1, 2, 4, 12"
    )
    # Two ranks for each group.
    assert not why_rows_not_cut(found, cp=4, tp=1)
    assert not why_rows_not_cut(one_group, cp=3, tp=2)
    assert "in different chunks" in why_not_batch_invariant(found)
    assert "in few bits" in why_not_quantised(found)


def test_gemma_3_as_its_folders_write_it() -> None:
    """As transformers 4 wrote google/gemma-3-1b-it's."""
    found = spec(
        **GEMMA3,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_theta=1000000,
        rope_scaling=None,
        sliding_window=128,
        sliding_window_pattern=2,
    )
    assert (found.rope_theta, found.local_rope_theta) == (1e6, 1e4)
    assert found.local_rope_layers == found.windowed_layers == (True, False, True)
    assert (found.softmax_scale, found.embedding_scale) == (1 / 16, 48**0.5)
    assert found.qk_norm and found.norms_after and found.norm_plus_one
    linear = spec(**GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert linear.rope_scaling == {"rope_type": "linear", "factor": 8.0}


def test_layers_without_rotary_embeddings_beside_windows() -> None:
    """EXAONE 4's and Cohere 2's layers with full attention, also if no sequence is longer than the window."""
    for folder in (EXAONE4, COHERE2):
        found = spec(**folder, sliding_window=512, sliding_window_pattern=2)
        assert found.layers_without_rope == (False, True, False)
        assert found.sliding_window is None
    full = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    assert spec(**EXAONE4, **full).layers_without_rope == ()


def test_seed_oss() -> None:
    """As its folders write it: dropouts that the engine does not have, and biases of q, k and v."""
    found = spec(
        **SEED_OSS
        | {"attention_dropout": 0.1, "residual_dropout": 0.1, "attention_bias": True}
    )
    assert found.qkv_bias
    assert not spec(**SEED_OSS | {"attention_bias": False}).qkv_bias


def test_layers_without_rotary_embeddings() -> None:
    assert spec(**SMOLLM3 | {"num_hidden_layers": 4}).layers_without_rope == (
        False,
        False,
        False,
        True,
    )
    assert spec(**SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0]}).layers_without_rope == (
        True,
        False,
        False,
    )
    assert spec(**SMOLLM3 | {"no_rope_layers": [1, 1, 1]}).layers_without_rope == ()


def test_a_shared_expert_with_a_gate() -> None:
    found = spec(**QWEN2_MOE | {"shared_expert_intermediate_size": 48}).moe
    assert found is not None and found.shared_gate
    assert (found.shared_ffn_hidden_size, found.normalize_weights) == (48, False)


def test_a_window_that_phi3_has_and_vllms_phi3_does_not() -> None:
    assert "no sliding window" in why_not_in_vllm(
        spec(**PHI3 | {"sliding_window": 128})
    )
    assert not why_not_in_vllm(spec(**PHI3 | {"sliding_window": 512}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            MISTRAL | {"sliding_window": 0},
            "sliding_window is 0; expected a whole number above 0, or null",
        ),
        (
            MISTRAL | {"sliding_window": 9, "layer_types": ["full_attention"] * 3},
            "Remove layer_types: every layer",
        ),
        (
            MIXTRAL | {"router_jitter_noise": 0.1},
            "router_jitter_noise is 0.1; only 0.0 is computed",
        ),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers is [0]; only []"),
        (
            QWEN3_MOE | {"num_experts_per_tok": 129},
            "num_experts_per_tok is 129, of 128 experts",
        ),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (
            GRANITE_MOE | {"num_experts_per_tok": 1},
            "The only expert's weight is thus 1",
        ),
        (
            GRANITE_MOE | {"head_dim": 16},
            "head_dim is 16; only 8=hidden_size/num_attention_heads is computed",
        ),
        # With this key vLLM's models also have sinks.
        (
            GRANITE_MOE | {"layer_types": ["full_attention"] * 3},
            "layer_types is ['full_attention', 'full_attention', 'full_attention']; only None is computed",
        ),
        (GRANITE | {"attention_sinks": True}, "attention_sinks is True; only False"),
        (
            DEEPSEEK | {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; only 'sigmoid'",
        ),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave is False"),
        (DEEPSEEK | {"n_group": 3}, "n_group=3 and topk_group=2 do not fit 16 experts"),
        (
            DEEPSEEK | {"first_k_dense_replace": 3},
            "first_k_dense_replace is 3, of 3 layers",
        ),
        (DEEPSEEK | {"q_lora_rank": 0}, "q_lora_rank is 0; expected a whole number"),
        (
            GEMMA | {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; only gelu_pytorch_tanh",
        ),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is of the method 'fp8'",
        ),
        ({"mlp_bias": True}, "mlp_bias is True; only False"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            WINDOW | {"layer_types": ["sliding_attention"] * 3},
            "false and remove layer_types to train with full",
        ),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 3}, "there is no window"),
        (
            QWEN3 | {"layer_types": ["chunked_attention"] * 3},
            "layer_types names chunked_attention",
        ),
        (
            GPT_OSS | {"sliding_window": None},
            "sliding_window is None; expected a whole number",
        ),
        (
            MIXTRAL | {"num_experts_per_tok": 1},
            "The only expert's weight is thus 1",
        ),
        (
            QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "The only expert's weight is thus 1",
        ),
        (
            GPT_OSS | {"num_experts_per_tok": 1},
            "The only expert's weight is thus 1",
        ),
        (
            DEEPSEEK | {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            "norm_topk_prob=True and num_experts_p",
        ),
        (
            DEEPSEEK | {"norm_topk_prob": False},
            "norm_topk_prob=False and num_experts_per_tok=4 cannot be computed",
        ),
        (
            DEEPSEEK | {"topk_group": 1},
            "num_experts_per_tok=4 and topk_group=1 cannot be computed",
        ),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias is True; only False"),
        (DEEPSEEK | {"rope_interleave": None}, "rope_interleave is None"),
        (
            DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.7}},
            "by 1.139, vLLM (0.32) by 1.097",
        ),
        (
            DEEPSEEK | {"rope_scaling": YARN | {"mscale_all_dim": 0.7}},
            "{'mscale_all_dim': 0.7} in the rotary",
        ),
        (
            DEEPSEEK | {"rope_scaling": YARN | {"attention_factor": 1.5}},
            "by 1.5, vLLM (0.32) by 1.139",
        ),
        (DEEPSEEK | {"rope_scaling": YARN | {"truncate": False}}, "truncate is False"),
        (
            DEEPSEEK | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "only default, yarn are computed",
        ),
        (
            GPT_OSS | {"rope_scaling": YARN | {"attention_factor": 1.5}},
            "vLLM (0.32) by 1.139",
        ),
        (GLM | {"rope_scaling": YARN}, "yarn with a partial_rotary_factor of 0.5"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "high_freq_factor is below low_freq_factor",
        ),
        (LLAMA4 | {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1"),
        (LLAMA4 | {"moe_layers": [0]}, "vLLM (0.32) reads interleave_moe_layer_step=1"),
        (
            LLAMA4 | {"interleave_moe_layer_step": -1, "moe_layers": []},
            "interleave_moe_layer_step is -1; expected a whole number above 0",
        ),
        (
            LLAMA4 | {"attention_chunk_size": None},
            "set it to max_position_embeddings=512 for full attention",
        ),
        (LLAMA4 | {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        (
            LLAMA4 | {"layer_types": ["chunked_attention"] * 3},
            "vLLM (0.32) does not read it",
        ),
        (LLAMA4 | {"no_rope_layers": [1, 0, 2]}, "for each of 3 layers"),
        (LLAMA4 | {"attention_bias": True}, "attention_bias is True; only False"),
        (LLAMA4 | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (LLAMA4 | {"floor_scale": 0}, "floor_scale is 0; expected a number above 0"),
        (LLAMA4 | {"rope_scaling": YARN}, "only default, linear, llama3 are computed"),
        (
            {"rope_scaling": {"type": "yarn"}},
            'transformers cannot read it: KeyError: "Missing required keys',
        ),
        (
            {"rope_scaling": YARN | {"factor": None}},
            "factor is None in the rotary embedding's",
        ),
        (
            {"rope_scaling": YARN | {"factor": 1.0, "attention_factor": 1.5}},
            "computed with factors above 1",
        ),
        (
            {"rope_scaling": "yarn"},
            "rope_scaling is 'yarn'; expected a JSON object or null",
        ),
        ({"rope_theta": None}, "rope_theta is None; expected a number above 0"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        # vLLM reads it.
        (MISTRAL | {"attention_bias": True}, "attention_bias is True; only False"),
        (
            {"attention_dropout": 0.1},
            "To train with dropout, set megatron.attention_dropout",
        ),
        ({"logit_scale": 0.5}, "logit_scale is 0.5; only 1.0"),
        ({"is_causal": False}, "is_causal is False; only True"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4},
            "num_key_value_heads=4 does not divide num_a",
        ),
        (
            SEED_OSS | {"attention_out_bias": True},
            "attention_out_bias is True; only False",
        ),
        (SEED_OSS | {"residual_dropout": 0.2}, "residual_dropout is 0.2; only 0.0"),
        (SEED_OSS | {"mlp_bias": True}, "mlp_bias is True; only False"),
        (
            SMOLLM3 | {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 3},
            "is [1, 0]; expected a 1",
        ),
        (
            SMOLLM3 | {"no_rope_layers": [1, 0, 2]},
            "no_rope_layers is [1, 0, 2]; expected a 1",
        ),
        (
            SMOLLM3 | WINDOW | {"num_hidden_layers": 4},
            "SmolLM3ForCausalLM is computed with full attention only",
        ),
        (SMOLLM3 | {"attention_bias": True}, "attention_bias is True; only False"),
        (
            NEMOTRON_H | {"hybrid_override_pattern": "ME*-M", "moe_latent_size": 8},
            "moe_latent_size is 8; only None is computed",
        ),
        (
            NEMOTRON_H | {"hybrid_override_pattern": "ME*-M", "n_shared_experts": 2},
            "n_shared_experts is 2; only 1 is computed",
        ),
        (
            NEMOTRON_H
            | {
                "hybrid_override_pattern": "ME*-M",
                "moe_shared_expert_intermediate_size": 0,
            },
            "moe_shared_expert_intermediate_size is 0; expected a whole number above 0",
        ),
        (
            NEMOTRON_H
            | {"hybrid_override_pattern": "ME*-M", "routed_scaling_factor": 0.0},
            "routed_scaling_factor is 0.0; expected a number above 0",
        ),
        (
            NEMOTRON_H | {"hybrid_override_pattern": "ME*-M", "norm_topk_prob": False},
            "megatron-core's router divides sigmoid scores by their sum",
        ),
        (
            NEMOTRON_H | {"hybrid_override_pattern": "ME*-M", "num_experts_per_tok": 9},
            "num_experts_per_tok is 9, of 8 experts",
        ),
        (NEMOTRON_H | {"n_groups": 5}, "n_groups=5 does not divide mamba_num_heads=12"),
        (NEMOTRON_H | {"conv_kernel": 0}, "conv_kernel is 0; expected a whole number"),
        (
            NEMOTRON_H | {"time_step_limit": [0.01, 1.0]},
            "only [0.0, Infinity] is computed",
        ),
        (NEMOTRON_H | {"use_bias": True}, "use_bias is True; only False"),
        (NEMOTRON_H | {"sliding_window": 8}, "sliding_window is 8; only None"),
        (NEMOTRON_H | {"mlp_hidden_act": "silu"}, "only relu2 is computed"),
        (FALCON_H1 | {"mamba_proj_bias": True}, "mamba_proj_bias is True; only False"),
        (FALCON_H1 | {"projectors_bias": True}, "projectors_bias is True; only False"),
        (FALCON_H1 | {"attention_bias": True}, "attention_bias is True; only False"),
        (FALCON_H1 | {"mlp_bias": True}, "mlp_bias is True; only False"),
        (FALCON_H1 | {"sliding_window": 8}, "sliding_window is 8; only None"),
        (FALCON_H1 | {"hidden_act": "swish"}, "only silu is computed"),
        (
            FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "vLLM (0.32) always gates before the norm",
        ),
        (
            FALCON_H1 | {"time_step_limit": [0.0, 0.1]},
            "time_step_limit is [0.0, 0.1]; only [0.0, Infinity] is computed",
        ),
        (FALCON_H1 | {"time_step_limit": None}, "only [0.0, Infinity] is computed"),
        (FALCON_H1 | {"attn_rotary_emb": 4}, "only 8, a whole head, is computed"),
        (FALCON_H1 | {"attn_rotary_emb": None}, "only 8, a whole head, is computed"),
        (FALCON_H1 | {"head_dim": None}, "Remove the key, or set it to 8."),
        (
            FALCON_H1 | {"mamba_n_groups": 5},
            "mamba_n_groups=5 does not divide mamba_n_heads=12",
        ),
        (FALCON_H1 | {"mamba_n_heads": 0}, "mamba_n_heads is 0; expected a whole"),
        (FALCON_H1 | {"mamba_d_head": None}, 'above 0, or "auto"'),
        (FALCON_H1 | {"mamba_d_head": 7}, "do not match the model intermediate_size"),
        (FALCON_H1 | {"mlp_multipliers": [1.0]}, "expected 2 numbers above 0"),
        (
            FALCON_H1 | {"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.0]},
            "expected 5 numbers above 0",
        ),
        (FALCON_H1 | {"key_multiplier": 0}, "key_multiplier is 0; expected a number"),
        (FALCON_H1 | {"layer_types": ["hybrid"] * 3}, "transformers cannot read it"),
        (ERNIE | {"use_bias": True}, "use_bias is True; only False"),
        (
            ERNIE | {"rope_scaling": YARN},
            "only default, linear, llama3 are computed for Ernie4_5ForCausalLM",
        ),
        (
            MINISTRAL | {"head_dim": None},
            "head_dim is None; transformers needs it for Ministral",
        ),
        (
            MINISTRAL | {"sliding_window": None},
            "Set sliding_window to max_position_embeddings=512 for full attention",
        ),
        (
            QWEN2_MOE | WINDOW,
            "Qwen2MoeForCausalLM is computed with full attention only",
        ),
        (QWEN2_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers is [0]; only []"),
        (
            QWEN2_MOE | {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0; expected a whole",
        ),
        (
            QWEN2_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "The only expert's weight is thus 1",
        ),
        (
            GLM4 | {"rope_scaling": YARN},
            "only default, linear, llama3 are computed for Glm4ForCausalLM",
        ),
        (PHI3 | {"resid_pdrop": 0.1}, "resid_pdrop is 0.1; only 0.0"),
        (PHI3 | {"rope_scaling": LONGROPE}, "rope_type is 'longrope'"),
        (
            OLMOE | {"clip_qkv": 8.0, "rms_norm_eps": 1e-5},
            "clip_qkv is 8.0; only None",
        ),
        (OLMOE | {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
        (
            OLMOE | {"rms_norm_eps": 1e-5, "head_dim": 16},
            "head_dim is 16; only 8=hidden_size/num_attention_heads",
        ),
        (
            DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"},
            "topk_method is 'group_limited_greedy'; only 'greedy'",
        ),
        (
            DEEPSEEK_V2 | {"num_experts_per_tok": None},
            "num_experts_per_tok is None; expected a whole number",
        ),
        (
            DEEPSEEK_V2 | {"first_k_dense_replace": 3},
            "first_k_dense_replace is 3, of 3 layers",
        ),
        (
            GLM_LITE | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "only dense layers followed by sparse ones are computed, 3 in all",
        ),
        (
            GLM_LITE | {"mlp_layer_types": ["dense"] * 3},
            "only dense layers followed by sparse ones",
        ),
        (
            GLM_LITE | {"first_k_dense_replace": 2},
            "first_k_dense_replace is 2, and mlp_layer_types has 1 dense layers",
        ),
        (
            MINIMAX | {"num_experts_per_tok": 1},
            "num_experts_per_tok=1 cannot be computed: megatron-core's router",
        ),
        (MINIMAX | {"scoring_func": "softmax"}, "only 'sigmoid' is computed"),
        (
            COHERE2 | {"sliding_window": None},
            "transformers computes Cohere2ForCausalLM only with a window",
        ),
        (COHERE2 | {"use_qk_norm": True}, "use_qk_norm is True; only False"),
        (COHERE2 | {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; only None"),
        (
            COHERE2 | {"rope_scaling": YARN},
            "only default, linear, llama3 are computed for Cohere2ForCausalLM",
        ),
        (COHERE2 | {"logit_scale": 0.0}, "logit_scale is 0.0; expected a number above"),
        (
            GEMMA3 | {"rope_scaling": YARN},
            "only default, linear, llama3 are computed for Gemma3ForCausalLM",
        ),
        (
            GEMMA3
            | {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                    "full_attention": {"rope_type": "default"},
                }
            },
            "only the rope_type default with a rope_theta above 0 is computed",
        ),
        (
            GEMMA2 | {"final_logit_softcapping": 0.0},
            "final_logit_softcapping is 0.0; expected a number above 0, or null",
        ),
        (
            GEMMA3 | {"hidden_activation": "silu"},
            "hidden_activation is 'silu'; only gelu_pytorch_tanh",
        ),
        (
            GEMMA3 | {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0; only None",
        ),
        (
            GEMMA3 | {"layer_types": ["full_attention"]},
            "must be equal to the number of `layer_types` (1)",
        ),
        (
            EXAONE4 | {"layer_types": ["full_attention"] * 3},
            "Set sliding_window to null",
        ),
        (
            NEMOTRON | {"num_key_value_heads": None},
            "num_key_value_heads is None; transformers needs it",
        ),
        (NEMOTRON | {"norm_eps": 0}, "norm_eps is 0; expected a number above 0"),
        (
            GRANITE | {"logits_scaling": 0},
            "logits_scaling is 0; expected a number above 0",
        ),
        (ERNIE_MOE | {"moe_k": 17}, "moe_k is 17, of 16 experts"),
        (ERNIE_MOE | {"moe_k": 1}, "The only expert's weight is thus 1"),
        (
            ERNIE_MOE | {"moe_k": None},
            "moe_k is None; expected a whole number",
        ),
        (
            ERNIE_MOE | {"moe_layer_interval": 2},
            "moe_layer_interval is 2; only 1",
        ),
        (
            ERNIE_MOE | {"moe_layer_start_index": 3},
            "moe_layer_start_index is 3, of 3 layers",
        ),
        (
            ERNIE_MOE | {"moe_layer_end_index": 1},
            "only dense layers followed by layers with experts are computed, 3 in all",
        ),
        (
            ERNIE_MOE | {"moe_num_shared_experts": -1},
            "moe_num_shared_experts is -1; expected a whole number from 0",
        ),
        (ERNIE_MOE | {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; only 1e-12"),
        (
            QWEN3_NEXT | {"linear_num_value_heads": 6},
            "linear_num_key_heads=4 does not divide linear_num_value_heads=6",
        ),
        (
            QWEN3_NEXT | {"linear_key_head_dim": 0},
            "linear_key_head_dim is 0; expected a whole number above 0",
        ),
        (
            QWEN3_NEXT | {"layer_types": ["linear_attention"] * 3},
            "transformers needs a layer with full_attention",
        ),
        (
            QWEN3_NEXT
            | {
                "layer_types": [
                    "linear_attention",
                    "sliding_attention",
                    "full_attention",
                ]
            },
            "expected linear_attention or full_attention for each of 3 layers",
        ),
        (QWEN3_NEXT | {"mlp_only_layers": [1]}, "mlp_only_layers is [1]; only []"),
        (
            QWEN3_NEXT | {"attn_output_gate": False},
            "attn_output_gate is False; only True",
        ),
        (
            QWEN3_NEXT | {"output_gate_type": "sigmoid"},
            "output_gate_type is 'sigmoid'; only 'silu'",
        ),
        (QWEN3_NEXT | {"layer_scale": True}, "layer_scale is True; only False"),
        (
            HUNYUAN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "alpha is None in the rotary embedding's",
        ),
        (
            HUNYUAN | {"rope_scaling": ALPHA, "head_dim": 2},
            "head_dim is 2; alpha in",
        ),
        (HUNYUAN | {"head_dim": None}, "transformers needs it for HunYuanDenseV1"),
        (HUNYUAN | {"use_qk_norm": False}, "use_qk_norm is False; only True"),
        (HUNYUAN | {"use_cla": True}, "use_cla is True; only False"),
        (BAILING | {"use_bias": True}, "use_bias is True; only False is computed"),
        (BAILING | {"use_qkv_bias": True}, "use_qkv_bias is True; only False"),
        (BAILING | {"use_rmsnorm": False}, "use_rmsnorm is False; only True"),
        (BAILING | {"norm_head": True}, "norm_head is True; only False"),
        (BAILING | {"score_function": "softmax"}, "only 'sigmoid' is computed"),
        (
            BAILING | {"moe_router_enable_expert_bias": False},
            "moe_router_enable_expert_bias is False; only True",
        ),
        (BAILING | {"embedding_dropout": 0.1}, "embedding_dropout is 0.1; only 0.0"),
        (
            BAILING | {"moe_shared_expert_intermediate_size": 5},
            "moe_shared_expert_intermediate_size is 5; only 12 is computed",
        ),
        (BAILING | {"rotary_dim": 16}, "rotary_dim is 16; only 8 is computed"),
        (
            BAILING | {"num_shared_experts": 0},
            "num_shared_experts is 0; expected a whole number above 0",
        ),
        (
            BAILING | {"n_group": None},
            "n_group is None; expected a whole number above 0",
        ),
        (
            BAILING | {"num_experts_per_tok": 4},
            "num_experts_per_tok=4 and topk_group=4 (the model's default) cannot be computed",
        ),
        (
            BAILING | {"norm_topk_prob": False},
            "norm_topk_prob=False and num_experts_per_tok=8 cannot be computed",
        ),
        (
            BAILING | {"rope_scaling": YARN},
            "rope_type is yarn with a partial_rotary_factor of 0.5",
        ),
        (MIMO | {"use_mrope": True}, "use_mrope is True; only False is computed"),
        (MIMO | {"head_dim": 4}, "head_dim is 4; only 8=hidden_size"),
        (
            QWEN2 | {"num_key_value_heads": 2, "head_dim": 4},
            "head_dim is 4; only 8=hidden_size",
        ),
        (INTERNLM3 | {"bias": True}, "bias is True; only False is computed"),
        (
            INTERNLM3 | {"attention_bias": True},
            "attention_bias is True; only False is computed",
        ),
        (
            INTERNLM3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 0}},
            "factor is 0 in the rotary embedding's",
        ),
        (
            INTERNLM3 | {"rope_scaling": ALPHA},
            "has a factor and an alpha; vLLM (0.32) reads alpha alone",
        ),
        ({"rope_scaling": ALPHA}, "rope_type is 'dynamic'"),
        (ARCEE | {"hidden_act": "silu"}, "hidden_act is 'silu'; only relu2"),
        (
            STARCODER2 | {"residual_dropout": 0.2},
            "residual_dropout is 0.2; only 0.0",
        ),
        (
            {"model_type": "mistral"},
            "transformers would build the former, vLLM the latter",
        ),
        (
            {"tie_word_embeddings": "yes"},
            "transformers cannot read it: Validation error for field",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert said in str(caught.value)


def test_top_1_that_is_not_divided_is_computed() -> None:
    found = spec(
        **DEEPSEEK
        | {
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        }
    )
    assert found.moe is not None and not found.moe.normalize_weights


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 512},  # as long as the longest sequence
        QWEN3_MOE
        | {"sliding_window": 128, "use_sliding_window": False, "mlp_only_layers": []},
        QWEN3_MOE | {"sliding_window": 128},  # Qwen's windows wait to be switched on
        {
            "quantization_config": None,
            "mlp_bias": False,
            "attn_logit_softcapping": None,
        },
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
)
def test_what_is_equal_to_what_is_computed_is_accepted(changes: dict[str, Any]) -> None:
    assert spec(**changes).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        (MISTRAL | {"sliding_window": 128}, 128, ()),
        # transformers' default.
        (MISTRAL | {"max_position_embeddings": 8192}, 4096, ()),
        (MIXTRAL | {"sliding_window": 511}, 511, ()),
        (QWEN2 | WINDOW | {"max_window_layers": 2}, 128, (False, False, True)),
        (QWEN2 | WINDOW | {"max_window_layers": 0}, 128, ()),
        (QWEN2 | WINDOW | {"max_window_layers": 3}, None, ()),
        (
            QWEN2
            | WINDOW
            | {"layer_types": ["sliding_attention", *["full_attention"] * 2]},
            128,
            (True, False, False),
        ),
        (QWEN3 | WINDOW | {"max_window_layers": 1}, 128, (False, True, True)),
        (QWEN3_MOE | WINDOW, 128, ()),  # in all layers, whatever max_window_layers says
    ],
)
def test_windows_are_read(
    changes: dict[str, Any], window: int | None, layers: tuple[bool, ...]
) -> None:
    found = spec(**changes)
    assert (found.sliding_window, found.windowed_layers) == (window, layers)
    assert bool(why_not_in_vllm(found)) == bool(layers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (COHERE2 | {"sliding_window": 128}, "attends to 129 tokens"),
        (STARCODER2 | {"sliding_window": 128}, "has no sliding window"),
        (EXAONE4 | {"sliding_window": 128}, ""),
        (GEMMA3 | {"sliding_window": 128}, ""),
    ],
)
def test_windows_that_vllm_computes_otherwise(
    changes: dict[str, Any], said: str
) -> None:
    why = why_not_in_vllm(spec(**changes))
    assert said in why and bool(why) == bool(said)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        spec(
            without="num_experts",
            **QWEN3_MOE | {"hidden_size": 0, "moe_intermediate_size": "24"},
        )
    assert [line.split()[1] for line in str(caught.value).splitlines()] == [
        "hidden_size",
        "moe_intermediate_size",
    ]
    with pytest.raises(ModelError) as caught:
        spec(**MIXTRAL, mlp_bias=True, sliding_window=0, hidden_act="relu")
    assert len(str(caught.value).splitlines()) == 3


def test_a_sliding_window_that_is_not_used_is_none() -> None:
    """As Qwen2.5's folders write it."""
    assert (
        spec(
            use_sliding_window=False, sliding_window=128, max_window_layers=2
        ).num_layers
        == 3
    )
    assert (
        spec(
            use_sliding_window=True, sliding_window=128, max_window_layers=3
        ).num_layers
        == 3
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not found. `model.path` must name"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "expected a JSON object"),
    ],
)
def test_a_folder_that_is_none(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_folder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert said in str(caught.value)


def test_a_folder_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = (
        "import sys; from megaverl.sharding.model_spec import ModelSpec; "
        "print(ModelSpec.from_folder(sys.argv[1]).num_heads, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "6 False\n", done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {
                "architectures": ["QWenLMHeadModel"],
                "model_type": "qwen",
                "auto_map": {"AutoConfig": "a.B"},
            },
            "if that code",
        ),
        (
            {"architectures": ["QWenLMHeadModel"], "model_type": "qwen"},
            "actor.engine=fsdp does not train it either",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            "builds gpt2 models: set actor.engine=fsdp.",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "does not train it either",
        ),
    ],
)
def test_a_refusal_says_whether_fsdp2_trains_the_model(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as refused:
        ModelSpec.from_config(config)
    assert said in str(refused.value)


# The keys of Qwen/Qwen2-VL-2B-Instruct's config.json, with smaller numbers: the decoder's
# beside the tower's.
QWEN2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_act": "silu",
    "hidden_size": 64,
    "image_token_id": 95,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "video_token_id": 96,
    "vision_config": {
        "depth": 3,
        "embed_dim": 48,
        "hidden_size": 64,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 94,
    "vision_start_token_id": 93,
    "vocab_size": 100,
}


def test_qwen2_vl_as_its_first_folders_write_it() -> None:
    found = ModelSpec.from_config(QWEN2_VL)
    assert (found.num_layers, found.head_dim, found.tie_embeddings) == (2, 16, True)
    assert (found.rope_theta, found.rope_scaling, found.qkv_bias) == (1e6, None, True)
    assert found.rope_axes == (0, 0, 1, 1, 1, 2, 2, 2)
    vision = found.vision
    assert vision is not None
    assert (vision.image_token, vision.depth, vision.width) == (95, 3, 48)
    assert (vision.ffn, vision.patch, vision.merge) == (192, (3, 2, 14, 14), 2)
    assert hash(found) == hash(ModelSpec.from_config(QWEN2_VL))


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"type": "mrope", "mrope_section": [2, 3]}, "expected three whole numbers"),
        ({"type": "mrope", "mrope_section": [2, 3, 4]}, "with the sum 8, half of"),
        (
            {
                "rope_type": "yarn",
                "mrope_section": [2, 3, 3],
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "only default are computed for Qwen2VLForConditionalGeneration",
        ),
        (
            {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
            "as if it were false",
        ),
    ],
)
def test_positions_of_images_that_are_not_computed(
    rope: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match="mrope|rope_type") as refused:
        ModelSpec.from_config(QWEN2_VL | {"rope_scaling": rope})
    assert said in str(refused.value)


# As published folders of Qwen3.5 write it, with smaller sizes.
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 95,
    "text_config": {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 100,
    },
    "tie_word_embeddings": True,
    "video_token_id": 96,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "model_type": "qwen3_5",
        "num_heads": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 94,
    "vision_start_token_id": 93,
}


def test_qwen3_5_as_its_folders_write_it() -> None:
    found = ModelSpec.from_config(QWEN3_5)
    assert (found.num_layers, found.head_dim, found.tie_embeddings) == (4, 32, True)
    assert (found.rope_theta, found.rotary_fraction) == (1e7, 0.25)
    assert found.rope_axes == (0, 1, 2, 0)
    assert (found.qk_norm, found.norm_plus_one, found.output_gate) == (True,) * 3
    assert found.delta_net is not None and found.delta_net.layers == (True,) * 3 + (
        False,
    )
    vision = found.vision
    assert vision is not None
    assert (vision.width, vision.ffn, vision.deepstack) == (48, 80, 0)
    assert (vision.patch, vision.num_positions) == ((3, 2, 16, 16), 64)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        (
            "vision_config",
            {"deepstack_visual_indexes": [1]},
            r"deepstack_visual_indexes is \[1\]; transformers ignores it",
        ),
        ("vision_config", {"out_hidden_size": 80}, "whose hidden_size is 64"),
        ("vision_config", {"num_heads": 5}, "num_heads=5 does not divide hidden_size"),
        ("vision_config", {"patch_size": [16, 16]}, "patch_size is .*whole number"),
        (
            "vision_config",
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e6}},
            "rope_theta is 1000000.0; vLLM",
        ),
        ("text_config", {"rope_parameters": {}}, "mrope_section is None"),
        ("text_config", {"attn_output_gate": False}, "attn_output_gate is False"),
        (
            "text_config",
            {"layer_types": ["linear_attention"] * 4},
            "transformers needs a layer with full_attention",
        ),
        ("", {"rms_norm_eps": 1e-5}, "outside of text_config"),
    ],
)
def test_what_qwen3_5_with_images_does_not_compute(
    part: str, change: dict[str, Any], said: str
) -> None:
    config = copy.deepcopy(QWEN3_5)
    (config[part] if part else config).update(change)
    with pytest.raises(ModelError, match=said):
        ModelSpec.from_config(config)


def test_a_quarter_of_a_head_is_divided_among_axes() -> None:
    config = copy.deepcopy(QWEN3_5)
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    with pytest.raises(ModelError, match="sum 4, half of the rotated dimensions"):
        ModelSpec.from_config(config)


def test_another_tower_is_refused_in_words() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {},
    }
    with pytest.raises(ModelError, match="joins transformers' vision tower") as refused:
        ModelSpec.from_config(config)
    assert "set actor.engine=fsdp" in str(refused.value)


def test_images_are_not_cut_over_context_parallel_ranks() -> None:
    found = ModelSpec.from_config(QWEN2_VL)
    assert "Use cp=1" in why_rows_not_cut(found, cp=2, tp=1)
    assert not why_rows_not_cut(found, cp=1, tp=1)
