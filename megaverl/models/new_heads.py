"""Untrained heads of speculative decoders for a target model, and the target's layers beside an MTP head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from megaverl.errors import ModelError
from megaverl.models.draft_head import HEADS
from megaverl.sharding.draft_head import (
    ARCHITECTURES,
    AUX_LAYERS,
    EAGLE3,
    MTP,
    MTP_ARCHITECTURE,
    NUM_MTP_LAYERS,
    HeadSpec,
    Method,
    default_aux_layers,
    why_no_mtp,
)
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.safetensors_writer import cannot_write
from megaverl.weights.stored import read_weight_map

EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Beside model.safetensors, which alone is read to train a head.
TARGET_FILE = "target.safetensors"


def make_draft_head(
    folder: str | Path,
    target: str | Path,
    *,
    method: Method = EAGLE3,
    seed: int = 0,
    intermediate_size: int | None = None,
) -> Path:
    """Write an untrained head for a target model: config.json and safetensors.

    The output layer is the target's, and all other weights are random. The head has the
    target's heads and rotary embeddings.

    Args:
        folder: must not contain a model yet.
        target: Hugging Face folder of the target.
        method: kind of the head, by vLLM's name.
        seed: seed of the weights.
        intermediate_size: of the MLP. None: the target's.

    Raises:
        ModelError: the target has no folder with weights, is of another kind than Llama, scales its embeddings, or
            cannot have an MTP head; `folder` exists; `intermediate_size` is below 1, or given for an MTP head.
        CheckpointError: `folder` cannot be written.
    """
    folder, target = Path(folder), Path(target)
    if intermediate_size is not None and intermediate_size < 1:
        raise ModelError(
            f"intermediate_size={intermediate_size}: a head's MLP has a width of 1 or more."
        )
    if intermediate_size is not None and method == MTP:
        raise ModelError(
            f"intermediate_size={intermediate_size}: vLLM gives an MTP head the target's MLP. Leave it out."
        )
    if (folder / "config.json").exists():
        raise ModelError(f"{folder}: there is a model already. Name a new folder.")
    config = _config_for(target, method, intermediate_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = HEADS[method](config)
    output = _target_layer(target, OUTPUT, EMBEDDINGS)
    expected = (config.vocab_size, config.hidden_size)
    if output.shape != expected:
        raise ModelError(
            f"{target}: its output layer has the shape {tuple(output.shape)}, and config.json describes "
            f"{expected}. Use the config.json that belongs to the weights."
        )
    if (own := head.get_output_embeddings()) is not None:
        with torch.no_grad():
            own.weight.copy_(output)
    try:
        head.to(output.dtype).save_pretrained(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    copy_target_layers(folder, target)
    return folder


def copy_target_layers(folder: str | Path, target: str | Path) -> None:
    """Write the target's embeddings and output layer beside an MTP head. Other heads need none.

    vLLM expects both in the head's folder, and replaces them by the target's once it has
    read them (0.32).

    Args:
        folder: folder of a head.
        target: Hugging Face folder of the target.

    Raises:
        ModelError: the target's folder has no such weights.
        CheckpointError: `folder` cannot be written.
    """
    if HeadSpec.from_folder(folder).method != MTP:
        return
    layers = {
        EMBEDDINGS: _target_layer(Path(target), EMBEDDINGS),
        OUTPUT: _target_layer(Path(target), OUTPUT, EMBEDDINGS),
    }
    try:
        save_file(layers, Path(folder) / TARGET_FILE, metadata={"format": "pt"})
    except OSError as error:
        raise cannot_write(Path(folder), error) from error


def _config_for(
    target: Path, method: Method, intermediate_size: int | None
) -> LlamaConfig:
    """Return the configuration of a head for a target."""
    spec = ModelSpec.outline(target)
    if spec.embedding_scale != 1.0:
        raise ModelError(
            f"{target}: {spec.architecture} scales its embeddings, which vLLM's heads read unscaled. Train a draft "
            "model instead."
        )
    if method == MTP and (reason := why_no_mtp(spec)):
        raise ModelError(f"{target}: {reason}. Make an EAGLE-3 head instead.")
    try:
        of_target = AutoConfig.from_pretrained(str(target)).get_text_config()
        sizes = {
            name: getattr(of_target, name)
            for name in (
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
                "rms_norm_eps",
                "max_position_embeddings",
                "rope_parameters",
            )
        }
        intermediate_size = intermediate_size or of_target.intermediate_size
        num_layers = int(of_target.num_hidden_layers)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{target}: a head needs a target of Llama's kind in a Hugging Face folder ({error}). Train a "
            "draft model instead."
        ) from error
    of_method: dict[str, Any] = {NUM_MTP_LAYERS: 1}
    if method == EAGLE3:
        layers = list(default_aux_layers(num_layers))
        of_method = {"draft_vocab_size": sizes["vocab_size"], AUX_LAYERS: layers}
    config = LlamaConfig(
        **sizes,
        head_dim=getattr(of_target, "head_dim", None)
        or sizes["hidden_size"] // sizes["num_attention_heads"],
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        hidden_act="silu",
        tie_word_embeddings=False,
        bos_token_id=of_target.bos_token_id,
        eos_token_id=of_target.eos_token_id,
        pad_token_id=of_target.pad_token_id,
        **of_method,
    )
    config.architectures = [MTP_ARCHITECTURE if method == MTP else ARCHITECTURES[0]]
    return config


def _target_layer(target: Path, *names: str) -> torch.Tensor:
    """Return the first of these weights that the target has."""
    index = target / "model.safetensors.index.json"
    files = (
        read_weight_map(index)
        if index.is_file()
        else dict.fromkeys(names, "model.safetensors")
    )
    for name in names:
        file = target / files.get(name, "")
        if not file.is_file():
            continue
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  # not a dictionary
                weight: torch.Tensor = tensors.get_tensor(name)
                return weight
    raise ModelError(
        f"{target}: {' or '.join(names)} is not in its safetensors files. Name a folder with the whole model."
    )
