"""Interface of a transport, its job and options, and messages of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megaverl.distributed.failures import Failures
from megaverl.sharding.boxes import carry, split
from megaverl.sharding.plan import Hop, Plan, Transfer
from megaverl.weights.transports.sent_weights import DeltaMode, SentWeights
from megaverl.weights.transports.tensor_views import Tensors, view

BUCKET_BYTES = 64 * 2**20
# A box of at least this fraction of a message has a message of its own, so that it can
# be sent and received in place.
ALONE = 1 / 16
# From this size on, a copy on a GPU runs alone. On an H200 the kernel that copies many
# tensors reaches 2.7 TB/s (bytes read and written) at any size from 4 MiB, and plain
# copies 2.5 TB/s at 8 MiB, 3.0 at 16 and 4.0 at 128 MiB. Kernels that convert the dtype
# are quicker together at every size. (tools/bench_copies.py)
LARGE_COPY = 16 * 2**20


@dataclass(frozen=True)
class TransportOptions:
    """Permitted ways to move weights, equal on every rank.

    Attributes:
        bucket_bytes: size of the send buffer and of the receive buffer.
        alias: whether the destination may share the source's storage.
        may_rebind: whether the destination's tensors may move to other storage at any time: no captured graph holds
            their addresses.
        node_of: returns the node of a rank; None: all ranks share one node.
        timeout: longest wait for another rank; None: the group's timeout.
        folder: folder for files through which weights pass between nodes; None: use the network.
        ipc: whether processes of one node may read each other's memory.
        never_alias: destination tensors that need their own storage, because they are written after a run.
        delta: whether messages have only the elements that changed since the last version (`reshard.delta`).
    """

    bucket_bytes: int = BUCKET_BYTES
    alias: bool = False
    may_rebind: bool = True
    node_of: Callable[[int], int] | None = None
    timeout: timedelta | None = None
    folder: Path | None = None
    ipc: bool = False
    never_alias: frozenset[str] = frozenset()
    delta: DeltaMode = "off"

    def same_node(self, a: int, b: int) -> bool:
        """Return whether two ranks are on one node."""
        return self.node_of is None or self.node_of(a) == self.node_of(b)


@dataclass
class TransferJob:
    """One rank's plan and tensors. `copies`, `sends`, `receives` and `relays` hold what no transport has taken yet.

    Attributes:
        wire: global tensor -> the dtype in which it is sent.
        converts: global tensor -> whether its dtype differs between source and destination.
        failures: converts errors between ranks into an error that names the rank.
        sent: copies of what was sent last, by which the next version is compared. None: everything is sent whole.
    """

    plan: Plan
    source: Tensors
    dest: Tensors
    wire: Callable[[str], torch.dtype]
    converts: Callable[[str], bool]
    group: dist.ProcessGroup | None
    options: TransportOptions
    failures: Failures
    sent: SentWeights | None = None
    copies: list[Transfer] = field(init=False)
    sends: dict[int, tuple[Transfer, ...]] = field(init=False)
    receives: dict[int, tuple[Transfer, ...]] = field(init=False)
    relays: tuple[Hop, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._keep(self.plan)

    def _keep(self, plan: Plan) -> None:
        self.copies, self.relays = list(plan.copies), plan.relays
        self.sends, self.receives = dict(plan.sends), dict(plan.receives)

    def leave_out(self, tensors: Collection[str]) -> None:
        """Remove all transfers of these weights, which another job carries."""
        left = replace(
            self.plan,
            copies=tuple(self.copies),
            sends=self.sends,
            receives=self.receives,
            relays=self.relays,
        )
        self._keep(left.only(lambda tensor: tensor not in tensors))

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Everything between ranks that no transport has taken yet, in order."""
        return Hop(self.sends, self.receives), *self.relays

    def wire_of(self, transfer: Transfer) -> torch.dtype:
        """Return the dtype in which a transfer is sent."""
        return self.wire(transfer.tensor)

    def wire_bytes(self, transfers: Iterable[Transfer]) -> int:
        """Return the bytes of these transfers on the wire."""
        return sum(
            transfer.box.numel * self.wire_of(transfer).itemsize
            for transfer in transfers
        )

    def origins(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """Return the boxes to read on this rank, in place."""
        return [
            view(self.source[transfer.source_local], transfer.source_box)
            for transfer in transfers
        ]

    def forwarded(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """Return the boxes that this rank has received and forwards (`Hop.after`), in place."""
        return [
            view(self.dest[transfer.source_local], transfer.source_box)
            for transfer in transfers
        ]

    def targets(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """Return the boxes to write on this rank, in place."""
        return [
            view(self.dest[transfer.dest_local], transfer.dest_box)
            for transfer in transfers
        ]

    def take_peers(
        self, wanted: Callable[[int], bool]
    ) -> tuple[dict[int, tuple[Transfer, ...]], ...]:
        """Remove and return all (sends, receives) with the wanted peers. Both ends must decide alike."""
        taken = []
        for lists in (self.sends, self.receives):
            peers = [peer for peer in lists if wanted(peer)]
            taken.append({peer: lists.pop(peer) for peer in peers})
        return tuple(taken)

    def take_relays(self) -> tuple[Hop, ...]:
        """Remove and return the hops of a fan-out, which are empty on ranks that take no part in it."""
        taken, self.relays = self.relays, ()
        return taken


class Moved(NamedTuple):
    """Bytes that one transport moved in one run.

    Attributes:
        messages: number of sends and receives.
        unsent: bytes that were not sent because they had not changed.
        compared, changed: elements that this rank compared with the last version, and those of them that changed.
    """

    aliased: int = 0
    local: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0
    unsent: int = 0
    compared: int = 0
    changed: int = 0

    def plus(self, other: Moved) -> Moved:
        """Return the sum of two results."""
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


class TransportKind(Protocol):
    """A class of transports."""

    def take(self, job: TransferJob) -> Transport | None:
        """Take the transfers that this kind supports from the job; return None if there are none.

        Every rank of the group calls this in the same order, so small collectives are
        allowed.
        """


class Transport(Protocol):
    """Carries its share of a plan, any number of times.

    Example:
        transport = PointToPoint.take(job)
        transport.start(version=1)   # post sends and receives
        moved = transport.finish()   # wait until the destination is complete
    """

    def start(self, version: int) -> None:
        """Begin the work that can proceed while other transports work.

        Args:
            version: number of the run, from 1.
        """

    def finish(self) -> Moved:
        """Do the rest. Afterwards the transport's part of the destination is complete.

        Raises:
            ReshardError: a rank died or stalled; names the rank.
        """


class Message(NamedTuple):
    """Boxes that are sent together from one rank to another, and the byte offset of each, without gaps."""

    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        first, last = self.transfers[0], self.transfers[-1]
        rest = f" to {last.tensor} {last.box}" if len(self.transfers) > 1 else ""
        return f"{first.tensor} {first.box}{rest}"


def messages(
    transfers: Sequence[Transfer],
    dtype_of: Callable[[Transfer], torch.dtype],
    max_bytes: int,
) -> list[Message]:
    """Pack the boxes from one rank to another into messages of at most `max_bytes`.

    Both ranks call this with the same boxes and get the same messages, since only sizes
    matter. The number of messages grows with the bytes, not with the boxes: small boxes
    share a message, large ones have one of their own, and larger ones are split. Wider
    dtypes come first, so that every box is aligned without padding.
    """
    out: list[Message] = []
    packed: list[Transfer] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        if packed:
            out.append(Message(tuple(packed), tuple(offsets), end))
            packed.clear()
            offsets.clear()

    by_width = sorted(transfers, key=lambda transfer: -dtype_of(transfer).itemsize)
    for transfer in _parts(by_width, dtype_of, max_bytes):
        nbytes = transfer.box.numel * dtype_of(transfer).itemsize
        if nbytes >= max_bytes * ALONE:
            out.append(Message((transfer,), (0,), nbytes))
            continue
        start = end if packed else 0
        if start + nbytes > max_bytes:
            close()
            start = 0
        packed.append(transfer)
        offsets.append(start)
        end = start + nbytes
    close()
    return out


def messages_by_dtype(
    transfers: Sequence[Transfer],
    dtype_of: Callable[[Transfer], torch.dtype],
    max_bytes: int,
) -> list[Message]:
    """Pack the boxes as `messages` does, with boxes of one dtype in each message, so that it can be compared."""
    of_dtype: dict[torch.dtype, list[Transfer]] = {}
    for transfer in transfers:
        of_dtype.setdefault(dtype_of(transfer), []).append(transfer)
    return [
        message
        for boxes in of_dtype.values()
        for message in messages(boxes, dtype_of, max_bytes)
    ]


def _parts(
    transfers: Iterable[Transfer],
    dtype_of: Callable[[Transfer], torch.dtype],
    max_bytes: int,
) -> Iterator[Transfer]:
    for transfer in transfers:
        max_numel = max(1, max_bytes // dtype_of(transfer).itemsize)
        if transfer.box.numel <= max_numel:
            yield transfer
            continue
        for box in split(transfer.box, max_numel):
            yield transfer._replace(
                box=box,
                source_box=carry(box, transfer.box, transfer.source_box),
                dest_box=carry(box, transfer.box, transfer.dest_box),
            )


def copy_boxes(
    targets: Sequence[torch.Tensor], origins: Sequence[torch.Tensor]
) -> None:
    """Copy each origin into its target of the same shape (up to axes of size one), converting the dtype.

    Small boxes of a GPU are copied by a few kernels, and boxes of a CPU by one call.
    Large ones on a GPU, whose elements lie in the same order on both sides, are copied
    one by one: `LARGE_COPY` says why.
    """
    fused_targets, fused_origins = [], []
    for target, whole_origin in zip(targets, origins, strict=True):
        origin = whole_origin.reshape(target.shape)
        if _is_large_copy(target, origin):
            target.copy_(origin)
        else:
            fused_targets.append(target)
            fused_origins.append(origin)
    if fused_targets:
        torch._foreach_copy_(fused_targets, fused_origins)


def _is_large_copy(target: torch.Tensor, origin: torch.Tensor) -> bool:
    """Return whether a copy is quicker by itself than in a kernel that copies many tensors."""
    return (
        target.is_cuda
        and target.device == origin.device
        and target.dtype == origin.dtype
        and target.is_contiguous()
        and origin.is_contiguous()
        and target.numel() * target.element_size() >= LARGE_COPY
    )
