"""Transports: they carry the boxes of a plan, one module each; `megaverl.weights.reshard` defines their order.

This module has what they share: checks that tensors fit their layout, agreement on dtypes, a transport's job, and
messages of bounded size.
"""

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
    """Local tensors and a layout's views of them.

    Views are made again in every access, since a tensor's storage may have changed.
    """

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
    """Return the tensors that the pieces of a layout name, views included."""
    return Viewed(layout, tensors) if layout.views else tensors


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor or parameter that shares its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(
    layout: Layout,
    tensors: Tensors,
    holder: str,
    error: type[MegaverlError],
    *,
    exact: bool = False,
) -> None:
    """Check that `tensors` has every local tensor of the layout, with the layout's shape.

    Args:
        exact: whether `tensors` must contain nothing else.

    Raises:
        error: lists every tensor that is missing, has another shape or, if `exact`, belongs to no weight.
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
    """The dtypes of one side's tensors over all ranks: one for most tensors, and exceptions by name.

    Args:
        name: name of the side, for messages.
        common: dtype of most tensors.
        others: tensor -> its dtype, and a rank that holds it in this dtype.
        odd: (rank, dtype) of ranks most of whose tensors have another dtype.
    """

    def __init__(
        self, name: str, common: str, others: Mapping[str, tuple[str, int]], odd: Sequence[tuple[int, str]]
    ) -> None:
        self._name, self._common, self._others, self._odd = name, common, others, odd

    @staticmethod
    def summary(reports: Sequence[Any]) -> list[Any]:
        """Return the constructor's arguments after the name, as JSON, from every rank's report in rank order."""
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
        """Dtype of most tensors."""
        return MOVABLE[self._common]

    def of(self, tensor: str) -> torch.dtype | None:
        """Return the dtype of a global tensor on any rank; None if the side holds nothing that could be moved."""
        return MOVABLE.get(self._others[tensor][0] if tensor in self._others else self._common)

    def problems(self, layout: Layout, tensors: Tensors) -> Iterator[tuple[str, str]]:
        """Yield (problem, tensor) for each tensor of this rank."""
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
    """Return the dtypes of each side over all ranks. Collective over the group.

    Args:
        sides: name -> this rank's layout and tensors; the source first.

    Raises:
        ReshardError: on every rank; lists every tensor whose dtype differs between ranks of one side, is not a
            floating-point type of at least 16 bits, or cannot be converted without loss of range (float16 and
            bfloat16).
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
    """Return a function from a global tensor to the dtype in which it is sent.

    This is the smallest dtype of the sides (in a tie, the last side's). So float32 masters reach a bfloat16 engine in
    half
    the bytes.
    """

    def wire(tensor: str) -> torch.dtype:
        dtypes = [dtype for side in reversed(list(sides.values())) if (dtype := side.of(tensor)) is not None]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    return wire


def converting(sides: Mapping[str, SideDtypes]) -> Callable[[str], bool]:
    """Return a function from a global tensor to whether the sides hold it in different dtypes."""
    return lambda tensor: len({side.of(tensor) for side in sides.values()}) > 1


def _dtypes(layout: Layout, tensors: Tensors) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for piece in layout.pieces:
        found.setdefault(piece.tensor, set()).add(str(tensors[layout.stored_in(piece.local)].dtype))
    return {tensor: sorted(dtypes) for tensor, dtypes in found.items()}


def _report(layout: Layout, tensors: Tensors) -> dict[str, Any]:
    """Return this rank's dtypes in compact form: the most common one, and the names of tensors with another."""
    by_dtype: dict[str, list[str]] = {}
    for tensor, dtypes in _dtypes(layout, tensors).items():
        for dtype in dtypes:
            by_dtype.setdefault(dtype, []).append(tensor)
    common = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]), default="")
    return {"common": common, "others": {dtype: names for dtype, names in by_dtype.items() if dtype != common}}


BUCKET_BYTES = 64 * 2**20
# A box of at least this fraction of a message has a message of its own, so that it can be sent and received in place.
ALONE = 1 / 16


@dataclass(frozen=True)
class TransportOptions:
    """Permitted ways to move weights, equal on every rank.

    Attributes:
        bucket_bytes: size of the send buffer and of the receive buffer.
        alias: whether the destination may share the source's storage.
        may_rebind: whether the destination's tensors may move to other storage at any time: no captured graph holds
            their
            addresses.
        node_of: returns the node of a rank; None: all ranks share one node.
        timeout: longest wait for another rank; None: the group's timeout.
        folder: folder for files through which weights pass between nodes; None: use the network.
        ipc: whether processes of one node may read each other's memory.
        never_alias: destination tensors that need their own storage, because they are written after a run.
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
        """Return whether two ranks are on one node."""
        return self.node_of is None or self.node_of(a) == self.node_of(b)


@dataclass
class TransferJob:
    """One rank's plan and tensors. `copies`, `sends` and `receives` hold the transfers that no transport has taken yet.

    Attributes:
        wire: global tensor -> the dtype in which it is sent.
        converts: global tensor -> whether its dtype differs between source and destination.
        failures: converts errors between ranks into an error that names the rank.
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
        """Remove all transfers of these weights, which another job carries."""
        left = replace(self.plan, copies=tuple(self.copies), sends=self.sends, receives=self.receives)
        left = left.only(lambda tensor: tensor not in tensors)
        self.copies, self.sends, self.receives = list(left.copies), left.sends, left.receives

    def wire_of(self, transfer: Transfer) -> torch.dtype:
        """Return the dtype in which a transfer is sent."""
        return self.wire(transfer.tensor)

    def wire_bytes(self, transfers: Iterable[Transfer]) -> int:
        """Return the bytes of these transfers on the wire."""
        return sum(transfer.box.numel * self.wire_of(transfer).itemsize for transfer in transfers)

    def origins(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """Return the boxes to read on this rank, in place."""
        return [view(self.source[transfer.source_local], transfer.source_box) for transfer in transfers]

    def targets(self, transfers: Iterable[Transfer]) -> list[torch.Tensor]:
        """Return the boxes to write on this rank, in place."""
        return [view(self.dest[transfer.dest_local], transfer.dest_box) for transfer in transfers]

    def take_peers(self, wanted: Callable[[int], bool]) -> tuple[dict[int, tuple[Transfer, ...]], ...]:
        """Remove and return all (sends, receives) with the wanted peers. Both ends must decide alike."""
        taken = []
        for lists in (self.sends, self.receives):
            peers = [peer for peer in lists if wanted(peer)]
            taken.append({peer: lists.pop(peer) for peer in peers})
        return tuple(taken)


class Moved(NamedTuple):
    """Bytes that one transport moved in one run. `messages` counts sends and receives."""

    aliased: int = 0
    local: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0

    def plus(self, other: Moved) -> Moved:
        """Return the sum of two results."""
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


class TransportKind(Protocol):
    """A class of transports."""

    def take(self, job: TransferJob) -> Transport | None:
        """Take the transfers that this kind supports from the job; return None if there are none.

        Every rank of the group calls this in the same order, so small collectives are allowed.
        """


class Transport(Protocol):
    """Carries its share of a plan, any number of times.

    Example:
        transport = PointToPoint.take(job)
        transport.start(version=1)   # post sends and receives
        moved = transport.finish()   # wait until the destination is complete
    """

    def start(self, version: int) -> None:
        """Begin what can proceed while other transports work.

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
    transfers: Sequence[Transfer], dtype_of: Callable[[Transfer], torch.dtype], max_bytes: int
) -> list[Message]:
    """Pack the boxes from one rank to another into messages of at most `max_bytes`.

    Both ranks call this with the same boxes and get the same messages, since only sizes matter. The number of messages
    grows with the bytes, not with the boxes: small boxes share a message, large ones have one of their own, and larger
    ones
    are split. Wider dtypes come first, so that every box is aligned without padding.
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
    """Copy each origin into its target of the same shape (up to axes of size one), converting the dtype.

    This takes a few kernels on a GPU, and one call on a CPU.
    """
    if targets:
        torch._foreach_copy_(
            list(targets), [origin.reshape(target.shape) for origin, target in zip(origins, targets, strict=True)]
        )
