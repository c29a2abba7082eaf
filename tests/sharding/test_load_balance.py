"""Who holds what, and who serves whom: deals against dealing cards one by one, and small cases by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece, whole_layout
from megaverl.sharding.load_balance import Deal, RankLayouts, ShardRange, group_tensors
from megaverl.sharding.plan import Plan, make_plans
from megaverl.sharding.proof import check_plans
from tests.weights.cases import SHAPES, random_layouts
from tests.weights.simulate import layouts_of


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 7), st.data())
def test_a_deal_seen_from_both_sides(
    ranks: list[int], num_holders: int, start: int, data: st.DataObject
) -> None:
    """Also with fewer requests than holders: some then have none, and none has two."""
    pool, start = ranks[:num_holders], start % num_holders
    parts = st.builds(
        lambda group, num: ShardRange(group, 0, num, group % 3),
        st.integers(0, 9),
        st.integers(1, 5),
    )
    asked = st.lists(parts, unique_by=lambda part: part.group, min_size=1, max_size=4)
    wanted = data.draw(st.dictionaries(st.integers(100, 110), asked, max_size=6))
    deal = Deal(pool, start, wanted)
    fetched = [
        (holder, rank, part.group, part.shards, tensor)
        for rank in wanted
        for holder, part in deal.fetched(rank)
        for tensor in range(part.low, part.high)
    ]
    served = [
        (holder, rank, part.group, part.shards, tensor)
        for place, holder in enumerate(pool)
        for rank, part in deal.served(place)
        for tensor in range(part.low, part.high)
    ]
    assert sorted(served) == sorted(fetched)
    assert sorted(request[1:] for request in fetched) == sorted(
        (rank, part.group, part.shards, tensor)
        for rank, parts in wanted.items()
        for part in parts
        for tensor in range(part.high)
    )
    each, extra = divmod(len(fetched), num_holders)
    counts = Counter(holder for holder, *_ in fetched)
    for turn in range(num_holders):
        assert counts[pool[(start + turn) % num_holders]] == each + (turn < extra)
    assert deal.end == (start + extra) % num_holders
    # runs: in the order of the line, a holder's requests are neighbours
    turns = [
        (pool.index(holder) - start) % num_holders
        for rank in wanted
        for holder, _ in deal.fetched(rank)
    ]
    assert turns == sorted(turns)


def test_those_who_need_little_ask_few_holders() -> None:
    """Of two groups with boxes of one size, a rank's requests stand together in the line."""
    both = [ShardRange(0, 0, 2, 0), ShardRange(1, 0, 2, 0)]
    deal = Deal([0, 1], 0, {2: both, 3: both})
    assert [list(deal.fetched(rank)) for rank in (2, 3)] == [
        [(0, part) for part in both],
        [(1, part) for part in both],
    ]


def given_by(plan: Plan) -> dict[str, int]:
    """Tensor -> the rank that it comes from."""
    return {
        transfer.tensor: peer
        for peer, transfers in plan.receives.items()
        for transfer in transfers
    }


def plans(
    held: list[Layout], wanted: dict[int, Layout], nodes: list[int]
) -> list[Plan]:
    dest = [wanted.get(rank, EMPTY) for rank in range(len(held))]
    return list(
        make_plans(
            layouts_of(held), layouts_of(dest), len(held), lambda rank: nodes[rank]
        )
    )


def test_requests_from_far_go_to_every_node_before_a_node_gets_two() -> None:
    model = whole_layout((name, (2,)) for name in "abcd")
    made = plans([model] * 4 + [EMPTY], {4: model}, [7, 7, 3, 3, 5])
    assert given_by(made[4]) == {"a": 0, "b": 2, "c": 1, "d": 3}
    two = whole_layout((name, (2,)) for name in "ab")
    assert given_by(plans([two] * 4 + [EMPTY], {4: two}, [7, 7, 3, 3, 5])[4]) == {
        "a": 0,
        "b": 2,
    }
    # three on one node, one on the other
    assert given_by(plans([model] * 4 + [EMPTY], {4: model}, [7, 7, 7, 3, 5])[4]) == {
        "a": 0,
        "b": 3,
        "c": 1,
        "d": 2,
    }


def test_the_next_size_goes_on_where_the_last_one_ended_and_large_ones_are_first() -> (
    None
):
    model = whole_layout({"small": (1,), "large": (3,), "middle": (2,)}.items())
    made = plans([model] * 3 + [EMPTY], {3: model}, [0] * 4)
    assert given_by(made[3]) == {"large": 0, "middle": 1, "small": 2}
    made = plans([model] * 2 + [EMPTY] * 2, {2: model, 3: model}, [0] * 4)
    assert given_by(made[2]) == {"large": 0, "middle": 0, "small": 0}
    assert given_by(made[3]) == {"large": 1, "middle": 1, "small": 1}
    made = plans([model] * 2 + [EMPTY] * 3, dict.fromkeys((2, 3, 4), model), [0] * 5)
    assert [given_by(plan)["large"] for plan in made[2:]] == [0, 0, 1]
    assert [given_by(plan)["middle"] for plan in made[2:]] == [1, 1, 0], (
        "begins with the one that had one less"
    )


def test_a_holder_near_by_is_asked_before_all_others() -> None:
    model = whole_layout((name, (2,)) for name in "ab")
    made = plans([model, model, EMPTY, EMPTY], {2: model, 3: model}, [0, 1, 1, 2])
    assert given_by(made[2]) == {"a": 1, "b": 1}
    assert given_by(made[3]) == {"a": 0, "b": 1}
    assert [plan.num_sent for plan in made] == [2, 6, 0, 0]


def test_what_a_rank_holds_itself_it_asks_nobody_for() -> None:
    model = whole_layout([("a", (2,))])
    made = plans([model] * 3, {0: model, 2: model}, [0] * 3)
    for plan in made:
        assert not plan.sends and not plan.receives
    assert [len(plan.copies) for plan in made] == [1, 0, 1]


@given(st.data(), st.integers(1, 4))
def test_groups_count_every_element_once(data: st.DataObject, world: int) -> None:
    """Shard sets are disjoint, held by just their classes, and wanted as often as an array of counts says."""
    sides = [
        RankLayouts(
            layouts_of(data.draw(random_layouts(world, everywhere=False))), world
        )
        for _ in range(2)
    ]
    source, dest = sides
    held = [masks(layout) for layout in source.layouts]
    wanted = [masks(layout) for layout in dest.layouts]
    seen = set()
    for group in group_tensors(source, dest):
        for tensor in group.tensors:
            seen.add(tensor)
            covered = np.zeros(SHAPES[tensor], dtype=int)
            for shards in group.shards:
                for cell in shards.cells:
                    covered[cell.slices] += 1
                    holders = [
                        i
                        for i, mask in enumerate(held)
                        if mask[tensor][cell.slices].any()
                    ]
                    assert list(shards.classes) == holders
                    assert all(held[i][tensor][cell.slices].all() for i in holders)
            assert (covered == np.any([mask[tensor] for mask in held], axis=0)).all()
            for number, amounts in group.wanted.items():
                for index, shards in enumerate(group.shards):
                    met = sum(
                        int(wanted[number][tensor][cell.slices].sum())
                        for cell in shards.cells
                    )
                    assert amounts.get(index, 0) == met
                lacking = wanted[number][tensor] & (covered == 0)
                assert (number in group.missing) == bool(lacking.any())
                if lacking.any():
                    box = group.missing[number]
                    assert box.numel and lacking[box.slices].all()
            assert set(group.wanted) == {
                i for i, mask in enumerate(wanted) if mask[tensor].any()
            }
    assert seen == {
        tensor for tensor in source.shapes if any(mask[tensor].any() for mask in wanted)
    }


def masks(layout: Layout) -> dict[str, np.ndarray]:
    found = {tensor: np.zeros(shape, dtype=bool) for tensor, shape in SHAPES.items()}
    for piece in layout.pieces:
        found[piece.tensor][piece.box.slices] = True
    return found


def test_ranks_that_share_a_layout_are_one_class_and_others_none() -> None:
    model, alike = whole_layout([("a", (2, 3))]), whole_layout([("a", (2, 3))])
    side = RankLayouts(layouts_of([model, alike, model]), 3)
    assert (side.class_of, side.ranks) == ([0, 1, 0], [[0, 2], [1]])
    assert side.held == {"a": (0, 0, 1, 0)} and side.boxes == [(whole((2, 3)),)], (
        "in the same boxes"
    )
    assert list(side.holding(side.held["a"])) == [
        (0, side.boxes[0]),
        (1, side.boxes[0]),
    ]
    assert side.disagreements == []


def test_every_class_that_disagrees_on_a_shape_is_told() -> None:
    sides = [
        whole_layout([("a", shape), ("b", (1,))]) for shape in ((2,), (3,), (2,), (4,))
    ]
    said = RankLayouts(layouts_of(sides), 4).disagreements
    assert said == [
        f"a: ranks of one side say (2,) and ({size},) of its shape" for size in (3, 4)
    ]


@pytest.mark.parametrize("place", [(0, 0), (1, 2), (3, 4)])
def test_a_single_missing_element_is_named(place: tuple[int, int]) -> None:
    element = Box(place, (place[0] + 1, place[1] + 1))
    rest = np.ones((4, 5), dtype=bool)
    rest[element.slices] = False
    boxes = [Box((i, j), (i + 1, j + 1)) for i, j in np.argwhere(rest).tolist()]
    pieces = tuple(
        Piece("w", box, f"w{i}", whole((1, 1))) for i, box in enumerate(boxes)
    )
    source = Layout(pieces, {piece.local: (1, 1) for piece in pieces}, {"w": (4, 5)})
    dest = whole_layout([("w", (4, 5))])
    with pytest.raises(
        Exception,
        match=rf"rank 1 needs \[{place[0]}:{place[0] + 1}, {place[1]}:{place[1] + 1}\] for",
    ):
        make_plans(lambda _: source, lambda rank: dest if rank else EMPTY, 2)


def test_a_holder_may_give_one_row_of_more_tensors_than_another() -> None:
    """Of three tensors alike rank 0 gives the first row of two and the second row of one: so many hold them."""

    def rows(*held: int) -> Layout:
        pieces = [
            Piece(name, Box((i, 0), (i + 1, 2)), f"{name}{i}", whole((1, 2)))
            for name in "abc"
            for i in held
        ]
        return Layout(
            tuple(pieces),
            {piece.local: (1, 2) for piece in pieces},
            dict.fromkeys("abc", (2, 2)),
        )

    source = [rows(0, 1), rows(0), rows(1), rows(1), EMPTY]
    made = plans(source, {4: whole_layout((name, (2, 2)) for name in "abc")}, [0] * 5)
    check_plans(made)
    assert [sorted(t.box.numel for t in made[rank].sends[4]) for rank in range(4)] == [
        [2] * 3,
        [2],
        [2],
        [2],
    ]
