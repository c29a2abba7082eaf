"""What a model is, read from a Hugging Face `config.json`: plain numbers, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaverl.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
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


@dataclass(frozen=True)
class ModelSpec:
    """The dimensions of a decoder-only transformer, in Hugging Face's meaning of each.

    `rope_scaling` is None for plain rotary embeddings, else the Hugging Face dictionary
    (`rope_type`, `factor`, ...).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json`.

        Raises:
            ModelError: no such file, not JSON, an unsupported architecture, or a missing key.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ModelError(
                f"{path}: not found. `model.path` must name a Hugging Face folder with config.json, "
                "safetensors weights and a tokenizer."
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not valid JSON ({error}). {AGAIN}") from error
        return cls.from_config(config, source=str(path))

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str = "config.json") -> ModelSpec:
        """Build the spec from the dictionary of a Hugging Face `config.json`.

        Raises:
            ModelError: as `from_folder`; also for what would be computed otherwise than its author meant.
        """
        if not isinstance(config, dict):
            raise ModelError(f"{source}: expected a JSON object, found {type(config).__name__}. {AGAIN}")
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{source}: architecture {architecture!r} is not supported. Supported: {', '.join(ARCHITECTURES)}."
            )
        problem = _problem(config)
        if problem:
            raise ModelError(f"{source}: {problem}")
        return cls(**_read(architecture, config))


def _problem(config: dict[str, Any]) -> str:
    """What keeps this config.json from being read, or from meaning what it says here; empty if nothing does."""
    for key in (*WHOLE_NUMBERS, "rms_norm_eps"):
        if key not in config:
            return f"the key {key!r} is missing. {AGAIN}"
    for key in (*WHOLE_NUMBERS, *(key for key in OPTIONAL_NUMBERS if config.get(key) is not None)):
        if type(config[key]) is not int or config[key] < 1:
            return f"{key} is {config[key]!r}; expected a whole number above 0. {AGAIN}"
    if type(config["rms_norm_eps"]) not in (int, float) or not config["rms_norm_eps"] > 0:
        return f"rms_norm_eps is {config['rms_norm_eps']!r}; expected a number above 0. {AGAIN}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {config['hidden_act']!r}; only silu is computed. Use another model."
    windows = config.get("use_sliding_window") and config.get("sliding_window")
    if windows and config["num_hidden_layers"] > config.get("max_window_layers", 28):
        return (
            f"use_sliding_window with a window of {config['sliding_window']} tokens; only full attention is "
            "computed. Use another model, or set use_sliding_window to false and train with full attention."
        )
    return ""


def _read(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    # transformers 5 writes `rope_parameters`; older files hold `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    return {
        "architecture": architecture,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "vocab_size": config["vocab_size"],
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope_scaling": None if rope_type == "default" else dict(rope),
        "max_positions": config["max_position_embeddings"],
    }
