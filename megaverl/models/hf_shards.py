"""Any Hugging Face causal language model without its data: what its folder holds and which part each rank holds.

Parts come from FSDP2, and from tensor parallelism applied before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.errors import ConfigError, ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.architectures.table import TOWER
from megaverl.models.vision import VisionReader, auto_class_of
from megaverl.outside import read_json_file
from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.layout import Layout, join_layouts, shard_box, whole_layout
from megaverl.sharding.model_spec import ModelSpec, why_not_in_transformers
from megaverl.sharding.tracing import weights_of_module
from megaverl.sharding.transformers_config import is_model_type
from megaverl.sharding.weight import Split, Weight
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


TRUST = "If you trust the Python files that come with the model, set model.trust_remote_code=true."


def module_without_data(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the model of a folder's config.json on the meta device: parameters have shapes and no elements.

    Raises:
        ModelError: transformers does not know the model, or cannot build it on the meta device.
    """
    from transformers import AutoConfig

    # Code that comes with a model may raise anything.
    with user_code(lambda error: not_built(folder, error), keep=ModelError):
        check_in_transformers(folder, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            model: PreTrainedModel = auto_class_of(config).from_config(
                config, trust_remote_code=trust_remote_code
            )
    return model


def check_in_transformers(folder: str | Path, *, trust_remote_code: bool) -> None:
    """Refuse a model that transformers builds only with code of the model's folder, which may not run.

    Args:
        folder: the model's folder, or its config.json.

    Raises:
        ModelError: names the keys that use transformers, and what to set instead.
    """
    path = Path(folder)
    file = path / "config.json" if path.is_dir() else path
    if trust_remote_code or not file.is_file():
        return
    config = read_json_file(file)
    # A head for multi-token prediction is a MiMoForCausalLM to vLLM, and a Llama to
    # transformers.
    if is_model_type(config.get("model_type")):
        return
    if reason := why_not_in_transformers((config.get("architectures") or [""])[0]):
        raise ModelError(f"{folder}: {reason}")


def not_built(
    folder: str | Path, error: BaseException, *, in_forward: bool = False
) -> ModelError:
    """Return the error for a model that transformers, or code in its folder, cannot build.

    Args:
        in_forward: the model was built, and its forward pass failed.
    """
    failure = (
        "builds the model, but its forward pass does not run"
        if in_forward
        else "does not build a causal language model of it"
    )
    reason = (
        str(error)
        if isinstance(error, Exception)
        else f"its code raised {describe(error)}"
    )
    message = f"{folder}: transformers {failure}: {reason}"
    if "trust_remote_code=True" in reason:
        message += f" {TRUST}"
    if isinstance(error, AttributeError | TypeError | NameError | AssertionError):
        message += (
            f" ({type(error).__name__}). Where its code comes with its folder, it was written for another version of "
            f"transformers than {version('transformers')}."
        )
    return ModelError(message)


VALUE_HEAD = "score"
# Name of the weight in transformers' `...ForSequenceClassification`.
VALUE_WEIGHT = f"{VALUE_HEAD}.weight"
LAYER_NUMBER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class ShardedWeights:
    """Global arrays of a module, and what each rank holds of them, under the module's own names.

    Attributes:
        weights: the global arrays.
        layout_of: rank -> what it holds.
        renamed: name in the module -> name in the files, for tensors that are equal in both.
    """

    weights: list[Weight]
    layout_of: Callable[[int], Layout]
    renamed: dict[str, str]


def sharded_weights(
    model: PreTrainedModel,
    spec: ModelSpec,
    num_shards: int,
    *,
    value_head: int = 0,
    beside_logits: bool = False,
    cuts: TensorCuts | None = None,
) -> ShardedWeights:
    """Return the weights of an unsharded module and their shards. The module may be on the meta device.

    Rank r holds shard r modulo `num_shards` of every parameter, and whole copies of
    saved buffers. With `cuts`, that applies to the part of tensor-parallel rank r
    modulo their size, and as many adjacent ranks have the same shard.

    Args:
        value_head: number of values per position. Above 0, a value head replaces the output layer.
        beside_logits: keep the output layer beside the value head.

    Raises:
        ModelError: as `weights_of_module`.
    """
    described = weights_of_module(model)
    full = described.layout
    # A critic has no logits, so its output layer is left out unless it is the embedding
    # as well.
    absent = (
        set() if beside_logits or not value_head else _output_layer_parameters(model)
    )
    # A layout of whole tensors, without the output layer that a critic does not have.
    full = full.shard(
        {
            name: whole(shape)
            for name, shape in full.local_shapes.items()
            if name not in absent
        }
    )
    if value_head:
        shape = (int(value_head), model.config.get_text_config().hidden_size)
        full = join_layouts(full, whole_layout([(VALUE_WEIGHT, shape)]))
    # FSDP2 splits parameters only. Buffers are whole on every rank.
    sharded = {name for name, _ in model.named_parameters(remove_duplicate=False)} | {
        VALUE_WEIGHT
    }
    parts = cuts or TensorCuts()

    @cache
    # Ranks with the same shard share one layout object, which keeps plans small.
    def layout_of_shard(index: int, tp_rank: int) -> Layout:
        # Tensor parallelism splits first, and FSDP splits the part that remains.
        boxes = {
            name: shard_box(parts.box(name, shape, tp_rank), index, num_shards)
            if name in sharded
            else whole(shape)
            for name, shape in full.local_shapes.items()
        }
        return full.shard(boxes)

    weights = _weights(
        full.global_shapes,
        spec,
        value_head=int(value_head),
        beside_logits=beside_logits,
    )

    def layout_of(rank: int) -> Layout:
        # Tensor-parallel ranks are neighbours, and replicas follow each other.
        return layout_of_shard(rank // parts.size % num_shards, rank % parts.size)

    return ShardedWeights(weights, layout_of, described.renamed)


def _output_layer_parameters(model: PreTrainedModel) -> set[str]:
    """Return names of parameters that belong to the output layer and no other module."""
    head = model.get_output_embeddings()
    # By identity, because tied parameters belong to several modules.
    used_elsewhere = {
        id(parameter)
        for module in model.modules()
        if module is not head
        for parameter in module.parameters(recurse=False)
    }
    head_only = {id(parameter) for parameter in head.parameters()} - used_elsewhere
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in head_only
    }


def _weights(
    shapes: Mapping[str, tuple[int, ...]],
    spec: ModelSpec,
    *,
    value_head: int,
    beside_logits: bool,
) -> list[Weight]:
    """Return the global arrays of a module. If the architecture has a table, they are described as in the table."""
    known: dict[str, Weight] = {}
    if spec.is_tabled:
        # The table lacks some variants, such as biases that Megatron's model cannot
        # have.
        with suppress(ModelError):
            described = weights_of(
                spec, value_head=value_head, beside_logits=beside_logits
            )
            # A tower's weights are described by their names, as in models without a
            # table: adapters are of the layers that a name has a number of.
            known = {
                weight.name: weight
                for weight in described
                if not weight.megatron.startswith(TOWER)
            }
    return [
        # A table describes a weight only if its shape is the same: the folder decides.
        known[name]
        if name in known and known[name].shape == tuple(shape)
        else _described(name, tuple(shape))
        for name, shape in shapes.items()
    ]


def _described(name: str, shape: tuple[int, ...]) -> Weight:
    """Return a replicated weight, without a table. Its name contains the layer."""
    layer = LAYER_NUMBER.search(f".{name}")
    return Weight(
        name,
        shape,
        Split.REPLICATED,
        int(layer.group(1)) if layer else "first",
        "",
        None,
    )


# transformers' styles of linear layers (5.19, `distributed/tensor_parallel.py`) -> axis
# of the weight that is split.
AXES = {"colwise": 0, "rowwise": 1}
# Norms of each head: every rank holds the whole weight and the gradient of its own
# heads only.
PARTIAL = "replicated_with_grad_allreduce"
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class TensorCuts:
    """Split of a module's parameters over tensor-parallel ranks. Parameters that are not named are whole on every rank.

    Embeddings and output layer are whole as well. transformers would split tied ones
    into two parameters, and gather all logits.

    Attributes:
        size: number of ranks.
        plan: the part of transformers' own plan that is followed.
        axes: parameter -> axis that is split evenly.
        partial: parameters whose gradients must be summed over the ranks.
    """

    size: int = 1
    plan: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    def box(self, name: str, shape: tuple[int, ...], rank: int) -> Box:
        """Return the box of a parameter that tensor-parallel rank `rank` holds."""
        if (axis := self.axes.get(name)) is None:
            return whole(shape)
        part = shape[axis] // self.size
        return cut(shape, axis, rank * part, (rank + 1) * part)


def tensor_cuts(model: PreTrainedModel, size: int, role: str) -> TensorCuts:
    """Return the split by transformers' tensor-parallel plan for the model, which may be on the meta device.

    Raises:
        ConfigError: there is no plan, it covers other layers than linear ones, or `size` does not divide them.
    """
    if size == 1:
        return TensorCuts()
    if getattr(model, "is_whole_on_tensor_ranks", False):
        return TensorCuts(size)
    name = type(model).__name__
    key = f"{role}.tp={size}"
    # Only entries of decoder layers are followed. Embeddings and the output layer stay
    # whole on every rank.
    inner = {
        part: style
        for part, style in (getattr(model, "tp_plan", None) or {}).items()
        if ".*." in part
    }
    unknown_styles = sorted(
        {style for style in inner.values() if style not in (*AXES, PARTIAL)}
    )
    if not inner or unknown_styles or VisionReader.of(model.config) is not None:
        reason = (
            f"has parts that are not tried here ({', '.join(unknown_styles)})"
            if unknown_styles
            else "is of no use here"
        )
        raise ConfigError(
            f"{key}: transformers' tensor-parallel plan for {name} {reason}. Set {role}.tp=1."
        )
    config = model.config.get_text_config()
    # transformers would cut a head in two without a word.
    for heads in HEADS:
        if (count := getattr(config, heads, None)) and count % size:
            raise ConfigError(
                f"{key}: it does not divide the model's {count} {heads}. Choose one that does."
            )
    axes = {}
    partial = set()
    for parameter, tensor in model.named_parameters():
        layer, _, kind = re.sub(r"\.\d+\.", ".*.", parameter).rpartition(".")
        style = inner.get(layer)
        if style == PARTIAL:
            partial.add(parameter)
        # A row-wise layer's bias is added once, after the sum over ranks, so it stays
        # whole.
        elif style == "colwise" or (style == "rowwise" and kind == "weight"):
            axis = AXES[style] if tensor.ndim > 1 else 0
            if tensor.shape[axis] % size:
                raise ConfigError(
                    f"{key}: it does not divide axis {axis} of {parameter}, which has {tensor.shape[axis]}. Choose one "
                    "that does."
                )
            axes[parameter] = axis
    plan = {part: style for part, style in inner.items() if style in AXES}
    return TensorCuts(size, plan, axes, frozenset(partial))


def cut_over_tensor_ranks(
    model: PreTrainedModel, cuts: TensorCuts, mesh: DeviceMesh
) -> None:
    """Split a whole module in place. Every rank keeps its own part of the data that it has."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if cuts.plan:
        apply_tensor_parallelism(model, mesh, dict(cuts.plan))
