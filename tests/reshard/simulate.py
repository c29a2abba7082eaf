"""Carrying out plans on numpy arrays, all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from megaverl.layout.boxes import Box
from megaverl.layout.layout import Layout
from megaverl.reshard.plan import Plan

Arrays = dict[str, np.ndarray]


def carry_out(plans: Sequence[Plan], source: Sequence[Arrays], dest: Sequence[Arrays]) -> None:
    """Copies within each rank; then what each rank sends, through the list that the receiver made."""
    for plan in plans:
        for t in plan.copies:
            target = dest[t.dest][t.dest_local][t.dest_box.slices]
            target[...] = source[t.source][t.source_local][t.source_box.slices].reshape(target.shape)
        for peer, transfers in plan.sends.items():
            boxes = [source[plan.rank][t.source_local][t.source_box.slices] for t in transfers]
            for t, box in zip(plans[peer].receives[plan.rank], boxes, strict=True):
                target = dest[peer][t.dest_local][t.dest_box.slices]
                target[...] = box.reshape(target.shape)


def must_fetch(source: Layout, dest: Layout) -> int:
    """Elements that `dest` needs and `source` (the same rank's) lacks, counted one by one."""
    held: dict[str, set[tuple[int, ...]]] = {}
    for piece in source.pieces:
        held.setdefault(piece.tensor, set()).update(_indices(piece.box))
    needed = [(p.tensor, index) for p in dest.pieces for index in _indices(p.box)]
    return sum(index not in held.get(tensor, ()) for tensor, index in needed)


def _indices(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(low, high) for low, high in zip(box.start, box.stop, strict=True))))


def layouts_of(layouts: Sequence[Layout]) -> Callable[[int], Layout]:
    return lambda rank: layouts[rank]
