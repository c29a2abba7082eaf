"""Reference models: transformers' classes, and the same mathematics for architectures that it has no class of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from megaverl.sharding.own_configs import OWN_CONFIGS


class InternLM3Reference(transformers.LlamaForCausalLM):
    """Llama, with biases on queries, keys and values but not on the output projection."""

    config_class = OWN_CONFIGS["InternLM3ForCausalLM"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers if config.qkv_bias else ():
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                matrix = getattr(attention, name)
                biased = nn.Linear(matrix.in_features, matrix.out_features)
                setattr(attention, name, biased)
        self.post_init()


class MiMoReference(transformers.Qwen2ForCausalLM):
    """Qwen2."""

    config_class = OWN_CONFIGS["MiMoForCausalLM"]


REFERENCES: dict[str, Any] = {
    "InternLM3ForCausalLM": InternLM3Reference,
    "MiMoForCausalLM": MiMoReference,
}


def model_class_of(architecture: str) -> Any:
    """The class that computes an architecture: transformers', or one of the references above."""
    return REFERENCES.get(architecture) or getattr(transformers, architecture)


def load_reference(folder: str | Path, **options: Any) -> Any:
    """The model of a folder, as `AutoModelForCausalLM.from_pretrained` would give it."""
    config = json.loads((Path(folder) / "config.json").read_text())
    kind = REFERENCES.get(config["architectures"][0], transformers.AutoModelForCausalLM)
    return kind.from_pretrained(str(folder), **options)
