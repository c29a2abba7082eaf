"""Boxes, the index ranges of arrays that layouts consist of, and the operations on them that plans need."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Box(NamedTuple):
    """Half-open range `[start, stop)` per axis of an array. Boxes sort by start, then by stop."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each axis."""
        return tuple(
            stop - start for start, stop in zip(self.start, self.stop, strict=True)
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects this box from a tensor."""
        return tuple(map(slice, self.start, self.stop))

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
            + "]"
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return Box((0,) * len(shape), tuple(shape))


def cut(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """Return the box of a whole array, narrowed to `[start, stop)` along one axis."""
    starts = [0] * len(shape)
    stops = list(shape)
    starts[axis], stops[axis] = start, stop
    return Box(tuple(starts), tuple(stops))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of the same array, or None if it is empty."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    # Most pairs of boxes are disjoint, so the first empty axis ends the comparison.
    for low, high in zip(start, stop, strict=True):
        if low >= high:
            return None
    return Box(start, stop)


def contains(outer: Box, inner: Box) -> bool:
    """Return whether `inner` lies inside `outer`."""
    return all(a <= b for a, b in zip(outer.start, inner.start, strict=True)) and all(
        a >= b for a, b in zip(outer.stop, inner.stop, strict=True)
    )


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover `box` without `hole`, at most two per axis."""
    # Cut the box into slabs around the hole, axis by axis. What remains of `box` after
    # an axis is as narrow as the hole there.
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest = []
    start = list(box.start)
    stop = list(box.stop)
    for axis, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
        if start[axis] < low:
            rest.append(Box(tuple(start), (*stop[:axis], low, *stop[axis + 1 :])))
        if high < stop[axis]:
            rest.append(Box((*start[:axis], high, *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = low, high
    return rest


def subtract_all(box: Box, holes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that cover `box` without any of the holes."""
    rest = [box]
    for hole in holes:
        rest = [part for left in rest for part in subtract(left, hole)]
    return rest


def same_up_to_ones(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether two shapes are equal except for axes of size one."""
    return [n for n in a if n != 1] == [n for n in b if n != 1]


def carry(inner: Box, outer: Box, target: Box) -> Box:
    """Map `inner`, a part of `outer`, to the same elements of `target`.

    `outer` and `target` hold the same elements in the same order. Their shapes are
    equal up to axes of size one (a 2-D expert weight inside a 3-D fused tensor).
    """
    # Axes of size one may be missing on either side, such as the expert's axis. The
    # others correspond in order.
    offsets = [
        (low - base, high - base)
        for low, high, base, end in zip(
            inner.start, inner.stop, outer.start, outer.stop, strict=True
        )
        if end - base != 1
    ]
    axes = iter(offsets)
    start = list(target.start)
    stop = list(target.stop)
    for axis, size in enumerate(target.shape):
        if size != 1:
            low, high = next(axes)
            start[axis], stop[axis] = (
                target.start[axis] + low,
                target.start[axis] + high,
            )
    return Box(tuple(start), tuple(stop))


def join(a: Box, b: Box) -> Box | None:
    """Return the union of two boxes if `b` follows `a` along one axis and they are equal in the others, else None."""
    joined = False
    # Boxes can only be joined if they differ along a single axis, and there `b` must
    # start where `a` stops.
    for a_start, a_stop, b_start, b_stop in zip(
        a.start, a.stop, b.start, b.stop, strict=True
    ):
        if a_start == b_start and a_stop == b_stop:
            continue
        if joined or a_stop != b_start:
            return None
        joined = True
    return Box(a.start, b.stop) if joined else None


def split(box: Box, max_numel: int) -> list[Box]:
    """Split a box into boxes of at most `max_numel` elements, along the slowest axes first."""
    if box.numel <= max_numel:
        return [box]
    # A slab of the slowest axis is contiguous in memory.
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    step = max(1, max_numel // (box.numel // box.shape[axis]))
    parts = []
    for low in range(box.start[axis], box.stop[axis], step):
        high = min(low + step, box.stop[axis])
        # A slab of a single index may still be too large. It is split along the next
        # axis.
        start = (*box.start[:axis], low, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], high, *box.stop[axis + 1 :])
        parts += split(Box(start, stop), max_numel)
    return parts


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements [start, stop) of an array in row-major order, as disjoint boxes in order, each contiguous.

    There are at most two boxes per axis, less one: the end of a row, whole rows, the
    beginning of a row.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop,)) if shape else Box((), ())]
    # Number of elements behind one index of the first axis.
    row = math.prod(shape[1:])
    first, low = divmod(start, row)
    last, high = divmod(stop, row)

    def in_row(number: int, low: int, high: int) -> list[Box]:
        inner = flat_boxes(shape[1:], low, high)
        return [Box((number, *box.start), (number + 1, *box.stop)) for box in inner]

    if first == last:
        return in_row(first, low, high)
    head = in_row(first, low, row) if low else []
    first += bool(low)
    rows: list[Box] = []
    if first < last:
        rows = [Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))]
    # If `stop` is the start of a row, the last part is empty and `in_row` returns
    # nothing.
    return [*head, *rows, *in_row(last, 0, high)]


class BoxIndex:
    """Search index for boxes of one array, sorted along the axis with the most distinct starts."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        # The axis with the most distinct starts separates the boxes best.
        cuts = [
            len(set(starts))
            for starts in zip(*(box.start for box in boxes), strict=True)
        ]
        # An array without axes has one element, so all boxes intersect.
        self._axis = cuts.index(max(cuts)) if cuts else None
        self._boxes = list(enumerate(boxes))
        if self._axis is not None:
            axis = self._axis
            self._boxes.sort(key=lambda numbered: numbered[1].start[axis])
            self._starts = [box.start[axis] for _, box in self._boxes]
            # The largest stop so far never decreases, so it can be bisected like the
            # starts.
            self._reach = list(
                accumulate((box.stop[axis] for _, box in self._boxes), max)
            )

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the number of each box that intersects `box`, and the intersection."""
        low = 0
        high = len(self._boxes)
        if self._axis is not None:
            # Boxes before `low` end before `box` starts, and boxes from `high` on start
            # after it ends.
            low = bisect_right(self._reach, box.start[self._axis])
            high = bisect_left(self._starts, box.stop[self._axis])
        for number, candidate in self._boxes[low:high]:
            common = intersect(box, candidate)
            if common is not None:
                yield number, common


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes of the list that intersect, or None if all are disjoint."""
    # The index makes this fast for the thousands of shards of a large job.
    if len(boxes) > 1:
        index = BoxIndex(boxes)
        for number, box in enumerate(boxes):
            for other, _ in index.meeting(box):
                # Every box meets itself.
                if other != number:
                    return min(number, other), max(number, other)
    return None
