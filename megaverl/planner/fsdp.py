"""Memory and messages of a role under FSDP2: shards, gathered blocks, gradients.

The rules are those of `models.hf_model.shard_module`. Each decoder block is gathered on
its own, and the next one while it computes. Norms and heads stay gathered from the
forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.moment_dtypes import moment_bytes, moment_dtypes
from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.planner.buffers import ITEMSIZE, TrainedBytes
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout, even_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megaverl.models.hf_shards import ShardedWeights

# Bytes per element of trained weights, of gradients and, by default, of each of Adam's
# moments: all are float32.
MASTER = 4


@lru_cache(maxsize=16)
def described(spec: ModelSpec, value_head: bool = False) -> list[Weight]:
    """List all weights of a model, from its table or from the module that transformers builds.

    Raises:
        ModelError: transformers cannot build the model from its config.json.
    """
    if spec.is_tabled:
        return weights_of(spec, value_head=value_head)
    return _module_weights(spec, value_head, tp=1, count=1).weights


@lru_cache(maxsize=16)
def tensor_rank_weights(spec: ModelSpec, value_head: bool, tp: int) -> list[Weight]:
    """List the weights with the shapes that one of `tp` tensor-parallel ranks holds.

    Raises:
        ModelError: transformers cannot build the model from its config.json.
        ConfigError: transformers has no tensor-parallel plan for the model on `tp` ranks.
    """
    weights = described(spec, value_head)
    if tp == 1:
        return weights
    layout = _module_weights(spec, value_head, tp=tp, count=1).layout_of(0)
    shapes = {piece.tensor: piece.box.shape for piece in layout.pieces}
    return [weight._replace(shape=shapes[weight.name]) for weight in weights]


@lru_cache(maxsize=64)
def _module_weights(
    spec: ModelSpec, value_head: bool, *, tp: int, count: int
) -> ShardedWeights:
    """Return the weights of the module that transformers builds from the model's config.json, and their layouts.

    Raises:
        ModelError: the config.json is not there, or transformers builds no such model.
        ConfigError: transformers has no tensor-parallel plan for so many ranks.
    """
    from megaverl.models.hf_shards import sharded_weights, tensor_cuts

    model = _module(spec.source, spec.trusts_code)
    return sharded_weights(
        model,
        spec,
        count,
        value_head=int(value_head),
        cuts=tensor_cuts(model, tp, "actor"),
    )


@lru_cache(maxsize=4)
def _module(config: str, trusts_code: bool) -> PreTrainedModel:
    """Build a model without data from its config.json.

    Only this plan imports torch and all of transformers. Other plans have transformers'
    configuration class read the config.json, in a child process without torch
    (`sharding/transformers_config.py`).
    """
    from megaverl.models.hf_shards import module_without_data

    path = Path(config)
    if not path.is_file():
        raise ModelError(
            f"{path}: not found. A plan of this model under FSDP2 builds it from its config.json: give that file with "
            "--model-config FILE or model.config."
        )
    # Transformers looks for a model's own code in a folder.
    folder_or_file = path.parent if trusts_code else path
    return module_without_data(folder_or_file, trust_remote_code=trusts_code)


class Shards(NamedTuple):
    """Number of ranks that weights are sharded over, and number of ranks that hold the same shard."""

    size: int
    replicas: int


class Passes(NamedTuple):
    """Bytes that each rank receives in one micro-batch."""

    gathered: float
    reduced: float


def shards_of(fsdp: FsdpConfig, world: int, gpus_per_node: int) -> Shards:
    """Return how a role on `world` data-parallel ranks is sharded under `fsdp.sharding_strategy`."""
    sizes = {
        "no_shard": 1,
        "hybrid_shard": fsdp.shard_size or min(gpus_per_node, world),
    }
    count = sizes.get(fsdp.sharding_strategy, world)
    return Shards(count, world // count)


def fsdp_layouts(
    spec: ModelSpec, value_head: bool, count: int, tp: int = 1
) -> Callable[[int], Layout]:
    """Return a function from a rank of the role to its layout. Ranks of a shard group are neighbours."""
    if tp > 1:
        return _module_weights(spec, value_head, tp=tp, count=count).layout_of
    weights = described(spec, value_head)

    @cache
    def shard(index: int) -> Layout:
        return even_layout(weights, count, index)

    return lambda rank: shard(rank % count)


def shard_bytes(
    layout: Layout, fsdp: FsdpConfig, replicas: int, optimizer: Mapping[str, Any]
) -> TrainedBytes:
    """Return the bytes of a rank's shards in training.

    Args:
        optimizer: the role's `optimizer` mapping.
    """
    sizes = [whole(shape).numel for shape in layout.local_shapes.values()]
    numel = sum(sizes)
    here = 0 if fsdp.cpu_offload else numel
    dtypes = moment_dtypes(optimizer).values()
    moments = sum(moment_bytes(dtype, size) for dtype in dtypes for size in sizes)
    # Adam's foreach implementation takes the square root of all second moments at once.
    # Small moments are updated slice by slice, which takes next to nothing.
    is_small = set(dtypes) != {"float32"}
    return TrainedBytes(
        weights=MASTER * here,
        gradients=MASTER * here,
        optimizer=0 if fsdp.cpu_offload else moments,
        step=0 if is_small else MASTER * here,
        saved_weights=MASTER * numel // replicas,
        saved_optimizer=2 * MASTER * numel // replicas,
        loaded=3 * MASTER * numel,
    )


def gathered_bytes(
    weights: Sequence[Weight],
    fsdp: FsdpConfig,
    itemsize: int,
    *,
    train: bool,
    micro_batches: int,
) -> float:
    """Return the peak bytes that a forward and backward pass needs beside the shards.

    Args:
        itemsize: bytes of an element in the computation.
        micro_batches: number of micro-batches of an update. With several, unsharded gradients stay between them.
    """
    groups, root = _gathered_together(weights)
    total, largest = sum(groups) + root, max(groups, default=0)
    keeps = fsdp.sharding_strategy in ("shard_grad_op", "no_shard")
    held = float(itemsize * (total if keeps and train else root + 2 * largest))
    if not train:
        return held
    reduced = ITEMSIZE[fsdp.reduce_dtype or "float32"]
    if keeps and micro_batches > 1:
        held += reduced * total
    return held + (itemsize + reduced) * max(largest, root)


def passes_of(
    weights: Sequence[Weight], fsdp: FsdpConfig, itemsize: int, shards: Shards
) -> Passes:
    """Return the bytes of a forward and backward pass: all-gathers of weights, reduce-scatter of gradients."""
    groups, root = _gathered_together(weights)
    keeps = fsdp.sharding_strategy in ("shard_grad_op", "no_shard")
    share = (shards.size - 1) / shards.size
    gathered = itemsize * (root + sum(groups) * (1 if keeps else 2)) * share
    return Passes(
        gathered,
        ITEMSIZE[fsdp.reduce_dtype or "float32"] * (root + sum(groups)) * share,
    )


def _gathered_together(weights: Sequence[Weight]) -> tuple[list[int], int]:
    """Return the elements of each group that is gathered on its own, and of the group that stays gathered.

    The groups are the decoder blocks, and the embedding unless it is tied to the output
    layer.
    """
    blocks: dict[int, int] = {}
    first = last = 0
    has_head = False
    for weight in weights:
        numel = whole(weight.shape).numel
        if isinstance(weight.stage, int):
            blocks[weight.stage] = blocks.get(weight.stage, 0) + numel
        elif weight.stage == "first":
            first += numel
        else:
            last, has_head = last + numel, has_head or len(weight.shape) > 1
    return (
        ([*blocks.values(), first], last)
        if has_head
        else (list(blocks.values()), first + last)
    )
