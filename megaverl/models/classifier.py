"""Folders of reward models and critics: to Hugging Face a classifier with one label, on a language model's backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaverl.errors import ModelError
from megaverl.sharding.model_spec import ModelSpec

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def read_model(folder: Path) -> tuple[dict[str, Any], ModelSpec, bool]:
    """config.json, what it describes, and whether that has a value head (`...ForSequenceClassification`).

    Raises:
        ModelError: as `ModelSpec.from_folder`; a classifier with several labels.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        ModelSpec.from_folder(folder)  # says what is wrong with it
        raise ModelError(f"{path}: names no architecture.") from None
    if not architecture.endswith(CLASSIFIER):
        return config, ModelSpec.from_folder(folder), False
    labels = config.get("num_labels", len(config.get("id2label") or {"0": "", "1": ""}))
    if labels != 1:
        raise ModelError(f"{path}: a classifier with {labels} labels; only a reward or value head (one) is known here.")
    described = {**config, "architectures": [architecture.removesuffix(CLASSIFIER) + CAUSAL]}
    return config, ModelSpec.from_config(described, source=str(path)), True


def classifier_config(config: dict[str, Any], *, pad_token_id: int | None) -> dict[str, Any]:
    """config.json of a classifier with one label on the same backbone; by `pad_token_id` it finds a text's end."""
    name = str(config["architectures"][0]).removesuffix(CAUSAL).removesuffix(CLASSIFIER)
    changed = {
        **config,
        "architectures": [f"{name}{CLASSIFIER}"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": False,
    }
    return changed if pad_token_id is None else {**changed, "pad_token_id": pad_token_id}
