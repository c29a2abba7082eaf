"""Transports: what carries a plan's boxes, one file each; `megaverl.weights.reshard` has their order. What moves are
tensors that fit their layout, in agreed dtypes: here are a transport's job, and messages of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import reduce_json, together
from megaverl.distributed.failures import Failures
from megaverl.errors import MegaverlError, ReshardError
from megaverl.sharding.boxes import Box, carry, split
from megaverl.sharding.layout import Layout
from megaverl.sharding.plan import Plan, Transfer
from megaverl.sharding.weight import listed

Tensors = Mapping[str, torch.Tensor]  # local name -> tensor
MOVABLE = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class Viewed(Mapping[str, torch.Tensor]):
    """Local tensors and a layout's views of them, which are made anew each time they are asked for: a tensor's storage
    may be another one by then."""

    def __init__(self, layout: Layout, tensors: Tensors) -> None:
        self._views, self._tensors = layout.views, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._views:
            return self._tensors[name]
        local, view = self._views[name]
        return view.of(self._tensors[local].detach())

    def __iter__(self) -> Iterator[str]:
        return chain(self._tensors, self._views)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._views)


def viewed(layout: Layout, tensors: Tensors) -> Tensors:
    """The tensors that the pieces of a layout name."""
    return Viewed(layout, tensors) if layout.views else tensors


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor or parameter, sharing its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(
    layout: Layout,
    tensors: Tensors,
    holder: str,
    error: type[MegaverlError],
    *,
    exact: bool = False,
) -> None:
    """Every local tensor of the layout is in `tensors`, with the layout's shape.

    Args:
        exact: `tensors` must hold nothing else either.

    Raises:
        error: names every tensor that is missing, of another shape or, if `exact`, that no weight belongs to.
    """
    missing = [name for name in layout.local_shapes if name not in tensors]
    problems = [f"{holder} has no such parameter: {', '.join(listed(missing))}"] if missing else []
    shapes: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, shape in layout.local_shapes.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            shapes.setdefault((tuple(tensors[name].shape), tuple(shape)), []).append(name)
    for (found, wanted), names in shapes.items():
        problems.append(f"shape {list(found)}, the layout says {list(wanted)}: {', '.join(listed(names))}")
    extra = [name for name in tensors if name not in layout.local_shapes] if exact else []
    if extra:
        problems.append(
            f"no weight of the model belongs to {', '.join(listed(extra))} (quantised or adapted models have such)"
        )
    if problems:
        raise error(f"{holder} does not fit its layout: " + "; ".join(problems) + ".")


class SideDtypes:
    """The dtypes of one side's tensors over all ranks: one for almost all, and the others by name.

    Args:
        name: of the side, for messages.
        common: dtype of most tensors.
        others: tensor -> its dtype, and a rank that has it so.
        odd: ranks most of whose tensors have another dtype, and which.
    """

    def __init__(
        self, name: str, common: str, others: Mapping[str, tuple[str, int]], odd: Sequence[tuple[int, str]]
    ) -> None:
        self._name, self._common, self._others, self._odd = name, common, others, odd

    @staticmethod
    def summary(reports: Sequence[Any]) -> list[Any]:
        """The arguments after the name, of each rank's report, in rank order; JSON."""
        counts = Counter(report["common"] for report in reports if report["common"])
        common = counts.most_common(1)[0][0] if counts else ""
        others: dict[str, tuple[str, int]] = {}
        for rank, report in enumerate(reports):
            for dtype, tensors in report["others"].items():
                for tensor in tensors:
                    others.setdefault(tensor, (dtype, rank))
        odd = [(rank, report["common"]) for rank, report in enumerate(reports) if report["common"] not in ("", common)]
        return [common, others, odd]

    @property
    def common(self) -> torch.dtype:
        """Of most tensors."""
        return MOVABLE[self._common]

    def of(self, tensor: str) -> torch.dtype | None:
        """Of a global tensor, whichever rank holds it; None where the side holds nothing that could be moved."""
        return MOVABLE.get(self._others[tensor][0] if tensor in self._others else self._common)

    def problems(self, layout: Layout, tensors: Tensors) -> Iterator[tuple[str, str]]:
        """(what is wrong, tensor) for each tensor of this rank."""
        for tensor, dtypes in _dtypes(layout, tensors).items():
            wanted, rank = self._others.get(tensor, (self._common, None))
            for dtype in dtypes:
                if dtype != wanted:
                    there = f"on rank {rank}" if rank is not None else "on most ranks"
                    yield f"{dtype} at the {self._name} here, {wanted} {there}", tensor
                elif self._odd and rank is None:
                    odd = ", ".join(f"{dtype} on rank {rank}" for rank, dtype in self._odd)
                    yield f"{wanted} at the {self._name}, yet {odd}", tensor
                if dtype not in MOVABLE:
                    yield f"{dtype} at the {self._name}", tensor


def agree_on_dtypes(
    sides: Mapping[str, tuple[Layout, Tensors]], group: dist.ProcessGroup | None
) -> dict[str, SideDtypes]:
    """The dtypes of each side, on all ranks; all of them take part.

    Args:
        sides: name -> this rank's layout and tensors; the source first.

    Raises:
        ReshardError: on every rank, naming every tensor whose dtype differs between ranks of one side, is no
            floating-point one of at least 16 bits, or cannot be converted without loss of
            range (float16 and bfloat16).
    """
    mine = {name: _report(layout, tensors) for name, (layout, tensors) in sides.items()}

    def summaries(every: list[Any]) -> dict[str, Any]:
        return {name: SideDtypes.summary([report[name] for report in every]) for name in sides}

    found_on_all = reduce_json(mine, summaries, group) if dist.is_initialized() else summaries([mine])
    merged = {name: SideDtypes(name, *found) for name, found in found_on_all.items()}
    with together(group) if dist.is_initialized() else nullcontext():
        problems: dict[str, list[str]] = {}
        for name, (layout, tensors) in sides.items():
            for problem, tensor in merged[name].problems(layout, tensors):
                problems.setdefault(problem, []).append(tensor)
        for tensor in sorted({tensor for layout, _ in sides.values() for tensor in layout.global_shapes}):
            found = {name: side.of(tensor) for name, side in merged.items()}
            if {torch.float16, torch.bfloat16} <= set(found.values()):
                what = ", ".join(f"{dtype} at the {name}" for name, dtype in found.items())
                problems.setdefault(what, []).append(tensor)
        if problems:
            lines = "; ".join(f"{problem}: {', '.join(listed(names))}" for problem, names in problems.items())
            raise ReshardError(
                f"nothing was moved, as dtypes do not fit: {lines}. Use one floating-point dtype per side "
                "(model.dtype), and for a quantised engine one of the rollout.vllm.quantization that are known."
            )
    return merged


def wire_dtypes(sides: Mapping[str, SideDtypes]) -> Callable[[str], torch.dtype]:
    """Global tensor -> the dtype in which it travels: the smallest of the sides' (the last side's when they are
    as large), so that float32 masters reach a bfloat16 engine at half the bytes."""

    def wire(tensor: str) -> torch.dtype:
        dtypes = [dtype for side in reversed(list(sides.values())) if (dtype := side.of(tensor)) is not None]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    return wire


def converting(sides: Mapping[str, SideDtypes]) -> Callable[[str], bool]:
    """Global tensor -> whether the sides hold it in different dtypes."""
    return lambda tensor: len({side.of(tensor) for side in sides.values()}) > 1


def _dtypes(layout: Layout, tensors: Tensors) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for piece in layout.pieces:
        found.setdefault(piece.tensor, set()).add(str(tensors[layout.stored_in(piece.local)].dtype))
    return {tensor: sorted(dtypes) for tensor, dtypes in found.items()}


def _report(layout: Layout, tensors: Tensors) -> dict[str, Any]:
    """This rank's dtypes, short for almost all models: the commonest, and the names of what has another."""
    by_dtype: dict[str, list[str]] = {}
    for tensor, dtypes in _dtypes(layout, tensors).items():
        for dtype in dtypes:
            by_dtype.setdefault(dtype, []).append(tensor)
    common = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]), default="")
    return {"common": common, "others": {dtype: names for dtype, names in by_dtype.items() if dtype != common}}


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
        never_alias: destination tensors that must keep a storage of their own, as they are written to after a run.
    """

    bucket_bytes: int = BUCKET_BYTES
    alias: bool = False
    may_rebind: bool = True
    node_of: Callable[[int], int] | None = None
    timeout: timedelta | None = None
    folder: Path | None = None
    ipc: bool = False
    never_alias: frozenset[str] = frozenset()

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

    def leave_out(self, tensors: Collection[str]) -> None:
        """Take everything that concerns these weights, for another to carry."""
        left = replace(self.plan, copies=tuple(self.copies), sends=self.sends, receives=self.receives)
        left = left.only(lambda tensor: tensor not in tensors)
        self.copies, self.sends, self.receives = list(left.copies), left.sends, left.receives

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


class TransportKind(Protocol):
    """A class of transports."""

    def take(self, job: TransferJob) -> Transport | None:
        """Take from the job what such a transport carries; None when that is nothing.

        Every rank of the group calls this, in the same order: small collectives are allowed.
        """


class Transport(Protocol):
    """Carries its share of a plan, as often as asked."""

    def start(self, version: int) -> None:
        """Begin what can go on by itself while other transports work. `version` numbers the run, from 1."""

    def finish(self) -> Moved:
        """Do the rest; afterwards the transport's part of the destination is whole.

        Raises:
            ReshardError: a rank that died or stalled, by its number.
        """


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
