"""Processes of one node read boxes straight out of each other's memory: cross-memory attach on CPUs, and what CUDA IPC
(`cuda_ipc`) shares with it.

A reader needs nothing of the other side but that its weights are ready, which one number per rank and run says; and
they stay as they are until every rank has finished. No bucket and no packing. What tells another process where the
tensors lie goes to its readers as JSON, never as pickles, and again whenever some rank's tensors have moved.

Cross-memory attach (MPI's and UCX's word) is Linux's `process_vm_readv(2)`: one copy between processes, from place to
place, where a socket copies twice and needs both sides awake.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.collectives import device_of, gather_json, reduce_json
from megaverl.distributed.failures import record_event, wait, wait_for_event
from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Transfer
from megaverl.weights.transfer import Moved, Tensors, TransferJob

logger = logging.getLogger(__name__)

MAX_PARTS = 1024  # of memory on either side of one call: IOV_MAX of Linux
MAX_BYTES = 2**30  # of one call; Linux stops just below 2 GiB
# one `struct iovec`: where a part of memory starts, and its bytes
PART = np.dtype([("start", np.uint64), ("nbytes", np.uint64)])

Transfers = Mapping[int, Sequence[Transfer]]  # by peer


def no_problem(problem: str, job: TransferJob) -> bool:
    """Whether no rank has a problem, the same on all; one line says which one stands in the way. All take part."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(gather_json(problem, job.group)) if text]
    if found and job.plan.rank == 0:
        logger.warning("weights go over the network within nodes: %s", found[0])
    return not found


class NodeReaders:
    """What both transports share: every rank learns that all sources are ready, and its readers where they lie."""

    def __init__(self, job: TransferJob, sends: Transfers, receives: Transfers) -> None:
        self._job, self._sends, self._receives = job, sends, receives
        self._sent = sum(map(job.wire_bytes, sends.values()))
        self._version = 0
        self._described: Any = None  # as the readers were told last
        self._told: dict[int, Any] = {}  # by rank that is read from

    def _meet(self, described: Any) -> bool:
        """Whether a rank's tensors have moved since the last time, and all know where they lie now."""
        what = "waiting until all ranks' weights are ready to be read"
        moved = self._any_rank(described != self._described, what)
        if moved:
            self._described = described
            self._told = self._exchange(described)
        return moved

    def _any_rank(self, mine: bool, what: str) -> bool:
        """Whether it holds on any rank; all take part."""
        flag = torch.tensor([mine], dtype=torch.int64, device=platform.device)
        try:
            self._wait(dist.all_reduce(flag, group=self._job.group, async_op=True))
        except (RuntimeError, TimeoutError) as error:
            raise self._job.failures.blame(self._version, -1, what, error) from error
        return bool(flag)

    def _exchange(self, value: Any) -> dict[int, Any]:
        """This rank's `value` to its readers, and those of the ranks that it reads from."""
        device = device_of(self._job.group)
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        lengths = {peer: torch.zeros(1, dtype=torch.int64, device=device) for peer in self._receives}
        self._batch(torch.tensor([data.numel()], device=device), lengths)
        parts = {peer: torch.empty(int(n), dtype=torch.uint8, device=device) for peer, n in lengths.items()}
        self._batch(data, parts)
        return {peer: json.loads(bytes(part.cpu().numpy())) for peer, part in parts.items()}

    def _batch(self, data: torch.Tensor, into: Mapping[int, torch.Tensor]) -> None:
        group, peers = self._job.group, [*into, *self._sends]
        ops = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in into.items()]
        ops += [dist.P2POp(dist.isend, data, group=group, group_peer=peer) for peer in self._sends]
        for number, work in enumerate(dist.batch_isend_irecv(ops) if ops else ()):
            try:
                self._wait(work)
            except (RuntimeError, TimeoutError) as error:
                what = f"exchanging with rank {peers[number]} where tensors lie"
                raise self._job.failures.blame(self._version, peers[number], what, error) from error

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        wait(work, self._job.options.timeout)
        wait_for_event(record_event(), self._job.options.timeout)


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


class CrossMemory(NodeReaders):
    """Takes what goes between CPU processes of one node in one dtype, where the kernel lets them read each other:
    boxes go from where they lie to where they belong, many to a call."""

    def __init__(self, job: TransferJob, sends: Transfers, receives: Transfers, pids: Sequence[int]) -> None:
        super().__init__(job, sends, receives)
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
        dest = _places(self._job.dest)
        remote = {name: TensorAddress(where, tuple(by), size) for name, (where, by, size) in self._told[peer].items()}
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
