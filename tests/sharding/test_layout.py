"""Even chunks along axis 0: against torch.chunk, and against what FSDP2 itself holds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.layout import even_layout
from tests.launcher import Launcher
from tests.sharding.specs import element_ids, fill, make_weights

SHAPES = {
    "long.weight": (7, 3),
    "square.weight": (4, 4),
    "short.weight": (2, 5),
    "norm.weight": (5,),
    "one.bias": (1,),
}


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
def test_chunks_are_those_of_torch(rows: int, columns: int, world: int) -> None:
    weights = make_weights({"w": (rows, columns)})
    ids = element_ids(weights)
    chunks = torch.from_numpy(ids["w"]).chunk(world)
    for rank in range(world):
        found = fill(even_layout(weights, world, rank), ids)
        if rank >= len(chunks):
            assert found == {}
            continue
        expected = chunks[rank].numpy()
        assert found["w"].shape == expected.shape
        assert (found["w"] == expected).all()


def test_an_empty_shard_is_left_out() -> None:
    layout = even_layout(make_weights({"w": (2, 3)}), 4, 3)
    assert (layout.pieces, layout.local_shapes, layout.numel) == ((), {}, 0)


def test_fsdp2_itself_holds_these_elements(launch: Launcher) -> None:
    """4 ranks and tensors of 1 to 7 rows: whole chunks, short ones and none."""
    results = launch.world(
        4,
        "tests.sharding.ranks:compare_with_fsdp2",
        shapes={name: list(s) for name, s in SHAPES.items()},
    )
    assert results == [[]] * 4
