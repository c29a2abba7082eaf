"""Tiny random models in Hugging Face folders, made on the spot: for tests and the quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Write a randomly initialised model: config.json, generation_config.json and safetensors.

    Every parameter is random, biases and norms too, so that a swapped or forgotten one shows.

    Args:
        architecture: one of `megaverl.models.spec.ARCHITECTURES`.
        shard_bytes: split the weights into files of at most this size, with an index; None: one file.
        config: changes to `TINY`, under Hugging Face's names.
    """
    import torch
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    settings = {**TINY, "tie_word_embeddings": tie_embeddings, **config}
    # Qwen3's configuration has a head size of its own, far from that of a tiny model
    settings.setdefault("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config_class(**settings))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.data.normal_(centre, 0.1)
    limit = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(str(folder), **limit)
    return Path(folder)
