"""Carrying out plans on numpy arrays, all ranks in one process, and the plain way that they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

from megaverl.sharding.boxes import Box, intersect
from megaverl.sharding.layout import Layout
from megaverl.sharding.plan import Plan

Arrays = dict[str, np.ndarray]


def carry_out(
    plans: Sequence[Plan], source: Sequence[Arrays], dest: Sequence[Arrays]
) -> None:
    """Copies within each rank; then, hop by hop, what each rank sends, through the list that the receiver made.

    A hop reads all that it forwards before it writes anything, so that nothing is
    forwarded in the hop that brought it.
    """
    for plan in plans:
        for t in plan.copies:
            target = dest[t.dest][t.dest_local][t.dest_box.slices]
            target[...] = source[t.source][t.source_local][t.source_box.slices].reshape(
                target.shape
            )
    for number in range(max(len(plan.hops) for plan in plans)):
        in_flight = []
        for plan in plans:
            hop = plan.hops[number]
            side = source if hop.after is None else dest
            for peer, transfers in hop.sends.items():
                boxes = [
                    side[plan.rank][t.source_local][t.source_box.slices].copy()
                    for t in transfers
                ]
                in_flight.append((plan.rank, peer, boxes))
        for rank, peer, boxes in in_flight:
            for t, box in zip(
                plans[peer].hops[number].receives[rank], boxes, strict=True
            ):
                target = dest[peer][t.dest_local][t.dest_box.slices]
                assert not target.any(), "written twice"
                target[...] = box.reshape(target.shape)


def gather(layouts: Sequence[Layout], arrays: Sequence[Arrays]) -> Arrays:
    """Every global array whole, from what the ranks hold."""
    full = {
        name: np.zeros(shape, np.int64)
        for layout in layouts
        for name, shape in layout.global_shapes.items()
    }
    for layout, held in zip(layouts, arrays, strict=True):
        for piece in layout.pieces:
            target = full[piece.tensor][piece.box.slices]
            target[...] = held[piece.local][piece.local_box.slices].reshape(
                target.shape
            )
    return full


def must_fetch(source: Layout, dest: Layout) -> int:
    """Elements that `dest` needs and `source` (the same rank's) lacks, counted one by one."""
    missing = {
        tensor: np.ones(shape, dtype=bool)
        for tensor, shape in dest.global_shapes.items()
    }
    for piece in source.pieces:
        if piece.tensor in missing:
            missing[piece.tensor][piece.box.slices] = False
    return sum(
        int(missing[piece.tensor][piece.box.slices].sum()) for piece in dest.pieces
    )


def unfair(plans: Sequence[Plan], node_of: Callable[[int], int]) -> list[str]:
    """What is wrong with who serves whom; empty if nothing is.

    For sources whose boxes are equal or disjoint. Ranks that hold the same boxes share
    out those that need them: on their own node if one of them is there, and each as
    much as the other, up to one largest request.
    """
    holders = _holders(plans)
    sent: dict[tuple[frozenset[int], int], dict[int, int]] = {}
    largest: dict[frozenset[int], int] = {}
    wrong = []
    for plan in plans:
        for dest, transfers in plan.sends.items():
            requests: dict[tuple[frozenset[int], str], int] = {}
            for t in transfers:
                for piece in plan.source_layout.by_tensor[t.tensor]:
                    if piece.local == t.source_local and (
                        common := intersect(piece.box, t.box)
                    ):
                        key = (holders[t.tensor, piece.box], t.tensor)
                        requests[key] = requests.get(key, 0) + common.numel
            for (group, tensor), numel in requests.items():
                near = any(node_of(holder) == node_of(dest) for holder in group)
                if near and node_of(plan.rank) != node_of(dest):
                    wrong.append(
                        f"{tensor}: rank {dest} has a holder on its node, yet asks rank {plan.rank}"
                    )
                by_rank = sent.setdefault((group, node_of(dest) if near else -1), {})
                by_rank[plan.rank] = by_rank.get(plan.rank, 0) + numel
                largest[group] = max(largest.get(group, 0), numel)
    for (group, node), by_rank in sent.items():
        counts = {
            rank: by_rank.get(rank, 0) for rank in group if node in (-1, node_of(rank))
        }
        for a, b in combinations(counts, 2):
            if abs(counts[a] - counts[b]) > largest[group]:
                wrong.append(
                    f"of the same boxes rank {a} sends {counts[a]}, rank {b} {counts[b]}"
                )
    return wrong


def _holders(plans: Sequence[Plan]) -> Mapping[tuple[str, Box], frozenset[int]]:
    holders: dict[tuple[str, Box], set[int]] = {}
    for plan in plans:
        for piece in plan.source_layout.pieces:
            holders.setdefault((piece.tensor, piece.box), set()).add(plan.rank)
    return {key: frozenset(ranks) for key, ranks in holders.items()}


def layouts_of(layouts: Sequence[Layout]) -> Callable[[int], Layout]:
    return lambda rank: layouts[rank]
