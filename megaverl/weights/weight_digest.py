"""One short name for all of a model's weights, the same on every grid: two models of one name are the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout
from megaverl.weights.fingerprint import fingerprints


def model_identity(
    layouts: Callable[[int], Layout], tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> str:
    """16 hexadecimal digits that depend on every element of every weight. Every rank of the group takes part.

    Args:
        layouts: rank -> layout; of boxes that several ranks hold, the first one's counts.
        tensors: this rank's, by local name.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    first: dict[tuple[str, Box], int] = {}
    for other, layout in _distinct(layouts, world):
        for piece in layout.pieces:
            first.setdefault((piece.tensor, piece.box), other)
    mine, counted = [], set()
    layout = layouts(rank)
    for piece in layout.pieces:
        key = piece.tensor, piece.box
        if first[key] == rank and key not in counted:
            counted.add(key)
            mine.append(piece)
    parts = fingerprints(Layout(tuple(mine), layout.local_shapes, layout.global_shapes), tensors)
    total: dict[str, int] = {}
    for part in gather_json({name: str(value) for name, value in parts.items()}, group):  # 64 bits: no JSON number
        for name, value in part.items():
            total[name] = (total.get(name, 0) + int(value)) % 2**64
    return hashlib.blake2b(json.dumps(sorted(total.items())).encode(), digest_size=8).hexdigest()


def _distinct(layouts: Callable[[int], Layout], world: int) -> list[tuple[int, Layout]]:
    """The first rank of each layout, where ranks share one object."""
    found: dict[int, tuple[int, Layout]] = {}
    for other in range(world):
        found.setdefault(id(layouts(other)), (other, layouts(other)))
    return list(found.values())
