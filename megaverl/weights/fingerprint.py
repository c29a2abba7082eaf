"""Fingerprints: verify that the weights on both sides of a reshard are equal, element by element.

The fingerprint of a box of a global array is the sum, modulo 2**64, of each element's
bits (as an integer of its own width) times an odd 64-bit weight. The weight depends on
the element's place in the *global* array: it is the product over the axes of a hash of
the index along that axis. It follows that
- fingerprints are exact and independent of order: the sums of disjoint boxes add up to that of their union, whichever
  ranks hold them;
- a single changed element always shows (its change, less than 2**32, times an odd number is not zero), and the bits of
  zero and of minus zero differ;
- two swapped elements or rows, a shifted or stale part, or any change that was not made with these hashes in mind goes
  unnoticed with a probability of about 2**-31 (float32) or 2**-47 (16 bits);
- padding belongs to no box, so it does not count.
"""

from __future__ import annotations

import copy as copying
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json, reduce_json
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, BoxIndex, carry
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.plan import MAX_NAMED, Layouts
from megaverl.weights.transports import Tensors, agree_on_dtypes, view, viewed

# Elements that are widened to 64 bits at a time. A CPU's chunk fits into its cache; a
# GPU's keeps it busy.
CPU_CHUNK, CUDA_CHUNK = 2**18, 2**23
# From a local tensor's name and a box to its elements.
ViewOf = Callable[[str, Box], torch.Tensor]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(
    layout: Layout, tensors: Tensors, dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Return this rank's part of every global tensor's fingerprint, each between 0 and 2**64 - 1.

    Parts of disjoint boxes, on one rank or several, add up modulo 2**64. A box that a
    rank holds twice counts twice.

    Args:
        tensors: local name -> tensor, as in `layout`.
        dtype: round elements to this dtype first; None: use them as they are.
    """
    # Scalars stay on the device and are read back together, because every read blocks
    # the host.
    sums: dict[str, torch.Tensor] = {}
    tensors = viewed(layout, tensors)
    for piece in layout.pieces:
        part = box_fingerprint(
            view(tensors[piece.local], piece.local_box), piece.box, dtype
        )
        sums[piece.tensor] = sums[piece.tensor] + part if piece.tensor in sums else part
    if not sums:
        return {}
    return {
        name: value % 2**64
        for name, value in zip(
            sums, torch.stack(list(sums.values())).tolist(), strict=True
        )
    }


@torch.no_grad()
def box_fingerprint(
    data: torch.Tensor, box: Box, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the fingerprint of one box as an int64 scalar on the data's device.

    Args:
        data: elements of `box`, in its shape up to axes of size one.
        box: place of the elements in the global array.
        dtype: round elements to this dtype first.
    """
    dtype = dtype or data.dtype
    shape = box.shape or (1,)
    weights = [
        _axis_weights(axis, low, high, data.device)
        for axis, (low, high) in enumerate(zip(*box, strict=True))
    ] or [torch.ones(1, dtype=torch.int64, device=data.device)]
    # An element's weight is the product of its indices' hashes, so that it does not
    # depend on the box around the element.
    columns = weights[-1]
    rows = torch.ones(1, dtype=torch.int64, device=data.device)
    for weight in weights[:-1]:
        rows = torch.outer(rows, weight).flatten()
    # [all axes but the last, last axis], so that one product of two vectors gives all
    # weights.
    matrix = data.reshape(math.prod(shape[:-1]), shape[-1])
    chunk = CUDA_CHUNK if data.is_cuda else CPU_CHUNK
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    width = min(chunk, matrix.shape[1])
    height = min(max(1, chunk // max(1, width)), matrix.shape[0])
    # One small buffer for all chunks: an int64 copy of the whole box would take up to
    # eight times its memory.
    widened = torch.empty(height, width, dtype=torch.int64, device=data.device)
    for top in range(0, matrix.shape[0], max(1, height)):
        for left in range(0, matrix.shape[1], max(1, width)):
            # Converted chunk by chunk, so that no copy of the whole box in `dtype` is
            # made.
            part = matrix[top : top + height, left : left + width].to(dtype)
            products = widened[: part.shape[0], : part.shape[1]]
            products.copy_(part.view(INTEGERS[dtype.itemsize]))
            products.mul_(columns[left : left + width])
            # Sums of one row fit the wrapping int64 as well: addition modulo 2**64 does
            # not depend on the order.
            total += products.sum(1).mul_(rows[top : top + height]).sum()
    return total


@lru_cache(maxsize=32)
def _axis_weights(axis: int, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Return odd hashes [high - low] of the indices along an axis: splitmix64, in wrapping int64."""
    mixed = (
        # The axis is part of the hash. Otherwise a square matrix and its transpose
        # would have equal fingerprints.
        torch.arange(low, high, dtype=torch.int64, device=device) + (axis + 1) * 2**40
    )
    mixed = mixed * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    # Odd, so that multiplication modulo 2**64 loses no bit of an element.
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right without the sign."""
    shifted: torch.Tensor = (bits >> shift) & (2 ** (64 - shift) - 1)
    return shifted


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


class Held(NamedTuple):
    """A cell (the intersection of a source and a destination box) in one local tensor of this rank."""

    cell: int
    side: str
    tensor: str
    box: Box
    local: str
    local_box: Box


class Difference(NamedTuple):
    """A copy whose elements differ from the source's, and a rank whose source copy is right.

    Attributes:
        side: "source" or "destination".
        rank: the rank of the wrong copy.
        right: the rank of a right copy.
    """

    tensor: str
    box: Box
    side: str
    local: str
    rank: int
    right: int

    def __str__(self) -> str:
        return (
            f"{self.tensor} {self.box}: {self.local} of the {self.side} on rank {self.rank} is not what the source "
            f"holds on rank {self.right}"
        )


@dataclass(frozen=True)
class CheckStats:
    """Cost of one comparison: tensors compared over all ranks, bytes read on this rank, and seconds."""

    num_tensors: int
    bytes_read: int
    seconds: float


class ReshardCheck:
    """Compares both sides of a reshard, any number of times. Construction and comparison are collective over the group.

    Every copy is compared on its own, in cells: the intersections of the boxes that
    source and destination ranks hold. One source rank provides the fingerprint of each
    cell to all ranks, in one all-reduce of 8 bytes a cell. Each rank then compares its
    own copies.

    Args:
        source_layouts, dest_layouts: rank -> layout; the same functions on every rank.
        source_tensors, dest_tensors: local name -> tensor, looked up again in every comparison. If the dtypes differ,
            the source is rounded to the destination's.
        group: the ranks of the layouts, in order; None: all.

    Example:
        check = ReshardCheck(actor.layouts, engine.layouts, actor_tensors, engine_tensors)
        resharder.run()
        check.compare()  # raises ReshardError if any copy differs
    """

    def __init__(
        self,
        source_layouts: Layouts,
        dest_layouts: Layouts,
        source_tensors: Tensors,
        dest_tensors: Tensors,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._layouts = {"source": source_layouts, "destination": dest_layouts}
        self._tensors = {"source": source_tensors, "destination": dest_tensors}
        self._group = group
        self._dtypes: Callable[[str], torch.dtype | None] | None = None

    @cached_property
    def _cells(self) -> _Cells:
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        return _Cells(
            self._layouts["source"], self._layouts["destination"], world, rank
        )

    @property
    def tensors(self) -> frozenset[str]:
        """Global names of all weights of the source."""
        return frozenset(self._cells.tensors)

    def compare(
        self, only: Collection[str] | None = None, landed: ViewOf | None = None
    ) -> CheckStats:
        """Compare every copy of every element on both sides.

        Args:
            only, landed: as in `differences`.

        Raises:
            ReshardError: on every rank; names tensor, box, local tensor and rank of what differs.
        """
        stats, differences, num_more = self.differences(only=only, landed=landed)
        if differences:
            more = f"; and {num_more} more boxes" if num_more else ""
            raise ReshardError(
                f"source and destination differ after resharding: {'; '.join(map(str, differences))}{more}. If an "
                "optimizer step or a load ran in between, reshard again; otherwise stop, as responses would come "
                "from wrong weights."
            )
        return stats

    def differences(
        self,
        limit: int = MAX_NAMED,
        only: Collection[str] | None = None,
        landed: ViewOf | None = None,
    ) -> tuple[CheckStats, list[Difference], int]:
        """Return the differences in the first `limit` cells that have some, equal on
        every rank, and the number of further cells.

        Args:
            only: weights to compare, equal on every rank; None: all.
            landed: returns the box of a local destination tensor that is not in its place yet.
        """
        start, rank = time.perf_counter(), dist.get_rank(self._group)
        # The destination's dtypes do not change, so they are exchanged once, collectively
        # over the group.
        if self._dtypes is None:
            sides = {
                "destination": (
                    self._layouts["destination"](rank),
                    self._tensors["destination"],
                )
            }
            self._dtypes = agree_on_dtypes(sides, self._group)["destination"].dtype_of
        cells = self._cells if only is None else self._cells.only(only)
        num_tensors = len(self._cells.tensors if only is None else only)
        tensors = {
            side: viewed(self._layouts[side](rank), held)
            for side, held in self._tensors.items()
        }
        # One value per local copy of a cell, in the order of `cells.held`: `values`
        # [copies], int64.
        nbytes, values = (
            0,
            torch.zeros(len(cells.held), dtype=torch.int64, device=platform.device),
        )
        for i, held in enumerate(cells.held):
            if landed is not None and held.side == "destination":
                data = landed(held.local, held.local_box)
            else:
                data = view(tensors[held.side][held.local], held.local_box)
            values[i] = box_fingerprint(data, held.box, self._dtypes(held.tensor))
            nbytes += data.numel() * data.element_size()
        index = torch.tensor(
            [held.cell for held in cells.held], dtype=torch.int64, device=values.device
        )
        expected = torch.zeros(cells.num_cells, dtype=torch.int64, device=values.device)
        expected[index[cells.given]] = values[cells.given]
        # One rank contributes each cell's value and all others zero, so the sum is that
        # value.
        dist.all_reduce(expected, group=self._group)
        # Every copy is compared with the value that one source rank gave for its cell.
        wrong = (values != expected[index]).nonzero().flatten()
        named_differences: list[Difference] = []
        num_more = 0
        # Collective: all ranks gather values if any of them has a difference.
        if reduce_json(wrong.numel(), sum, self._group):
            named_differences, num_more = self._name(
                cells.held, set(wrong.tolist()), values.tolist(), limit
            )
        return (
            CheckStats(num_tensors, nbytes, time.perf_counter() - start),
            named_differences,
            num_more,
        )

    def _name(
        self, held_here: list[Held], wrong: set[int], values: list[int], limit: int
    ) -> tuple[list[Difference], int]:
        """Gather every rank's values of the first cells that differ, so that all ranks can tell which copies are wrong.

        Args:
            wrong: positions in `held_here`.
        """
        cells = sorted({held_here[i].cell for i in wrong})
        all_wrong = sorted(
            {
                cell
                for named_differences in gather_json(cells, self._group)
                for cell in named_differences
            }
        )
        named = set(all_wrong[:limit])
        reports_here = [
            [held.cell, held.tensor, held.box, held.side, held.local, value]
            for held, value in zip(held_here, values, strict=True)
            if held.cell in named
        ]
        copies: dict[int, list[_Copy]] = {}
        for rank, reports in enumerate(gather_json(reports_here, self._group)):
            for cell, tensor, (low, high), side, local, value in reports:
                copy = _Copy(
                    tensor, Box(tuple(low), tuple(high)), side, local, rank, value
                )
                copies.setdefault(cell, []).append(copy)
        named_differences = [
            difference
            for cell in sorted(copies)
            for difference in _odd_ones(copies[cell])
        ]
        return named_differences, len(all_wrong) - len(named)


class _Copy(NamedTuple):
    tensor: str
    box: Box
    side: str
    local: str
    rank: int
    value: int


def _odd_ones(copies: list[_Copy]) -> Iterator[Difference]:
    """Yield the copies that differ from most of the source's; in a tie, those that differ from the lowest rank's."""
    votes: dict[int, int] = {}
    for copy in copies:
        if copy.side == "source":
            votes[copy.value] = votes.get(copy.value, 0) + 1
    # Among equally frequent values, `max` takes the first, which comes from the lowest
    # rank.
    right = max(votes, key=lambda value: votes[value])
    holder = min(
        copy.rank for copy in copies if copy.side == "source" and copy.value == right
    )
    for copy in copies:
        if copy.value != right:
            yield Difference(
                copy.tensor, copy.box, copy.side, copy.local, copy.rank, holder
            )


class _Cells:
    """The cells of both sides, numbered equally on every rank, and those that this rank holds.

    Attributes:
        given: positions in `held` of the copies whose values this rank provides to all.
    """

    def __init__(
        self, source_layouts: Layouts, dest_layouts: Layouts, world: int, rank: int
    ) -> None:
        sources, dests = _holders(source_layouts, world), _holders(dest_layouts, world)
        own_source, own_dest = _own(source_layouts(rank)), _own(dest_layouts(rank))
        self.num_cells = 0
        self.held: list[Held] = []
        # A copy is given by exactly one rank: the first that holds the source's box.
        self.given: list[int] = []
        # Tensor -> the numbers of its cells, and their positions in `held`.
        self._numbers: dict[str, range] = {}
        self._positions: dict[str, list[int]] = {}
        # Sorted, so that all ranks number the cells alike without communication.
        for tensor in sorted(sources):
            first = self.num_cells
            boxes = sorted(dests.get(tensor, {}))
            index = BoxIndex(boxes)
            for box in sorted(sources[tensor]):
                pieces_here = own_source.get((tensor, box), ())
                for number, common in index.meeting(box):
                    # Source and destination may hold a box several times on one rank.
                    # Every copy is compared.
                    if pieces_here and sources[tensor][box] == rank:
                        self.given.append(len(self.held))
                    self._add(pieces_here, common, "source")
                    self._add(
                        own_dest.get((tensor, boxes[number]), ()), common, "destination"
                    )
                    self.num_cells += 1
            self._numbers[tensor] = range(first, self.num_cells)
        self._given = frozenset(self.given)

    @property
    def tensors(self) -> Collection[str]:
        """Names of the source's tensors on all ranks."""
        return self._numbers.keys()

    def only(self, tensors: Collection[str]) -> _Cells:
        """Return the cells of these tensors, with new numbers."""
        part = copying.copy(self)
        part.num_cells, part.held, part.given = 0, [], []
        numbers = self._given
        for tensor in sorted(tensors):
            # Cells keep their order within a tensor and are shifted to the new numbers.
            shift = part.num_cells - self._numbers[tensor].start
            for position in self._positions.get(tensor, ()):
                held = self.held[position]
                if position in numbers:
                    part.given.append(len(part.held))
                part.held.append(held._replace(cell=held.cell + shift))
            part.num_cells += len(self._numbers[tensor])
        return part

    def _add(self, pieces: Iterable[Piece], common: Box, side: str) -> None:
        for piece in pieces:
            local_box = carry(common, piece.box, piece.local_box)
            self._positions.setdefault(piece.tensor, []).append(len(self.held))
            self.held.append(
                Held(self.num_cells, side, piece.tensor, common, piece.local, local_box)
            )


def _holders(layouts: Layouts, world: int) -> dict[str, dict[Box, int]]:
    """Return tensor -> distinct box -> the first rank that holds it."""
    holders: dict[str, dict[Box, int]] = {}
    seen: dict[int, Layout] = {}
    for rank in range(world):
        layout = layouts(rank)
        # The layout is kept with its identity, which could otherwise be reused for
        # another one.
        if id(layout) not in seen:
            seen[id(layout)] = layout
            for piece in layout.pieces:
                holders.setdefault(piece.tensor, {}).setdefault(piece.box, rank)
    return holders


def _own(layout: Layout) -> dict[tuple[str, Box], list[Piece]]:
    pieces: dict[tuple[str, Box], list[Piece]] = {}
    for piece in layout.pieces:
        pieces.setdefault((piece.tensor, piece.box), []).append(piece)
    return pieces


def model_identity(
    layouts: Layouts, tensors: Tensors, group: dist.ProcessGroup | None = None
) -> str:
    """Return 16 hexadecimal digits that depend on every element of every weight. Collective over the group.

    Args:
        layouts: rank -> layout. If several ranks hold a box, the first one counts.
        tensors: this rank's tensors by local name.
    """
    rank = dist.get_rank(group)
    layout, first = layouts(rank), _holders(layouts, dist.get_world_size(group))
    # In reverse, so that the first piece of a box wins if a rank holds the box twice.
    counted = {
        (p.tensor, p.box): p
        for p in reversed(layout.pieces)
        if first[p.tensor][p.box] == rank
    }
    counted_layout = Layout(
        tuple(counted.values()),
        layout.local_shapes,
        layout.global_shapes,
        views=layout.views,
    )
    parts = fingerprints(counted_layout, tensors)

    def digest(ranks: list[dict[str, str]]) -> str:
        total: dict[str, int] = {}
        for part in ranks:
            for name, value in part.items():
                total[name] = (total.get(name, 0) + int(value)) % 2**64
        return hashlib.blake2b(
            json.dumps(sorted(total.items())).encode(), digest_size=8
        ).hexdigest()

    # JSON numbers cannot hold 64 bits exactly, so send the values as text.
    return str(
        reduce_json({name: str(value) for name, value in parts.items()}, digest, group)
    )
