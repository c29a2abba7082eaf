"""Where a Hugging Face model's weights lie when FSDP2 has cut its module over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from megaverl.models.architectures import LAYERS, weights_of
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import Layout, join_layouts, whole_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.module_weights import weights_of_module
from megaverl.sharding.weight import Split, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    model: PreTrainedModel, spec: ModelSpec, num_shards: int, *, value_head: int = 0, beside_logits: bool = False
) -> ShardedWeights:
    """Of a module that is still whole, with or without data; with a value head in the place of its output layer, or
    beside it.

    Rank r holds shard r modulo `num_shards` of every parameter, and saved buffers whole.

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
    cut = {name for name, _ in model.named_parameters(remove_duplicate=False)} | {VALUE_WEIGHT}

    @cache
    def of_shard(index: int) -> Layout:
        boxes = {
            name: shard_box(shape, index, num_shards) if name in cut else whole(shape)
            for name, shape in full.local_shapes.items()
        }
        return full.shard({name: box for name, box in boxes.items() if box.numel})

    weights = _weights(full.global_shapes, spec, value_head=int(value_head), beside_logits=beside_logits)
    return ShardedWeights(weights, lambda rank: of_shard(rank % num_shards), described.renamed)


def _of_output_layer_alone(model: PreTrainedModel) -> set[str]:
    """Names of parameters that no other layer has."""
    head = model.get_output_embeddings()
    others = {id(p) for module in model.modules() if module is not head for p in module.parameters(recurse=False)}
    own = {id(parameter) for parameter in head.parameters()} - others
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def shard_box(shape: Sequence[int], index: int, count: int) -> Box:
    """What the shard `index` of `count` holds: rows of even chunks, the last of which may be shorter or empty.

    Rule (torch 2.13, `_fsdp_param.py` and `_fsdp_common.py`): that of `torch.chunk` along the first axis.
    """
    chunk = -(-shape[0] // count)
    low, high = min(index * chunk, shape[0]), min((index + 1) * chunk, shape[0])
    full = whole(tuple(shape))
    return Box((low, *full.start[1:]), (high, *full.stop[1:]))


def _weights(
    shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, *, value_head: int, beside_logits: bool
) -> list[Weight]:
    """The global arrays of a module; of an architecture with a table as that describes them."""
    known: dict[str, Weight] = {}
    if spec.architecture in LAYERS:
        described = weights_of(spec, value_head=value_head, beside_logits=beside_logits)
        known = {weight.name: weight for weight in described}
    return [
        known[name] if name in known and known[name].shape == tuple(shape) else _described(name, tuple(shape))
        for name, shape in shapes.items()
    ]


def _described(name: str, shape: tuple[int, ...]) -> Weight:
    found = LAYER_NUMBER.search(f".{name}")
    return Weight(name, shape, Split.REPLICATED, int(found.group(1)) if found else "first", "", None)
