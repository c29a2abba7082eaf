"""Create tiny random models in Hugging Face folders, for tests and the quickstart.

Vision-language models come with a tokenizer and an image processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import save_torch_state_dict

from megaverl.models.architectures import weights_of
from megaverl.sharding.model_config import NOT_IN_TRANSFORMERS
from megaverl.sharding.model_spec import ModelSpec

if TYPE_CHECKING:
    import torch

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GROUPED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # transformers normalizes the latents with this default value, vLLM with the
    # configured one.
    "rms_norm_eps": 1e-6,
}
# Granite's factors on embeddings, scores of attention and outputs of layers, and the
# divisor of its logits.
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
# Every other layer is a gated delta net, also in a model of two layers.
DELTA_NETS = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
# Further settings by architecture. Fields that a configuration class does not know are
# left out.
TINY_MORE: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": None},
    "Phi3ForCausalLM": {"pad_token_id": None, "partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {"pad_token_id": None, "attention_bias": True},
    # Experts, and no rotary embeddings, in every other layer, also in a model of two
    # layers. Samples are longer than a chunk, and longer than the scaling's first step.
    "Llama4ForCausalLM": EXPERTS
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "pad_token_id": None,
        "eos_token_id": None,
        "bos_token_id": None,
    },
    # transformers needs a window. This one is never exceeded.
    "MinistralForCausalLM": {"sliding_window": 256},
    # Every other layer has no rotary embeddings, also in a model of two layers.
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2, "pad_token_id": None},
    "Qwen2MoeForCausalLM": EXPERTS
    | {"norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    "MixtralForCausalLM": EXPERTS,
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "pad_token_id": None,
    },
    "Qwen3MoeForCausalLM": EXPERTS | {"norm_topk_prob": True},
    "Qwen3NextForCausalLM": EXPERTS
    | DELTA_NETS
    | {"norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    "Qwen3_5ForCausalLM": DELTA_NETS,
    "Qwen3_5MoeForCausalLM": EXPERTS
    | DELTA_NETS
    | {"shared_expert_intermediate_size": 48},
    "DeepseekV3ForCausalLM": GROUPED
    | LATENT
    # transformers assumes these two entries; vLLM reads them from the file.
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    # The same holds for these entries, and for the number of dense layers.
    "Glm4MoeLiteForCausalLM": GROUPED
    | LATENT
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "DeepseekV2ForCausalLM": GROUPED
    | LATENT
    | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "OlmoeForCausalLM": EXPERTS | {"norm_topk_prob": False, "pad_token_id": None},
    # transformers assumes the first two entries and derives the last; vLLM reads them
    # from the file.
    "MiniMaxM2ForCausalLM": EXPERTS
    | {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 4},
    "BailingMoeV2ForCausalLM": {
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "partial_rotary_factor": 0.5,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "GraniteForCausalLM": MULTIPLIERS,
    "GraniteMoeForCausalLM": EXPERTS | MULTIPLIERS,
    "Starcoder2ForCausalLM": {"norm_epsilon": 1e-5},
    "NemotronHForCausalLM": {
        "layers_block_type": [
            "linear_attention",
            "mlp",
            "full_attention",
            "linear_attention",
        ],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 4,
        # Shorter than most samples.
        "chunk_size": 16,
        # transformers raises shorter time steps to this length, and vLLM does not.
        "time_step_min": 1e-9,
        "layer_norm_epsilon": 1e-5,
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        # Shorter than most samples.
        "mamba_chunk_size": 16,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "pad_token_id": None,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.4, 1.5, 0.6, 1.7, 0.8],
        "mlp_multipliers": [1.4, 0.5],
    },
    "Olmo2ForCausalLM": {"pad_token_id": None},
    # Shorter than most samples. Every other layer has full attention, without rotary
    # embeddings.
    "Exaone4ForCausalLM": {"sliding_window": 8, "sliding_window_pattern": 2},
    # Caps so low that they change scores and logits.
    "Gemma2ForCausalLM": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.5,
        "pad_token_id": None,
    },
    "Gemma3ForCausalLM": {
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 10,
        "pad_token_id": None,
    },
    # vLLM's window is one token longer. This one is never exceeded.
    "Cohere2ForCausalLM": {
        "sliding_window": 256,
        "sliding_window_pattern": 2,
        "logit_scale": 0.5,
        "pad_token_id": None,
        "rms_norm_eps": None,
    },
    # The published folders have this scaling, and no biases.
    "InternLM3ForCausalLM": {
        "qkv_bias": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 6.0,
        },
    },
    # The scaling that the published folders have.
    "HunYuanDenseV1ForCausalLM": {
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "alpha": 50.0,
        },
    },
    "Glm4MoeForCausalLM": GROUPED
    | {"attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True},
    "GptOssForCausalLM": EXPERTS
    | {
        # Shorter than most samples, so that the window has an effect.
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}


def make_tiny_folder(
    folder: str | Path,
    architecture: str = "Qwen2ForCausalLM",
    *,
    tie_embeddings: bool = False,
    shard_bytes: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a randomly initialized model: config.json, generation_config.json and safetensors.

    Every parameter is random, including biases and norms, so that a swapped or
    forgotten one shows.

    Args:
        architecture: one of those in `megaverl.sharding.model_spec`.
        tie_embeddings: share one weight between embedding and output layer.
        shard_bytes: split the weights into files of at most this size, with an index. None: one file.
        dtype: dtype of the stored weights.
        seed: seed of the weights.
        config: changes to `TINY`, under Hugging Face's names.
    """
    import torch
    import transformers

    settings = {
        **TINY,
        **TINY_MORE.get(architecture, {}),
        "tie_word_embeddings": tie_embeddings,
        **config,
    }
    if "kv_lora_rank" not in settings:
        # Qwen3's and Gemma's configurations have a fixed head size, which is too large
        # for a tiny model.
        settings.setdefault(
            "head_dim", settings["hidden_size"] // settings["num_attention_heads"]
        )
    limit: dict[str, Any] = (
        {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture in NOT_IN_TRANSFORMERS:
            tensors = _draw_by_table(folder, architecture, settings, dtype)
            _redraw(architecture, tensors.items())
            save_torch_state_dict(
                {name: x.to(getattr(torch, dtype)) for name, x in tensors.items()},
                str(folder),
                **limit,
            )
            return Path(folder)
        model_class = getattr(transformers, architecture)
        model = model_class(model_class.config_class(**settings))
        _redraw(architecture, (*model.named_parameters(), *model.named_buffers()))
    model.to(getattr(torch, dtype)).save_pretrained(str(folder), **limit)
    return Path(folder)


def _redraw(architecture: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Draw tensors again that a new model has zeros or ones in, or equal values."""
    # These models' norms multiply by weight + 1.
    stored_minus_one = ("Gemma", "NemotronFor", "Qwen3Next", "Qwen3_5")
    norms_at_zero = architecture.startswith(stored_minus_one)
    for name, tensor in tensors:
        if name.endswith(("mlp.gate.weight", ".router.weight")):
            # Some routers are initialized with zeros, where all experts score alike and
            # ties decide.
            tensor.data.normal_(0.0, 0.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.data.normal_(0.0, 0.1)
        elif architecture == "GptOssForCausalLM" and name.endswith(
            "experts.gate_up_proj"
        ):
            # Large enough that some gates reach the limit at which they are clamped.
            tensor.data.normal_(0.0, 0.5)
        elif name.endswith("A_log"):
            # Slow decay, so that tokens far back have an effect.
            tensor.data.normal_(-2.0, 0.5)
        elif name.endswith("linear_attn.norm.weight"):
            # Alone among these models' norms it multiplies by the weight itself.
            tensor.data.normal_(1.0, 0.1)
        elif name.endswith("proj_bias"):
            # Biases of all experts of a layer: random values, so that mixed-up experts
            # show.
            tensor.data.normal_(0.0, 0.1)
        elif tensor.dim() == 1 and not name.endswith("inv_freq"):
            is_norm = name.endswith(".weight")
            # Norms of vision towers multiply by the weight itself.
            at_zero = norms_at_zero and "visual." not in name
            centre = 1.0 if is_norm and not at_zero else 0.0
            tensor.data.normal_(centre, 0.1)


def _draw_by_table(
    folder: str | Path, architecture: str, settings: Mapping[str, Any], dtype: str
) -> dict[str, torch.Tensor]:
    """Write the config.json of a model that transformers has no class of, and draw the arrays of its table."""
    import torch
    import transformers

    from megaverl.sharding.own_configs import OWN_CONFIGS

    config = OWN_CONFIGS[architecture](
        architectures=[architecture], dtype=dtype, **settings
    )
    config.save_pretrained(str(folder))
    transformers.GenerationConfig.from_model_config(config).save_pretrained(str(folder))
    return {
        weight.name: torch.normal(0.0, config.initializer_range, weight.shape)
        for weight in weights_of(ModelSpec.from_folder(folder))
    }


SPECIAL = ("<unk>", "<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
OF_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = (
    "user",
    "assistant",
    "system",
    "which",
    "colour",
    "shape",
    "how",
    "many",
    "and",
    "is",
    "the",
)
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("square", "circle", "triangle", "cross")
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # vLLM's CPU attention has no kernel for 16.
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 3,
    "pad_token_id": 1,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "out_hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
}


class Family(NamedTuple):
    """A family of vision-language models.

    Attributes:
        name: beginning of the names of its classes.
        vision: further settings of its vision section.
        sections: how a head's rotated dimensions are divided among time, height and width.
        text: further settings of its text section.
        alternates: the dimensions of time, height and width take turns.
    """

    name: str
    vision: dict[str, Any]
    sections: list[int]
    text: dict[str, Any] = {}
    alternates: bool = False


# A gated delta net before attention, whose heads have a size for which vLLM's CPU build
# has kernels. A quarter of each of attention's heads is rotated.
NETS_OF_FAMILY = DELTA_NETS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
FAMILIES = {
    "qwen2_vl": Family(
        "Qwen2VL",
        {"embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        [4, 6, 6],
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        TOWER_SIZES | {"window_size": 56, "fullatt_block_indexes": [1]},
        [4, 6, 6],
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        TOWER_SIZES | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        [6, 5, 5],
        alternates=True,
    ),
    "qwen3_5": Family(
        "Qwen3_5",
        TOWER_SIZES | {"num_position_embeddings": 64},
        [2, 1, 1],
        NETS_OF_FAMILY,
        alternates=True,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        TOWER_SIZES | {"num_position_embeddings": 64},
        [2, 1, 1],
        NETS_OF_FAMILY | EXPERTS | {"shared_expert_intermediate_size": 48},
        alternates=True,
    ),
}


def make_tiny_vision_folder(
    folder: str | Path,
    family: str = "qwen2_vl",
    *,
    words: Sequence[str] = (*WORDS, *COLOURS, *SHAPES),
    pixels: tuple[int, int] = (56 * 56, 56 * 84),
    weights: bool = True,
    tie_embeddings: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **text: Any,
) -> Path:
    """Write config.json, safetensors, a tokenizer of whole words, and preprocessor_config.json.

    Args:
        family: one of `FAMILIES`.
        words: the tokenizer's vocabulary besides its special tokens.
        pixels: smallest and largest number of pixels of a resized image.
        weights: False writes no weights.
        tie_embeddings: share one weight between embedding and output layer.
        dtype: dtype of the stored weights.
        seed: seed of the weights.
        text: changes to `TEXT`.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    folder = Path(folder)
    ids = {word: number for number, word in enumerate((*SPECIAL, *OF_VISION, *words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=[*SPECIAL[4:], *OF_VISION],
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        min_pixels=pixels[0], max_pixels=pixels[1]
    ).save_pretrained(folder)
    described = FAMILIES[family]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "mrope_section": described.sections,
        "rope_theta": 10000.0,
    }
    # transformers assumes this entry; vLLM reads it from the file.
    if described.alternates:
        rope["mrope_interleaved"] = True
    text_config = {
        **TEXT,
        **described.text,
        "vocab_size": len(ids),
        "rope_parameters": rope,
        **text,
    }
    config = getattr(transformers, f"{described.name}Config")(
        text_config=text_config,
        vision_config=VISION | described.vision,
        tie_word_embeddings=tie_embeddings,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    config.architectures = [f"{described.name}ForConditionalGeneration"]
    if not weights:
        config.save_pretrained(folder)
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, config.architectures[0])(config)
        _redraw(config.architectures[0], model.named_parameters())
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
