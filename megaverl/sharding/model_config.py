"""What a Hugging Face `config.json` must say, and what it may not ask for, to be a model that Megatron-core builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

AGAIN = "Copy the file again from its source."

WHOLE_NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL_NUMBERS = ("num_key_value_heads", "head_dim")
# The number of experts, as each model calls it; transformers 5 writes the second for Qwen3-MoE too.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MORE_WHOLE_NUMBERS: dict[str, tuple[str, ...]] = {
    "MixtralForCausalLM": ("num_experts_per_tok",),
    "Qwen3MoeForCausalLM": ("num_experts_per_tok", "moe_intermediate_size"),
    "DeepseekV3ForCausalLM": (
        "num_experts_per_tok",
        "moe_intermediate_size",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
    "Glm4MoeForCausalLM": ("num_experts_per_tok", "moe_intermediate_size"),
    "GptOssForCausalLM": ("num_experts_per_tok",),
}
MORE_OPTIONAL_NUMBERS = {
    "DeepseekV3ForCausalLM": ("q_lora_rank", "n_group", "topk_group", "n_shared_experts"),
    "Glm4MoeForCausalLM": ("n_group", "topk_group", "n_shared_experts"),
}
# Whose routers score by a sigmoid, with a bias and shared experts, behind first layers that have none.
SIGMOID_ROUTED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
# Whose experts are as wide as `intermediate_size` says; they have no other MLP.
WIDTH_OF_EXPERTS = ("MixtralForCausalLM", "GptOssForCausalLM")
# Rotary embeddings turn a fraction of each head, by default so much.
PARTLY_ROTARY = {"Glm4MoeForCausalLM": 0.5}

# Where a config.json may ask for something else: the key, and the only value (besides none) that is computed.
ONLY: dict[str, tuple[tuple[str, Any], ...]] = {
    "": (
        ("quantization_config", None),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("mlp_bias", False),
        ("use_bidirectional_attention", False),
    ),
    "MixtralForCausalLM": (("router_jitter_noise", 0.0),),
    "Qwen3MoeForCausalLM": (
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
        ("shared_expert_intermediate_size", 0),
    ),
    "DeepseekV3ForCausalLM": (
        ("moe_layer_freq", 1),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("rope_interleave", True),
    ),
    # what vLLM computes, whatever is set (0.32, `gpt_oss.py`)
    "GptOssForCausalLM": (
        ("attention_bias", True),
        ("rms_norm_eps", 1e-5),
        ("swiglu_alpha", 1.702),
        ("swiglu_limit", 7.0),
    ),
}
# These apply a window wherever `sliding_window` is a number; Qwen's wait for `use_sliding_window`.
ALWAYS_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM")


def wrong_numbers(architecture: str, config: dict[str, Any]) -> Iterator[str]:
    """What is missing in this config.json, or is no number that a model can have."""
    needed = [*WHOLE_NUMBERS, *MORE_WHOLE_NUMBERS.get(architecture, ())]
    if architecture in MORE_WHOLE_NUMBERS:
        needed.append(next((key for key in NUM_EXPERTS if key in config), NUM_EXPERTS[0]))
    optional = (*OPTIONAL_NUMBERS, *MORE_OPTIONAL_NUMBERS.get(architecture, ()))
    for key in (*needed, "rms_norm_eps"):
        if key not in config:
            yield f"the key {key!r} is missing. {AGAIN}"
    for key in (*needed, *(key for key in optional if config.get(key) is not None)):
        if key in config and (type(config[key]) is not int or config[key] < 1):
            yield f"{key} is {config[key]!r}; expected a whole number above 0. {AGAIN}"
    eps = config.get("rms_norm_eps", 1.0)
    if type(eps) not in (int, float) or not eps > 0:
        yield f"rms_norm_eps is {eps!r}; expected a number above 0. {AGAIN}"


def computed_otherwise(architecture: str, config: dict[str, Any]) -> Iterator[str]:
    """What this config.json asks for and would not be given."""
    rope = config.get("rope_parameters") or {}
    whole_heads = () if architecture in PARTLY_ROTARY else (("partial_rotary_factor", 1.0),)
    for key, value in (*ONLY[""], *whole_heads, *ONLY.get(architecture, ())):
        found = config.get(key, rope.get(key))
        if found is not None and found != value:
            yield f"{key} is {found!r}; only {value!r} is computed. {instead_of(key, found)}"
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if architecture == "GemmaForCausalLM":
        # as transformers and vLLM read it: Gemma's first folders say gelu in hidden_act, and mean its tanh form
        legacy = "hidden_activation" not in config and activation == "gelu"
        if activation != "gelu_pytorch_tanh" and not legacy:
            yield f"hidden_act is {activation!r}; only gelu_pytorch_tanh is computed. Use another model."
    elif activation != "silu":
        yield f"hidden_act is {activation!r}; only silu is computed. Use another model."
    yield from _windows(architecture, config)
    if architecture in MORE_WHOLE_NUMBERS:
        yield from _impossible_experts(config)


def instead_of(key: str, found: Any) -> str:
    """What to do about a value that is not computed."""
    if key != "quantization_config":
        return "Use another model."
    if not isinstance(found, dict) or found.get("quant_method") != "mxfp4":
        return "Use a folder of the model that is not quantised."
    return (
        "Write its weights in bfloat16 once, and name that folder: transformers' from_pretrained(PATH, dtype='bfloat16'"
        ", quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER, save_original_format=False), and "
        "the tokenizer's files."
    )


def _windows(architecture: str, config: dict[str, Any]) -> Iterator[str]:
    """A sliding window that some token of the longest sequence would feel."""
    window = config.get("sliding_window")
    if architecture == "GptOssForCausalLM":
        kinds = config.get("layer_types") or []
        if any(kind != ("full_attention" if layer % 2 else "sliding_attention") for layer, kind in enumerate(kinds)):
            yield f"layer_types is {kinds}; windows are computed in every other layer, the first first. {AGAIN}"
        return
    if window is None or window >= config["max_position_embeddings"]:
        return
    everywhere = architecture in ALWAYS_WINDOWED
    used = config.get("use_sliding_window", everywhere)
    if used and (everywhere or config["num_hidden_layers"] > config.get("max_window_layers", 28)):
        yield (
            f"use_sliding_window with a window of {window} tokens; only full attention is computed. Use another "
            f"model, or set {'sliding_window to null' if everywhere else 'use_sliding_window to false'} and train "
            "with full attention."
        )


def _impossible_experts(config: dict[str, Any]) -> Iterator[str]:
    num_experts = next(config[key] for key in NUM_EXPERTS if key in config)
    if config["num_experts_per_tok"] > num_experts:
        yield f"num_experts_per_tok is {config['num_experts_per_tok']}, of {num_experts} experts. {AGAIN}"
    groups = config.get("n_group") or 1
    if num_experts % groups or (config.get("topk_group") or 1) > groups:
        yield f"n_group is {groups} and topk_group {config.get('topk_group')}, of {num_experts} experts. {AGAIN}"
    dense = config.get("first_k_dense_replace") or 0
    if type(dense) is not int or not 0 <= dense < config["num_hidden_layers"]:
        yield f"first_k_dense_replace is {dense!r}, of {config['num_hidden_layers']} layers. {AGAIN}"
