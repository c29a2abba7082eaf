"""Read config.json of a model's folder, and write that of a classifier. No weights are read.

Reward models and critics are stored as Hugging Face classifiers with one label on a
language model's backbone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaverl.errors import ModelError
from megaverl.outside import read_json_file
from megaverl.sharding.model_spec import ModelSpec

CAUSAL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"


def read_model(folder: Path) -> tuple[dict[str, Any], ModelSpec, bool]:
    """Read a folder's config.json. Returns it, the model it describes, and whether that has a value head.

    Raises:
        ModelError: as `ModelSpec.from_folder`, or a classifier has several labels.
    """
    path = folder / "config.json"
    try:
        config = read_json_file(path)
        architecture = str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        # Raises the error that says what is wrong with the folder.
        ModelSpec.from_folder(folder)
        raise ModelError(f"{path}: names no architecture.") from None
    if not architecture.endswith(CLASSIFIER):
        return config, ModelSpec.from_folder(folder), False
    labels = config.get("num_labels", len(config.get("id2label") or {"0": "", "1": ""}))
    if labels != 1:
        raise ModelError(
            f"{path}: a classifier with {labels} labels; only a reward or value head (one) is known here."
        )
    described = {
        **config,
        "architectures": [architecture.removesuffix(CLASSIFIER) + CAUSAL],
    }
    return config, ModelSpec.from_config(described, source=str(path)), True


def classifier_config(
    config: dict[str, Any], *, pad_token_id: int | None
) -> dict[str, Any]:
    """Return config.json of a classifier with one label on the same backbone.

    Args:
        config: config.json of a language model or a classifier.
        pad_token_id: token by which transformers finds the end of a text. None: leave it as it is.

    Raises:
        ModelError: the model takes images, and megaverl writes no such classifier.
    """
    if config.get("vision_config") is not None:
        raise ModelError(
            f"{config['architectures'][0]} with a value head: megaverl writes no classifier that takes images. "
            "Keep the checkpoint, which megaverl can resume."
        )
    name = str(config["architectures"][0]).removesuffix(CAUSAL).removesuffix(CLASSIFIER)
    changed = {
        **config,
        "architectures": [f"{name}{CLASSIFIER}"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": False,
    }
    return (
        changed if pad_token_id is None else {**changed, "pad_token_id": pad_token_id}
    )
