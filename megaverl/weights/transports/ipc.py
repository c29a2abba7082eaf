"""Processes of one node read boxes straight out of each other's memory: CUDA IPC on GPUs, cross-memory attach on CPUs.

A reader needs nothing of the other side but that its weights are ready, which one number per rank and run says; and
they stay as they are until every rank has finished. No bucket and no packing. What tells another process where the
tensors lie goes round once as JSON, never as pickles, and again whenever some rank's tensors have moved.

Cross-memory attach (MPI's and UCX's word) is Linux's `process_vm_readv(2)`: one copy between processes, from place to
place, where a socket copies twice and needs both sides awake. `tools/gpu_check.py` runs what needs a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json, reduce_json
from megaverl.distributed.failures import record_event, wait, wait_for_event
from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Transfer
from megaverl.weights.transfer import Moved, Tensors, TransferJob, copy_boxes, view

logger = logging.getLogger(__name__)

MAX_PARTS = 1024  # of memory on either side of one call: IOV_MAX of Linux
MAX_BYTES = 2**30  # of one call; Linux stops just below 2 GiB
# one `struct iovec`: where a part of memory starts, and its bytes
PART = np.dtype([("start", np.uint64), ("nbytes", np.uint64)])


class _Readers:
    """What both transports share: every rank learns that all sources are ready, and where they lie."""

    def __init__(self, job: TransferJob, receives: Mapping[int, Sequence[Transfer]], sent: int) -> None:
        self._job, self._receives, self._sent = job, receives, sent
        self._addresses: list[int] | None = None
        self._remote: dict[int, Any] = {}

    @staticmethod
    def peers(
        job: TransferJob, problem: str, wanted: Callable[[int], bool]
    ) -> tuple[dict[int, tuple[Transfer, ...]], int] | None:
        """(receives, bytes sent) between this rank and these peers, taken from the job.

        None where some rank has a problem, or none has anything to read. Every rank takes part; one that has nothing
        to do goes on taking part in exchanging addresses.
        """
        if problems := [found for found in gather_json(problem, job.group) if found]:
            if job.plan.rank == 0:
                logger.warning("weights go over the network within nodes: %s", problems[0])
            return None
        sends, receives = job.take_peers(wanted)
        if not reduce_json(bool(sends or receives), any, job.group):
            return None
        return receives, sum(map(job.wire_bytes, sends.values()))

    def describe(self) -> Any:
        """JSON from which another process finds this rank's source tensors."""
        raise NotImplementedError

    def open(self, described: Any) -> Any:
        """Another rank's `describe`, ready for use."""
        raise NotImplementedError

    def start(self, version: int) -> None:
        """All ranks' weights are ready to be read, and known to their readers."""
        self._version = version
        if platform.is_cuda:
            torch.cuda.current_stream().synchronize()
        addresses = [tensor.data_ptr() for tensor in self._job.source.values()]
        moved = torch.tensor([addresses != self._addresses], dtype=torch.int64, device=platform.device)
        timeout = self._job.options.timeout
        try:
            wait(dist.all_reduce(moved, group=self._job.group, async_op=True), timeout)
            wait_for_event(record_event(), timeout)
        except (RuntimeError, TimeoutError) as error:
            what = "waiting until all ranks' weights are ready to be read"
            raise self._job.failures.blame(version, -1, what, error) from error
        if int(moved):
            self._addresses = addresses
            self._remote = {}
            everyone = gather_json(self.describe(), self._job.group)
            self._remote = {peer: self.open(everyone[peer]) for peer in self._receives}


class TensorAddress(NamedTuple):
    """Where a tensor lies: address, strides in elements, bytes of an element."""

    address: int
    strides: tuple[int, ...]
    itemsize: int


class Read(NamedTuple):
    """One call: so many bytes from the other process's parts, in order, into this one's."""

    here: np.ndarray
    there: np.ndarray
    nbytes: int


class CrossMemory(_Readers):
    """Takes what goes between CPU processes of one node in one dtype, where the kernel lets them read each other:
    boxes go from where they lie to where they belong, many to a call."""

    def __init__(
        self, job: TransferJob, receives: Mapping[int, Sequence[Transfer]], sent: int, pids: Sequence[int]
    ) -> None:
        super().__init__(job, receives, sent)
        self._pids = pids
        self._here: list[int] | None = None
        self._reads: dict[int, list[Read]] = {}

    @classmethod
    def take(cls, job: TransferJob) -> CrossMemory | None:
        if not job.options.ipc or platform.is_cuda or job.plan.world == 1 or sys.platform != "linux":
            return None

        def wanted(peer: int) -> bool:
            both = (*job.sends.get(peer, ()), *job.receives.get(peer, ()))
            return job.options.same_node(job.plan.rank, peer) and not any(job.converts(t.tensor) for t in both)

        secret = np.frombuffer(os.urandom(16), dtype=np.uint8)
        everyone = gather_json([os.getpid(), secret.ctypes.data, secret.tobytes().hex()], job.group)
        problem = next((why for peer in job.receives if wanted(peer) and (why := _cannot_read(everyone[peer]))), "")
        taken = cls.peers(job, problem, wanted)
        return None if taken is None else cls(job, *taken, [pid for pid, *_ in everyone])

    def describe(self) -> dict[str, TensorAddress]:
        return _places(self._job.source)

    def open(self, described: Mapping[str, Any]) -> dict[str, TensorAddress]:
        return {
            name: TensorAddress(address, tuple(strides), size) for name, (address, strides, size) in described.items()
        }

    def start(self, version: int) -> None:
        known = self._remote
        super().start(version)
        here = [tensor.data_ptr() for tensor in self._job.dest.values()]
        if self._remote is not known or here != self._here:
            self._here = here
            self._reads = {peer: self._reads_of(peer) for peer in self._receives}

    def finish(self) -> Moved:
        received = calls = 0
        for peer, reads in self._reads.items():
            for read in reads:
                try:
                    _read(self._pids[peer], read)
                except OSError as error:
                    first, last = self._receives[peer][0], self._receives[peer][-1]
                    what = f"reading {first.tensor} to {last.tensor} in the memory of rank {peer}"
                    raise self._job.failures.blame(self._version, peer, what, error) from error
                received += read.nbytes
                calls += 1
        return Moved(sent=self._sent, received=received, messages=calls)

    def _reads_of(self, peer: int) -> list[Read]:
        dest, remote = _places(self._job.dest), self._remote[peer]
        here = [parts(dest[t.dest_local], t.dest_box) for t in self._receives[peer]]
        there = [parts(remote[t.source_local], t.source_box) for t in self._receives[peer]]
        return calls_for(joined(np.concatenate(here)), joined(np.concatenate(there)))


def parts(place: TensorAddress, box: Box) -> np.ndarray:
    """The runs of memory that a box of a tensor consists of, in its order: an array of PART."""
    run, axis = 1, len(box.shape)
    while axis and (box.shape[axis - 1] == 1 or place.strides[axis - 1] == run):
        axis -= 1
        run *= box.shape[axis]
    first = sum(start * stride for start, stride in zip(box.start, place.strides, strict=True))
    starts = np.array([place.address + first * place.itemsize], dtype=np.uint64)
    for size, stride in zip(box.shape[:axis], place.strides[:axis], strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * place.itemsize)
        starts = (starts[:, None] + steps).ravel()
    found = np.empty(len(starts), dtype=PART)
    found["start"], found["nbytes"] = starts, run * place.itemsize
    return found


def joined(found: np.ndarray) -> np.ndarray:
    """The same memory, with parts that lie one behind the other made one."""
    opens = np.ones(len(found), dtype=bool)
    opens[1:] = found["start"][1:] != found["start"][:-1] + found["nbytes"][:-1]
    out = found[opens]
    out["nbytes"] = np.add.reduceat(found["nbytes"], np.flatnonzero(opens))
    return out


def calls_for(here: np.ndarray, there: np.ndarray) -> list[Read]:
    """Cut two descriptions of as many bytes into calls of at most MAX_PARTS parts on each side."""
    ends = [np.cumsum(side["nbytes"]) for side in (here, there)]
    total, done = int(ends[0][-1]), 0
    reads = []
    while done < total:
        firsts = [int(np.searchsorted(end, done, side="right")) for end in ends]
        stops = [int(end[min(first + MAX_PARTS, len(end)) - 1]) for end, first in zip(ends, firsts, strict=True)]
        stop = min(*stops, done + MAX_BYTES)
        reads.append(Read(_cut(here, ends[0], done, stop), _cut(there, ends[1], done, stop), stop - done))
        done = stop
    return reads


def _cut(side: np.ndarray, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The bytes from `start` to `stop` of all that `side` describes."""
    first, last = (int(np.searchsorted(ends, byte, side="right")) for byte in (start, stop - 1))
    out = side[first : last + 1].copy()
    out["nbytes"][-1] -= np.uint64(int(ends[last]) - stop)
    skipped = np.uint64(start - int(ends[first] - side["nbytes"][first]))
    out["start"][0] += skipped
    out["nbytes"][0] -= skipped
    return out


def _read(pid: int, read: Read) -> None:
    """Raises OSError when the process is gone, may not be read, or has no such memory."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    sides = [
        argument
        for side in (read.here, read.there)
        for argument in (ctypes.c_void_p(side.ctypes.data), ctypes.c_ulong(len(side)))
    ]
    count = call(ctypes.c_int(pid), *sides, ctypes.c_ulong(0))
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if count != read.nbytes:
        raise OSError(f"{count} bytes came instead of {read.nbytes}")


def _cannot_read(probe: Sequence[Any]) -> str:
    """Why another process's memory cannot be read from here, or ''."""
    pid, address, secret = probe
    found = np.zeros(len(secret) // 2, dtype=np.uint8)
    here, there = (np.array([(start, found.nbytes)], dtype=PART) for start in (found.ctypes.data, address))
    try:
        _read(pid, Read(here, there, found.nbytes))
    except (OSError, AttributeError) as error:
        return (
            f"process {os.getpid()} may not read process {pid}'s memory ({error}). Allow it (kernel.yama.ptrace_scope "
            "of 0, or the capability SYS_PTRACE in a container), or set reshard.ipc=never"
        )
    return "" if found.tobytes().hex() == secret else f"process {pid} is another one here: not the same machine"


def _places(tensors: Tensors) -> dict[str, TensorAddress]:
    return {name: TensorAddress(t.data_ptr(), tuple(t.stride()), t.element_size()) for name, t in tensors.items()}


class CudaIpc(_Readers):
    """Takes what goes between processes of one node, each of which sees the same CUDA devices, converting the dtype.

    Every rank exports the storages that its source tensors lie in: a few, as Megatron keeps parameters in buffers.
    """

    @classmethod
    def take(cls, job: TransferJob) -> CudaIpc | None:
        if not job.options.ipc or not platform.is_cuda or job.plan.world == 1:
            return None
        taken = cls.peers(job, _cannot_export(job.source), lambda peer: job.options.same_node(job.plan.rank, peer))
        return None if taken is None else cls(job, *taken)

    def describe(self) -> dict[str, Any]:
        return _export(self._job.source)

    def open(self, described: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return _open(described)

    def finish(self) -> Moved:
        received = 0
        for peer, transfers in self._receives.items():
            remote = self._remote[peer]
            origins = [view(remote[t.source_local], t.source_box) for t in transfers]
            copy_boxes(self._job.targets(transfers), origins)
            received += self._job.wire_bytes(transfers)
        try:
            wait_for_event(record_event(), self._job.options.timeout)
        except TimeoutError as error:
            raise self._job.failures.blame(self._version, -1, "reading other ranks' memory", error) from error
        return Moved(sent=self._sent, received=received)


def _cannot_export(source: Tensors) -> str:
    """Why this process's memory cannot be shared, or ''."""
    try:
        _export(source)
    except RuntimeError as error:  # expandable segments, a container without the right to
        return f"CUDA IPC does not work: {str(error).splitlines()[0]}"
    return ""


def _export(source: Tensors) -> dict[str, Any]:
    """JSON: handles of the storages, and for each tensor its storage, place, shape, strides and dtype."""
    numbers: dict[int, int] = {}
    handles: list[list[Any]] = []
    tensors = {}
    for name, tensor in source.items():
        storage = tensor.detach().untyped_storage()
        if storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(handles)
            shared = storage._share_cuda_()
            handles.append([part.hex() if isinstance(part, bytes) else part for part in shared])
        tensors[name] = [
            numbers[storage.data_ptr()],
            tensor.storage_offset(),
            list(tensor.shape),
            list(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
        ]
    return {"handles": handles, "tensors": tensors}


# Places of bytes in what `_share_cuda_` returns: the memory's, the reference counter's and the event's handle.
BYTES = (1, 4, 6)


def _open(exported: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Another process's tensors, from what its `_export` gave."""
    storages = []
    for handle in exported["handles"]:
        parts = [bytes.fromhex(part) if place in BYTES else part for place, part in enumerate(handle)]
        storages.append(torch.UntypedStorage._new_shared_cuda(*parts))
    opened = {}
    for name, (number, offset, shape, stride, dtype) in exported["tensors"].items():
        storage = storages[number]
        empty = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        opened[name] = empty.set_(storage, offset, shape, stride)
    return opened
