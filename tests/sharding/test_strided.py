"""Copies between views as boxes: against numpy, which copies them element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.sharding.strided import (
    Copy,
    Loop,
    NotStrided,
    Strides,
    boxes,
    compose,
    dense_strides,
    settle,
)

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)


@st.composite
def views(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """What a program may do to an array before it copies it."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "step", "permute", "split"]))
        axis = draw(st.integers(0, array.ndim - 1))
        size = array.shape[axis]
        if kind == "slice":
            low = draw(st.integers(0, size - 1))
            array = array[
                (slice(None),) * axis + (slice(low, draw(st.integers(low + 1, size))),)
            ]
        elif kind == "step":
            first = draw(st.integers(0, min(1, size - 1)))
            array = array[(slice(None),) * axis + (slice(first, None, 2),)]
        elif kind == "permute":
            array = array.transpose(draw(st.permutations(range(array.ndim))))
        elif size % 2 == 0:
            array = np.lib.stride_tricks.as_strided(
                array,
                (*array.shape[:axis], size // 2, 2, *array.shape[axis + 1 :]),
                (
                    *array.strides[:axis],
                    2 * array.strides[axis],
                    array.strides[axis],
                    *array.strides[axis + 1 :],
                ),
            )
    return array


def copy_of(source: np.ndarray, dest: np.ndarray, starts: tuple[int, int]) -> Copy:
    loops = zip(source.shape, source.strides, dest.strides, strict=True)
    return Copy(*starts, tuple(Loop(n, a // 8, b // 8) for n, a, b in loops))


def start_in(view: np.ndarray, base: np.ndarray) -> int:
    return (
        view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    ) // 8


def seen(array: np.ndarray, view: Strides) -> np.ndarray:
    return array.transpose(view.axes)[
        tuple(map(slice, view.first, [None] * array.ndim, view.step))
    ]


def by_boxes(copy: Copy, source: np.ndarray, dest: np.ndarray) -> None:
    for box, view, local in boxes(copy, source.shape, dest.shape):
        target = seen(dest, view)[local.slices]
        assert (target == -1).all(), "each element once"
        target[...] = source[box.slices].reshape(target.shape)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_copy_between_views_is_its_boxes(data: st.DataObject) -> None:
    source = np.arange(math.prod(shape := data.draw(SHAPES))).reshape(shape)
    part = data.draw(views(source))
    flat = part.reshape(-1).shape[0]
    room = np.full(flat * 2, -1)
    dest = room[data.draw(st.integers(0, flat)) :][:flat].reshape(
        data.draw(st.permutations(part.shape))
    )
    target = dest.transpose(
        next(
            p
            for p in _permutations(dest.ndim)
            if tuple(dest.shape[axis] for axis in p) == part.shape
        )
    )
    copy = copy_of(part, target, (start_in(part, source), start_in(target, dest)))
    wanted = np.full(dest.shape, -1)
    wanted.transpose(
        next(
            p
            for p in _permutations(dest.ndim)
            if tuple(dest.shape[axis] for axis in p) == part.shape
        )
    )[...] = part
    found = np.full(dest.shape, -1)
    by_boxes(copy, source, found)
    assert (found == wanted).all()


def _permutations(count: int) -> list[tuple[int, ...]]:
    from itertools import permutations

    return list(permutations(range(count)))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_was_copied_twice_is_followed_back(data: st.DataObject) -> None:
    """source -> between -> dest, each step a copy between views."""
    source = np.arange(math.prod(shape := data.draw(SHAPES))).reshape(shape)
    first = data.draw(views(source))
    between = np.full((first.size + 3,), -1)
    held = between[2 : 2 + first.size].reshape(first.shape)
    held[...] = first
    write = copy_of(first, held, (start_in(first, source), 2))
    second = data.draw(views(held))
    dest = np.full(second.shape, -1)
    read = copy_of(second, dest, (start_in(second, between), 0))
    for part in compose(read, write):
        by_boxes(part, source, dest)
    assert (dest == second).all()


def test_settled_parts_stay_on_their_axes() -> None:
    parts = list(settle(Copy(4, 0, (Loop(10, 1, 1),)), "source", [6, 1]))
    assert sorted(parts) == [
        Copy(4, 0, (Loop(2, 1, 1),)),
        Copy(6, 2, (Loop(6, 1, 1),)),
        Copy(12, 8, (Loop(2, 1, 1),)),
    ]
    with pytest.raises(NotStrided, match="a stride of 3"):
        list(settle(Copy(0, 0, (Loop(2, 3, 1), Loop(2, 1, 5))), "source", [4, 2]))
    assert dense_strides((2, 3, 4)) == (12, 4, 1)
