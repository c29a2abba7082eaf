"""Where copies of storages lie in pinned host memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.workers import offload
from megaverl.workers.offload import ALIGNMENT, SLAB, aligned, slab_pieces, slab_sizes


@given(sizes=st.lists(st.integers(1, 5000), max_size=8))
@settings(deadline=None)
def test_every_byte_has_one_place(sizes: list[int]) -> None:
    """Storages lie end to end, each begins at a multiple of ALIGNMENT, and no piece leaves its slab."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SLAB", 4096)
        pieces = list(slab_pieces(sizes))
        slabs = slab_sizes(sum(map(aligned, sizes)))
    places: Counter[tuple[int, int]] = Counter()
    copied: dict[int, list[int]] = {number: [] for number in range(len(sizes))}
    for number, first, slab, start, size in pieces:
        assert size > 0 and start + size <= slabs[slab]
        places.update((slab, byte) for byte in range(start, start + size))
        copied[number] += range(first, first + size)
        assert first or start % ALIGNMENT == 0
    assert all(copied[number] == list(range(size)) for number, size in enumerate(sizes))
    assert not places or max(places.values()) == 1


@pytest.mark.parametrize("gigabytes", [0.01, 0.3, 5.1, 33.0, 70.5])
def test_slabs_take_what_they_hold(gigabytes: float) -> None:
    """torch pins powers of two: 5.1 GB in one piece would take 8.6."""
    nbytes = int(gigabytes * 1e9)
    sizes = slab_sizes(nbytes)
    assert all(size & (size - 1) == 0 for size in sizes), "no rounding by torch"
    assert nbytes <= sum(sizes) < nbytes + SLAB
