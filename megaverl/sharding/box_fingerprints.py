"""Fingerprints of boxes as JSON, and their sums over the processes that share a model (`weights/fingerprint.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UINT64 = 2**64

# Weight -> [start, stop, fingerprint] of each box that a process holds.
BoxFingerprints = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]


def join_fingerprints(
    parts: Iterable[Mapping[str, Sequence[Sequence[Any]]]],
) -> dict[str, int]:
    """Return the fingerprint of each weight from the boxes of all processes that share it.

    A box that several processes hold counts once.
    """
    boxes: dict[str, dict[tuple[Any, ...], int]] = {}
    for part in parts:
        for weight, of_weight in part.items():
            for start, stop, value in of_weight:
                boxes.setdefault(weight, {})[(*start, *stop)] = int(value)
    return {weight: sum(values.values()) % UINT64 for weight, values in boxes.items()}
