"""The local transport: boxes that this rank holds in another tensor or dtype are copied, all in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.packing import copy_all
from megaverl.weights.transports.registry import Moved, Tensors, TransferJob, register
from megaverl.weights.views import view


def copy_local(copies: Sequence[Transfer], source: Tensors, dest: Tensors) -> int:
    """Copy each box within this rank, converting the dtype. Returns the bytes written."""
    targets = [view(dest[transfer.dest_local], transfer.dest_box) for transfer in copies]
    origins = [view(source[transfer.source_local], transfer.source_box) for transfer in copies]
    copy_all(targets, [origin.reshape(target.shape) for origin, target in zip(origins, targets, strict=True)])
    return sum(target.numel() * target.element_size() for target in targets)


@register(order=20)
class LocalCopy:
    """Takes all copies that were not aliased."""

    def __init__(self, copies: Sequence[Transfer], source: Tensors, dest: Tensors) -> None:
        self._copies, self._source, self._dest = copies, source, dest

    @classmethod
    def take(cls, job: TransferJob) -> LocalCopy | None:
        copies, job.copies = job.copies, []
        return cls(copies, job.source, job.dest) if copies else None

    def start(self, version: int) -> None:
        """What is on the wire goes first; a copy needs no head start."""

    def finish(self) -> Moved:
        return Moved(local=copy_local(self._copies, self._source, self._dest))
