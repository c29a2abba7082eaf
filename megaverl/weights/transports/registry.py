"""What a transport is, and who carries what: each takes from a plan what it can carry and leaves the rest to others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from megaverl.distributed.failures import Failures
from megaverl.errors import ReshardError
from megaverl.sharding.boxes import carry, split
from megaverl.sharding.plan import Plan, Transfer
from megaverl.weights.tensors import Tensors, view

BUCKET_BYTES = 64 * 2**20
# A box of at least this part of a message travels alone, so that it can be sent from and land in its place.
ALONE = 1 / 16


@dataclass(frozen=True)
class TransportOptions:
    """How weights may be moved; the same on every rank.

    Attributes:
        bucket_bytes: buffer for each of sending and receiving.
        alias: let the destination take the source's storage where it can.
        may_rebind: the destination's tensors may take other storage at any time: no captured graph holds their
            addresses.
        node_of: the node of a rank; None: all on one.
        timeout: how long to wait for another rank; None: the group's own timeout.
        folder: where weights between nodes go through files; None: over the network.
        ipc: let processes of one node read each other's memory.
        apart: destination tensors that must keep a storage of their own, as they are written to after a run.
    """

    bucket_bytes: int = BUCKET_BYTES
    alias: bool = False
    may_rebind: bool = True
    node_of: Callable[[int], int] | None = None
    timeout: timedelta | None = None
    folder: Path | None = None
    ipc: bool = False
    apart: frozenset[str] = frozenset()

    def same_node(self, a: int, b: int) -> bool:
        return self.node_of is None or self.node_of(a) == self.node_of(b)


@dataclass
class TransferJob:
    """One rank's plan and tensors; the three lists hold what no transport has taken yet.

    Attributes:
        wire: global tensor -> the dtype in which it travels.
        converts: global tensor -> whether its dtype differs between source and destination.
        failures: turns what goes wrong between ranks into an error that names the rank.
    """

    plan: Plan
    source: Tensors
    dest: Tensors
    wire: Callable[[str], torch.dtype]
    converts: Callable[[str], bool]
    group: dist.ProcessGroup | None
    options: TransportOptions
    failures: Failures
    copies: list[Transfer] = field(init=False)
    sends: dict[int, tuple[Transfer, ...]] = field(init=False)
    receives: dict[int, tuple[Transfer, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.copies = list(self.plan.copies)
        self.sends, self.receives = dict(self.plan.sends), dict(self.plan.receives)

    def wire_of(self, transfer: Transfer) -> torch.dtype:
        return self.wire(transfer.tensor)

    def wire_bytes(self, transfers: Iterable[Transfer]) -> int:
        return sum(transfer.box.numel * self.wire_of(transfer).itemsize for transfer in transfers)

    def origins(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """The boxes that are read here, in their place."""
        return [view(self.source[transfer.source_local], transfer.source_box) for transfer in transfers]

    def targets(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """The boxes that are written here, in their place."""
        return [view(self.dest[transfer.dest_local], transfer.dest_box) for transfer in transfers]

    def take_peers(self, wanted: Callable[[int], bool]) -> tuple[dict[int, tuple[Transfer, ...]], ...]:
        """All (sends, receives) to and from the peers that are wanted; both ends must decide alike."""
        taken = []
        for lists in (self.sends, self.receives):
            peers = [peer for peer in lists if wanted(peer)]
            taken.append({peer: lists.pop(peer) for peer in peers})
        return tuple(taken)


class Moved(NamedTuple):
    """What one transport did in one run, in bytes; messages count sends and receives."""

    aliased: int = 0
    local: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0

    def plus(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


class Transport(Protocol):
    """Carries its share of a plan, as often as asked. A class that is registered has `take` as well."""

    def start(self, version: int) -> None:
        """Begin what can go on by itself while other transports work. `version` numbers the run, from 1."""

    def finish(self) -> Moved:
        """Do the rest; afterwards the transport's part of the destination is whole.

        Raises:
            ReshardError: a rank that died or stalled, by its number.
        """


class TransportClass(Protocol):
    """A registered class."""

    @classmethod
    def take(cls, job: TransferJob) -> Transport | None:
        """Take from the job what this transport carries; None when that is nothing.

        Every rank of the group calls this, in the same order: small collectives are allowed.
        """


_transports: list[tuple[int, TransportClass]] = []
Class = TypeVar("Class", bound=TransportClass)


def register(order: int) -> Callable[[type[Class]], type[Class]]:
    """Class decorator; transports of a lower `order` are asked first."""

    def add(cls: type[Class]) -> type[Class]:
        _transports.append((order, cls))
        _transports.sort(key=lambda entry: entry[0])
        return cls

    return add


def assign(job: TransferJob) -> list[Transport]:
    """Give every copy, send and receive of the job to a transport. Every rank of the group takes part.

    Raises:
        ReshardError: something is left that no transport carries.
    """
    found = [transport for _, cls in _transports if (transport := cls.take(job)) is not None]
    if job.copies or job.sends or job.receives:
        raise ReshardError(f"no transport carries the weights between rank {job.plan.rank} and {sorted(job.sends)}.")
    return found


class Message(NamedTuple):
    """Boxes that travel together from one rank to another, and the byte at which each starts: no byte between."""

    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        first, last = self.transfers[0], self.transfers[-1]
        rest = f" to {last.tensor} {last.box}" if len(self.transfers) > 1 else ""
        return f"{first.tensor} {first.box}{rest}"


def messages(
    transfers: Sequence[Transfer], dtype_of: Callable[[Transfer], torch.dtype], max_bytes: int
) -> list[Message]:
    """Pack the boxes from one rank to another into messages of at most `max_bytes`.

    Both ranks call this with the same boxes and get the same messages: it looks at sizes only. Their number
    grows with the bytes, not with the boxes: small boxes share a message, large ones travel alone, and those
    larger than a message in several parts. Wider dtypes go first, so that every box is aligned without padding.
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


def _parts(
    transfers: Iterable[Transfer], dtype_of: Callable[[Transfer], torch.dtype], max_bytes: int
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


def copy_boxes(targets: Sequence[torch.Tensor], origins: Sequence[torch.Tensor]) -> None:
    """Copy each origin into its target, of the same shape up to axes of size one, converting the dtype; few kernels on
    a GPU, one call on a CPU."""
    if targets:
        torch._foreach_copy_(
            list(targets), [origin.reshape(target.shape) for origin, target in zip(origins, targets, strict=True)]
        )
