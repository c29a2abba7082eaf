"""Transports within a node: processes read each other's memory, by cross-memory attach on CPUs and CUDA IPC on GPUs.

A reader only needs to know that the other side's weights are ready, which one number
per rank and run tells it. The weights stay unchanged until every rank has finished.
There are no buckets and no packing. The addresses of tensors are sent to readers as
JSON, never as pickles, and again whenever the tensors of some rank have moved.

    source rank                     all-reduce                    reading rank
    weights are ready   --------->  all ranks are ready  ------>  read boxes into place
    weights unchanged   <---------  all ranks agree on the version at the end of the run

Cross-memory attach (the term of MPI and UCX) is Linux's `process_vm_readv(2)`: one copy
between processes, from place to place. A socket copies twice and needs both sides to
run.

CUDA IPC relies on these properties of torch (torch 2.11 to 2.13:
`torch/csrc/StorageSharing.cpp`, `torch/csrc/CudaIPCTypes.h` and `.cpp`, `getIpcDevPtr`
in `c10/cuda/CUDACachingAllocator.cpp`):

- `_share_cuda_` puts its storage behind an unsigned count of readers in a file, which starts at one. With no reader or
  with two it never reaches zero, and the storage then stays allocated forever once it is freed. So `_handle` calls it
  on a storage of the same bytes that owns nothing, and the parameter's own storage is unaffected: emptying it frees its
  memory. This module ensures that nobody is reading at that time: every rank closes what it opened before the ranks
  agree at the end of a run (`Resharder`). CUDA requires this: freeing memory that is open elsewhere is undefined
  behaviour (cudaIpcOpenMemHandle).
- A handle names an allocation, not an address: memory that is freed and allocated again at the same address gets
  another handle (cudaIpcGetMemHandle). So readers' information is valid as long as the handles are the same.
- `_new_shared_cuda` makes the given device the current one. The sender's device would cost a CUDA context of some
  hundred MB on every peer's GPU; torch's own test (`test/distributed/test_p2p_ipc.py`) opens on the receiver's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.collectives import device_of, gather_json, reduce_json
from megaverl.distributed.failures import record_event, wait, wait_for_event
from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports import Moved, Tensors, TransferJob, copy_boxes, view
from megaverl.weights.transports.point_to_point import PointToPoint

logger = logging.getLogger(__name__)

MAX_PARTS = 1024  # memory ranges on either side of one call: IOV_MAX of Linux
MAX_BYTES = 2**30  # bytes of one call; Linux stops just below 2 GiB
# One `struct iovec`: start and size of a memory range.
PART = np.dtype([("start", np.uint64), ("nbytes", np.uint64)])

Transfers = Mapping[int, Sequence[Transfer]]  # peer -> transfers


def no_problem(problem: str, job: TransferJob) -> bool:
    """Return whether no rank has a problem, equal on all ranks; rank 0 logs the first
    problem. Collective over the group.
    """
    problems = [
        f"rank {rank}: {text}"
        for rank, text in enumerate(gather_json(problem, job.group))
        if text
    ]
    if problems and job.plan.rank == 0:
        logger.warning("weights go over the network within nodes: %s", problems[0])
    return not problems


class NodeReaders:
    """Base of both transports: every rank learns that all sources are ready, and readers learn their addresses."""

    def __init__(self, job: TransferJob, sends: Transfers, receives: Transfers) -> None:
        self._job, self._sends, self._receives = job, sends, receives
        self._sent = sum(map(job.wire_bytes, sends.values()))
        self._version = 0
        self._described: Any = None  # this rank's addresses, as its readers know them
        self._told: dict[int, Any] = {}  # peer -> addresses of its tensors

    def _meet(self, described: Any) -> bool:
        """Return whether tensors of some rank have moved; then all readers have received the new addresses.

        Collective.
        """
        # Storage moves rarely (after a sleep, or by offloading), so addresses are
        # exchanged only if some rank's have changed. All ranks take part, as a reader
        # cannot know whether its source has moved. The collective is also the signal
        # that the sources are final.
        doing = "waiting until all ranks' weights are ready to be read"
        moved = self._any_rank(described != self._described, doing)
        if moved:
            self._described = described
            self._told = self._exchange(described)
        return moved

    def _any_rank(self, flag_here: bool, doing: str) -> bool:
        """Return whether the condition holds on any rank. Collective over the group."""
        flag = torch.tensor([flag_here], dtype=torch.int64, device=platform.device)
        try:
            self._wait(dist.all_reduce(flag, group=self._job.group, async_op=True))
        except (RuntimeError, TimeoutError) as error:
            raise self._job.failures.blame(self._version, -1, doing, error) from error
        return bool(flag)

    def _exchange(self, value: Any) -> dict[int, Any]:
        """Send this rank's `value` to its readers, and return those of the ranks that it reads from."""
        device = device_of(self._job.group)
        data = torch.frombuffer(
            bytearray(json.dumps(value).encode()), dtype=torch.uint8
        ).to(device)
        # A receive needs a buffer of the right size, so the lengths travel first.
        lengths = {
            peer: torch.zeros(1, dtype=torch.int64, device=device)
            for peer in self._receives
        }
        self._batch(torch.tensor([data.numel()], device=device), lengths)
        parts = {
            peer: torch.empty(int(n), dtype=torch.uint8, device=device)
            for peer, n in lengths.items()
        }
        self._batch(data, parts)
        return {
            peer: json.loads(bytes(part.cpu().numpy())) for peer, part in parts.items()
        }

    def _batch(self, data: torch.Tensor, into: Mapping[int, torch.Tensor]) -> None:
        group, peers = self._job.group, [*into, *self._sends]
        ops = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer)
            for peer, tensor in into.items()
        ]
        ops += [
            dist.P2POp(dist.isend, data, group=group, group_peer=peer)
            for peer in self._sends
        ]
        for number, work in enumerate(dist.batch_isend_irecv(ops) if ops else ()):
            try:
                self._wait(work)
            except (RuntimeError, TimeoutError) as error:
                doing = f"exchanging with rank {peers[number]} where tensors lie"
                raise self._job.failures.blame(
                    self._version, peers[number], doing, error
                ) from error

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        wait(work, self._job.options.timeout)
        wait_for_event(record_event(), self._job.options.timeout)


class TensorAddress(NamedTuple):
    """Place of a tensor: address, strides in elements, bytes of an element."""

    address: int
    strides: tuple[int, ...]
    itemsize: int


class Read(NamedTuple):
    """One call: copy `nbytes` bytes from the other process's memory ranges, in order, into this process's."""

    here: np.ndarray
    there: np.ndarray
    nbytes: int


class CrossMemory(NodeReaders):
    """Takes transfers between CPU processes of one node that need no conversion, if the kernel permits the reads.

    Boxes are copied from place to place, many in one call.
    """

    def __init__(
        self,
        job: TransferJob,
        sends: Transfers,
        receives: Transfers,
        pids: Sequence[int],
    ) -> None:
        super().__init__(job, sends, receives)
        self._pids = pids
        self._here: list[int] | None = None
        self._reads: dict[int, list[Read]] = {}

    @classmethod
    def take(cls, job: TransferJob) -> CrossMemory | None:
        if (
            not job.options.ipc
            or platform.is_cuda
            or job.plan.world == 1
            or sys.platform != "linux"
        ):
            return None

        def wanted(peer: int) -> bool:
            both = (*job.sends.get(peer, ()), *job.receives.get(peer, ()))
            return job.options.same_node(job.plan.rank, peer) and not any(
                job.converts(t.tensor) for t in both
            )

        # A process id can mean another process here (containers have PID namespaces of
        # their own), so each rank reads a secret out of the other's memory before it
        # relies on the id.
        secret = np.frombuffer(os.urandom(16), dtype=np.uint8)
        everyone = gather_json(
            [os.getpid(), secret.ctypes.data, secret.tobytes().hex()], job.group
        )
        problem = next(
            (
                reason
                for peer in job.receives
                if wanted(peer) and (reason := _cannot_read(everyone[peer]))
            ),
            "",
        )
        if not no_problem(problem, job):
            return None
        sends, receives = job.take_peers(wanted)
        if not reduce_json(bool(sends or receives), any, job.group):
            return None
        return cls(job, sends, receives, [pid for pid, *_ in everyone])

    def start(self, version: int) -> None:
        self._version = version
        moved = self._meet(_places(self._job.source))
        here = [tensor.data_ptr() for tensor in self._job.dest.values()]
        if moved or here != self._here:
            self._here = here
            self._reads = {peer: self._reads_of(peer) for peer in self._receives}

    def finish(self) -> Moved:
        received = calls = 0
        for peer, pending in self._reads.items():
            for read in pending:
                try:
                    _read(self._pids[peer], read)
                except OSError as error:
                    first, last = self._receives[peer][0], self._receives[peer][-1]
                    doing = f"reading {first.tensor} to {last.tensor} in the memory of rank {peer}"
                    raise self._job.failures.blame(
                        self._version, peer, doing, error
                    ) from error
                received += read.nbytes
                calls += 1
        return Moved(sent=self._sent, received=received, messages=calls)

    def _reads_of(self, peer: int) -> list[Read]:
        dest = _places(self._job.dest)
        remote = {
            name: TensorAddress(where, tuple(by), size)
            for name, (where, by, size) in self._told[peer].items()
        }
        here = [parts(dest[t.dest_local], t.dest_box) for t in self._receives[peer]]
        remote_parts = [
            parts(remote[t.source_local], t.source_box) for t in self._receives[peer]
        ]
        return calls_for(
            joined(np.concatenate(here)), joined(np.concatenate(remote_parts))
        )


def parts(place: TensorAddress, box: Box) -> np.ndarray:
    """Return the memory ranges of a box of a tensor, in its order: an array of PART."""
    # Find the longest contiguous run: the trailing axes that lie without gaps.
    run, axis = 1, len(box.shape)
    while axis and (box.shape[axis - 1] == 1 or place.strides[axis - 1] == run):
        axis -= 1
        run *= box.shape[axis]
    first = sum(
        start * stride for start, stride in zip(box.start, place.strides, strict=True)
    )
    starts = np.array([place.address + first * place.itemsize], dtype=np.uint64)
    for size, stride in zip(box.shape[:axis], place.strides[:axis], strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * place.itemsize)
        starts = (starts[:, None] + steps).ravel()
    runs = np.empty(len(starts), dtype=PART)
    runs["start"], runs["nbytes"] = starts, run * place.itemsize
    return runs


def joined(runs: np.ndarray) -> np.ndarray:
    """Merge ranges that directly follow each other in memory."""
    opens = np.ones(len(runs), dtype=bool)
    opens[1:] = runs["start"][1:] != runs["start"][:-1] + runs["nbytes"][:-1]
    out: np.ndarray = runs[opens]
    out["nbytes"] = np.add.reduceat(runs["nbytes"], np.flatnonzero(opens))
    return out


def calls_for(local: np.ndarray, remote: np.ndarray) -> list[Read]:
    """Split two descriptions of equally many bytes into calls of at most MAX_PARTS ranges on each side."""
    ends = [np.cumsum(side["nbytes"]) for side in (local, remote)]
    total, done = int(ends[0][-1]), 0
    calls = []
    while done < total:
        firsts = [int(np.searchsorted(end, done, side="right")) for end in ends]
        stops = [
            int(end[min(first + MAX_PARTS, len(end)) - 1])
            for end, first in zip(ends, firsts, strict=True)
        ]
        stop = min(*stops, done + MAX_BYTES)
        calls.append(
            Read(
                _cut(local, ends[0], done, stop),
                _cut(remote, ends[1], done, stop),
                stop - done,
            )
        )
        done = stop
    return calls


def _cut(side: np.ndarray, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the bytes from `start` to `stop` of the ranges in `side`."""
    first, last = (
        int(np.searchsorted(ends, byte, side="right")) for byte in (start, stop - 1)
    )
    out = side[first : last + 1].copy()
    out["nbytes"][-1] -= np.uint64(int(ends[last]) - stop)
    skipped = np.uint64(start - int(ends[first] - side["nbytes"][first]))
    out["start"][0] += skipped
    out["nbytes"][0] -= skipped
    return out


def _read(pid: int, read: Read) -> None:
    """Copy memory of another process.

    Raises:
        OSError: the process is gone, may not be read, or has no such memory.
    """
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
    """Return why another process's memory cannot be read from here, or ''."""
    pid, address, secret = probe
    secret_read = np.zeros(len(secret) // 2, dtype=np.uint8)
    local, remote = (
        np.array([(start, secret_read.nbytes)], dtype=PART)
        for start in (secret_read.ctypes.data, address)
    )
    try:
        _read(pid, Read(local, remote, secret_read.nbytes))
    except (OSError, AttributeError) as error:
        return (
            f"process {os.getpid()} may not read process {pid}'s memory ({error}). Allow it (kernel.yama.ptrace_scope "
            "of 0, or the capability SYS_PTRACE in a container), or set reshard.ipc=never"
        )
    return (
        ""
        if secret_read.tobytes().hex() == secret
        else f"process {pid} is another one here: not the same machine"
    )


def _places(tensors: Tensors) -> dict[str, TensorAddress]:
    return {
        name: TensorAddress(t.data_ptr(), tuple(t.stride()), t.element_size())
        for name, t in tensors.items()
    }


# Name of a counter file that does not exist. torch then assumes that the sender has
# ended, and proceeds.
NO_COUNTER = b"/megaverl_counts_by_itself"


class CudaIpc(NodeReaders):
    """Takes transfers between processes of one node that can open each other's GPU memory, converting the dtype.

    One trial before anything moves decides for all ranks; if it fails, weights go
    through the process group. Opening memory may also fail later, for example if it
    comes from a pool that cannot be shared.
    """

    def __init__(self, job: TransferJob, sends: Transfers, receives: Transfers) -> None:
        super().__init__(job, sends, receives)
        self._opened: dict[int, dict[str, torch.Tensor]] = {}
        self._instead: PointToPoint | None = None
        self._moved = Moved()

    @classmethod
    def take(cls, job: TransferJob) -> CudaIpc | None:
        if not job.options.ipc or not platform.is_cuda or job.plan.world == 1:
            return None
        sends, receives = job.take_peers(
            lambda peer: job.options.same_node(job.plan.rank, peer)
        )
        if not reduce_json(bool(sends or receives), any, job.group):
            return None
        transport = cls(job, sends, receives)
        if no_problem(transport._open_all(), job):
            transport._opened.clear()
            return transport
        job.sends |= sends
        job.receives |= receives
        return None

    def start(self, version: int) -> None:
        """Wait until all ranks' weights are ready, and open them."""
        self._version = version
        if self._instead is None:
            problem = self._open_all()
            if self._any_rank(bool(problem), "opening other ranks' memory"):
                self._opened.clear()
                no_problem(problem, self._job)
                self._instead = PointToPoint(self._job, self._sends, self._receives)
        # The fallback uses the same group as the network's transport, so complete it
        # before that one starts.
        if self._instead is not None:
            self._instead.start(version)
            self._moved = self._instead.finish()

    def finish(self) -> Moved:
        if self._instead is not None:
            return self._moved
        received = 0
        for peer, transfers in self._receives.items():
            remote = self._opened[peer]
            origins = [view(remote[t.source_local], t.source_box) for t in transfers]
            copy_boxes(self._job.targets(transfers), origins)
            received += self._job.wire_bytes(transfers)
        try:
            wait_for_event(record_event(), self._job.options.timeout)
        except TimeoutError as error:
            raise self._job.failures.blame(
                self._version, -1, "reading other ranks' memory", error
            ) from error
        self._opened.clear()
        return Moved(sent=self._sent, received=received)

    def _open_all(self) -> str:
        """Open the memory of all ranks that this one reads from; return why that failed, or ''."""
        torch.cuda.current_stream().synchronize()  # the weights are ready to be read
        problem, described = "", None
        try:
            described = _describe(self._job.source)
        except RuntimeError as error:
            problem = f"its memory cannot be shared ({_first_line(error)})"
        self._meet(described)
        for peer, description in self._told.items():
            try:
                self._opened[peer] = (
                    _open(description) if description is not None else {}
                )
            except RuntimeError as error:
                problem = (
                    problem
                    or f"the memory of rank {peer} cannot be opened ({_first_line(error)})"
                )
        return problem and f"{problem}. {CAUSES}"


CAUSES = (
    "That takes peer access between the GPUs, processes that share a PID and an IPC namespace, and memory from torch's "
    "own allocator. reshard.ipc=never leaves the trial out"
)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _describe(source: Tensors) -> dict[str, Any]:
    """Return handles of the storages and, for each tensor, its storage, offset, shape, strides and dtype, as JSON.

    Offloaded tensors have no storage on the device, and are left out.
    """
    numbers: dict[int, int] = {}
    handles: list[list[Any]] = []
    tensors = {}
    for name, tensor in source.items():
        storage = tensor.detach().untyped_storage()
        if not storage.nbytes():
            continue
        if storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(handles)
            handles.append(_handle(storage))
        tensors[name] = [
            numbers[storage.data_ptr()],
            tensor.storage_offset(),
            list(tensor.shape),
            list(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
        ]
    return {"handles": handles, "tensors": tensors}


def _handle(storage: torch.UntypedStorage) -> list[Any]:
    """Return [handle of the allocation, the storage's bytes, its offset in the allocation]."""
    storage_alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    alias = cast(torch.UntypedStorage, storage_alias)
    _, handle, nbytes, offset, counter, place, *_ = alias._share_cuda_()
    # No reader uses the counter, so release it at once.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
    return [handle.hex(), nbytes, offset]


def _open(described: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Open another process's tensors from its `_describe`. The memory is closed when the last of them is freed."""
    storages = [
        torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(),
            bytes.fromhex(handle),
            nbytes,
            offset,
            NO_COUNTER,
            0,
            b"",
            False,
        )
        for handle, nbytes, offset in described["handles"]
    ]
    opened = {}
    for name, (number, offset, shape, stride, dtype) in described["tensors"].items():
        storage = storages[number]
        empty = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        opened[name] = empty.set_(storage, offset, shape, stride)
    return opened
