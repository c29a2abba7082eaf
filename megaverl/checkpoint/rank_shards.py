"""Shards that one rank writes: its optimizer state, and its share of what all data-parallel ranks hold.

A rank of megatron-core's distributed optimizer holds flat ranges of its parameters'
states. A flat range of a local tensor is a few boxes of global arrays, with the names
and shapes that the whole would have. So each rank writes what it holds and reads what
it will hold: nothing is gathered, and files do not depend on which rank wrote which
part.

megatron-core's own sharding types do less (0.16 to 0.19,
`DistributedOptimizer.sharded_state_dict`). "fully_reshardable" gathers all states of a
rank's parameters on every data-parallel rank. "dp_reshardable" writes shards of
buckets, which cannot be read with another number of data-parallel ranks.
"fully_sharded_model_space" makes flat `ShardedTensor`s, which these versions refuse.
"dp_zero_gather_scatter" gathers, and fixes TP and PP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megaverl.errors import CheckpointError
from megaverl.platform import platform
from megaverl.sharding.boxes import flat_boxes, split, whole
from megaverl.weights.torch_dist import CHUNK_BYTES
from megaverl.workers.muon import whole_parameters
from megaverl.workers.optimizers import optimizer_tensors

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import (  # noqa: E402
    dict_list_map_inplace,
    nested_values,
)  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

Described: TypeAlias = ShardedTensor | ShardedTensorFactory
# Part of the names of weights that are replicated over the expert-data-parallel group.
EXPERTS = ".experts."


def optimizer_shards(
    optimizer: Any, described: Mapping[str, Any], *, loading: bool
) -> dict[int, dict[str, Any]]:
    """Return this rank's shards of a `DistributedOptimizer`'s state, parameter by parameter in the optimizer's order.

    Args:
        described: the model's sharded state, whose tensors are its parameters.
        loading: whether the result describes where to read to.

    Returns:
        number -> name of the state -> {"held": the flat tensor, "boxes": its boxes of global arrays}.
    """
    of_parameter = _by_parameter(described)
    # Memory of the optimizer's own states.
    places = {
        tensor.untyped_storage().data_ptr() for tensor in optimizer_tensors(optimizer)
    }
    # With partial sharding there are several instances of the optimizer; all optimizers
    # of a chain share the number.
    instance = optimizer.distributed_optimizer_instance_id
    state: dict[int, dict[str, Any]] = {}
    # Numbered in the optimizer's order, which is the same on every rank that holds the
    # range.
    for parameter, start in _held_parameters(optimizer):
        of = of_parameter[id(parameter)]
        entry = state[len(state)] = {}
        for name, tensor in optimizer._get_main_param_and_optimizer_states(
            parameter
        ).items():
            if name == "step" or not isinstance(tensor, torch.Tensor):
                # Steps are saved with the parameter groups.
                continue
            if not loading and tensor.untyped_storage().data_ptr() not in places:
                # An optimizer that stores its state in fewer bits has made this float32
                # copy for the call.
                tensor = tensor.cpu()
            boxes = list(
                boxes_of(
                    of, tensor.detach(), start, f"optimizer.state.{name}.", instance
                )
            )
            entry[name] = {"held": LocalNonpersistentObject(tensor), "boxes": boxes}
    return state


def whole_parameter_shards(
    optimizer: Any, described: Mapping[str, Any]
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return the state of the whole parameters that Muon updates on this rank.

    The boxes have views of the state itself, so they are also where it is read to.

    Args:
        optimizer: one optimizer, whose state exists.
        described: the model's sharded state, whose tensors are its parameters.

    Returns:
        number -> name of the state -> its boxes of global arrays.
    """
    of_parameter = _by_parameter(described)
    state: dict[int, dict[str, list[ShardedTensor]]] = {}
    for parameter, master in whole_parameters(optimizer):
        tensors = dict(optimizer.optimizer.state[master])
        # A float32 weight is its own master, and is saved with the model.
        if master is not parameter:
            tensors["param"] = master
        # This rank alone holds the parameter's state, whatever its number among the
        # data-parallel ranks.
        state[len(state)] = {
            name: list(
                boxes_of(
                    of_parameter[id(parameter)],
                    tensor.detach().view(-1),
                    0,
                    f"optimizer.state.{name}.",
                    0,
                )
            )
            for name, tensor in tensors.items()
        }
    return state


def _by_parameter(described: Mapping[str, Any]) -> dict[int, Described]:
    """Return the descriptions of a model's parameters, by the identity of the parameter."""
    return {
        id(described_tensor.data): described_tensor
        for described_tensor in nested_values(described)
        if isinstance(described_tensor, Described)
    }


def _held_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter of which this rank holds a range, and the start of the range, in the optimizer's order."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, held in bucket["param_map"].items():
                    yield parameter, held["param"].start


def boxes_of(
    of: Described, flat: torch.Tensor, start: int, prefix: str, instance: int
) -> Iterator[ShardedTensor]:
    """Yield the elements of a local tensor from `start` as boxes of global arrays, whose data are views of `flat`.

    Args:
        of: description of the whole local tensor, which may consist of several boxes (gate and up).
        flat: 1-D tensor of the elements.
        prefix: prefix of the global name.
        instance: last number of the boxes' `replica_id`; a rank of instance 0 writes them.
    """
    stop = start + flat.numel()
    for place, part in _parts(of, flat.dtype):
        # Elements of this part that lie in the flat range.
        low, high = max(start, place), min(stop, place + whole(part.local_shape).numel)
        at = low - start
        # A flat range is a few boxes: the end of a row, whole rows, the beginning of a
        # row.
        for box in flat_boxes(part.local_shape, low - place, high - place):
            data = flat[at : at + box.numel].view(box.shape)
            at += box.numel
            yield from boxed(
                part,
                box.start,
                data,
                prefix + part.key,
                (*part.replica_id[:-1], instance),
            )


def _parts(of: Described, dtype: torch.dtype) -> Iterator[tuple[int, ShardedTensor]]:
    """Yield (offset in elements, box) for the boxes of global arrays that make up a local tensor."""
    if isinstance(of, ShardedTensor):
        yield 0, of
        return
    # Build from a meta tensor, which takes no memory: its views have the offsets of the
    # parts.
    built = replace(
        of, data=torch.empty(of.data.shape, dtype=dtype, device="meta")
    ).build()
    for part in nested_values(built):
        if not part.data.is_contiguous():
            raise CheckpointError(
                f"{part.key}: megatron-core stores it in another order than it is held in, so no rank can write its "
                "part of the optimizer's state alone. Set ddp.use_distributed_optimizer=false."
            )
        yield part.data.storage_offset(), part


def boxed(
    of: ShardedTensor,
    start: tuple[int, ...],
    data: torch.Tensor,
    key: str,
    replica: tuple[int, ...],
) -> Iterator[ShardedTensor]:
    """Yield `data`, which begins at `start` of the local tensor `of`, in boxes of at most `CHUNK_BYTES`.

    This bounds what is copied, or read beyond what is wanted, at one time. An axis of
    stacked layers becomes an ordinary axis.
    """
    stacked = of.prepend_axis_num
    for box in split(whole(data.shape), CHUNK_BYTES // data.itemsize):
        # Where the box begins in the global array.
        places = zip(of.global_offset[stacked:], start, box.start, strict=True)
        shape = (1,) * stacked + box.shape
        yield replace(
            of,
            key=key,
            data=data[box.slices].view(shape),
            dtype=data.dtype,
            local_shape=shape,
            global_offset=(*of.global_offset[:stacked], *map(sum, places)),
            axis_fragmentations=None,  # boxes may have any size
            replica_id=replica,
            prepend_axis_num=0,
        )


def share_replicas(
    state: dict[str, Any], dense: dist.ProcessGroup, experts: dist.ProcessGroup
) -> None:
    """Keep only this rank's share of the tensors that all data-parallel ranks hold. Shares have equal bytes.

    Replicas have equal states, so each rank computes all shares itself. A tensor is
    split only where a share ends, between rows.

    Args:
        state: a sharded state, changed in place. Tensors of this rank alone (`optimizer_shards`) stay.
        dense, experts: the ranks with the same weights, and those with the same experts.
    """
    # Factories become the tensors that they stand for.
    apply_factories(state)
    shared = [tensor for tensor in nested_values(state) if _is_shared(tensor)]
    shares: dict[int, Any] = {}
    # Weights of experts have replicas of their own.
    for group, of_experts in ((dense, False), (experts, True)):
        tensors = [tensor for tensor in shared if (EXPERTS in tensor.key) is of_experts]
        for tensor, share in zip(
            tensors, shares_of(tensors, group.size()), strict=True
        ):
            shares[id(tensor)] = share
    dict_list_map_inplace(lambda tensor: shares.get(id(tensor), tensor), state)


def shares_of(
    tensors: Sequence[ShardedTensor], count: int
) -> Iterator[list[ShardedTensor | LocalNonpersistentObject]]:
    """Yield, for each tensor, the rows in this rank's share, or nothing.

    The last number of a tensor's `replica_id` is the rank's index among the `count`
    ranks that hold the same.
    """
    # Bytes of the tensors so far: shares are ranges of the concatenation of all
    # tensors.
    total, before = sum(tensor.data.nbytes for tensor in tensors), 0
    for tensor in tensors:
        number, data = tensor.replica_id[-1], tensor.data.detach()
        rows = data.shape[0] if data.ndim else 1
        # A row belongs to the share that contains its first byte.
        ends = (
            max(0, total * share // count - before) for share in (number, number + 1)
        )
        low, high = (min(rows, -(-end * rows // data.nbytes)) for end in ends)
        before += data.nbytes
        if low == high:
            # This rank writes nothing of the tensor. The place in the state must still
            # be filled.
            yield [LocalNonpersistentObject(None)]
            continue
        start = (low, *(0 for _ in data.shape[1:])) if data.ndim else ()
        # A view of other rows would be written with all of its storage.
        rest = data[low:high].contiguous() if data.ndim else data
        yield list(boxed(tensor, start, rest, tensor.key, (*tensor.replica_id[:-1], 0)))


def _is_shared(value: Any) -> bool:
    """Return whether all data-parallel ranks hold the value, and no rank outside them writes it."""
    return (
        isinstance(value, ShardedTensor)
        and value.has_regular_grid  # otherwise it belongs to one rank already
        and is_main_replica(value.replica_id[:-1])
        and value.data.numel() > 0
    )
