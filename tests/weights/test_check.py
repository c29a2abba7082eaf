"""The checker: whatever is changed in a plan is seen, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece, whole_layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import Plan, Transfer, make_plan, make_plans
from megaverl.sharding.proof import check_plan, check_plans
from megaverl.sharding.vllm import vllm_layouts
from tests.sharding.specs import make_spec
from tests.weights.cases import model_cases
from tests.weights.simulate import layouts_of


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """TP2 x PP2 x DP2 to TP2: copies, sends and receives, and rows that are not in one piece at the source."""
    spec = make_spec(num_kv_heads=4)
    weights = weights_of(spec)
    source = megatron_layouts(
        weights, spec, GridShape(tp=2, pp=2, dp=2), padded_vocab_size=64
    )
    return list(
        make_plans(source, vllm_layouts(weights, spec, 2), 8, lambda rank: rank // 4)
    )


def move(box: Box, axis: int, by: int = 1) -> Box:
    start, stop = list(box.start), list(box.stop)
    start[axis] += by
    stop[axis] += by
    return Box(tuple(start), tuple(stop))


def change(plan: Plan, kind: str, peer: int | None, to: tuple[Transfer, ...]) -> Plan:
    """The plan with other copies, or other sends or receives of one peer."""
    if peer is None:
        return replace(plan, copies=to)
    lists = {**(plan.sends if kind == "sends" else plan.receives), peer: to}
    return (
        replace(plan, sends=lists) if kind == "sends" else replace(plan, receives=lists)
    )


@st.composite
def mutations(draw: st.DrawFn) -> tuple[list[Plan], set[str]]:
    """All plans of a case, one transfer of one of them changed; and the tensors that are then wrong."""
    plans = draw(model_cases()).plans()
    lists: list[tuple[int, str, int | None]] = []
    for plan in plans:
        lists += [(plan.rank, "copies", None)] if plan.copies else []
        lists += [
            (plan.rank, kind, peer)
            for kind in ("sends", "receives")
            for peer in getattr(plan, kind)
        ]
    assume(lists)
    rank, kind, peer = draw(st.sampled_from(lists))
    found = plans[rank].copies if peer is None else getattr(plans[rank], kind)[peer]
    i = draw(st.integers(0, len(found) - 1))
    mutation = draw(
        st.sampled_from(
            [
                "drop",
                "double",
                "swap",
                "box",
                "source_box",
                "dest_box",
                "local",
                "to",
                "name",
            ]
        )
    )
    transfer = found[i]
    changed = list(found)
    if mutation == "drop":
        del changed[i]
    elif mutation == "double":
        changed.insert(i, transfer)
    elif mutation == "swap":
        assume(peer is not None and len(found) > 1)
        changed[i], changed[i - 1] = changed[i - 1], changed[i]
    elif mutation == "local":
        changed[i] = transfer._replace(
            **{draw(st.sampled_from(["source_local", "dest_local"])): "nobody's"}
        )
    elif mutation == "to":
        changed[i] = transfer._replace(
            **{draw(st.sampled_from(["source", "dest"])): len(plans) + 1}
        )
    elif mutation == "name":
        other = draw(
            st.sampled_from(
                sorted({t.tensor for t in found} - {transfer.tensor}) or ["nothing"]
            )
        )
        changed[i] = transfer._replace(tensor=other)
    else:
        box = getattr(transfer, mutation)
        axis = draw(st.integers(0, len(box.start) - 1))
        changed[i] = transfer._replace(
            **{mutation: move(box, axis, draw(st.sampled_from([-1, 1, 2])))}
        )
    plans[rank] = change(plans[rank], kind, peer, tuple(changed))
    return plans, {transfer.tensor, *{t.tensor for t in changed if t not in found}}


@settings(max_examples=200, deadline=None)
@given(mutations())
def test_any_change_of_any_plan_is_seen_and_its_tensor_named(
    case: tuple[list[Plan], set[str]],
) -> None:
    plans, wrong = case
    with pytest.raises(ReshardError) as error:
        check_plans(plans)
    assert any(tensor in str(error.value) for tensor in wrong)


Mutate = Callable[[Plan], Plan]


def first(plan: Plan, kind: str) -> tuple[int, tuple[Transfer, ...]]:
    return next(iter(getattr(plan, kind).items()))


def without_a_copy(plan: Plan) -> Plan:
    return replace(plan, copies=plan.copies[1:])


def without_a_receive(plan: Plan) -> Plan:
    peer, transfers = first(plan, "receives")
    return change(plan, "receives", peer, transfers[1:])


def twice(plan: Plan) -> Plan:
    return replace(plan, copies=(*plan.copies, plan.copies[0]))


def shifted(plan: Plan) -> Plan:
    transfer = plan.copies[0]
    return replace(
        plan,
        copies=(
            transfer._replace(dest_box=move(transfer.dest_box, 0, 999)),
            *plan.copies[1:],
        ),
    )


def crossed(plan: Plan) -> Plan:
    """Two boxes of one tensor change places: every element is still written once."""
    a, b = next(
        (a, b)
        for a in plan.copies
        for b in plan.copies
        if (a.tensor, a.dest_local) == (b.tensor, b.dest_local)
        and a.box < b.box
        and a.box.shape == b.box.shape
    )
    swapped = (a._replace(dest_box=b.dest_box), b._replace(dest_box=a.dest_box))
    return replace(
        plan, copies=tuple(t for t in plan.copies if t not in (a, b)) + swapped
    )


def fetching_what_it_holds(plan: Plan) -> Plan:
    held, (peer, transfers) = plan.copies[0], first(plan, "receives")
    return change(
        without_a_copy(plan), "receives", peer, (*transfers, held._replace(source=peer))
    )


def sending_what_it_lacks(plan: Plan) -> Plan:
    peer, transfers = first(plan, "sends")
    lacking = transfers[0]._replace(source_box=move(transfers[0].source_box, 0, 999))
    return change(plan, "sends", peer, (lacking, *transfers[1:]))


def sending_it_as_another_box_too(plan: Plan) -> Plan:
    """The same place twice, the second time as a box that lies elsewhere."""
    peer, transfers = first(plan, "sends")
    other = transfers[0]._replace(box=move(transfers[0].box, 0))
    return change(plan, "sends", peer, (transfers[0], other, *transfers[1:]))


def copied_for_another(plan: Plan) -> Plan:
    return replace(plan, copies=(plan.copies[0]._replace(dest=2), *plan.copies[1:]))


def sent_by_another(plan: Plan) -> Plan:
    peer, transfers = first(plan, "sends")
    return change(
        plan, "sends", peer, (transfers[0]._replace(source=2), *transfers[1:])
    )


def with_peer(kind: str, stranger: int) -> Mutate:
    def changed(plan: Plan) -> Plan:
        peer, transfers = first(plan, kind)
        lists = {**getattr(plan, kind), stranger: transfers}
        return (
            replace(plan, sends=lists)
            if kind == "sends"
            else replace(plan, receives=lists)
        )

    return changed


def part(transfer: Transfer, start: tuple[int, int], stop: tuple[int, int]) -> Transfer:
    """The rows and columns of a transfer, counted from its own first ones."""

    def within(box: Box) -> Box:
        first_row, first_column = box.start
        return Box(
            (first_row + start[0], first_column + start[1]),
            (first_row + stop[0], first_column + stop[1]),
        )

    boxes = {
        name: within(getattr(transfer, name))
        for name in ("box", "source_box", "dest_box")
    }
    return transfer._replace(**boxes)


def lacking_one_element(plan: Plan) -> Plan:
    all_of_it, rows, columns = plan.copies[0], *plan.copies[0].box.shape
    parts = (
        part(all_of_it, (0, 0), (rows - 1, columns)),
        part(all_of_it, (rows - 1, 0), (rows, columns - 1)),
    )
    return replace(plan, copies=(*parts, *plan.copies[1:]))


def fetching_one_element_that_it_holds(plan: Plan) -> Plan:
    lacking, (peer, transfers) = lacking_one_element(plan), first(plan, "receives")
    rows, columns = plan.copies[0].box.shape
    last = part(plan.copies[0], (rows - 1, columns - 1), (rows, columns))._replace(
        source=peer
    )
    return change(lacking, "receives", peer, (*transfers, last))


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (
            without_a_copy,
            r"embed_tokens.weight: rank 1 never gets \[0:18, 0:8\] of model.embed_tokens.weight",
        ),
        (without_a_receive, "rank 1 never gets"),
        (
            twice,
            r"embed_tokens.weight: on rank 1, model.embed_tokens.weight \[0:18, 0:8\] is written twice",
        ),
        (shifted, "lies outside what rank 1 has of"),
        (
            crossed,
            r"q_proj.weight .* on rank 1 is the place of \[\d+:\d+, 0:8\], not of",
        ),
        (fetching_what_it_holds, "fetches .* from rank 5, but holds it itself in"),
        (sending_what_it_lacks, "lies outside what rank 1 has of"),
        (sending_it_as_another_box_too, r"on rank 1 is the place of \[.*\], not of \["),
        (
            copied_for_another,
            "of rank 2: rank 1 has it among what goes from rank 1 to rank 1",
        ),
        (
            sent_by_another,
            "of rank 2 to .*: rank 1 has it among what goes from rank 1 to rank",
        ),
        (
            lacking_one_element,
            r"embed_tokens.weight: rank 1 never gets \[17:18, 7:8\] of model.embed_tokens.weight",
        ),
        (
            fetching_one_element_that_it_holds,
            r"fetches \[49:50, 7:8\] from rank 5, but holds it itself in",
        ),
        (
            with_peer("receives", 8),
            "rank 1 receives from rank 8, which is none of its peers",
        ),
        (
            with_peer("receives", -1),
            "rank 1 receives from rank -1, which is none of its peers",
        ),
        (
            with_peer("receives", 1),
            "rank 1 receives from rank 1, which is none of its peers",
        ),
        (with_peer("sends", 8), "rank 1 sends to rank 8, which is none of its peers"),
        (with_peer("sends", -1), "rank 1 sends to rank -1, which is none of its peers"),
        (with_peer("sends", 1), "rank 1 sends to rank 1, which is none of its peers"),
    ],
)
def test_one_rank_sees_its_own_mistakes(
    plans: list[Plan], mutate: Mutate, message: str
) -> None:
    check_plan(plans[1])
    with pytest.raises(ReshardError, match=message):
        check_plan(mutate(plans[1]))


def test_the_first_and_the_last_rank_are_peers() -> None:
    model = whole_layout([("w", (2, 3))])
    for sides in ([model, EMPTY, EMPTY], [EMPTY, EMPTY, model]):
        plans = make_plans(layouts_of(sides), layouts_of(sides[::-1]), 3)
        check_plans(plans)
        assert {
            *plans[0].sends,
            *plans[0].receives,
            *plans[2].sends,
            *plans[2].receives,
        } == {0, 2}


def test_both_ranks_are_named_where_they_differ(plans: list[Plan]) -> None:
    peer, transfers = first(plans[0], "sends")
    for changed, message in (
        (transfers[1:], f"rank 0 sends .*, where rank {peer} expects"),
        (
            transfers[:-1],
            f"rank 0 sends {len(transfers) - 1} boxes to rank {peer}, which expects {len(transfers)}",
        ),
        ((), f"rank 0 sends 0 boxes to rank {peer}"),
    ):
        with pytest.raises(ReshardError, match=message):
            check_plans([change(plans[0], "sends", peer, changed), *plans[1:]])


def test_a_wrong_source_that_both_agree_on(plans: list[Plan]) -> None:
    """Rank 1 asks a rank of another stage, and that rank is ready to send what it does not hold."""
    peer, transfers = first(plans[1], "receives")
    wrong = next(rank for rank in range(8) if rank // 4 != peer // 4 and rank != 1)
    moved = transfers[0]._replace(source=wrong)
    new = list(plans)
    new[peer] = change(plans[peer], "sends", 1, plans[peer].sends[1][1:])
    new[1] = change(
        change(plans[1], "receives", peer, transfers[1:]), "receives", wrong, (moved,)
    )
    new[wrong] = change(plans[wrong], "sends", 1, (moved,))
    with pytest.raises(
        ReshardError, match=f"lies outside what rank {wrong} has of|but holds it itself"
    ):
        check_plans(new)


def test_plans_of_another_world_or_in_another_order_are_refused(
    plans: list[Plan],
) -> None:
    with pytest.raises(ReshardError, match="plan 0 of 8 is that of rank 1 of 8"):
        check_plans([plans[1], plans[0], *plans[2:]])
    with pytest.raises(ReshardError, match="plan 0 of 7 is that of rank 0 of 8"):
        check_plans(plans[:7])


def test_a_layout_that_gives_one_place_to_two_weights_is_refused() -> None:
    pieces = tuple(
        Piece(name, whole((2, 3)), "fused", Box((row, 0), (row + 2, 3)))
        for row, name in enumerate("vw")
    )
    dest = Layout(pieces, {"fused": (3, 3)}, dict.fromkeys("vw", (2, 3)))
    source = whole_layout([("v", (2, 3)), ("w", (2, 3))])
    plan = make_plan(layouts_of([source]), layouts_of([dest]), 1, 0)
    with pytest.raises(
        ReshardError,
        match=r"two weights have the same place in fused: v \[0:2, 0:3\] and w",
    ):
        check_plan(plan)
    outside = replace(dest, local_shapes={"fused": (2, 3)})
    with pytest.raises(
        ReshardError, match=r"w: on rank 0, fused \[1:3, 0:3\] lies outside \(2, 3\)"
    ):
        check_plan(replace(plan, dest_layout=outside))


def test_what_was_proven_of_one_tensor_is_not_believed_of_another() -> None:
    """Two tensors alike, the second one's transfer with the first one's boxes but another local tensor."""
    source = whole_layout([("v", (2, 3)), ("w", (2, 3))])
    plan = make_plan(layouts_of([source]), layouts_of([source]), 1, 0)
    check_plan(plan)
    for wrong in ({"source_local": "v"}, {"dest_local": "v"}):
        with pytest.raises(ReshardError, match="w "):
            check_plan(
                replace(plan, copies=(plan.copies[0], plan.copies[1]._replace(**wrong)))
            )


def two_places(*names: str) -> Layout:
    """Each tensor twice in the same boxes of two local tensors, as tied weights are."""
    pieces = tuple(
        Piece(name, whole((4, 3)), f"{name}{i}", Box((1, 0), (5, 3)))
        for name in names
        for i in range(2)
    )
    return Layout(
        pieces, {piece.local: (5, 3) for piece in pieces}, dict.fromkeys(names, (4, 3))
    )


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [
        {"dest_box": Box((0, 0), (4, 3))},
        {"source_box": Box((0, 0), (4, 3))},
        {"box": Box((0, 0), (3, 3))},
        {
            "box": Box((0, 0), (3, 3)),
            "source_box": Box((1, 0), (4, 3)),
            "dest_box": Box((1, 0), (4, 3)),
        },
        {"dest_local": "other"},
        {"source_local": "nobody's"},
    ],
)
def test_what_was_proven_of_one_rank_is_not_believed_of_another(
    wrong: dict[str, object], at: int
) -> None:
    """Two ranks with the same layouts, and in the second one's plan one transfer that is not right."""
    layout = two_places("v")
    plans = list(make_plans(lambda _: layout, lambda _: layout, 2))
    check_plans(plans)
    changed = list(plans[1].copies)
    if wrong == {"dest_local": "other"}:
        wrong = {"dest_local": plans[1].copies[1 - at].dest_local}
    changed[at] = changed[at]._replace(**wrong)
    with pytest.raises(ReshardError, match="v"):
        check_plans([plans[0], replace(plans[1], copies=tuple(changed))])


def test_boxes_with_more_or_fewer_axes_than_the_local_tensor_are_refused() -> None:
    """As many elements, in the same order: still not a place in that tensor."""
    flat, deep = whole((2, 3)), whole((1, 2, 3))
    for held, box in ((flat, deep), (deep, flat)):
        layout = Layout(
            (Piece("v", flat, "here", held),), {"here": held.shape}, {"v": (2, 3)}
        )
        plan = make_plan(layouts_of([layout]), layouts_of([layout]), 1, 0)
        check_plan(plan)
        for side in ("source_box", "dest_box"):
            with pytest.raises(ReshardError, match="lies outside what rank 0 has of v"):
                check_plan(
                    replace(plan, copies=(plan.copies[0]._replace(**{side: box}),))
                )
        outside = replace(layout, local_shapes={"here": box.shape})
        with pytest.raises(ReshardError, match="v: on rank 0, here .* lies outside"):
            check_plan(replace(plan, dest_layout=outside))


def test_a_local_tensor_that_the_layout_does_not_have_is_refused() -> None:
    layout = whole_layout([("v", (2, 3))])
    plan = make_plan(layouts_of([layout]), layouts_of([layout]), 1, 0)
    with pytest.raises(ReshardError, match="v: on rank 0, v .* lies outside None"):
        check_plan(replace(plan, dest_layout=replace(layout, local_shapes={})))


def test_a_tensor_that_the_destination_does_not_have_is_refused() -> None:
    source = whole_layout([("v", (2, 3)), ("w", (2, 3))])
    plan = make_plan(layouts_of([source]), layouts_of([source]), 1, 0)
    with pytest.raises(ReshardError, match="the destination has no place for w"):
        check_plan(replace(plan, dest_layout=whole_layout([("v", (2, 3))])))
