"""Checks of a Hugging Face `config.json` before Megatron-core builds its model.

A configuration is checked twice. `wrong_types` looks at the file as it is written.
`not_computed` looks at the keys as transformers reads them, with the defaults of the
model's class (`transformers_config.py`). Anything that would give other logits than
transformers, or other logits in vLLM than in the trainer, is refused before any rank
starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

AGAIN = "Copy the file again from its source."
OTHER_MODEL = "Use another model."

# Supported architectures -> the `model_type` by which transformers finds their
# configuration class.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4_text",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "GemmaForCausalLM": "gemma",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "MinistralForCausalLM": "ministral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Phi3ForCausalLM": "phi3",
    "Glm4ForCausalLM": "glm4",
    "CwmForCausalLM": "cwm",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "ArceeForCausalLM": "arcee",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "FalconH1ForCausalLM": "falcon_h1",
    "Starcoder2ForCausalLM": "starcoder2",
    "Olmo2ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Cohere2ForCausalLM": "cohere2",
    "OlmoeForCausalLM": "olmoe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "InternLM3ForCausalLM": "internlm3",
    "MiMoForCausalLM": "mimo",
    "BailingMoeV2ForCausalLM": "bailing_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
# transformers (5.19) has no class of these architectures. `own_configs.py` has classes
# that read their config.json.
NOT_IN_TRANSFORMERS = (
    "InternLM3ForCausalLM",
    "MiMoForCausalLM",
    "BailingMoeV2ForCausalLM",
)

# Like MODEL_TYPES, for supported models that take images: a decoder, whose fields are in
# `text_config`, and transformers' vision tower.
IMAGE_MODEL_TYPES = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
# Time, height and width take turns along a head's dimensions. In the other models each
# has a run of them.
ALTERNATING_AXES = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# The tower has no further outputs.
WITHOUT_DEEPSTACK = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
TOWER_NUMBERS = (
    "depth",
    "num_heads",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
)
# Rotary base of the towers' patches, and epsilon of the norms in Qwen3-VL's and
# Qwen3.5's towers.
TOWER_ROPE_THETA = 10000.0
TOWER_NORM_EPS = 1e-6

WHOLE_NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL_NUMBERS = ("num_key_value_heads", "head_dim")
# Far beyond any model. A damaged file could otherwise ask for lists of a billion layers
# or experts.
LARGEST_NUMBER = 2**31 - 1
LARGEST = {
    "num_hidden_layers": 10_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "moe_num_experts": 100_000,
    "n_routed_experts": 100_000,
    "n_shared_experts": 1_000,
    "num_shared_experts": 1_000,
}


class ExpertKeys(NamedTuple):
    """Names of the keys that describe routed experts, and properties of the router.

    Attributes:
        number: key of the number of experts.
        width: key of the inner width of one expert.
        per_token: key of the number of experts that a token goes to.
        by_sigmoid: the router uses sigmoid scores and a bias.
        by_biased_softmax: the router uses softmax scores and a bias.
        has_groups: experts are in `n_group` groups.
        has_shared: shared experts stand beside the routed ones, the first layers are dense, and
            `routed_scaling_factor` scales the routed experts' output.
        shared_number: key of their number.
        has_aux_loss: transformers computes a load-balancing loss.
        shared_width: key of the inner width of a shared expert whose output a sigmoid gate scales. "": none.
        num_shared: key of the number of shared experts, which may be 0 and have no scaling, in models whose first
            layers, up to `moe_layer_start_index`, are dense. "": none.
        shared_alone: key of the inner width of a shared expert without a gate, in models whose layers have one part
            each. "": none.
        scales_input: a sigmoid score scales the input of a token's only expert. There is one shared expert of the same
            width, and dense layers lie between layers with experts (`interleave_moe_layer_step`).
    """

    number: str
    width: str = "moe_intermediate_size"
    per_token: str = "num_experts_per_tok"
    by_sigmoid: bool = False
    by_biased_softmax: bool = False
    has_groups: bool = False
    has_shared: bool = False
    shared_number: str = "n_shared_experts"
    has_aux_loss: bool = True
    shared_width: str = ""
    num_shared: str = ""
    shared_alone: str = ""
    scales_input: bool = False


DEEPSEEK_KEYS = ExpertKeys(
    "n_routed_experts",
    by_sigmoid=True,
    has_groups=True,
    has_shared=True,
    has_aux_loss=False,
)
EXPERT_KEYS = {
    "Llama4ForCausalLM": ExpertKeys(
        "num_local_experts",
        width="intermediate_size",
        has_aux_loss=False,
        scales_input=True,
    ),
    "MixtralForCausalLM": ExpertKeys("num_local_experts", width="intermediate_size"),
    "Qwen3MoeForCausalLM": ExpertKeys("num_experts"),
    "DeepseekV3ForCausalLM": DEEPSEEK_KEYS,
    "Glm4MoeForCausalLM": DEEPSEEK_KEYS,
    "Glm4MoeLiteForCausalLM": DEEPSEEK_KEYS,
    "DeepseekV2ForCausalLM": ExpertKeys(
        "n_routed_experts", has_shared=True, has_aux_loss=False
    ),
    "OlmoeForCausalLM": ExpertKeys("num_experts", width="intermediate_size"),
    "MiniMaxM2ForCausalLM": ExpertKeys(
        "num_local_experts", width="intermediate_size", by_sigmoid=True
    ),
    "GptOssForCausalLM": ExpertKeys("num_local_experts", width="intermediate_size"),
    "GraniteMoeForCausalLM": ExpertKeys("num_local_experts", width="intermediate_size"),
    "Qwen2MoeForCausalLM": ExpertKeys(
        "num_experts", shared_width="shared_expert_intermediate_size"
    ),
    "BailingMoeV2ForCausalLM": DEEPSEEK_KEYS._replace(
        number="num_experts", shared_number="num_shared_experts"
    ),
    "Ernie4_5_MoeForCausalLM": ExpertKeys(
        "moe_num_experts",
        per_token="moe_k",
        by_biased_softmax=True,
        num_shared="moe_num_shared_experts",
    ),
    "NemotronHForCausalLM": ExpertKeys(
        "n_routed_experts",
        by_sigmoid=True,
        has_groups=True,
        has_aux_loss=False,
        shared_alone="moe_shared_expert_intermediate_size",
    ),
    **dict.fromkeys(
        (
            "Qwen3NextForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        ExpertKeys("num_experts", shared_width="shared_expert_intermediate_size"),
    ),
}
# Architectures in which `norm_topk_prob` decides whether the chosen experts' weights
# are normalized.
MAYBE_NORMALIZED = (
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "OlmoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "BailingMoeV2ForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
)
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GROUP_NUMBERS = ("n_group", "topk_group")
WITH_DELTA_NET = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Rotary embeddings rotate only the fraction `partial_rotary_factor` of each head in
# these architectures.
PARTLY_ROTARY = (
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Phi3ForCausalLM",
    "NemotronForCausalLM",
    "MiniMaxM2ForCausalLM",
    "BailingMoeV2ForCausalLM",
    *WITH_DELTA_NET,
)
# Layers that `layer_types` names LINEAR are gated delta nets of these sizes.
DELTA_NET_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
LINEAR = "linear_attention"
# `no_rope_layers` has a 0 for layers without rotary embeddings in these architectures.
SOMETIMES_ROTARY = ("Llama4ForCausalLM", "SmolLM3ForCausalLM")
# Layers with full attention have no rotary embeddings in these architectures, if the
# others have a window.
ROTARY_IN_WINDOWS = ("Exaone4ForCausalLM", "Cohere2ForCausalLM")
# `rope_parameters` describes the rotary embedding of each type of layers in these
# architectures.
ROTARY_BY_LAYER = ("Gemma3ForCausalLM",)
# Rotary embeddings rotate pairs of neighbouring dimensions in these architectures, and
# in others each dimension with the one half a head further on.
ROTATED_IN_PAIRS = (
    "Llama4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Glm4ForCausalLM",
    "Cohere2ForCausalLM",
)
WITH_LATENT_ATTENTION = (
    "DeepseekV3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
# WINDOWED_EVERYWHERE attend within `sliding_window` in every layer, WINDOWED_BY_LAYER
# in the layers that `layer_types` names. gpt-oss has windows in every other layer from
# the first on: vLLM (0.32) computes it so whatever `layer_types` is.
WINDOWED_EVERYWHERE = (
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Phi3ForCausalLM",
    "Starcoder2ForCausalLM",
)
WINDOWED_BY_LAYER = (
    "Qwen2ForCausalLM",
    "MiMoForCausalLM",
    "Qwen3ForCausalLM",
    "MinistralForCausalLM",
    "CwmForCausalLM",
    "Exaone4ForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
# vLLM's models of these architectures (0.32) ignore `head_dim`.
HEADS_FILL_HIDDEN = (
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "MiMoForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
)
# transformers cannot build these architectures with a `head_dim` of null.
NEEDS_HEAD_DIM = ("MinistralForCausalLM", "HunYuanDenseV1ForCausalLM")
# transformers cannot compute these architectures without a window, or vLLM cannot.
NEEDS_WINDOW = (
    "MinistralForCausalLM",
    "CwmForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
SLIDING = "sliding_attention"
# Layers with rotary embeddings attend within chunks of `attention_chunk_size` tokens in
# these architectures, and `attn_temperature_tuning` scales the queries of the others.
WITH_CHUNKS = ("Llama4ForCausalLM",)
CHUNKED = "chunked_attention"
# Architectures whose key of the norms' epsilon is not `rms_norm_eps`.
NORM_EPS = {
    "NemotronForCausalLM": "norm_eps",
    "Starcoder2ForCausalLM": "norm_epsilon",
    "Cohere2ForCausalLM": "layer_norm_eps",
    "NemotronHForCausalLM": "layer_norm_epsilon",
}
# Architectures whose layers are Mamba-2, attention, an MLP or experts each, without rotary
# embeddings -> their names in transformers' `layers_block_type`.
MAMBA_LAYERS: dict[str, dict[str, Literal["mamba", "attention", "mlp", "moe"]]] = {
    "NemotronHForCausalLM": {
        "linear_attention": "mamba",
        "full_attention": "attention",
        "mlp": "mlp",
        "moe": "moe",
    },
}
# Sizes of their Mamba-2 layers.
MAMBA_SIZES = (
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "chunk_size",
)
# Architectures whose layers add the outputs of attention and of a Mamba-2 layer, and the
# sizes of the latter.
ATTENTION_BESIDE_MAMBA = ("FalconH1ForCausalLM",)
BESIDE_SIZES = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_chunk_size",
)
# Keys with several factors on parts of these layers -> their number.
LISTED_SCALES = {"mlp_multipliers": 2, "ssm_multipliers": 5}
# The only supported `time_step_limit`, the range of a Mamba-2 layer's time steps. vLLM
# ignores the key.
UNLIMITED_STEPS = (0.0, math.inf)
# Architectures whose MLP has another activation than SiLU, or SiLU under one name -> the
# only supported value of `hidden_act`, and the name in `ModelSpec.activation`.
OTHER_ACTIVATION = {
    "GemmaForCausalLM": ("gelu_pytorch_tanh", "gelu_tanh"),
    "Gemma2ForCausalLM": ("gelu_pytorch_tanh", "gelu_tanh"),
    "Gemma3ForCausalLM": ("gelu_pytorch_tanh", "gelu_tanh"),
    "Starcoder2ForCausalLM": ("gelu_pytorch_tanh", "gelu_tanh"),
    "ArceeForCausalLM": ("relu2", "squared_relu"),
    "NemotronHForCausalLM": ("relu2", "squared_relu"),
    "NemotronForCausalLM": ("relu2", "squared_relu"),
    # vLLM (0.32, `falcon_h1.py`) does not know the name "swish".
    "FalconH1ForCausalLM": ("silu", "silu"),
}

# vLLM (0.32, `granite.py`) reads these keys of Granite's models, and transformers' class
# of these models does not.
PLAIN_GRANITE: dict[str, tuple[Any, ...]] = {
    "layer_types": (None,),
    "layer_rope_theta": (None,),
    "attention_sinks": (False, None),
}
# transformers ignores these keys of models with gated delta nets, and vLLM (0.32,
# `qwen3_next.py`, `qwen_gdn_linear_attn.py`) does not.
UNREAD_OF_DELTA_NETS: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "layer_scale": (False, None),
    "output_gate_type": ("silu", "swish"),
}
# Architecture ("" for all) -> key -> values that are computed correctly. Messages name
# the first one.
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {
        "quantization_config": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "mlp_bias": (False, None),
        "use_bidirectional_attention": (False, None),
        "per_layer_config": (None,),
        # transformers and megaverl ignore the model's own dropout. A run can set
        # megatron.attention_dropout.
        "attention_dropout": (0.0, None),
        # transformers ignores these keys, and vLLM (0.32) does not.
        "is_causal": (True,),
        "logit_scale": (1.0, None),
        "qkv_bias": (False, None),
        "qk_norm": (False, None),
    },
    # transformers' class and vLLM ignore this key.
    "Llama4ForCausalLM": {"router_jitter_noise": (0.0,)},
    "MixtralForCausalLM": {"router_jitter_noise": (0.0,)},
    "Qwen3MoeForCausalLM": {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "shared_expert_intermediate_size": (0, None),
    },
    "DeepseekV3ForCausalLM": {
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (True,),
        "index_topk": (None,),
    },
    # vLLM always computes these values (0.32, `gpt_oss.py`).
    "GptOssForCausalLM": {
        "attention_bias": (True,),
        "rms_norm_eps": (1e-5,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    # The published folders have dropouts of 0.1. Like any dropout of a model they are
    # ignored: the engine samples without it.
    "SeedOssForCausalLM": {
        "attention_dropout": (0.0, 0.1, None),
        "residual_dropout": (0.0, 0.1, None),
        "attention_out_bias": (False,),
    },
    "Phi3ForCausalLM": {"resid_pdrop": (0.0, None), "embd_pdrop": (0.0, None)},
    "Ernie4_5ForCausalLM": {"use_bias": (False, None)},
    # vLLM (0.32, `ernie45_moe.py`) ignores `moe_norm_min`.
    "Ernie4_5_MoeForCausalLM": {
        "use_bias": (False, None),
        "moe_layer_interval": (1,),
        "moe_norm_min": (1e-12,),
    },
    "Qwen2MoeForCausalLM": {
        "qkv_bias": (True, False),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    # The published folders have dropouts of 0.1, which are ignored as in Seed-OSS.
    "Starcoder2ForCausalLM": dict.fromkeys(
        ("attention_dropout", "residual_dropout", "embedding_dropout"),
        (0.0, 0.1, None),
    ),
    # transformers ignores these keys, and vLLM (0.32, `commandr.py`) does not.
    "Cohere2ForCausalLM": {
        "use_qk_norm": (False, None),
        "rms_norm_eps": (None,),
    },
    "GraniteForCausalLM": PLAIN_GRANITE,
    "GraniteMoeForCausalLM": PLAIN_GRANITE,
    # vLLM (0.32, `olmoe.py`) always computes these values.
    "OlmoeForCausalLM": {
        "clip_qkv": (None,),
        "norm_topk_prob": (False,),
        "rms_norm_eps": (1e-5,),
    },
    # vLLM (0.32, `minimax_m2.py`) reads keys that transformers' class ignores.
    "MiniMaxM2ForCausalLM": {
        "router_jitter_noise": (0.0,),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
    },
    # megatron-core ranks groups of experts by other experts than "group_limited_greedy".
    "DeepseekV2ForCausalLM": {
        "topk_method": ("greedy",),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
        "n_group": (1, None),
        "topk_group": (1, None),
    },
    "Glm4MoeLiteForCausalLM": {
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # vLLM (0.32, `llama.py`) has no biases in the MLP, which this key asks for.
    "InternLM3ForCausalLM": {"bias": (False, None), "qkv_bias": (False, True, None)},
    "MiMoForCausalLM": {"use_mrope": (False, None)},
    # vLLM (0.32, `bailing_moe.py`) reads `use_rmsnorm` and `norm_head`, the model's own
    # code does not.
    "BailingMoeV2ForCausalLM": {
        "use_bias": (False,),
        "use_qkv_bias": (False,),
        "use_rmsnorm": (True,),
        "norm_head": (False, None),
        "embedding_dropout": (0.0,),
        "output_dropout": (0.0,),
        "score_function": ("sigmoid",),
        "moe_router_enable_expert_bias": (True,),
    },
    # transformers' class ignores the last four keys. vLLM (0.32, `nemotron_h.py`) reads
    # the window.
    "NemotronHForCausalLM": {
        "mamba_hidden_act": ("silu", "swish"),
        "use_bias": (False, None),
        "mamba_proj_bias": (False, None),
        "sliding_window": (None,),
        "residual_in_fp32": (False, None),
        "hidden_dropout": (0.0, None),
    },
    # vLLM (0.32, `falcon_h1.py`) has no biases in attention and MLP, and one key for those
    # of both projections of a Mamba layer, for which transformers has two. It reads the
    # window, which transformers' class ignores.
    "FalconH1ForCausalLM": {
        "mamba_proj_bias": (False, None),
        "projectors_bias": (False, None),
        "sliding_window": (None,),
    },
    # transformers' class ignores these keys of Tencent's own class.
    "HunYuanDenseV1ForCausalLM": {
        "use_qk_norm": (True,),
        "use_cla": (False, None),
    },
    "Qwen3NextForCausalLM": {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        **UNREAD_OF_DELTA_NETS,
    },
    "Qwen3_5ForCausalLM": UNREAD_OF_DELTA_NETS,
    "Qwen3_5MoeForCausalLM": UNREAD_OF_DELTA_NETS,
    "Qwen3_5ForConditionalGeneration": UNREAD_OF_DELTA_NETS,
    "Qwen3_5MoeForConditionalGeneration": UNREAD_OF_DELTA_NETS,
}
# Keys that scale what a layer computes, by the architecture that has them. `logit_scale`
# multiplies logits, `logits_scaling` divides them.
GRANITE_SCALES = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
SCALES = {
    "GraniteForCausalLM": GRANITE_SCALES,
    "GraniteMoeForCausalLM": GRANITE_SCALES,
    "Cohere2ForCausalLM": ("logit_scale",),
    "Gemma2ForCausalLM": ("query_pre_attn_scalar",),
    "Gemma3ForCausalLM": ("query_pre_attn_scalar",),
    "FalconH1ForCausalLM": (
        "embedding_multiplier",
        "lm_head_multiplier",
        "key_multiplier",
        "attention_in_multiplier",
        "attention_out_multiplier",
        "ssm_in_multiplier",
        "ssm_out_multiplier",
    ),
}
# Soft caps on attention's scores and on logits, which may be null, by the architecture
# that has them.
SOFTCAPS = {
    "Gemma2ForCausalLM": ("attn_logit_softcapping", "final_logit_softcapping"),
}
# Biases of the attention projections: optional in GLM-4, GLM-4.5 and Seed-OSS
# (`attention_bias`) and in Qwen2-MoE and InternLM 3 (`qkv_bias`), always there in Qwen2,
# MiMo and gpt-oss, nowhere else.
WITH_OPTIONAL_BIAS = ("Glm4ForCausalLM", "Glm4MoeForCausalLM", "SeedOssForCausalLM")
WITH_ATTENTION_BIAS = (
    "Qwen2ForCausalLM",
    "MiMoForCausalLM",
    "GptOssForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)

# Rotary scaling -> numbers that it needs.
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Architectures with the scaling "dynamic" -> the number that it needs. It multiplies the
# rotary base by a power of `alpha` for all lengths up to `max_position_embeddings`.
# With `factor` it changes the base only for longer samples, which a run refuses.
DYNAMIC_NUMBERS = {
    "HunYuanDenseV1ForCausalLM": "alpha",
    "InternLM3ForCausalLM": "factor",
}
OPTIONAL_ROPE_NUMBERS = ("beta_fast", "beta_slow", "attention_factor")


class Described:
    """Keys of a config.json as transformers reads them.

    Args:
        values: all keys, with defaults.
        written: keys in the file.

    Attributes:
        rope: the rotary embedding; that of layers with full attention, if there are several.
        local_rope: the rotary embedding of layers with a window, in ROTARY_BY_LAYER.
    """

    def __init__(
        self, architecture: str, values: dict[str, Any], written: dict[str, Any]
    ) -> None:
        self.architecture = architecture
        self.values = values
        self.rope: dict[str, Any] = values.get("rope_parameters") or {}
        self.local_rope: dict[str, Any] = {}
        if architecture in ROTARY_BY_LAYER:
            self.local_rope = self.rope.get(SLIDING) or {}
            self.rope = self.rope.get("full_attention") or {}
        self._written = written

    def says(self, key: str) -> str:
        """Return "key is value", followed by "(transformers' default)" if the file leaves the key out.

        Defaults of megaverl's own configuration classes are called "the model's".
        """
        return f"{key} is {self._value(key)}"

    def named(self, *keys: str) -> str:
        """Return "key=value and key=value", with the same note."""
        return " and ".join(f"{key}={self._value(key)}" for key in keys)

    def is_written(self, key: str) -> bool:
        """Return whether the file itself has the key."""
        return key in self._written

    def _value(self, key: str) -> str:
        value = self.values.get(key)
        text = f"{value!r}"
        if key == "quantization_config" and isinstance(value, dict):
            # It lists every layer that is left out.
            text = f"of the method {value.get('quant_method')!r}"
        if self.is_written(key):
            return text
        is_own = self.architecture in NOT_IN_TRANSFORMERS
        owner = "the model's" if is_own else "transformers'"
        return f"{text} ({owner} default)"


def wrong_types(architecture: str, config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each number of the file that no model can have."""
    numbers = [*WHOLE_NUMBERS, *OPTIONAL_NUMBERS]
    optional = {*OPTIONAL_NUMBERS, "q_lora_rank"}
    if architecture in WITH_CHUNKS:
        numbers += ["intermediate_size_mlp", "no_rope_layer_interval"]
    experts = EXPERT_KEYS.get(architecture)
    if experts is not None:
        numbers += [
            experts.per_token,
            experts.number,
            "num_experts",
            "num_local_experts",
            experts.width,
        ]
        numbers += GROUP_NUMBERS if experts.has_groups else ()
        numbers += [experts.shared_number] if experts.has_shared else []
        numbers += [experts.shared_width] if experts.shared_width else []
    if architecture in WITH_LATENT_ATTENTION:
        numbers += [*LATENT_SIZES, "q_lora_rank"]
    if architecture in WITH_DELTA_NET:
        numbers += DELTA_NET_SIZES
    if architecture in ATTENTION_BESIDE_MAMBA:
        numbers += [*BESIDE_SIZES, "mamba_d_ssm"]
        optional.add("mamba_d_ssm")
        yield from _listed_scales(config)
    for key in dict.fromkeys(numbers):
        value = config.get(key, 1)
        # `isinstance` would accept True, which is an int.
        if (type(value) is not int or value < 1) and not (
            value is None and key in optional
        ):
            yield f"{key} is {value!r}; expected a whole number above 0. {AGAIN}"
        elif type(value) is int and value > LARGEST.get(key, LARGEST_NUMBER):
            yield f"{key} is {value:,}; expected at most {LARGEST.get(key, LARGEST_NUMBER):,}. {AGAIN}"
    factors = [*SCALES.get(architecture, ())]
    if architecture in WITH_CHUNKS:
        factors += ["floor_scale", "attn_scale"]
    if experts is not None and experts.has_shared:
        factors.append("routed_scaling_factor")
    norm_eps = NORM_EPS.get(architecture, "rms_norm_eps")
    for key in (norm_eps, "rope_theta", *factors):
        value = config.get(key, 1.0)
        if not _is_positive(value):
            yield f"{key} is {value!r}; expected a number above 0. {AGAIN}"
    for key in SOFTCAPS.get(architecture, ()):
        if config.get(key) is not None and not _is_positive(config[key]):
            yield f"{key} is {config[key]!r}; expected a number above 0, or null. {AGAIN}"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), dict | None):
            yield f"{key} is {config[key]!r}; expected a JSON object or null. {AGAIN}"


def _listed_scales(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems with lists of factors, and with the width of a Mamba head, which may be "auto"."""
    for key, number in LISTED_SCALES.items():
        value = config.get(key)
        is_list = isinstance(value, list) and len(value) == number
        if value is not None and not (is_list and all(map(_is_positive, value))):
            yield f"{key} is {value!r}; expected {number} numbers above 0. {AGAIN}"
    width = config.get("mamba_d_head", "auto")
    if width != "auto" and (type(width) is not int or width < 1):
        yield f'mamba_d_head is {width!r}; expected a whole number above 0, or "auto". {AGAIN}'


def not_computed(described: Described) -> Iterator[str]:
    """Yield a message for everything that would be computed differently from transformers."""
    architecture = described.architecture
    values = described.values
    allowed = {**ONLY[""], **ONLY.get(architecture, {})}
    for key in (*SCALES.get(architecture, ()), *SOFTCAPS.get(architecture, ())):
        allowed.pop(key, None)
    if architecture not in (*WITH_OPTIONAL_BIAS, *WITH_ATTENTION_BIAS):
        allowed["attention_bias"] = (False, None)
    for key, expected in allowed.items():
        if key in values and values[key] not in expected:
            yield f"{described.says(key)}; only {expected[0]!r} is computed. {instead_of(key, values[key])}"
    yield from _activation(described)
    yield from _heads(described)
    if architecture in WITH_DELTA_NET:
        yield from _delta_nets(described)
    if architecture in MAMBA_LAYERS:
        yield from _mamba(described)
        return
    if architecture in ATTENTION_BESIDE_MAMBA:
        yield from _mamba_beside_attention(described)
    elif architecture in WITH_CHUNKS:
        yield from _chunks(described)
    else:
        yield from _windows(described)
    yield from _rope(described)
    if architecture in IMAGE_MODEL_TYPES:
        yield from _rope_in_three_dimensions(described)
    yield from _rope_by_layer_type(described)
    yield from _layers_without_rope(described)
    if architecture in EXPERT_KEYS:
        yield from _experts(described)
    if architecture == "BailingMoeV2ForCausalLM":
        yield from _sizes_given_twice(described)


def instead_of(key: str, value: Any) -> str:
    """Return what the user can do about an unsupported value."""
    if key == "attention_dropout":
        return "Set it to 0.0. To train with dropout, set megatron.attention_dropout."
    if key != "quantization_config":
        return OTHER_MODEL
    if not isinstance(value, dict) or value.get("quant_method") != "mxfp4":
        return "Use a folder of the model that is not quantised."
    return (
        "Write its weights in bfloat16 once, and name that folder: transformers' from_pretrained(PATH, dtype='bfloat16'"
        ", quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER, save_original_format=False), and "
        "the tokenizer's files."
    )


def _is_positive(value: Any) -> bool:
    """Return whether `value` is a finite number above 0."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _activation(described: Described) -> Iterator[str]:
    """Yield problems with the activation function."""
    architecture = described.architecture
    expected: tuple[str, ...] = ("silu", "swish")
    if architecture in OTHER_ACTIVATION:
        expected = (OTHER_ACTIVATION[architecture][0],)
    # transformers treats `gelu` in Gemma's first folders as the tanh form.
    is_new_gemma = architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
    key = "hidden_activation" if is_new_gemma else "hidden_act"
    if described.architecture in MAMBA_LAYERS:
        key = "mlp_hidden_act"
    if described.values[key] not in expected:
        yield f"{described.says(key)}; only {expected[0]} is computed. {OTHER_MODEL}"
    # transformers' Gemma ignores hidden_activation, and vLLM's (0.32) prefers it.
    unread = described.values.get("hidden_activation")
    if architecture == "GemmaForCausalLM" and unread not in (None, *expected):
        yield f"{described.says('hidden_activation')}; only {expected[0]} is computed. {OTHER_MODEL}"


def _heads(described: Described) -> Iterator[str]:
    """Yield problems with sizes of heads. Latent attention has as many key-value heads as heads."""
    values = described.values
    if described.architecture in WITH_LATENT_ATTENTION:
        if values["qk_rope_head_dim"] % 2:
            yield f"{described.says('qk_rope_head_dim')}; rotary embeddings turn an even number of dimensions. {AGAIN}"
        if values["head_dim"] != values["qk_rope_head_dim"]:
            yield f"{described.says('head_dim')}; only {described.named('qk_rope_head_dim')} is computed. {AGAIN}"
        return
    if described.architecture in NEEDS_HEAD_DIM and values["head_dim"] is None:
        size = values["hidden_size"] // values["num_attention_heads"]
        yield f"{described.says('head_dim')}; transformers needs it for {described.architecture}. Set it to {size}."
    heads = values["num_attention_heads"]
    kv_heads = values["num_key_value_heads"]
    if kv_heads is None:
        yield (
            f"{described.says('num_key_value_heads')}; transformers needs it for {described.architecture}. Set it to "
            f"{heads} for one per head."
        )
        return
    if described.architecture in HEADS_FILL_HIDDEN:
        size = values["hidden_size"] // heads
        if values.get("head_dim") not in (None, size):
            yield f"{described.says('head_dim')}; only {size}=hidden_size/num_attention_heads is computed. {AGAIN}"
    yield from _undivided(described, "num_key_value_heads", "num_attention_heads")


def _undivided(described: Described, divisor: str, number: str) -> Iterator[str]:
    """Yield a problem if the value of `divisor` does not divide that of `number`."""
    if described.values[number] % described.values[divisor]:
        yield f"{described.named(divisor)} does not divide {described.named(number)}. {AGAIN}"


def _delta_nets(described: Described) -> Iterator[str]:
    """Yield problems with gated delta nets: which layers are some, and how their heads share keys."""
    values = described.values
    kinds, num_layers = values["layer_types"], values["num_hidden_layers"]
    if len(kinds) != num_layers or {*kinds} - {LINEAR, "full_attention"}:
        yield (
            f"{described.says('layer_types')}; expected {LINEAR} or full_attention for each of {num_layers} layers. "
            f"{AGAIN}"
        )
    elif "full_attention" not in kinds:
        yield f"{described.says('layer_types')}; transformers needs a layer with full_attention. {OTHER_MODEL}"
    yield from _undivided(described, "linear_num_key_heads", "linear_num_value_heads")


def _mamba(described: Described) -> Iterator[str]:
    """Yield problems with the kinds of layers, and with Mamba-2 layers."""
    values = described.values
    known = MAMBA_LAYERS[described.architecture]
    if "moe" in values["layers_block_type"]:
        yield from _experts(described)
        yield from _experts_of_nemotron(described)
    if unknown := sorted(set(values["layers_block_type"]) - known.keys()):
        yield f"layers_block_type names {', '.join(unknown)}; only {', '.join(known)} are computed. {OTHER_MODEL}"
    wrong = [
        key for key in MAMBA_SIZES if type(values[key]) is not int or values[key] < 1
    ]
    for key in wrong:
        yield f"{described.says(key)}; expected a whole number above 0. {AGAIN}"
    if not wrong:
        yield from _undivided(described, "n_groups", "mamba_num_heads")
    limit = values.get("time_step_limit")
    if limit is not None and tuple(map(_as_float, limit)) != UNLIMITED_STEPS:
        yield (
            f"{described.says('time_step_limit')}; only [0.0, Infinity] is computed, and transformers and vLLM (0.32) "
            f"ignore the key. {OTHER_MODEL}"
        )


def _experts_of_nemotron(described: Described) -> Iterator[str]:
    """Yield problems with layers of experts alone."""
    values = described.values
    if values["moe_latent_size"] is not None:
        yield f"{described.says('moe_latent_size')}; only None is computed. {OTHER_MODEL}"
    # vLLM (0.32) multiplies the shared expert's width by this number, transformers does not.
    if values["n_shared_experts"] != 1:
        yield f"{described.says('n_shared_experts')}; only 1 is computed. {OTHER_MODEL}"
    width = values["moe_shared_expert_intermediate_size"]
    if type(width) is not int or width < 1:
        yield f"moe_shared_expert_intermediate_size is {width!r}; expected a whole number above 0. {AGAIN}"
    if not _is_positive(values["routed_scaling_factor"]):
        yield f"{described.says('routed_scaling_factor')}; expected a number above 0. {AGAIN}"


def _mamba_beside_attention(described: Described) -> Iterator[str]:
    """Yield problems with layers that add the outputs of attention and of a Mamba-2 layer."""
    values = described.values
    yield from _undivided(described, "mamba_n_groups", "mamba_n_heads")
    if values["mamba_rms_norm"] and values["mamba_norm_before_gate"]:
        yield (
            f"{described.named('mamba_rms_norm', 'mamba_norm_before_gate')}: vLLM (0.32) always gates before the norm, "
            f"as do the models published with this norm. {OTHER_MODEL}"
        )
    # transformers cannot compute a null.
    if tuple(map(_as_float, values["time_step_limit"] or ())) != UNLIMITED_STEPS:
        yield (
            f"{described.says('time_step_limit')}; only [0.0, Infinity] is computed, and vLLM (0.32) ignores the key. "
            f"{OTHER_MODEL}"
        )
    if "head_dim" in values and values["head_dim"] is None:
        size = values["hidden_size"] // values["num_attention_heads"]
        yield f"{described.says('head_dim')}; transformers cannot compute it. Remove the key, or set it to {size}."
    # vLLM (0.32) rotates so many dimensions of each head, transformers' class all.
    whole = values.get("head_dim") or (
        values["hidden_size"] // values["num_attention_heads"]
    )
    if values.get("attn_rotary_emb", whole) != whole:
        yield f"{described.says('attn_rotary_emb')}; only {whole}, a whole head, is computed. {OTHER_MODEL}"


def _as_float(value: Any) -> float:
    """Return `value` as a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _windows(described: Described) -> Iterator[str]:
    """Yield problems with a sliding window that would not be computed as written."""
    values = described.values
    architecture = described.architecture
    window = _window_of(described)
    layer_types = values.get("layer_types") or []
    if architecture == "GptOssForCausalLM":
        if any(
            kind != ("full_attention" if i % 2 else SLIDING)
            for i, kind in enumerate(layer_types)
        ):
            yield f"layer_types is {layer_types}; windows are computed in every other layer, the first first. {AGAIN}"
        if type(window) is not int or window < 1:
            yield f"{described.says('sliding_window')}; expected a whole number above 0. {AGAIN}"
        return
    if architecture in NEEDS_WINDOW and window is None:
        yield (
            f"{described.says('sliding_window')}; transformers computes {architecture} only with a window. Set "
            f"sliding_window to max_position_embeddings={values['max_position_embeddings']} for full attention."
        )
        return
    # `_delta_nets` checks the layers of models that have some.
    known = {LINEAR} if architecture in WITH_DELTA_NET else {SLIDING}
    unknown = sorted(set(layer_types) - {"full_attention", *known})
    if unknown:
        yield f"layer_types names {', '.join(unknown)}; only full_attention and {SLIDING} are computed. {OTHER_MODEL}"
    if window is not None and (type(window) is not int or window < 1):
        yield f"{described.says('sliding_window')}; expected a whole number above 0, or null. {AGAIN}"
    elif SLIDING in layer_types and window is None:
        yield (
            f"layer_types names {SLIDING}, and there is no window: sliding_window or use_sliding_window is not "
            "set. Remove layer_types to train with full attention."
        )
    elif not _is_felt(window, values):
        return
    elif architecture in WINDOWED_BY_LAYER:
        if len(layer_types) != (layers := values["num_hidden_layers"]):
            yield f"layer_types has {len(layer_types)} entries; num_hidden_layers is {layers}. {AGAIN}"
    elif architecture in WINDOWED_EVERYWHERE:
        if layer_types and set(layer_types) != {SLIDING}:
            yield (
                f"layer_types names full_attention, which transformers ignores for {architecture} and vLLM (0.32) does "
                f"not. Remove layer_types: every layer attends within sliding_window={window}."
            )
    elif SLIDING in layer_types or _asks_for_window(values):
        off = "use_sliding_window to false"
        off += " and remove layer_types" if described.is_written("layer_types") else ""
        yield (
            f"{described.says('sliding_window')}: a window of {window} tokens; {architecture} is computed with full "
            f"attention only. Use another model, or set {off} to train with full attention."
        )


def _chunks(described: Described) -> Iterator[str]:
    """Yield problems with attention within chunks."""
    values = described.values
    chunk = values["attention_chunk_size"]
    longest = values["max_position_embeddings"]
    if type(chunk) is not int or chunk < 1:
        yield (
            f"{described.says('attention_chunk_size')}; expected a whole number above 0. transformers computes no "
            f"model without it: set it to max_position_embeddings={longest} for full attention."
        )
    # `_layers_without_rope` checks `no_rope_layers`.
    expected = [
        CHUNKED if has_rope else "full_attention"
        for has_rope in values["no_rope_layers"]
    ]
    if values["layer_types"] != expected:
        yield (
            f"{described.says('layer_types')}; vLLM (0.32) does not read it: layers with rotary embeddings attend "
            "within chunks, and the others to all tokens. Remove layer_types."
        )
    if values.get("sliding_window") is not None:
        yield f"{described.says('sliding_window')}; only chunks are computed. {OTHER_MODEL}"


def windows_of(described: Described) -> tuple[int | None, tuple[bool, ...]]:
    """Return the sliding window, if the longest sequence exceeds it, and the layers that use it.

    Returns:
        The window in tokens, including the query's own; None for full attention. Then whether each layer has the
            window; empty if all have.
    """
    values = described.values
    architecture = described.architecture
    window = _window_of(described)
    if architecture == "GptOssForCausalLM":
        return window, tuple(
            layer % 2 == 0 for layer in range(values["num_hidden_layers"])
        )
    if not _is_felt(window, values):
        return None, ()
    if architecture in WINDOWED_EVERYWHERE:
        return window, ()
    windowed = tuple(kind == SLIDING for kind in values.get("layer_types") or ())
    if architecture not in WINDOWED_BY_LAYER or not any(windowed):
        return None, ()
    return window, () if all(windowed) else windowed


def _window_of(described: Described) -> Any:
    """Return `sliding_window` as written, or None for the 0 that Qwen2-MoE's class writes for no window."""
    window = described.values.get("sliding_window")
    has_none = (
        described.architecture == "Qwen2MoeForCausalLM"
        and not described.values.get("use_sliding_window")
    )
    return None if has_none else window


def _asks_for_window(values: dict[str, Any]) -> bool:
    """Return whether keys of Qwen2, in a model whose class does not read them, request windows in some layers."""
    first = values.get("max_window_layers", 28)
    unread = "layer_types" not in values and type(first) is int
    return bool(
        unread
        and values.get("use_sliding_window")
        and values["num_hidden_layers"] > first
    )


def _is_felt(window: int | None, values: dict[str, Any]) -> bool:
    """Return whether the window is shorter than the longest sequence."""
    return window is not None and window < values["max_position_embeddings"]


def _rope(described: Described) -> Iterator[str]:
    """Yield problems with the rotary embedding."""
    rope = described.rope
    kind = described.rope.get("rope_type")
    is_latent = described.architecture in WITH_LATENT_ATTENTION
    dynamic = DYNAMIC_NUMBERS.get(described.architecture)
    supported = ("default", "yarn") if is_latent else tuple(ROPE_NUMBERS)
    if dynamic is not None:
        supported = (*supported, "dynamic")
    if described.architecture in IMAGE_MODEL_TYPES:
        # Three-dimensional positions were compared with transformers without scaling only.
        supported = ("default",)
    elif described.architecture in (*ROTATED_IN_PAIRS, *ROTARY_BY_LAYER):
        # megatron-core's YaRN (0.16 to 0.19, `yarn_rotary_pos_embedding.py`) rotates
        # halves of heads only, and scales queries and keys of all layers.
        supported = tuple(name for name in supported if name != "yarn")
    if kind not in supported:
        yield (
            f"rope_type is {kind!r} in {rope}; only {', '.join(supported)} are computed for "
            f"{described.architecture}. {OTHER_MODEL}"
        )
        return
    numbers = (dynamic,) if kind == "dynamic" else ROPE_NUMBERS[kind]
    wrong = [key for key in ("rope_theta", *numbers) if not _is_positive(rope.get(key))]
    if kind == "yarn":
        wrong += [
            key
            for key in OPTIONAL_ROPE_NUMBERS
            if rope.get(key) is not None and not _is_positive(rope[key])
        ]
    for key in wrong:
        yield f"{key} is {rope.get(key)!r} in the rotary embedding's {rope}; expected a number above 0. {AGAIN}"
    fraction = rope.get("partial_rotary_factor", 1.0)
    if described.architecture not in PARTLY_ROTARY and fraction != 1.0:
        yield f"partial_rotary_factor is {fraction!r}; only 1.0 is computed. {OTHER_MODEL}"
    elif not (_is_positive(fraction) and fraction <= 1.0):
        yield f"partial_rotary_factor is {fraction!r}; expected a number above 0, at most 1. {AGAIN}"
    elif (
        not wrong
        and kind == "llama3"
        and rope["high_freq_factor"] < rope["low_freq_factor"]
    ):
        yield f"high_freq_factor is below low_freq_factor in {rope}. {AGAIN}"
    elif not wrong and kind == "yarn":
        yield from _yarn(described, fraction)
    elif dynamic == "factor" and "alpha" in rope:
        yield f"{rope} has a factor and an alpha; vLLM (0.32) reads alpha alone. {AGAIN}"
    elif kind == "dynamic" and (described.values["head_dim"] or 4) <= 2:
        yield f"{described.says('head_dim')}; alpha in {rope} needs heads of more than 2 dimensions. {AGAIN}"


def _sizes_given_twice(described: Described) -> Iterator[str]:
    """Yield sizes of BailingMoE-V2 that vLLM (0.32) reads from another key than the model's own code."""
    values = described.values
    rotated = int(values["head_dim"] * described.rope["partial_rotary_factor"])
    expected = {
        "moe_shared_expert_intermediate_size": values["moe_intermediate_size"],
        "rotary_dim": rotated,
    }
    for key, size in expected.items():
        if values.get(key) not in (None, size):
            yield f"{described.says(key)}; only {size} is computed, which other keys ask for. {AGAIN}"


def _rope_in_three_dimensions(described: Described) -> Iterator[str]:
    """Yield problems with the division of a head's dimensions among time, height and width."""
    values = described.values
    size = values.get("head_dim") or (
        values["hidden_size"] // values["num_attention_heads"]
    )
    size = int(size * described.rope.get("partial_rotary_factor", 1.0))
    sections: Any = described.rope.get("mrope_section")
    is_list = isinstance(sections, list) and all(type(n) is int for n in sections)
    if not is_list or len(sections) != 3 or sum(sections) != size // 2:
        yield (
            f"mrope_section is {sections!r} in {described.rope}; expected three whole numbers with the sum "
            f"{size // 2}, half of the rotated dimensions of a head. {AGAIN}"
        )
    # transformers computes one order for each architecture, and vLLM (0.32) the one
    # that this key names.
    expected = described.architecture in ALTERNATING_AXES
    if bool(described.rope.get("mrope_interleaved")) != expected:
        yield (
            f"mrope_interleaved is {described.rope.get('mrope_interleaved')!r} in {described.rope}; transformers "
            f"computes {described.architecture} as if it were {str(expected).lower()}. Write that into config.json."
        )


def tower_not_computed(described: Described, whole: dict[str, Any]) -> Iterator[str]:
    """Yield a message for everything in a vision tower that transformers, vLLM and Megatron do not compute alike.

    Args:
        described: the language model.
        whole: keys of the whole config.json as transformers reads them.
    """
    architecture, tower = described.architecture, whole["vision_config"]
    wrong = [
        key for key in TOWER_NUMBERS if type(tower[key]) is not int or tower[key] < 1
    ]
    for key in wrong:
        yield f"vision_config: {key} is {tower[key]!r}; expected a whole number above 0. {AGAIN}"
    is_qwen2_vl = architecture == "Qwen2VLForConditionalGeneration"
    width_key, out_key = (
        ("embed_dim", "hidden_size")
        if is_qwen2_vl
        else ("hidden_size", "out_hidden_size")
    )
    if "num_heads" not in wrong and tower[width_key] % tower["num_heads"]:
        yield (
            f"vision_config: num_heads={tower['num_heads']} does not divide {width_key}={tower[width_key]}. {AGAIN}"
        )
    if tower[out_key] != (hidden := described.values["hidden_size"]):
        yield (
            f"vision_config: {out_key} is {tower[out_key]}; images take the place of embeddings, whose hidden_size is "
            f"{hidden}. {AGAIN}"
        )
    theta = (tower.get("rope_parameters") or {}).get("rope_theta", TOWER_ROPE_THETA)
    if theta != TOWER_ROPE_THETA:
        yield (
            f"vision_config: rope_theta is {theta}; vLLM (0.32) computes {TOWER_ROPE_THETA} alone. {OTHER_MODEL}"
        )
    if architecture in WITHOUT_DEEPSTACK and tower.get("deepstack_visual_indexes"):
        yield (
            f"vision_config: deepstack_visual_indexes is {tower['deepstack_visual_indexes']!r}; transformers ignores "
            f"it for {architecture}, and vLLM (0.32) does not. Set it to []."
        )
    norm_eps = whole.get("rms_norm_eps", TOWER_NORM_EPS)
    if architecture in ALTERNATING_AXES and norm_eps != TOWER_NORM_EPS:
        yield (
            f"rms_norm_eps is {norm_eps!r} outside of text_config; vLLM (0.32) reads it for the tower, and "
            f"transformers computes {TOWER_NORM_EPS}. Remove the key."
        )


def _rope_by_layer_type(described: Described) -> Iterator[str]:
    """Yield problems with rotary embeddings that depend on whether a layer has a window."""
    values = described.values
    has_window = values.get("sliding_window") is not None
    if (
        described.architecture in ROTARY_IN_WINDOWS
        and has_window
        and SLIDING not in values["layer_types"]
    ):
        yield (
            f"{described.says('sliding_window')}, and no entry of layer_types is {SLIDING}: transformers computes no "
            "rotary embedding, vLLM (0.32) computes it in every layer. Set sliding_window to null."
        )
    local = described.local_rope
    is_plain = local.get("rope_type") == "default" and _is_positive(
        local.get("rope_theta")
    )
    if described.architecture in ROTARY_BY_LAYER and not is_plain:
        yield (
            f"the rotary embedding of {SLIDING} is {local}; only the rope_type default with a rope_theta above 0 is "
            f"computed. {OTHER_MODEL}"
        )


def _layers_without_rope(described: Described) -> Iterator[str]:
    """Yield problems with the list of layers that have rotary embeddings."""
    if described.architecture not in SOMETIMES_ROTARY:
        return
    with_rope = described.values["no_rope_layers"]
    num_layers = described.values["num_hidden_layers"]
    if len(with_rope) < num_layers or any(entry not in (0, 1) for entry in with_rope):
        yield (
            f"{described.says('no_rope_layers')}; expected a 1 (rotary embeddings) or a 0 (none) for each of "
            f"{num_layers} layers. {AGAIN}"
        )


def _yarn(described: Described, fraction: float) -> Iterator[str]:
    """Yield problems with YaRN's scaling of the rotary embedding."""
    rope = described.rope
    if fraction != 1.0:
        yield (
            f"rope_type is yarn with a partial_rotary_factor of {fraction}; megatron-core's turns whole heads. "
            f"{OTHER_MODEL}"
        )
    if rope["factor"] < 1 or (
        rope["factor"] == 1 and rope.get("attention_factor") not in (None, 1.0)
    ):
        yield f"factor is {rope['factor']} in {rope}; YaRN is computed with factors above 1. {AGAIN}"
        return
    if described.architecture in WITH_LATENT_ATTENTION and not rope.get(
        "truncate", True
    ):
        yield (
            f"truncate is {rope['truncate']!r} in {rope}; vLLM (0.32) rounds the bounds of latent attention's YaRN "
            f"always. Remove the key, or use another model."
        )
    if described.architecture in (*WITH_LATENT_ATTENTION, "GptOssForCausalLM"):
        factor = yarn_attention_factor(rope)
        engines = _yarn_attention_factor_in_vllm(described)
        if not math.isclose(factor, engines, rel_tol=1e-6):
            settings = {
                key: rope[key]
                for key in ("attention_factor", "mscale", "mscale_all_dim")
                if key in rope
            }
            yield (
                f"{settings} in the rotary embedding of {described.architecture}: transformers multiplies queries and "
                f"keys by {factor:.4g}, vLLM (0.32) by {engines:.4g}. Remove these keys, or use another model."
            )


def yarn_attention_factor(rope: dict[str, Any]) -> float:
    """Return YaRN's factor on rotated queries and keys, as in transformers' `_compute_yarn_parameters`."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(rope["factor"], mscale) / yarn_mscale(
            rope["factor"], mscale_all_dim
        )
    return yarn_mscale(rope["factor"], 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's "attention temperature" (arXiv 2309.00071, eq. 22) for a scaling factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor_in_vllm(described: Described) -> float:
    """Return YaRN's factor as in vLLM 0.32: `deepseek_scaling_rope.py`, and `gpt_oss.py`, which ignores such keys."""
    rope = described.rope
    if described.architecture not in WITH_LATENT_ATTENTION:
        return yarn_mscale(rope["factor"], 1.0)
    mscale = rope.get("mscale", 1.0) or 0.0
    mscale_all_dim = rope.get("mscale_all_dim", 0.0) or 0.0
    return yarn_mscale(rope["factor"], mscale) / yarn_mscale(
        rope["factor"], mscale_all_dim
    )


def _experts(described: Described) -> Iterator[str]:
    """Yield problems with routed experts."""
    values = described.values
    keys = EXPERT_KEYS[described.architecture]
    if keys.scales_input:
        yield from _experts_with_scaled_inputs(described)
        return
    num_experts = values[keys.number]
    per_token = values[keys.per_token]
    if type(num_experts) is not int:
        yield f"{described.says(keys.number)}; expected a whole number above 0. {AGAIN}"
        return
    if type(per_token) is not int:
        yield f"{described.says(keys.per_token)}; expected a whole number above 0. {AGAIN}"
        return
    if per_token > num_experts:
        yield f"{described.says(keys.per_token)}, of {num_experts} experts. {AGAIN}"
        return
    is_divided = (
        bool(values.get("norm_topk_prob"))
        or described.architecture not in MAYBE_NORMALIZED
    )
    if keys.has_shared:
        yield from _dense_layers(described)
    if keys.num_shared:
        yield from _first_layer_with_experts(described, keys.num_shared)
    if not keys.by_sigmoid:
        if per_token == 1 and is_divided:
            yield (
                f"{described.says(keys.per_token)}, and the weights of a token's experts "
                "are scaled to sum to 1. The only expert's weight is thus 1 for every token, no gradient reaches the "
                "router, and megatron-core does not compute it. Use a model that sends a token to two experts or "
                "more, or one with norm_topk_prob false."
            )
        return
    if is_divided != (per_token > 1):
        keys_at_fault = ["num_experts_per_tok"]
        if described.architecture in MAYBE_NORMALIZED:
            keys_at_fault.insert(0, "norm_topk_prob")
        yield (
            f"{described.named(*keys_at_fault)} cannot be computed: megatron-core's router "
            "divides sigmoid scores by their sum if a token goes to two experts or more, and never otherwise. "
            f"{OTHER_MODEL}"
        )
    if keys.has_groups:
        yield from _groups_of_experts(described, num_experts, per_token)


def _experts_with_scaled_inputs(described: Described) -> Iterator[str]:
    """Yield problems with experts whose inputs are scaled, and with the layers that have them (Llama 4)."""
    values = described.values
    if values["num_experts_per_tok"] != 1:
        yield (
            f"{described.says('num_experts_per_tok')}; only 1 is computed: megatron-core scales the input of a token's "
            f"only expert. {OTHER_MODEL}"
        )
    step = values["interleave_moe_layer_step"]
    if type(step) is not int or step < 1:
        yield f"{described.says('interleave_moe_layer_step')}; expected a whole number above 0. {AGAIN}"
        return
    num_layers = values["num_hidden_layers"]
    expected = [*range(step - 1, num_layers, step)]
    if values["moe_layers"] != expected:
        yield (
            f"{described.says('moe_layers')}; vLLM (0.32) reads interleave_moe_layer_step={step} instead, which says "
            f"{expected}. Remove moe_layers, or set interleave_moe_layer_step to fit it."
        )


def _first_layer_with_experts(described: Described, num_shared: str) -> Iterator[str]:
    """Yield problems with the layers that have experts, and with the number of shared experts (Ernie 4.5)."""
    values = described.values
    first, last, layers, shared = (
        values[key]
        for key in (
            "moe_layer_start_index",
            "moe_layer_end_index",
            "num_hidden_layers",
            num_shared,
        )
    )
    if type(shared) is not int or not 0 <= shared <= LARGEST["n_shared_experts"]:
        yield f"{described.says(num_shared)}; expected a whole number from 0 to {LARGEST['n_shared_experts']}. {AGAIN}"
    if type(first) is not int or not 0 <= first < layers:
        yield f"{described.says('moe_layer_start_index')}, of {layers} layers. {AGAIN}"
    if type(last) is not int or last < layers - 1:
        yield (
            f"{described.says('moe_layer_end_index')}; only dense layers followed by layers with experts are computed, "
            f"{layers} in all. {OTHER_MODEL}"
        )


def _dense_layers(described: Described) -> Iterator[str]:
    """Yield problems with the number of first layers that have a plain MLP."""
    values = described.values
    kinds = values.get("mlp_layer_types")
    if kinds is not None:
        dense = num_dense_layers(values)
        expected = ["dense"] * dense + ["sparse"] * (
            values["num_hidden_layers"] - dense
        )
        if kinds != expected or dense == len(kinds):
            yield (
                f"mlp_layer_types is {kinds}; only dense layers followed by sparse ones are computed, "
                f"{values['num_hidden_layers']} in all. {OTHER_MODEL}"
            )
        # transformers ignores this key, and vLLM (0.32) reads it.
        elif values.get("first_k_dense_replace", dense) != dense:
            yield (
                f"{described.says('first_k_dense_replace')}, and mlp_layer_types has {dense} dense layers. Set it to "
                f"{dense}."
            )
        return
    dense = values["first_k_dense_replace"]
    if type(dense) is not int or not 0 <= dense < values["num_hidden_layers"]:
        yield f"{described.says('first_k_dense_replace')}, of {values['num_hidden_layers']} layers. {AGAIN}"


def num_dense_layers(values: dict[str, Any]) -> int:
    """Return the number of first layers with a plain MLP, by `mlp_layer_types` or `first_k_dense_replace`."""
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        return int(values["first_k_dense_replace"])
    return next(
        (layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds)
    )


def _groups_of_experts(
    described: Described, num_experts: int, per_token: int
) -> Iterator[str]:
    """Yield problems with groups of experts."""
    groups = described.values["n_group"]
    chosen = described.values["topk_group"]
    size, rest = divmod(num_experts, groups)
    if rest or chosen > groups or per_token > chosen * size:
        yield (
            f"{described.named('n_group', 'topk_group')} do not fit {num_experts} experts of which {per_token} are "
            f"chosen. {AGAIN}"
        )
    elif chosen < groups and per_token != 2 * chosen:
        yield (
            f"{described.named('num_experts_per_tok', 'topk_group')} cannot be computed: megatron-core ranks a group "
            "of experts by its best num_experts_per_tok / topk_group experts, transformers by its best two. Use a "
            "model where that quotient is 2."
        )
