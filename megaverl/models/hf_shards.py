"""Any Hugging Face causal language model without its data: what its folder holds, where that lies in a module, and
where its weights lie when FSDP2, and tensor parallelism before it, have cut the module."""

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
from megaverl.models.vision import VisionReader, auto_class_of
from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.layout import Layout, join_layouts, shard_box, whole_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.tracing import weights_of_module
from megaverl.sharding.weight import Split, Weight
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


TRUST = "If you trust the Python files that come with the model, set model.trust_remote_code=true."


def module_without_data(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a folder's config.json, on the meta device: its attention layers and weights have
    shapes and no elements.

    Raises:
        ModelError: transformers knows no such model, or cannot build it so.
    """
    from transformers import AutoConfig

    with user_code(lambda error: not_built(folder, error)):  # a model's own code may raise anything
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = auto_class_of(config).from_config(config, trust_remote_code=trust_remote_code)
    return model


def not_built(folder: str | Path, error: BaseException, *, in_forward: bool = False) -> ModelError:
    """What to say where transformers, or code that a folder brings along, does not build a model; or builds one whose
    forward pass does not run."""
    what = (
        "builds the model, but its forward pass does not run"
        if in_forward
        else "does not build a causal language model of it"
    )
    reason = str(error) if isinstance(error, Exception) else f"its code raised {describe(error)}"
    said = f"{folder}: transformers {what}: {reason}"
    if "trust_remote_code=True" in reason:
        said += f" {TRUST}"
    if isinstance(error, AttributeError | TypeError | NameError | AssertionError):
        said += (
            f" ({type(error).__name__}). Where its code comes with its folder, it was written for another version of "
            f"transformers than {version('transformers')}."
        )
    return ModelError(said)


VALUE_HEAD = "score"
VALUE_WEIGHT = f"{VALUE_HEAD}.weight"  # as `...ForSequenceClassification` calls it
LAYER_NUMBER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class ShardedWeights:
    """The global arrays of a module, and what each rank holds of them, under the module's own names.

    Attributes:
        renamed: name in the module -> in the files, of tensors that are the same in both.
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
    """Of a module that is still whole, with or without data; with a value head in the place of its output layer, or
    beside it.

    Rank r holds shard r modulo `num_shards` of every parameter, and saved buffers whole. Under `cuts` it holds that of
    what tensor-parallel rank r modulo their size has, and ranks with the same shard are so many neighbours.

    Raises:
        ModelError: as `weights_of_module`.
    """
    described = weights_of_module(model)
    full = described.layout
    absent = set() if beside_logits or not value_head else _of_output_layer_alone(model)
    full = full.shard({name: whole(shape) for name, shape in full.local_shapes.items() if name not in absent})
    if value_head:
        shape = (int(value_head), model.config.get_text_config().hidden_size)
        full = join_layouts(full, whole_layout([(VALUE_WEIGHT, shape)]))
    sharded = {name for name, _ in model.named_parameters(remove_duplicate=False)} | {VALUE_WEIGHT}
    parts = cuts or TensorCuts()

    @cache
    def of_shard(index: int, tp_rank: int) -> Layout:
        boxes = {
            name: shard_box(parts.box(name, shape, tp_rank), index, num_shards) if name in sharded else whole(shape)
            for name, shape in full.local_shapes.items()
        }
        return full.shard(boxes)

    weights = _weights(full.global_shapes, spec, value_head=int(value_head), beside_logits=beside_logits)

    def layout_of(rank: int) -> Layout:
        return of_shard(rank // parts.size % num_shards, rank % parts.size)

    return ShardedWeights(weights, layout_of, described.renamed)


def _of_output_layer_alone(model: PreTrainedModel) -> set[str]:
    """Names of parameters that no other layer has."""
    head = model.get_output_embeddings()
    others = {id(p) for module in model.modules() if module is not head for p in module.parameters(recurse=False)}
    own = {id(parameter) for parameter in head.parameters()} - others
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _weights(
    shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, *, value_head: int, beside_logits: bool
) -> list[Weight]:
    """The global arrays of a module; of an architecture with a table as that describes them."""
    known: dict[str, Weight] = {}
    if spec.is_tabled:
        with suppress(ModelError):  # a variant that the table has not, as with biases that Megatron's model lacks
            described = weights_of(spec, value_head=value_head, beside_logits=beside_logits)
            known = {weight.name: weight for weight in described}
    return [
        known[name] if name in known and known[name].shape == tuple(shape) else _described(name, tuple(shape))
        for name, shape in shapes.items()
    ]


def _described(name: str, shape: tuple[int, ...]) -> Weight:
    found = LAYER_NUMBER.search(f".{name}")
    return Weight(name, shape, Split.REPLICATED, int(found.group(1)) if found else "first", "", None)


# transformers' styles of linear layers (5.19, `distributed/tensor_parallel.py`) -> the axis of a weight that is cut.
AXES = {"colwise": 0, "rowwise": 1}
# Norms of each head: whole on every rank, which has the gradient of its own heads.
PARTIAL = "replicated_with_grad_allreduce"
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class TensorCuts:
    """What tensor-parallel ranks hold of a module's parameters; those that are named nowhere are whole on each.

    Embeddings and output layer are: transformers would cut them, tied ones into two parameters, and gather all logits.

    Attributes:
        size: ranks.
        plan: transformers' own, as far as it is followed.
        axes: parameter -> the axis that is cut, in even parts.
        partial: parameters whose gradients are to be added up over the ranks.
    """

    size: int = 1
    plan: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    def box(self, name: str, shape: tuple[int, ...], rank: int) -> Box:
        """What one of the ranks holds of a parameter."""
        if (axis := self.axes.get(name)) is None:
            return whole(shape)
        part = shape[axis] // self.size
        return cut(shape, axis, rank * part, (rank + 1) * part)


def tensor_cuts(model: PreTrainedModel, size: int, role: str) -> TensorCuts:
    """By transformers' plan for the model, with or without data.

    Raises:
        ConfigError: there is none, it is of other layers than linear ones, or `size` does not divide them.
    """
    if size == 1:
        return TensorCuts()
    name, key = type(model).__name__, f"{role}.tp={size}"
    inner = {part: style for part, style in (getattr(model, "tp_plan", None) or {}).items() if ".*." in part}
    other = sorted({style for style in inner.values() if style not in (*AXES, PARTIAL)})
    if not inner or other or VisionReader.of(model.config) is not None:
        why = f"has parts that are not tried here ({', '.join(other)})" if other else "is of no use here"
        raise ConfigError(f"{key}: transformers' tensor-parallel plan for {name} {why}. Set {role}.tp=1.")
    config = model.config.get_text_config()
    for heads in HEADS:
        if (count := getattr(config, heads, None)) and count % size:
            raise ConfigError(f"{key}: it does not divide the model's {count} {heads}. Choose one that does.")
    axes, partial = {}, set()
    for parameter, tensor in model.named_parameters():
        layer, _, kind = re.sub(r"\.\d+\.", ".*.", parameter).rpartition(".")
        style = inner.get(layer)
        if style == PARTIAL:
            partial.add(parameter)
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


def cut_over_tensor_ranks(model: PreTrainedModel, cuts: TensorCuts, mesh: DeviceMesh) -> None:
    """Cut a module that is whole, in place; every rank keeps its own part of what it has."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if cuts.size > 1:
        apply_tensor_parallelism(model, mesh, dict(cuts.plan))
