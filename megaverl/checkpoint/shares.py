"""Which part of a sharded state each rank writes: its own, and a share of what all data-parallel ranks have.

A rank of megatron-core's distributed optimizer holds flat ranges of its parameters' states. A flat range of a local
tensor is a few boxes of global arrays, under the names and shapes that the whole would have. So each rank writes what
it holds and reads what it will hold: nothing is gathered, and the files do not depend on who wrote which part.

megatron-core's own sharding types do less (0.16 to 0.19, `DistributedOptimizer.sharded_state_dict`).
"fully_reshardable" gathers all states of a rank's parameters on every data-parallel rank. "dp_reshardable" writes
shards of buckets, which only another number of data-parallel ranks can read. "fully_sharded_model_space" makes flat
`ShardedTensor`s, which these versions refuse. "dp_zero_gather_scatter" gathers, and fixes TP and PP.
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
from megaverl.workers.megatron_trainable import optimizer_tensors

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

Described: TypeAlias = ShardedTensor | ShardedTensorFactory
EXPERTS = ".experts."  # of a name: such a weight's replicas are the ranks of the expert-data-parallel group


def optimizer_shards(optimizer: Any, described: Mapping[str, Any], *, loading: bool) -> dict[int, dict[str, Any]]:
    """What this rank holds of a `DistributedOptimizer`'s state, parameter by parameter in the optimizer's order.

    Args:
        described: the model's sharded state, whose tensors are its parameters.
        loading: what is described is to be read into.

    Returns:
        number -> state's name -> {"held": the flat tensor, "boxes": what of which global array it is}.
    """
    of_parameter = {id(each.data): each for each in nested_values(described) if isinstance(each, Described)}
    places = {tensor.untyped_storage().data_ptr() for tensor in optimizer_tensors(optimizer)}
    # all optimizers of a chain have their instances' number; there are several where weights are sharded in part
    instance = optimizer.distributed_optimizer_instance_id
    state: dict[int, dict[str, Any]] = {}
    for parameter, start in _held_parameters(optimizer):
        of = of_parameter[id(parameter)]
        entry = state[len(state)] = {}
        for name, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items():
            if name == "step" or not isinstance(tensor, torch.Tensor):
                continue  # kept with the parameter groups
            if not loading and tensor.untyped_storage().data_ptr() not in places:
                tensor = tensor.cpu()  # made for us, by an optimizer that keeps its state in fewer bits
            boxes = list(boxes_of(of, tensor.detach(), start, f"optimizer.state.{name}.", instance))
            entry[name] = {"held": LocalNonpersistentObject(tensor), "boxes": boxes}
    return state


def _held_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Each parameter of which this rank holds a range, and where in it that begins; as the optimizer orders them."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, held in bucket["param_map"].items():
                    yield parameter, held["param"].start


def boxes_of(of: Described, flat: torch.Tensor, start: int, prefix: str, instance: int) -> Iterator[ShardedTensor]:
    """The elements of a local tensor from `start` on as boxes of global arrays, their data views of `flat`.

    Args:
        of: describes the whole local tensor, which may be parts of several boxes (gate and up).
        flat: 1-D.
        prefix: of the name.
        instance: the last number of their `replica_id`; a rank of instance 0 writes them.
    """
    stop = start + flat.numel()
    for place, part in _parts(of, flat.dtype):
        low, high = max(start, place), min(stop, place + whole(part.local_shape).numel)
        at = low - start
        for box in flat_boxes(part.local_shape, low - place, high - place):
            data = flat[at : at + box.numel].view(box.shape)
            at += box.numel
            yield from boxed(part, box.start, data, prefix + part.key, (*part.replica_id[:-1], instance))


def _parts(of: Described, dtype: torch.dtype) -> Iterator[tuple[int, ShardedTensor]]:
    """The boxes of global arrays that make up a local tensor, each with its place in it, in elements."""
    if isinstance(of, ShardedTensor):
        yield 0, of
        return
    # no memory: what the factory cuts tells its places
    built = replace(of, data=torch.empty(of.data.shape, dtype=dtype, device="meta")).build()
    for part in nested_values(built):
        if not part.data.is_contiguous():
            raise CheckpointError(
                f"{part.key}: megatron-core stores it in another order than it is held in, so no rank can write its "
                "part of the optimizer's state alone. Set ddp.use_distributed_optimizer=false."
            )
        yield part.data.storage_offset(), part


def boxed(
    of: ShardedTensor, start: tuple[int, ...], data: torch.Tensor, key: str, replica: tuple[int, ...]
) -> Iterator[ShardedTensor]:
    """`data`, from `start` on of the local tensor that `of` describes, in boxes of at most `CHUNK_BYTES`.

    So much is copied, or read besides what is wanted, at a time. The axis of stacked layers becomes one of their own.
    """
    stacked = of.prepend_axis_num
    for box in split(whole(data.shape), CHUNK_BYTES // data.itemsize):
        places = zip(of.global_offset[stacked:], start, box.start, strict=True)
        shape = (1,) * stacked + box.shape
        yield replace(
            of,
            key=key,
            data=data[box.slices].view(shape),
            dtype=data.dtype,
            local_shape=shape,
            global_offset=(*of.global_offset[:stacked], *map(sum, places)),
            axis_fragmentations=None,  # of any size
            replica_id=replica,
            prepend_axis_num=0,
        )


def share_replicas(state: dict[str, Any], dense: dist.ProcessGroup, experts: dist.ProcessGroup) -> None:
    """Leave this rank one share, of as many bytes as each other's, of the tensors that all data-parallel ranks have.

    Their states are alike, so each knows all shares. A tensor is cut between rows, and only where a share ends.

    Args:
        state: a sharded state, changed in place. What is a rank's own (`optimizer_shards`) stays.
        dense, experts: the ranks that have the same weights, and those that have the same experts.
    """
    apply_factories(state)
    shared = [each for each in nested_values(state) if _is_shared(each)]
    shares: dict[int, Any] = {}
    for group, of_experts in ((dense, False), (experts, True)):
        tensors = [each for each in shared if (EXPERTS in each.key) is of_experts]
        shares |= {id(each): share for each, share in zip(tensors, shares_of(tensors, group.size()), strict=True)}
    dict_list_map_inplace(lambda each: shares.get(id(each), each), state)


def shares_of(tensors: Sequence[ShardedTensor], count: int) -> Iterator[list[ShardedTensor | LocalNonpersistentObject]]:
    """Of each tensor the rows that fall into this rank's share, of so many; or nothing. The last number of their
    `replica_id` is the rank's among those that have the same."""
    total, before = sum(each.data.nbytes for each in tensors), 0
    for each in tensors:
        number, data = each.replica_id[-1], each.data.detach()
        rows = data.shape[0] if data.ndim else 1
        # a row belongs to the share that its first byte falls into
        ends = (max(0, total * share // count - before) for share in (number, number + 1))
        low, high = (min(rows, -(-end * rows // data.nbytes)) for end in ends)
        before += data.nbytes
        if low == high:
            yield [LocalNonpersistentObject(None)]
            continue
        start = (low, *(0 for _ in data.shape[1:])) if data.ndim else ()
        rest = data[low:high].contiguous() if data.ndim else data
        yield list(boxed(each, start, rest, each.key, (*each.replica_id[:-1], 0)))


def _is_shared(value: Any) -> bool:
    """Whether all data-parallel ranks have it, and no other rank has to write it."""
    return (
        isinstance(value, ShardedTensor)
        and value.has_regular_grid  # else it is a rank's own already
        and is_main_replica(value.replica_id[:-1])
        and value.data.numel() > 0
    )
