"""Copies between strided views, as loop nests: what a program copied, followed back to arrays and cut into boxes.

Addresses and strides count elements of a storage. A nest is `settled` on the axes of a dense array, given by their
falling strides, when each of its loops stays on one axis: then it is a set of boxes there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from megaverl.sharding.boxes import Box

if TYPE_CHECKING:
    import torch

MOST_PARTS = 100_000  # that one copy may fall into


class NotStrided(ValueError):
    """No boxes describe this copy."""


class Loop(NamedTuple):
    """Its turns, and how far one of them moves in the source and in the destination."""

    turns: int
    source: int
    dest: int


class Copy(NamedTuple):
    """`dest[dest_start + sum(i * loop.dest)] = source[source_start + sum(i * loop.source)]`, for all i of all loops."""

    source_start: int
    dest_start: int
    loops: tuple[Loop, ...]

    def shifted(self, loop: Loop, turns: int) -> Copy:
        """The same from a later turn of a loop on."""
        return self._replace(
            source_start=self.source_start + turns * loop.source, dest_start=self.dest_start + turns * loop.dest
        )


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of an array in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def settle(copy: Copy, side: str, strides: Sequence[int]) -> Iterator[Copy]:
    """The copy in parts that are settled on these axes of its `side` ("source" or "dest").

    Args:
        strides: falling, each a multiple of the next; the first axis has no end.

    Raises:
        NotStrided: a stride that is no multiple of its axis's, or too many parts.
    """
    pending, parts = [_plain(copy)], 0
    while pending:
        one = pending.pop()
        split = _split(one, side, strides)
        if split is None:
            parts += 1
            yield one
        else:
            pending += split
        if parts + len(pending) > MOST_PARTS:
            raise NotStrided(f"a copy falls into more than {MOST_PARTS} boxes")


def _plain(copy: Copy) -> Copy:
    """Without loops of one turn; two that are one in both sides are joined."""
    loops: list[Loop] = []
    for loop in sorted((loop for loop in copy.loops if loop.turns > 1), key=lambda loop: (-loop.source, -loop.dest)):
        if loops and loops[-1][1:] == (loop.source * loop.turns, loop.dest * loop.turns):
            loops[-1] = Loop(loops[-1].turns * loop.turns, loop.source, loop.dest)
        else:
            loops.append(loop)
    return copy._replace(loops=tuple(loops))


def _axis_of(stride: int, strides: Sequence[int]) -> int:
    axis = next((axis for axis, unit in enumerate(strides) if stride >= unit), None)
    if axis is None or stride % strides[axis]:
        raise NotStrided(f"a stride of {stride} is on none of the axes of strides {tuple(strides)}")
    return axis


def _split(copy: Copy, side: str, strides: Sequence[int]) -> list[Copy] | None:
    """Two or more parts of a copy that is not settled; None where it is."""
    start = getattr(copy, f"{side}_start")
    for axis in range(1, len(strides)):
        end, unit = strides[axis - 1], strides[axis]
        here = sorted(
            (loop for loop in copy.loops if unit <= getattr(loop, side) < end), key=lambda o: getattr(o, side)
        )
        for loop in here:
            _axis_of(getattr(loop, side), strides)
        first = start % end
        reach = first + sum((loop.turns - 1) * getattr(loop, side) for loop in here)
        if not here or reach - reach % unit < end:
            continue
        loop = here.pop()
        stride = getattr(loop, side)
        others = tuple(other for other in copy.loops if other is not loop)
        finer = first % stride + sum((other.turns - 1) * getattr(other, side) for other in here)
        if end % stride or finer - finer % unit >= stride:
            return [copy.shifted(loop, turn)._replace(loops=others) for turn in range(loop.turns)]
        turns = end // stride
        head = -(first // stride) % turns
        bounds = sorted({0, min(head, loop.turns), head + max(0, loop.turns - head) // turns * turns, loop.turns})
        parts = []
        for low, high in pairwise(bound for bound in bounds if bound <= loop.turns):
            rows, rest = divmod(high - low, turns) if low >= head else (0, high - low)
            inner = (
                (Loop(rows, loop.source * turns, loop.dest * turns), loop._replace(turns=turns))
                if rows
                else (loop._replace(turns=rest),)
            )
            parts.append(copy.shifted(loop, low)._replace(loops=(*others, *(one for one in inner if one.turns > 1))))
        return parts
    for loop in copy.loops:
        _axis_of(getattr(loop, side), strides)
    return None


def compose(read: Copy, write: Copy) -> Iterator[Copy]:
    """What `read` takes of what `write` has put there: from `write`'s source to `read`'s destination.

    Raises:
        NotStrided: see `settle`.
    """
    write = _plain(write)
    written = sorted(write.loops, key=lambda loop: -loop.dest)
    for outer, inner in pairwise(written):
        if outer.dest % inner.dest or (inner.turns - 1) * inner.dest >= outer.dest:
            raise NotStrided("a copy writes to an element twice")
    if not written or written[-1].dest > 1:
        written.append(Loop(1, 0, 1))
    strides = [loop.dest for loop in written]
    moved = read._replace(source_start=read.source_start - write.dest_start)
    for part in settle(moved, "source", strides):
        yield from _within(part, write.source_start, written)


def _within(part: Copy, source_start: int, written: Sequence[Loop]) -> Iterator[Copy]:
    """The turns of a settled copy that read what was written."""
    rest = part.source_start
    digits = []
    for loop in written:
        digit, rest = divmod(rest, loop.dest)
        digits.append(digit)
    loops: list[Loop] = []
    dest_start = part.dest_start
    for axis, (loop, digit) in enumerate(zip(written, digits, strict=True)):
        end = written[axis - 1].dest if axis else math.inf
        here = [each for each in part.loops if loop.dest <= each.source < end]
        last = digit + sum((each.turns - 1) * each.source // loop.dest for each in here)
        if digit >= 0 and last < loop.turns:
            loops += [Loop(each.turns, each.source // loop.dest * loop.source, each.dest) for each in here]
        elif len(here) == 1:
            step = here[0].source // loop.dest
            low = max(0, -(digit // step))
            high = min(here[0].turns, (loop.turns - 1 - digit) // step + 1)
            if low >= high:
                return
            digit += low * step
            dest_start += low * here[0].dest
            loops.append(Loop(high - low, step * loop.source, here[0].dest))
        elif here:
            widest = max(here, key=lambda each: each.source)
            others = tuple(each for each in part.loops if each is not widest)
            for turn in range(widest.turns):
                yield from _within(part.shifted(widest, turn)._replace(loops=others), source_start, written)
            return
        else:
            return
        source_start += digit * loop.source
    yield Copy(source_start, dest_start, tuple(loops))


class Strides(NamedTuple):
    """How an array is seen so that its elements come in another's order: its axes in this order, and of each every
    `step`-th element from `first` on."""

    axes: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def are_plain(self) -> bool:
        return self.axes == tuple(range(len(self.axes))) and set(self.step) <= {1}

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of an array of this shape, seen so."""
        permuted = [shape[axis] for axis in self.axes]
        return tuple(
            math.ceil((size - first) / step) for size, first, step in zip(permuted, self.first, self.step, strict=True)
        )

    def behind(self, count: int) -> Strides:
        """Of an array that has so many axes more in front, which stay as they are."""
        axes = (*range(count), *(count + axis for axis in self.axes))
        return Strides(axes, (0,) * count + self.first, (1,) * count + self.step)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor seen so, sharing its storage."""
        every = zip(self.first, self.step, strict=True)
        return tensor.permute(self.axes)[tuple(slice(first, None, step) for first, step in every)]

    def inside(self, part: Box) -> tuple[Box, Strides]:
        """What of the view lies in a box of the array: its box in the view, and how the box alone is seen so."""
        low = [part.start[axis] for axis in self.axes]
        high = [part.stop[axis] for axis in self.axes]
        every = list(zip(low, high, self.first, self.step, strict=True))
        start = tuple(max(0, -((first - at) // step)) for at, _, first, step in every)
        stop = tuple(max(0, -((first - end) // step)) for _, end, first, step in every)
        first = tuple(first + begin * step - at for (at, _, first, step), begin in zip(every, start, strict=True))
        return Box(start, stop), self._replace(first=first)

    def __str__(self) -> str:
        every = ", ".join(f"{first}::{step}" for first, step in zip(self.first, self.step, strict=True))
        return f"permute{self.axes}[{every}]"


def boxes(copy: Copy, source_shape: Sequence[int], dest_shape: Sequence[int]) -> Iterator[tuple[Box, Strides, Box]]:
    """The copy as `(box of the source, how the destination is seen, box of that view)`, for two dense arrays.

    Raises:
        NotStrided: see `settle`.
    """
    source_axes = [axis for axis, size in enumerate(source_shape) if size > 1]
    dest_axes = [axis for axis, size in enumerate(dest_shape) if size > 1]
    source_strides, dest_strides = dense_strides(source_shape), dense_strides(dest_shape)
    for half in settle(copy, "source", [source_strides[axis] for axis in source_axes] or [1]):
        for part in settle(half, "dest", [dest_strides[axis] for axis in dest_axes] or [1]):
            # source axis -> the loop that is an axis of the box; the other loops are turned one by one
            kept: dict[int, Loop] = {}
            for loop in sorted(part.loops, key=lambda loop: -loop.turns):
                axis = source_axes[_axis_of(loop.source, [source_strides[axis] for axis in source_axes])]
                taken = {_dest_axis(other.dest, dest_axes, dest_strides) for other in kept.values()}
                is_free = axis not in kept and _dest_axis(loop.dest, dest_axes, dest_strides) not in taken
                if is_free and loop.source == source_strides[axis]:
                    kept[axis] = loop
            turned = [loop for loop in part.loops if not any(loop is each for each in kept.values())]
            for turns in product(*(range(loop.turns) for loop in turned)):
                one = part
                for loop, turn in zip(turned, turns, strict=True):
                    one = one.shifted(loop, turn)
                yield _box(one, kept, source_strides, dest_axes, dest_strides)


def _dest_axis(stride: int, axes: Sequence[int], strides: Sequence[int]) -> int:
    return axes[_axis_of(stride, [strides[axis] for axis in axes])]


def _box(
    copy: Copy,
    kept: dict[int, Loop],
    source_strides: Sequence[int],
    dest_axes: Sequence[int],
    dest_strides: Sequence[int],
) -> tuple[Box, Strides, Box]:
    low, at = _unravel(copy.source_start, source_strides), _unravel(copy.dest_start, dest_strides)
    high = tuple(start + (kept[axis].turns if axis in kept else 1) for axis, start in enumerate(low))
    counts, steps = [1] * len(at), [1] * len(at)
    moving = []
    for source_axis in sorted(kept):
        loop = kept[source_axis]
        axis = _dest_axis(loop.dest, dest_axes, dest_strides)
        counts[axis], steps[axis] = loop.turns, loop.dest // dest_strides[axis]
        moving.append(axis)
    still = [axis for axis in range(len(at)) if axis not in moving]
    places = iter(moving)  # where an axis moves, the axes that move stand there in the source's order
    axes = tuple(axis if axis in still else next(places) for axis in range(len(at)))
    view = Strides(axes, tuple(at[axis] % steps[axis] for axis in axes), tuple(steps[axis] for axis in axes))
    start = tuple(at[axis] // steps[axis] for axis in axes)
    stop = tuple(first + counts[axis] for first, axis in zip(start, axes, strict=True))
    return Box(low, high), view, Box(start, stop)


def _unravel(address: int, strides: Sequence[int]) -> tuple[int, ...]:
    found = []
    for stride in strides:
        index, address = divmod(address, stride)
        found.append(index)
    return tuple(found)
