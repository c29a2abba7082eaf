"""The CUDA IPC transport: a rank reads boxes straight out of the memory of other processes on its node.

Not run on the machines that this was written on, which have no GPU: see `tools/gpu_check.py` for what is run there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json
from megaverl.distributed.deadlines import record_event, wait, wait_for_event
from megaverl.platform import platform
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.packing import copy_all
from megaverl.weights.transports.registry import Moved, Tensors, TransferJob, register
from megaverl.weights.views import view

logger = logging.getLogger(__name__)


@register(order=50)
class CudaIpc:
    """Takes what goes between processes of one node, each of which sees the same CUDA devices.

    Every rank exports the storages that its source tensors lie in (a few, as Megatron keeps parameters in
    buffers); the handles go round as hexadecimal JSON, never as pickles, once and again whenever some rank's
    storage has moved. A receiver then copies, converting the dtype, from the other's memory into place: no
    bucket, no packing, no message but one number per rank and run.
    """

    def __init__(self, job: TransferJob, receives: Mapping[int, Sequence[Transfer]], sent: int) -> None:
        self._job, self._receives, self._sent = job, receives, sent
        self._remote: dict[int, Tensors] = {}
        self._addresses: list[int] | None = None

    @classmethod
    def take(cls, job: TransferJob) -> CudaIpc | None:
        if not job.options.ipc or not platform.is_cuda or job.plan.world == 1:
            return None
        rank = job.plan.rank
        problems = gather_json(_cannot_export(job.source), job.group)
        if any(problems):
            logger.warning("weights go over the network within nodes, as CUDA IPC does not work: %s", problems)
            return None
        sends, receives = job.take_peers(lambda peer: job.options.same_node(rank, peer))
        sent = sum(t.box.numel * job.wire_of(t).itemsize for transfers in sends.values() for t in transfers)
        if not any(gather_json(bool(sends or receives), job.group)):
            return None
        return cls(job, receives, sent)  # also with nothing to do: the exchange of handles takes all ranks

    def start(self, version: int) -> None:
        """All ranks' sources are ready, and their handles known."""
        self._version = version
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
            self._remote.clear()
            everyone = gather_json(_export(self._job.source), self._job.group)
            self._remote = {peer: _open(everyone[peer]) for peer in self._receives}

    def finish(self) -> Moved:
        received = 0
        for peer, transfers in self._receives.items():
            remote = self._remote[peer]
            targets = [view(self._job.dest[t.dest_local], t.dest_box) for t in transfers]
            origins = [view(remote[t.source_local], t.source_box) for t in transfers]
            copy_all(targets, [origin.reshape(target.shape) for origin, target in zip(origins, targets, strict=True)])
            received += sum(t.box.numel * self._job.wire_of(t).itemsize for t in transfers)
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
        return str(error).splitlines()[0]
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
