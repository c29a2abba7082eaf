"""The cross-memory transport: on a CPU, a rank reads boxes straight out of the memory of other processes on its node.

What MPI and UCX call cross-memory attach: Linux's `process_vm_readv(2)` copies between processes once, from place to
place, where a socket copies twice and needs both sides awake. It is to a CPU what the CUDA IPC transport is to a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json
from megaverl.distributed.deadlines import wait
from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.registry import Moved, Tensors, TransferJob, register

logger = logging.getLogger(__name__)

MAX_PARTS = 1024  # of memory on either side of one call: IOV_MAX of Linux
MAX_BYTES = 2**30  # of one call; Linux stops just below 2 GiB
# one `struct iovec`: where a part of memory starts, and its bytes
PART = np.dtype([("start", np.uint64), ("nbytes", np.uint64)])


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


@register(order=50)
class CrossMemory:
    """Takes what goes between CPU processes of one node in one dtype, where the kernel lets them read each other.

    A reader needs nothing of the other side but that its weights are ready, which one number per rank and run says;
    and they stay as they are until every rank has finished. No bucket and no packing: boxes go from where they lie
    to where they belong, many to a call. Addresses go round once, and again whenever some rank's tensors have moved.
    """

    def __init__(
        self, job: TransferJob, pids: Sequence[int], receives: Mapping[int, Sequence[Transfer]], sent: int
    ) -> None:
        self._job, self._pids, self._receives, self._sent = job, pids, receives, sent
        self._here: list[int] | None = None
        self._source: list[int] | None = None
        self._remote: dict[int, Mapping[str, TensorAddress]] = {}
        self._reads: dict[int, list[Read]] = {}

    @classmethod
    def take(cls, job: TransferJob) -> CrossMemory | None:
        if not job.options.ipc or platform.is_cuda or job.plan.world == 1 or sys.platform != "linux":
            return None
        rank = job.plan.rank

        def wanted(peer: int) -> bool:
            both = (*job.sends.get(peer, ()), *job.receives.get(peer, ()))
            return job.options.same_node(rank, peer) and not any(job.converts(t.tensor) for t in both)

        secret = np.frombuffer(os.urandom(16), dtype=np.uint8)
        everyone = gather_json([os.getpid(), secret.ctypes.data, secret.tobytes().hex()], job.group)
        problem = next((why for peer in job.receives if wanted(peer) and (why := _cannot_read(everyone[peer]))), "")
        problems = gather_json(problem, job.group)
        if any(problems):
            if rank == 0:
                logger.warning("weights go over the network within nodes: %s", next(filter(None, problems)))
            return None
        sends, receives = job.take_peers(wanted)
        if not any(gather_json(bool(sends or receives), job.group)):
            return None
        sent = sum(t.box.numel * job.wire_of(t).itemsize for transfers in sends.values() for t in transfers)
        return cls(job, [pid for pid, *_ in everyone], receives, sent)  # the exchange of addresses takes all ranks

    def start(self, version: int) -> None:
        """All ranks' weights are ready to be read, and their addresses known."""
        self._version = version
        source = [tensor.data_ptr() for tensor in self._job.source.values()]
        moved = torch.tensor([source != self._source], dtype=torch.int64)
        try:
            wait(dist.all_reduce(moved, group=self._job.group, async_op=True), self._job.options.timeout)
        except RuntimeError as error:
            what = "waiting until all ranks' weights are ready to be read"
            raise self._job.failures.blame(version, -1, what, error) from error
        here = [tensor.data_ptr() for tensor in self._job.dest.values()]
        if int(moved):
            self._source = source
            everyone = gather_json(_places(self._job.source), self._job.group)
            self._remote = {
                peer: {
                    name: TensorAddress(address, tuple(strides), size)
                    for name, (address, strides, size) in found.items()
                }
                for peer, found in ((peer, everyone[peer]) for peer in self._receives)
            }
        if int(moved) or here != self._here:
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
        here = [parts(TensorAddress(*dest[t.dest_local]), t.dest_box) for t in self._receives[peer]]
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


def _places(tensors: Tensors) -> dict[str, tuple[int, tuple[int, ...], int]]:
    return {name: (t.data_ptr(), tuple(t.stride()), t.element_size()) for name, t in tensors.items()}
