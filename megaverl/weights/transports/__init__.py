"""Transports: what carries a plan's boxes, one file each. Each takes what it can and leaves the rest to the next."""

from __future__ import annotations

from megaverl.errors import ReshardError
from megaverl.weights.transfer import BUCKET_BYTES, Moved, TransferJob, Transport, TransportOptions
from megaverl.weights.transports.ipc import CrossMemory, CudaIpc
from megaverl.weights.transports.local import Alias, LocalCopy, copy_local
from megaverl.weights.transports.point_to_point import PointToPoint
from megaverl.weights.transports.shared_folder import SharedFolder

TRANSPORTS: tuple[type[Transport], ...] = (Alias, LocalCopy, CrossMemory, CudaIpc, SharedFolder, PointToPoint)

__all__ = ["BUCKET_BYTES", "Moved", "TransferJob", "Transport", "TransportOptions", "assign", "copy_local"]


def assign(job: TransferJob) -> list[Transport]:
    """Give every copy, send and receive of the job to a transport. Every rank of the group takes part.

    Raises:
        ReshardError: something is left that no transport carries.
    """
    found = [transport for cls in TRANSPORTS if (transport := cls.take(job)) is not None]
    if job.copies or job.sends or job.receives:
        raise ReshardError(f"no transport carries the weights between rank {job.plan.rank} and {sorted(job.sends)}.")
    return found
