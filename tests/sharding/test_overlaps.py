"""The index of boxes against comparing all with all."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import Box, intersect, whole
from megaverl.sharding.overlaps import BoxIndex, first_overlap


@st.composite
def boxes(draw: st.DrawFn, axes: int) -> Box:
    edges = [sorted(draw(st.sets(st.integers(0, 6), min_size=2, max_size=2))) for _ in range(axes)]
    return Box(tuple(low for low, _ in edges), tuple(high for _, high in edges))


@given(st.data(), st.integers(0, 3))
def test_it_finds_what_comparing_all_finds(data: st.DataObject, axes: int) -> None:
    held = data.draw(st.lists(boxes(axes), max_size=8))
    box = data.draw(boxes(axes))
    expected = {(i, common) for i, other in enumerate(held) if (common := intersect(box, other))}
    assert set(BoxIndex(held).meeting(box)) == expected


@given(st.data(), st.integers(1, 3))
def test_the_first_overlap_is_one(data: st.DataObject, axes: int) -> None:
    held = data.draw(st.lists(boxes(axes), max_size=6))
    overlapping = {(i, j) for i, j in combinations(range(len(held)), 2) if intersect(held[i], held[j])}
    found = first_overlap(held)
    assert found in overlapping if overlapping else found is None


def test_arrays_without_axes_meet() -> None:
    assert first_overlap([whole(()), whole(())]) == (0, 1)
    assert first_overlap([whole(())]) is None
