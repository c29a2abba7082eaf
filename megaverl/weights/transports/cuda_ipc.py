"""Processes of one node read boxes straight out of each other's GPU memory: CUDA IPC.

What torch does (torch 2.11 to 2.13: `torch/csrc/StorageSharing.cpp`, `torch/csrc/CudaIPCTypes.h` and `.cpp`,
`getIpcDevPtr` in `c10/cuda/CUDACachingAllocator.cpp`), and what follows from it here:

- `_share_cuda_` puts the storage that it is called on behind a count of readers in a file, which starts at one and is
  unsigned: none or two readers never bring it to zero, and then the storage, once freed, stays allocated for good. So
  it is called on a storage of the same bytes that owns nothing (`_handle`), and the parameter's own stays as it was:
  emptying it gives its memory back. That nobody reads it then is this module's own rule: whoever opened it has closed
  it before it comes to `Resharder`'s agreement at the end of a run. CUDA demands it: memory that is freed while it
  is open elsewhere is undefined behaviour (cudaIpcOpenMemHandle).
- A handle names an allocation, not an address: memory that is freed and allocated again at the same place gets another
  (cudaIpcGetMemHandle). So as long as the handles are the same, what readers were told holds.
- `_new_shared_cuda` makes the device that it is given the current one. The sender's would cost a CUDA context of some
  hundred MB on every peer's GPU; torch's own test (`test/distributed/test_p2p_ipc.py`) opens on the receiver's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from megaverl.distributed.collectives import reduce_json
from megaverl.distributed.failures import record_event, wait_for_event
from megaverl.platform import platform
from megaverl.weights.transfer import Moved, Tensors, TransferJob, copy_boxes, view
from megaverl.weights.transports.ipc import NodeReaders, Transfers, no_problem
from megaverl.weights.transports.point_to_point import PointToPoint

# Where torch would look for a count of readers, and finds none: it takes that for a sender that has ended, and goes on.
NO_COUNTER = b"/megaverl_counts_by_itself"


class CudaIpc(NodeReaders):
    """Takes what goes between processes of one node that can open each other's GPU memory, converting the dtype.

    Whether they can is tried once, before anything moves, and all ranks go by the result: else their weights go through
    the process group. It may also end later, as when memory comes back from a pool that cannot be shared.
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
        sends, receives = job.take_peers(lambda peer: job.options.same_node(job.plan.rank, peer))
        if not reduce_json(bool(sends or receives), any, job.group):
            return None
        made = cls(job, sends, receives)
        if no_problem(made._open_all(), job):
            made._opened.clear()
            return made
        job.sends |= sends
        job.receives |= receives
        return None

    def start(self, version: int) -> None:
        """All ranks' weights are ready to be read, and open on their readers."""
        self._version = version
        if self._instead is None:
            problem = self._open_all()
            if self._any_rank(bool(problem), "opening other ranks' memory"):
                self._opened.clear()
                no_problem(problem, self._job)
                self._instead = PointToPoint(self._job, self._sends, self._receives)
        if self._instead is not None:  # whole, before the network's own transport begins: one group, one order
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
            raise self._job.failures.blame(self._version, -1, "reading other ranks' memory", error) from error
        self._opened.clear()
        return Moved(sent=self._sent, received=received)

    def _open_all(self) -> str:
        """Open the memory of all ranks that this one reads from; why that does not work, or ''."""
        torch.cuda.current_stream().synchronize()  # the weights are ready to be read
        problem, described = "", None
        try:
            described = _describe(self._job.source)
        except RuntimeError as error:
            problem = f"its memory cannot be shared ({_first_line(error)})"
        self._meet(described)
        for peer, told in self._told.items():
            try:
                self._opened[peer] = _open(told) if told is not None else {}
            except RuntimeError as error:
                problem = problem or f"the memory of rank {peer} cannot be opened ({_first_line(error)})"
        return problem and f"{problem}. {CAUSES}"


CAUSES = (
    "That takes peer access between the GPUs, processes that share a PID and an IPC namespace, and memory from torch's "
    "own allocator. reshard.ipc=never leaves the trial out"
)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _describe(source: Tensors) -> dict[str, Any]:
    """JSON: handles of the storages, and for each tensor its storage, place, shape, strides and dtype. What is not in
    memory for now (offloaded) is left out."""
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
    """[handle of the allocation, the storage's bytes, where it begins in the allocation].

    Raises:
        RuntimeError: memory that cannot be shared.
    """
    made = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    alias = cast(torch.UntypedStorage, made)
    _, handle, nbytes, offset, counter, place, *_ = alias._share_cuda_()
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)  # no reader counts, so that it goes at once
    return [handle.hex(), nbytes, offset]


def _open(described: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Another process's tensors, from its `_describe`; it is closed when the last of them goes.

    Raises:
        RuntimeError: the driver or the system does not let this process open it.
    """
    storages = [
        torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(), bytes.fromhex(handle), nbytes, offset, NO_COUNTER, 0, b"", False
        )
        for handle, nbytes, offset in described["handles"]
    ]
    opened = {}
    for name, (number, offset, shape, stride, dtype) in described["tensors"].items():
        storage = storages[number]
        empty = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        opened[name] = empty.set_(storage, offset, shape, stride)
    return opened
