"""Which boxes of one array share elements, found without comparing all with all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megaverl.sharding.boxes import Box, intersect


class BoxIndex:
    """Boxes of one array, sorted along the axis that cuts them most, so that few are looked at."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        cuts = [len(set(starts)) for starts in zip(*(box.start for box in boxes), strict=True)]
        # an array without axes has one element: every box meets every other
        self._axis = cuts.index(max(cuts)) if cuts else None
        self._boxes = list(enumerate(boxes))
        if self._axis is not None:
            axis = self._axis
            self._boxes.sort(key=lambda numbered: numbered[1].start[axis])
            self._starts = [box.start[axis] for _, box in self._boxes]
            # the farthest stop so far never falls, so that it can be searched like the starts
            self._reach = list(accumulate((box.stop[axis] for _, box in self._boxes), max))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The number of each box that shares elements with `box`, and the box that they share."""
        low, high = 0, len(self._boxes)
        if self._axis is not None:
            low = bisect_right(self._reach, box.start[self._axis])
            high = bisect_left(self._starts, box.stop[self._axis])
        for number, other in self._boxes[low:high]:
            common = intersect(box, other)
            if common is not None:
                yield number, common


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The numbers of two boxes of the list that share elements; None when all are disjoint."""
    if len(boxes) > 1:
        index = BoxIndex(boxes)
        for number, box in enumerate(boxes):
            for other, _ in index.meeting(box):
                if other != number:
                    return min(number, other), max(number, other)
    return None
