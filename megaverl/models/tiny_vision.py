"""Tiny random vision-language models in Hugging Face folders, with tokenizer and image processor, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
OF_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = ("user", "assistant", "system", "which", "colour", "shape", "how", "many", "and", "is", "the")
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("square", "circle", "triangle", "cross")
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's CPU attention has no kernel for 16
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 3,
    "pad_token_id": 1,
}
VISION: dict[str, Any] = {"depth": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
# Of each family: the class of its model, what its sections have besides, and how a head's dimensions share a position.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "qwen2_vl": ("Qwen2VL", {"embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}, [4, 6, 6]),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
        | {"window_size": 56, "fullatt_block_indexes": [1]},
        [4, 6, 6],
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        [6, 5, 5],
    ),
}


def make_tiny_vision_folder(
    folder: str | Path,
    family: str = "qwen2_vl",
    *,
    words: Sequence[str] = (*WORDS, *COLOURS, *SHAPES),
    pixels: tuple[int, int] = (56 * 56, 56 * 84),
    weights: bool = True,
    seed: int = 0,
    **text: Any,
) -> Path:
    """Write config.json, safetensors, a tokenizer of whole words, and preprocessor_config.json.

    Args:
        family: of `FAMILIES`.
        words: all that the tokenizer knows besides its special tokens.
        pixels: least and most of an image, after it was resized.
        weights: False: none are written.
        text: changes to `TEXT`.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = Path(folder)
    ids = {word: number for number, word in enumerate((*SPECIAL, *OF_VISION, *words))}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=[*SPECIAL[4:], *OF_VISION],
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=pixels[0], max_pixels=pixels[1]).save_pretrained(folder)
    name, vision, sections = FAMILIES[family]
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    if family == "qwen3_vl":  # transformers takes it for granted, vLLM reads it
        rope["mrope_interleaved"] = True
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, "vocab_size": len(ids), "rope_parameters": rope, **text},
        vision_config=VISION | vision,
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    config.architectures = [f"{name}ForConditionalGeneration"]
    if not weights:
        config.save_pretrained(folder)
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, config.architectures[0])(config)
        for parameter_name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.data.normal_(float(parameter_name.endswith("weight")), 0.1)
    model.save_pretrained(folder)
    return folder
