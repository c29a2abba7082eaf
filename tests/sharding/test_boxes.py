"""Box arithmetic against numpy masks, and the index of boxes against comparing all with all."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import (
    Box,
    BoxIndex,
    carry,
    contains,
    cut,
    first_overlap,
    flat_boxes,
    intersect,
    join,
    split,
    subtract,
    whole,
)
from megaverl.sharding.layout import LayoutBuilder, padded_tensors, stack
from tests.sharding.specs import make_weights

AXES = st.integers(1, 3)


@st.composite
def boxes(draw: st.DrawFn, ndim: int, size: int = 5) -> Box:
    ranges = [
        sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))))
        for _ in range(ndim)
    ]
    start = tuple(min(low, high - 1) for low, high in ranges)
    return Box(start, tuple(high for _, high in ranges))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(AXES)
    return draw(boxes(ndim)), draw(boxes(ndim))


def mask(box: Box | None, ndim: int, size: int = 5) -> np.ndarray:
    out = np.zeros((size,) * ndim, dtype=int)
    if box is not None:
        out[box.slices] += 1
    return out


@given(pairs())
def test_intersection_and_difference_partition_a_box(pair: tuple[Box, Box]) -> None:
    a, b = pair
    ndim = len(a.start)
    common = intersect(a, b)
    assert (mask(common, ndim) == mask(a, ndim) * mask(b, ndim)).all()
    rest = subtract(a, b)
    total = mask(common, ndim) + sum(
        (mask(box, ndim) for box in rest), np.zeros_like(mask(a, ndim))
    )
    assert (total == mask(a, ndim)).all()
    assert contains(a, b) == (not subtract(b, a))


@given(pairs())
def test_join_is_the_union_when_it_is_a_box(pair: tuple[Box, Box]) -> None:
    a, b = pair
    ndim = len(a.start)
    joined = join(a, b)
    if joined is not None:
        assert (mask(joined, ndim) == mask(a, ndim) + mask(b, ndim)).all()
        # and taking it apart again along that axis gives the two back
        assert subtract(joined, a) == [b]


@given(
    st.lists(st.integers(1, 4), max_size=4), st.integers(0, 256), st.integers(0, 256)
)
def test_a_flat_range_is_contiguous_boxes_in_order(
    shape: list[int], one: int, other: int
) -> None:
    numbers = np.arange(whole(shape).numel).reshape(shape)
    start, stop = sorted((min(one, numbers.size), min(other, numbers.size)))
    boxes = flat_boxes(shape, start, stop)
    found = [numbers[box.slices].reshape(-1) for box in boxes]
    assert np.concatenate([np.arange(0), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_join_only_in_order_and_along_one_axis() -> None:
    left, right = cut((4, 6), 1, 0, 2), cut((4, 6), 1, 2, 6)
    assert join(left, right) == whole((4, 6))
    assert join(right, left) is None
    assert join(left, Box((1, 2), (4, 6))) is None


@given(boxes(3), st.integers(1, 30))
def test_split_keeps_elements_and_their_order(box: Box, max_numel: int) -> None:
    parts = split(box, max_numel)
    assert all(part.numel <= max_numel for part in parts)
    ids = np.arange(125).reshape(5, 5, 5)
    in_order = np.concatenate([ids[part.slices].reshape(-1) for part in parts])
    assert (in_order == ids[box.slices].reshape(-1)).all()


@given(boxes(2), st.data())
def test_carry_follows_the_elements_into_a_tensor_with_more_axes(
    outer: Box, data: st.DataObject
) -> None:
    """A weight inside a fused 3-D expert tensor: the same elements, an axis of size one more."""
    inner_shape = outer.shape
    low = [data.draw(st.integers(0, n - 1)) for n in inner_shape]
    high = [
        data.draw(st.integers(a + 1, n)) for a, n in zip(low, inner_shape, strict=True)
    ]
    inner = Box(
        tuple(s + a for s, a in zip(outer.start, low, strict=True)),
        tuple(s + b for s, b in zip(outer.start, high, strict=True)),
    )
    target = Box((2, 1, 3), (3, 1 + inner_shape[0], 3 + inner_shape[1]))
    ids = np.arange(25).reshape(5, 5)
    fused = np.full((4, 9, 9), -1)
    fused[target.slices] = ids[outer.slices].reshape(target.shape)
    carried = carry(inner, outer, target)
    assert (fused[carried.slices].reshape(inner.shape) == ids[inner.slices]).all()


def test_a_box_prints_as_ranges() -> None:
    assert str(Box((0, 4), (2, 8))) == "[0:2, 4:8]"


def test_a_local_tensor_with_an_element_that_no_piece_covers_is_padded() -> None:
    builder = LayoutBuilder()
    builder.add("whole", make_weights({"whole": (2, 3)}), stack([(0, whole((2, 3)))]))
    builder.add(
        "longer", make_weights({"part": (2, 1)}), stack([(0, Box((0, 0), (2, 1)))], 3)
    )
    assert padded_tensors(builder.build()) == ["longer"]


@given(st.data(), st.integers(0, 3))
def test_it_finds_what_comparing_all_finds(data: st.DataObject, axes: int) -> None:
    held = data.draw(st.lists(boxes(axes), max_size=8))
    box = data.draw(boxes(axes))
    expected = {
        (i, common) for i, other in enumerate(held) if (common := intersect(box, other))
    }
    assert set(BoxIndex(held).meeting(box)) == expected


@given(st.data(), st.integers(1, 3))
def test_the_first_overlap_is_one(data: st.DataObject, axes: int) -> None:
    held = data.draw(st.lists(boxes(axes), max_size=6))
    overlapping = {
        (i, j)
        for i, j in combinations(range(len(held)), 2)
        if intersect(held[i], held[j])
    }
    found = first_overlap(held)
    assert found in overlapping if overlapping else found is None


def test_arrays_without_axes_meet() -> None:
    assert first_overlap([whole(()), whole(())]) == (0, 1)
    assert first_overlap([whole(())]) is None
