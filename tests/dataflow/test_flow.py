"""Operators find their order by what they need; a flow that cannot run says why before it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.dataflow import DataFlow, Operator
from megaverl.errors import ConfigError


def chain(*names: str) -> list[Operator]:
    """Operators that each take what the one before gives."""
    inputs = ["start", *names]
    return [
        Operator(
            name,
            lambda value=0, **given: next(iter(given.values()), value) + 1,
            (inputs[i],),
        )
        for i, name in enumerate(names)
    ]


@given(st.permutations(range(6)))
def test_the_order_of_adding_does_not_matter(places: list[int]) -> None:
    operators = chain("a", "b", "c", "d", "e", "f")
    flow = DataFlow([operators[i] for i in places]).compile(given=["start"])
    assert flow.order == ["a", "b", "c", "d", "e", "f"]
    assert flow.run(start=10)["f"] == 16


def test_ties_keep_the_order_of_adding() -> None:
    flow = DataFlow(
        [Operator(name, lambda start: start) for name in ("z", "m", "a")]
    ).compile(given=["start"])
    assert flow.order == ["z", "m", "a"]


def test_inputs_and_outputs_are_the_functions_own_unless_named() -> None:
    def add(first: int, second: int) -> int:
        return first + second

    def split(total: int) -> dict[str, int]:
        return {"half": total // 2, "rest": total % 2}

    flow = DataFlow()
    flow.add_operator(Operator("parts", split, outputs=("half", "rest")))
    flow.add_operator(Operator("total", add))
    flow.add_operator(Operator("nothing", lambda half: half, outputs=()))
    assert flow.compile(given=["first", "second"]).run(first=3, second=4) == {
        "first": 3,
        "second": 4,
        "total": 7,
        "half": 3,
        "rest": 1,
    }


def test_parameters_with_a_default_are_options() -> None:
    def scaled(total: int, *rest: int, factor: int = 2, **more: int) -> int:
        return total * factor

    flow = DataFlow(
        [Operator("total", lambda: 3), Operator("scaled", scaled)]
    ).compile()
    assert flow.run()["scaled"] == 6
    named = Operator("more", scaled, inputs=("total", "factor"))
    assert (
        DataFlow([Operator("total", lambda: 3), named])
        .compile(["factor"])
        .run(factor=5)["more"]
        == 15
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Operator("a", 5), "operator 'a': func is 5; expected a function"),  # type: ignore[arg-type]
        (
            lambda: Operator("a", max).takes,
            r"operator 'a': name what it takes: inputs=\(",
        ),
        (
            lambda: Operator("a", nothing, outputs="ab"),
            "outputs is 'ab'; expected names",
        ),  # type: ignore[arg-type]
        (lambda: DataFlow().add_operator(nothing), "expected an Operator"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_operator(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_flow_runs_again_from_new_values() -> None:
    flow = DataFlow(chain("a", "b")).compile(given=["start"])
    assert [flow.run(start=n)["b"] for n in (0, 5)] == [2, 7]


def test_a_span_is_opened_around_every_operator() -> None:
    seen: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    operators = [
        Operator(name, lambda start, name=name: seen.append(name), ("start",))
        for name in ("a", "b")
    ]
    DataFlow(operators).compile(given=["start"]).run(span, start=0)
    assert seen == ["+a", "a", "-a", "+b", "b", "-b"]


def mistakes(operators: list[Operator], given: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        DataFlow(operators).compile(given=given or [])
    return str(caught.value)


def nothing(**given: Any) -> None:
    return None


def test_an_unknown_input_is_named_with_the_nearest_that_there_is() -> None:
    text = mistakes(
        [
            Operator("update", nothing, ("advantges",)),
            Operator("advantages", nothing, ()),
        ]
    )
    assert (
        text
        == "operator 'update' takes 'advantges', which nothing makes; did you mean 'advantages'?"
    )
    text = mistakes([Operator("update", nothing, ("x",))], given=["prompts", "step"])
    assert (
        text
        == "operator 'update' takes 'x', which nothing makes; there are: prompts, step, update"
    )


def test_a_value_made_twice_is_named_with_both_makers() -> None:
    two = [
        Operator("old", nothing, (), ("log_probs",)),
        Operator("new", nothing, (), ("log_probs",)),
    ]
    assert (
        mistakes(two) == "'log_probs' is made by operator 'new' and by operator 'old'"
    )
    given = mistakes([Operator("count", nothing, (), ("step",))], given=["step"])
    assert given == "'step' is made by operator 'count' and by what the flow is given"


def test_all_mistakes_come_at_once() -> None:
    text = mistakes(
        [Operator("a", nothing, ("x",), ("v",)), Operator("b", nothing, ("y",), ("v",))]
    )
    assert len(text.splitlines()) == 3
    assert all(word in text for word in ("'x'", "'y'", "'v' is made by"))


def test_a_cycle_names_who_waits_for_what() -> None:
    operators = [
        Operator("first", nothing, ()),
        Operator("a", nothing, ("b", "first")),
        Operator("b", nothing, ("a",)),
    ]
    assert (
        mistakes(operators)
        == "the operators wait for each other: 'a' waits for ['b'], 'b' waits for ['a']"
    )


def test_two_operators_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two operators are named 'a'"):
        DataFlow([*chain("a"), *chain("a")])


def test_what_is_given_must_be_what_was_named() -> None:
    flow = DataFlow(chain("a"))
    with pytest.raises(ConfigError, match=r"call compile\(\) first"):
        flow.run(start=1)
    flow.compile(given=["start"])
    with pytest.raises(
        ConfigError, match=r"compiled for \['start'\], and is given \['end'\]"
    ):
        flow.run(end=1)
    flow.add_operator(Operator("late", nothing, ("a",)))
    with pytest.raises(ConfigError, match=r"call compile\(\) first"):
        flow.run(start=1)


@pytest.mark.parametrize(
    ("returned", "found"),
    [(5, "int"), ({"x": 1}, r"\['x'\]"), ({"x": 1, "z": 2}, r"\['x', 'z'\]")],
)
def test_an_operator_must_give_what_it_declares(returned: Any, found: str) -> None:
    flow = DataFlow([Operator("make", lambda: returned, (), ("x", "y"))]).compile()
    with pytest.raises(
        ConfigError,
        match=rf"'make' declares the outputs \['x', 'y'\]; it returned {found}",
    ):
        flow.run()


def test_an_operator_that_was_half_done_runs_again_and_one_that_was_done_does_not() -> (
    None
):
    ran: list[str] = []

    def split(start: int) -> dict[str, int]:
        ran.append("split")
        return {"half": start // 2, "rest": start % 2}

    def joined(half: int, rest: int) -> int:
        ran.append("joined")
        return 10 * half + rest

    flow = DataFlow(
        [
            Operator("split", split, outputs=("half", "rest")),
            Operator("joined", joined),
            Operator("seen", lambda joined: ran.append("seen"), outputs=()),
        ]
    ).compile(given=["start"])
    for done, expected, result in (
        ({}, ["split", "joined", "seen"], 21),
        ({"half": 7}, ["split", "joined", "seen"], 21),
        ({"rest": 7}, ["split", "joined", "seen"], 21),
        ({"half": 7, "rest": 3}, ["joined", "seen"], 73),
        ({"half": 7, "rest": 3, "joined": 5}, ["seen"], 5),
        ({"joined": 5}, ["split", "seen"], 5),
    ):
        ran.clear()
        found = flow.run(done=done, start=5)
        assert (ran, found["joined"]) == (expected, result), done
        assert [span.operator for span in found.timeline] == expected


def test_an_operator_that_fails_gives_nothing_and_its_span_is_closed() -> None:
    seen: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(name)

    def fail(a: int) -> int:
        raise KeyError("b")

    flow = DataFlow(
        [*chain("a"), Operator("b", fail, ("a",)), *chain("a", "c")[1:]]
    ).compile(given=["start"])
    with pytest.raises(KeyError):
        flow.run(span, start=1)
    assert seen == ["a", "b"]
