"""A rank's part of a checkpoint: which tensors it writes, how they are laid out, and how they are copied meanwhile.

Each rank writes its own shards and a share of what all data-parallel ranks hold. A background thread writes while
training continues.

A rank of megatron-core's distributed optimizer holds flat ranges of its parameters' states. A flat range of a local
tensor is a few boxes of global arrays, with the names and shapes that the whole would have. So each rank writes what it
holds and reads what it will hold: nothing is gathered, and files do not depend on which rank wrote which part.

megatron-core's own sharding types do less (0.16 to 0.19, `DistributedOptimizer.sharded_state_dict`).
"fully_reshardable" gathers all states of a rank's parameters on every data-parallel rank. "dp_reshardable" writes
shards of buckets, which cannot be read with another number of data-parallel ranks. "fully_sharded_model_space" makes
flat `ShardedTensor`s, which these versions refuse. "dp_zero_gather_scatter" gathers, and fixes TP and PP.

Tensors are written and read without the copies that `torch.save` and `torch.load` make: everything around the elements
in a zip is known from shape, dtype and CRC-32. So a tensor is read directly into its place, and one comparison shows
whether every byte is intact. While training continues, a tensor is copied only if training is about to change it before
it is written.
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
from isal.isal_zlib import crc32

from megaverl.checkpoint import ChecksummedFile, read_into
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
EXPERTS = ".experts."  # part of the names of weights that are replicated over the expert-data-parallel group


def optimizer_shards(optimizer: Any, described: Mapping[str, Any], *, loading: bool) -> dict[int, dict[str, Any]]:
    """Return this rank's shards of a `DistributedOptimizer`'s state, parameter by parameter in the optimizer's order.

    Args:
        described: the model's sharded state, whose tensors are its parameters.
        loading: whether the result describes where to read to.

    Returns:
        number -> name of the state -> {"held": the flat tensor, "boxes": its boxes of global arrays}.
    """
    of_parameter = {
        id(described_tensor.data): described_tensor
        for described_tensor in nested_values(described)
        if isinstance(described_tensor, Described)
    }
    places = {tensor.untyped_storage().data_ptr() for tensor in optimizer_tensors(optimizer)}
    # With partial sharding there are several instances of the optimizer; all optimizers of a chain share the number.
    instance = optimizer.distributed_optimizer_instance_id
    state: dict[int, dict[str, Any]] = {}
    for parameter, start in _held_parameters(optimizer):
        of = of_parameter[id(parameter)]
        entry = state[len(state)] = {}
        for name, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items():
            if name == "step" or not isinstance(tensor, torch.Tensor):
                # Steps are saved with the parameter groups.
                continue
            if not loading and tensor.untyped_storage().data_ptr() not in places:
                # An optimizer that stores its state in fewer bits has made this float32 copy for the call.
                tensor = tensor.cpu()
            boxes = list(boxes_of(of, tensor.detach(), start, f"optimizer.state.{name}.", instance))
            entry[name] = {"held": LocalNonpersistentObject(tensor), "boxes": boxes}
    return state


def _held_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter of which this rank holds a range, and the start of the range, in the optimizer's order."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, held in bucket["param_map"].items():
                    yield parameter, held["param"].start


def boxes_of(of: Described, flat: torch.Tensor, start: int, prefix: str, instance: int) -> Iterator[ShardedTensor]:
    """Yield the elements of a local tensor from `start` as boxes of global arrays, whose data are views of `flat`.

    Args:
        of: description of the whole local tensor, which may consist of several boxes (gate and up).
        flat: 1-D tensor of the elements.
        prefix: prefix of the global name.
        instance: last number of the boxes' `replica_id`; a rank of instance 0 writes them.
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
    """Yield (offset in elements, box) for the boxes of global arrays that make up a local tensor."""
    if isinstance(of, ShardedTensor):
        yield 0, of
        return
    # Build from a meta tensor, which takes no memory: its views have the offsets of the parts.
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
    """Yield `data`, which begins at `start` of the local tensor `of`, in boxes of at most `CHUNK_BYTES`.

    This bounds what is copied, or read beyond what is wanted, at one time. An axis of stacked layers becomes an
    ordinary axis.
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
            axis_fragmentations=None,  # boxes may have any size
            replica_id=replica,
            prepend_axis_num=0,
        )


def share_replicas(state: dict[str, Any], dense: dist.ProcessGroup, experts: dist.ProcessGroup) -> None:
    """Keep only this rank's share of the tensors that all data-parallel ranks hold. Shares have equal bytes.

    Replicas have equal states, so each rank computes all shares itself. A tensor is split only where a share ends,
    between rows.

    Args:
        state: a sharded state, changed in place. Tensors of this rank alone (`optimizer_shards`) stay.
        dense, experts: the ranks with the same weights, and those with the same experts.
    """
    apply_factories(state)
    shared = [tensor for tensor in nested_values(state) if _is_shared(tensor)]
    shares: dict[int, Any] = {}
    for group, of_experts in ((dense, False), (experts, True)):
        tensors = [tensor for tensor in shared if (EXPERTS in tensor.key) is of_experts]
        shares |= {id(tensor): share for tensor, share in zip(tensors, shares_of(tensors, group.size()), strict=True)}
    dict_list_map_inplace(lambda tensor: shares.get(id(tensor), tensor), state)


def shares_of(tensors: Sequence[ShardedTensor], count: int) -> Iterator[list[ShardedTensor | LocalNonpersistentObject]]:
    """Yield, for each tensor, the rows in this rank's share, or nothing.

    The last number of a tensor's `replica_id` is the rank's index among the `count` ranks that hold the same.
    """
    total, before = sum(tensor.data.nbytes for tensor in tensors), 0
    for tensor in tensors:
        number, data = tensor.replica_id[-1], tensor.data.detach()
        rows = data.shape[0] if data.ndim else 1
        # A row belongs to the share that contains its first byte.
        ends = (max(0, total * share // count - before) for share in (number, number + 1))
        low, high = (min(rows, -(-end * rows // data.nbytes)) for end in ends)
        before += data.nbytes
        if low == high:
            yield [LocalNonpersistentObject(None)]
            continue
        start = (low, *(0 for _ in data.shape[1:])) if data.ndim else ()
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


LARGEST = (1 << 32) - (1 << 20)  # bytes that a zip can hold without its 64-bit extension


def frame_of(shape: Sequence[int], dtype: torch.dtype) -> Frame | None:
    """Return the zip frame of a tensor; None if torch must write it (an unusual dtype, or too large)."""
    if dtype not in STORAGES or torch.Size(shape).numel() * dtype.itemsize > LARGEST:
        return None
    return Frame(tuple(shape), dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: ChecksummedFile, tensor: torch.Tensor) -> None:
    """Append a tensor to a file. A device tensor is copied to the host first."""
    tensor = tensor.detach().cpu().contiguous()
    frame = frame_of(tensor.shape, tensor.dtype)
    if frame is None:
        # torch.save writes the whole storage of a tensor, so clone a view first.
        torch.save(tensor.clone(), file)
        return
    elements = bytes_of(tensor)
    checksum = crc32(elements)
    file.write(frame.head(checksum))
    file.write(elements, checksum)
    file.write(frame.tail(checksum))


def read_tensor(file: io.FileIO, offset: int, frame: Frame, into: torch.Tensor, *, keep_cached: bool = True) -> None:
    """Read a tensor that `write_tensor` wrote.

    Args:
        frame: zip frame of its shape and dtype.
        into: contiguous tensor in host memory.
        keep_cached: see `read_into`.

    Raises:
        DamagedCheckpoint: a byte has changed.
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
    """Read an object, or a tensor without `frame_of`, that torch wrote.

    Raises:
        DamagedCheckpoint: a byte of its contents has changed.
    """
    data = bytearray(length)
    try:
        read_into(file, memoryview(data), offset)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch does not compress its records. A compressed one could unpack to any size.
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

NICENESS = 10  # lower priority for the writing thread, so that training comes first


def start_writing(write: Callable[[], T], *, in_background: bool = True) -> Future[T]:
    """Call `write` in a thread, or directly, and return a future of its result.

    The thread does not belong to an executor: Python waits for executors at exit, and a disk may hang.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            if in_background and hasattr(os, "setpriority"):
                # On Linux every thread has its own priority.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            future.set_result(write())
        except Exception as error:
            # Reported to all ranks when the checkpoint is committed.
            future.set_exception(error)

    if in_background:
        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    else:
        run()
    return future


class HostBuffers:
    """Host memory for copies, page-locked if they come from a GPU. Buffers are kept and reused from save to save."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self.num_bytes = 0  # bytes of all buffers, free or in use

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a complete copy in memory that belongs to the caller until `give_back`."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        if not free:
            self.num_bytes += tensor.nbytes
            free.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=platform.is_cuda))
        return free.pop().copy_(tensor)

    def give_back(self, copy: torch.Tensor) -> None:
        """Return a buffer for reuse."""
        self._free[copy.shape, copy.dtype].append(copy)


class HeldTensors(Generic[K]):
    """Tensors that do not change between two updates: weights and optimizer state, for most of a step.

    The writing thread takes one tensor after the other, and may read each until it takes the next. Code that is about
    to change the tensors calls `settle` first, which copies those that are not written yet. A copy's memory is free
    again once it is written. So there is only one copy of a GPU tensor at a time, until an update begins.

        writing thread:    take(a) write   take(b) write   take(c) write copy   close()
        training thread:   ... generation ...        settle(): copy c, wait for b, then step

    Args:
        tensors: must not change before `settle`.
        changing: may change at once, so they are copied in the constructor.
        buffers: memory for the copies, which no other save may use meanwhile.
    """

    def __init__(
        self, tensors: Mapping[K, torch.Tensor], changing: Mapping[K, torch.Tensor], buffers: HostBuffers
    ) -> None:
        self._waiting = dict(tensors)  # not copied, and not written or still being written
        self._buffers = buffers
        self._copied = {key: buffers.copy(tensor) for key, tensor in changing.items()}
        self._reading: K | None = None
        self._changed = threading.Condition()

    def take(self, key: K) -> torch.Tensor:
        """Return the tensor or its copy, in host memory. The tensor taken before is released."""
        with self._changed:
            self._let_go()
            self._reading = key
            if key in self._waiting and self._waiting[key].is_cuda:
                self._copy(key)
            return self._copied[key] if key in self._copied else self._waiting[key]

    def close(self) -> None:
        """Release all tensors: the writing thread has finished or failed, and reads nothing more."""
        with self._changed:
            self._waiting.clear()
            self._reading = None
            for copy in self._copied.values():
                self._buffers.give_back(copy)
            self._copied.clear()
            self._changed.notify_all()

    def settle(self, waits: Callable[[], None] = lambda: None) -> None:
        """Copy tensors that are still to be written, and wait for the one that is being read. Then all may change.

        Args:
            waits: called before waiting, which takes long if the disk hangs.
        """
        while True:
            with self._changed:
                # Start with the last tensor, as the writing thread starts with the first.
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
