"""The tree along which hosts agree: pure arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.collectives import children, parent


def _below(place: int, size: int) -> list[int]:
    return [
        place,
        *(found for child in children(place, size) for found in _below(child, size)),
    ]


@given(st.integers(1, 2000))
def test_the_first_reaches_all_in_order_and_nobody_speaks_with_many(size: int) -> None:
    assert _below(0, size) == list(range(size)), (
        "so that joining what comes up keeps the order of ranks"
    )
    assert all(place in children(parent(place), size) for place in range(1, size))
    assert (
        max(len(children(place, size)) + (place > 0) for place in range(size))
        <= (size - 1).bit_length()
    )


@given(st.integers(3, 8), st.integers(1, 64))
def test_of_a_node_of_8_one_rank_alone_speaks_with_other_nodes(
    log_size: int, node: int
) -> None:
    size = 8 * 2**log_size
    first = 8 * (node % (size // 8))
    for place in range(first, first + 8):
        peers = children(place, size) + ([parent(place)] if place else [])
        assert place == first or all(first <= peer < first + 8 for peer in peers)
