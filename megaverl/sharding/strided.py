"""Copies between strided views as loop nests, traced back to arrays and split into boxes.

Addresses and strides count elements of a storage. A dense array is described by the
decreasing strides of its axes. A loop nest is `settled` on these axes if each of its
loops moves along one axis only. It then describes a set of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from megaverl.sharding.boxes import Box

if TYPE_CHECKING:
    import torch

# Limit of the boxes that one copy may fall into. More are not worth a plan.
MOST_PARTS = 100_000


class NotStrided(ValueError):
    """Raised for a copy that no set of boxes describes."""


class Loop(NamedTuple):
    """One loop of a copy: the number of iterations, and the step of each in the source and in the destination."""

    turns: int
    source: int
    dest: int


class Copy(NamedTuple):
    """Copy described by loops.

    `dest[dest_start + sum(i * loop.dest)] = source[source_start + sum(i *
    loop.source)]`, for all i of all loops.
    """

    source_start: int
    dest_start: int
    loops: tuple[Loop, ...]

    def shifted(self, loop: Loop, turns: int) -> Copy:
        """Return the copy with the starts of iteration `turns` of a loop."""
        return self._replace(
            source_start=self.source_start + turns * loop.source,
            dest_start=self.dest_start + turns * loop.dest,
        )


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense array in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def settle(copy: Copy, side: str, strides: Sequence[int]) -> Iterator[Copy]:
    """Yield parts of the copy that are settled on these axes of its `side` ("source" or "dest").

    Args:
        strides: decreasing, each a multiple of the next. The first axis is unbounded.

    Raises:
        NotStrided: a stride is not a multiple of its axis's stride, or there are too many parts.
    """
    # A part may have to be split again along a finer axis.
    pending = [_plain(copy)]
    parts = 0
    while pending:
        candidate = pending.pop()
        split = _split(candidate, side, strides)
        if split is None:
            parts += 1
            yield candidate
        else:
            pending += split
        if parts + len(pending) > MOST_PARTS:
            raise NotStrided(f"a copy falls into more than {MOST_PARTS} boxes")


def _plain(copy: Copy) -> Copy:
    """Remove loops of one iteration, and merge loops that are contiguous on both sides."""
    loops: list[Loop] = []
    repeated = [loop for loop in copy.loops if loop.turns > 1]
    # From coarse to fine steps, so that a loop directly follows the one that it may
    # continue.
    for loop in sorted(repeated, key=lambda loop: (-loop.source, -loop.dest)):
        if loops and loops[-1][1:] == (
            loop.source * loop.turns,
            loop.dest * loop.turns,
        ):
            loops[-1] = Loop(loops[-1].turns * loop.turns, loop.source, loop.dest)
        else:
            loops.append(loop)
    return copy._replace(loops=tuple(loops))


def _axis_of(stride: int, strides: Sequence[int]) -> int:
    """Return the axis along which a stride moves."""
    axis = next((axis for axis, unit in enumerate(strides) if stride >= unit), None)
    if axis is None or stride % strides[axis]:
        raise NotStrided(
            f"a stride of {stride} is on none of the axes of strides {tuple(strides)}"
        )
    return axis


def _split(copy: Copy, side: str, strides: Sequence[int]) -> list[Copy] | None:
    """Return two or more parts of a copy that is not settled, or None if it is settled."""
    start = getattr(copy, f"{side}_start")
    for axis in range(1, len(strides)):
        end = strides[axis - 1]
        unit = strides[axis]
        # Loops along this axis have steps from its stride up to that of the next
        # coarser axis.
        axis_loops = sorted(
            (loop for loop in copy.loops if unit <= getattr(loop, side) < end),
            key=lambda o: getattr(o, side),
        )
        for loop in axis_loops:
            _axis_of(getattr(loop, side), strides)
        first = start % end
        # If even the farthest iteration stays within this axis, its loops need no
        # splitting.
        reach = first + sum(
            (loop.turns - 1) * getattr(loop, side) for loop in axis_loops
        )
        if not axis_loops or reach - reach % unit < end:
            continue
        # The loop with the largest step is split first.
        loop = axis_loops.pop()
        stride = getattr(loop, side)
        other_loops = tuple(other for other in copy.loops if other is not loop)
        # Finer loops that cross a step of this loop's stride cannot be separated from
        # it, so its iterations are unrolled.
        finer = first % stride + sum(
            (other.turns - 1) * getattr(other, side) for other in axis_loops
        )
        if end % stride or finer - finer % unit >= stride:
            return [
                copy.shifted(loop, turn)._replace(loops=other_loops)
                for turn in range(loop.turns)
            ]
        # Otherwise the loop is cut at the axis's ends: the rest of the first row, whole
        # rows, the beginning of the last row.
        turns = end // stride
        # `turns` iterations fill a row, and `head` iterations complete the first one.
        head = -(first // stride) % turns
        last_whole_row = head + max(0, loop.turns - head) // turns * turns
        bounds = sorted({0, min(head, loop.turns), last_whole_row, loop.turns})
        parts = []
        for low, high in pairwise(bound for bound in bounds if bound <= loop.turns):
            # Whole rows become two loops, one over rows and one within a row.
            rows, rest = divmod(high - low, turns) if low >= head else (0, high - low)
            inner = (
                (
                    Loop(rows, loop.source * turns, loop.dest * turns),
                    loop._replace(turns=turns),
                )
                if rows
                else (loop._replace(turns=rest),)
            )
            parts.append(
                copy.shifted(loop, low)._replace(
                    loops=(
                        *other_loops,
                        *(part_loop for part_loop in inner if part_loop.turns > 1),
                    )
                )
            )
        return parts
    for loop in copy.loops:
        _axis_of(getattr(loop, side), strides)
    return None


def compose(read: Copy, write: Copy) -> Iterator[Copy]:
    """Return what `read` takes of what `write` has put there, as copies from `write`'s source to `read`'s destination.

    Raises:
        NotStrided: see `settle`.
    """
    write = _plain(write)
    # By decreasing step, like the digits of a number.
    written = sorted(write.loops, key=lambda loop: -loop.dest)
    for outer, inner in pairwise(written):
        if outer.dest % inner.dest or (inner.turns - 1) * inner.dest >= outer.dest:
            raise NotStrided("a copy writes to an element twice")
    # A last loop with step 1 takes the remainder of an address.
    if not written or written[-1].dest > 1:
        written.append(Loop(1, 0, 1))
    strides = [loop.dest for loop in written]
    moved = read._replace(source_start=read.source_start - write.dest_start)
    for part in settle(moved, "source", strides):
        yield from _within(part, write.source_start, written)


def _within(part: Copy, source_start: int, written: Sequence[Loop]) -> Iterator[Copy]:
    """Yield the iterations of a settled copy that read data written by an earlier one.

    Args:
        part: copy settled on the strides of `written`.
        source_start: start of the earlier copy in its source.
        written: loops of the earlier copy, by decreasing step in its destination.
    """
    rest = part.source_start
    # The start address in the mixed radix of the loops: one index per loop.
    digits = []
    for loop in written:
        digit, rest = divmod(rest, loop.dest)
        digits.append(digit)
    loops: list[Loop] = []
    dest_start = part.dest_start
    for axis, (loop, digit) in enumerate(zip(written, digits, strict=True)):
        end = written[axis - 1].dest if axis else math.inf
        # Reads with steps up to that of the next coarser loop change this loop's digit
        # only.
        axis_loops = [
            other_loop
            for other_loop in part.loops
            if loop.dest <= other_loop.source < end
        ]
        last = digit + sum(
            (other_loop.turns - 1) * other_loop.source // loop.dest
            for other_loop in axis_loops
        )
        # All iterations stay inside the written range.
        if digit >= 0 and last < loop.turns:
            loops += [
                Loop(
                    other_loop.turns,
                    other_loop.source // loop.dest * loop.source,
                    other_loop.dest,
                )
                for other_loop in axis_loops
            ]
        elif len(axis_loops) == 1:
            # A single loop leaves the written range. Only its iterations inside are
            # kept.
            step = axis_loops[0].source // loop.dest
            low = max(0, -(digit // step))
            high = min(axis_loops[0].turns, (loop.turns - 1 - digit) // step + 1)
            if low >= high:
                return
            digit += low * step
            dest_start += low * axis_loops[0].dest
            loops.append(Loop(high - low, step * loop.source, axis_loops[0].dest))
        elif axis_loops:
            # Several loops share the digit, so no single range of iterations lies
            # inside. The loop with the largest step is unrolled.
            widest = max(axis_loops, key=lambda other_loop: other_loop.source)
            remaining = tuple(
                other_loop for other_loop in part.loops if other_loop is not widest
            )
            for turn in range(widest.turns):
                yield from _within(
                    part.shifted(widest, turn)._replace(loops=remaining),
                    source_start,
                    written,
                )
            return
        else:
            # The read touches nothing that was written.
            return
        source_start += digit * loop.source
    yield Copy(source_start, dest_start, tuple(loops))


class Strides(NamedTuple):
    """View of an array whose elements come in another array's order.

    Attributes:
        axes: permutation of the axes.
        first, step: along each permuted axis, every `step`-th element from `first` on.
    """

    axes: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def are_plain(self) -> bool:
        """Return whether the view is the array itself, up to offsets."""
        return self.axes == tuple(range(len(self.axes))) and set(self.step) <= {1}

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the view of an array with the given shape."""
        permuted = [shape[axis] for axis in self.axes]
        return tuple(
            math.ceil((size - first) / step)
            for size, first, step in zip(permuted, self.first, self.step, strict=True)
        )

    def behind(self, count: int) -> Strides:
        """Return the view of an array with `count` more leading axes, which stay unchanged."""
        axes = (*range(count), *(count + axis for axis in self.axes))
        return Strides(axes, (0,) * count + self.first, (1,) * count + self.step)

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor, sharing its storage."""
        every = zip(self.first, self.step, strict=True)
        return tensor.permute(self.axes)[
            tuple(slice(first, None, step) for first, step in every)
        ]

    def inside(self, part: Box) -> tuple[Box, Strides]:
        """Return the part of the view inside a box of the array.

        Returns:
            The part's box in the view, and the view of the box by itself.
        """
        low = [part.start[axis] for axis in self.axes]
        high = [part.stop[axis] for axis in self.axes]
        every = list(zip(low, high, self.first, self.step, strict=True))
        # Rounded up: the first element of the view at or behind the start of the box.
        start = tuple(max(0, -((first - at) // step)) for at, _, first, step in every)
        stop = tuple(max(0, -((first - end) // step)) for _, end, first, step in every)
        # The view of the box counts from the corner of the box.
        first = tuple(
            first + begin * step - at
            for (at, _, first, step), begin in zip(every, start, strict=True)
        )
        return Box(start, stop), self._replace(first=first)

    def __str__(self) -> str:
        every = ", ".join(
            f"{first}::{step}"
            for first, step in zip(self.first, self.step, strict=True)
        )
        return f"permute{self.axes}[{every}]"


def boxes(
    copy: Copy, source_shape: Sequence[int], dest_shape: Sequence[int]
) -> Iterator[tuple[Box, Strides, Box]]:
    """Yield the copy as (box of the source, view of the destination, box of that view), for two dense arrays.

    Raises:
        NotStrided: see `settle`.
    """
    source_axes = [axis for axis, size in enumerate(source_shape) if size > 1]
    dest_axes = [axis for axis, size in enumerate(dest_shape) if size > 1]
    source_strides = dense_strides(source_shape)
    dest_strides = dense_strides(dest_shape)
    for half in settle(
        copy, "source", [source_strides[axis] for axis in source_axes] or [1]
    ):
        for part in settle(
            half, "dest", [dest_strides[axis] for axis in dest_axes] or [1]
        ):
            # Source axis -> the loop that becomes an axis of the box. All other loops
            # are unrolled. Long loops are kept first.
            kept: dict[int, Loop] = {}
            for loop in sorted(part.loops, key=lambda loop: -loop.turns):
                axis = source_axes[
                    _axis_of(
                        loop.source, [source_strides[axis] for axis in source_axes]
                    )
                ]
                taken = {
                    _dest_axis(other.dest, dest_axes, dest_strides)
                    for other in kept.values()
                }
                is_free = (
                    axis not in kept
                    and _dest_axis(loop.dest, dest_axes, dest_strides) not in taken
                )
                if is_free and loop.source == source_strides[axis]:
                    kept[axis] = loop
            unrolled = [
                loop
                for loop in part.loops
                if not any(loop is kept_loop for kept_loop in kept.values())
            ]
            # Every combination of the unrolled loops gives one box.
            for turns in product(*(range(loop.turns) for loop in unrolled)):
                shifted = part
                for loop, turn in zip(unrolled, turns, strict=True):
                    shifted = shifted.shifted(loop, turn)
                yield _box(shifted, kept, source_strides, dest_axes, dest_strides)


def _dest_axis(stride: int, axes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the destination axis along which a stride moves."""
    return axes[_axis_of(stride, [strides[axis] for axis in axes])]


def _box(
    copy: Copy,
    kept: dict[int, Loop],
    source_strides: Sequence[int],
    dest_axes: Sequence[int],
    dest_strides: Sequence[int],
) -> tuple[Box, Strides, Box]:
    """Return one box of a copy whose loops `kept` are its axes."""
    low = _unravel(copy.source_start, source_strides)
    at = _unravel(copy.dest_start, dest_strides)
    high = tuple(
        start + (kept[axis].turns if axis in kept else 1)
        for axis, start in enumerate(low)
    )
    counts = [1] * len(at)
    steps = [1] * len(at)
    moving = []
    for source_axis in sorted(kept):
        loop = kept[source_axis]
        axis = _dest_axis(loop.dest, dest_axes, dest_strides)
        counts[axis], steps[axis] = loop.turns, loop.dest // dest_strides[axis]
        moving.append(axis)
    fixed = [axis for axis in range(len(at)) if axis not in moving]
    # Moving axes take the order of the source's axes; the others keep their places.
    places = iter(moving)
    axes = tuple(axis if axis in fixed else next(places) for axis in range(len(at)))
    view = Strides(
        axes,
        tuple(at[axis] % steps[axis] for axis in axes),
        tuple(steps[axis] for axis in axes),
    )
    start = tuple(at[axis] // steps[axis] for axis in axes)
    stop = tuple(first + counts[axis] for first, axis in zip(start, axes, strict=True))
    return Box(low, high), view, Box(start, stop)


def _unravel(address: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an address in an array with these strides."""
    indices = []
    for stride in strides:
        index, address = divmod(address, stride)
        indices.append(index)
    return tuple(indices)
