"""A rank's part of a checkpoint: which part of a sharded state it writes (its own, and a share of what all
data-parallel ranks have), and how: in a thread while training goes on, as the zips that `torch.save` makes.

A rank of megatron-core's distributed optimizer holds flat ranges of its parameters' states. A flat range of a local
tensor is a few boxes of global arrays, under the names and shapes that the whole would have. So each rank writes what
it holds and reads what it will hold: nothing is gathered, and the files do not depend on who wrote which part.

megatron-core's own sharding types do less (0.16 to 0.19, `DistributedOptimizer.sharded_state_dict`).
"fully_reshardable" gathers all states of a rank's parameters on every data-parallel rank. "dp_reshardable" writes
shards of buckets, which only another number of data-parallel ranks can read. "fully_sharded_model_space" makes flat
`ShardedTensor`s, which these versions refuse. "dp_zero_gather_scatter" gathers, and fixes TP and PP.

A tensor goes into its zip, and out of it, without the copies that `torch.save` and `torch.load` make of each: all that
stands around the elements is known from shape, dtype and their CRC-32. So a tensor is read in one go, straight into
where it belongs, and one comparison tells whether every byte is as it was written. While training goes on a tensor is
copied only if training is about to change it before it is written.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from megaverl.checkpoint import ChecksummedFile, crc32, read_into
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.platform import platform
from megaverl.sharding.boxes import flat_boxes, split, whole
from megaverl.weights.torch_dist import CHUNK_BYTES, STORAGES, Frame
from megaverl.workers.optimizers import optimizer_tensors

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


LARGEST = (1 << 32) - (1 << 20)  # what a zip holds without its 64-bit extension


def frame_of(shape: Sequence[int], dtype: torch.dtype) -> Frame | None:
    """What stands around a tensor's elements; None where that is left to torch (no plain dtype, or too large)."""
    if dtype not in STORAGES or torch.Size(shape).numel() * dtype.itemsize > LARGEST:
        return None
    return Frame(tuple(shape), dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: ChecksummedFile, tensor: torch.Tensor) -> None:
    """Append a tensor to a file; one on a device is copied to the host first."""
    tensor = tensor.detach().cpu().contiguous()
    frame = frame_of(tensor.shape, tensor.dtype)
    if frame is None:
        torch.save(tensor.clone(), file)  # a clone: torch writes all of the memory that a tensor is a part of
        return
    elements = bytes_of(tensor)
    checksum = crc32(elements)
    file.write(frame.head(checksum))
    file.write(elements, checksum)
    file.write(frame.tail(checksum))


def read_tensor(file: io.FileIO, offset: int, frame: Frame, into: torch.Tensor, *, keep_cached: bool = True) -> None:
    """Read a tensor that `write_tensor` has written.

    Args:
        frame: of its shape and dtype.
        into: contiguous, in host memory.
        keep_cached: as of `read_into`.

    Raises:
        DamagedCheckpoint: a byte is not as it was written.
    """
    head, tail = bytearray(frame.data_offset), bytearray(len(frame.tail(0)))
    try:
        read_into(file, memoryview(head), offset)
        checksum = read_into(file, bytes_of(into), offset + frame.data_offset, keep_cached=keep_cached)
        read_into(file, memoryview(tail), offset + frame.length - len(tail))
    except EOFError as error:
        raise DamagedCheckpoint(str(error)) from error
    if head != frame.head(checksum) or tail != frame.tail(checksum):
        raise DamagedCheckpoint("its bytes are not those that were written")


def read_object(file: io.FileIO, offset: int, length: int) -> bytes:
    """Read what torch has written: an object, or a tensor that has no `frame_of`.

    Raises:
        DamagedCheckpoint: a byte of its contents is not as it was written.
    """
    data = bytearray(length)
    try:
        read_into(file, memoryview(data), offset)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch stores its records as they are; compressed ones may unpack without end
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise DamagedCheckpoint("it has compressed records, which torch does not write")
            damaged = archive.testzip()
    except (EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise DamagedCheckpoint(f"its bytes are not those that were written ({error})") from error
    if damaged is not None:
        raise DamagedCheckpoint(f"its bytes are not those that were written ({damaged})")
    return bytes(data)


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

NICENESS = 10  # of the writing thread: training comes first


def start_writing(write: Callable[[], T], *, in_background: bool = True) -> Future[T]:
    """Call `write` in a thread of its own, or here, and give its result or error.

    The thread is no executor's: those are waited for when a process ends, and a disk may hang.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            if in_background and hasattr(os, "setpriority"):
                # on Linux a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            future.set_result(write())
        except Exception as error:  # reported to all ranks when the checkpoint is committed
            future.set_exception(error)

    if in_background:
        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    else:
        run()
    return future


class HostBuffers:
    """Host memory for copies, page-locked where they come from a GPU. It is kept, and used again, from save to save."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self.num_bytes = 0  # of all, free or not

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, complete when this returns, in memory that is the caller's until it is given back."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        if not free:
            self.num_bytes += tensor.nbytes
            free.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=platform.is_cuda))
        return free.pop().copy_(tensor)

    def give_back(self, copy: torch.Tensor) -> None:
        """It is not needed any more."""
        self._free[copy.shape, copy.dtype].append(copy)


class HeldTensors(Generic[K]):
    """What weights and optimizer are from the end of one update to the next: most of a step, generation included.

    The writing thread takes one tensor after the other; it may read each until it takes the next. Whoever is about
    to change them calls `settle` first, which copies what was not written yet. A copy's memory is free again when it
    is written: of a GPU's tensors there is one copy at a time until an update begins.

    Args:
        tensors: not to be changed before `settle`.
        changing: may change as soon as this is made: copied now.
        buffers: for the copies; of no other save meanwhile.
    """

    def __init__(
        self, tensors: Mapping[K, torch.Tensor], changing: Mapping[K, torch.Tensor], buffers: HostBuffers
    ) -> None:
        self._waiting = dict(tensors)  # not written and not copied; one that is being written is among them
        self._buffers = buffers
        self._copied = {key: buffers.copy(tensor) for key, tensor in changing.items()}
        self._reading: K | None = None
        self._changed = threading.Condition()

    def take(self, key: K) -> torch.Tensor:
        """The tensor itself, or its copy; in host memory. The one taken before is done with."""
        with self._changed:
            self._let_go()
            self._reading = key
            if key in self._waiting and self._waiting[key].is_cuda:
                self._copy(key)
            return self._copied[key] if key in self._copied else self._waiting[key]

    def close(self) -> None:
        """The writing thread is through, or has failed: nothing is read any more."""
        with self._changed:
            self._waiting.clear()
            self._reading = None
            for copy in self._copied.values():
                self._buffers.give_back(copy)
            self._copied.clear()
            self._changed.notify_all()

    def settle(self, waits: Callable[[], None] = lambda: None) -> None:
        """Copy what is still to be written, and wait for the one that is being read: all may then change.

        Args:
            waits: called before waiting, which a disk that hangs makes long.
        """
        while True:
            with self._changed:
                # the last first: the writing thread comes from the other end
                key = next((key for key in reversed(self._waiting) if key != self._reading), None)
                if key is not None:
                    self._copy(key)
                elif self._waiting:
                    waits()
                    self._changed.wait()
                else:
                    return

    def _let_go(self) -> None:
        if self._reading is not None:
            self._waiting.pop(self._reading, None)
            if self._reading in self._copied:
                self._buffers.give_back(self._copied.pop(self._reading))
            self._reading = None
            self._changed.notify_all()

    def _copy(self, key: K) -> None:
        self._copied[key] = self._buffers.copy(self._waiting.pop(key))
