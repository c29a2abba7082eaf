"""Which of a sample's values a reward function's parameters get."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.rewards.registry import NAMES, VALUES, bind

GIVEN = ("P", "R", "A", {"level": 3})


def seen(function: Callable[..., Any], *options: str, batched: bool = False) -> Any:
    """What the function returns, called as it is bound."""
    arguments, keywords = bind(function, options, batched=batched).arguments(GIVEN)
    return function(*arguments, **keywords, **dict.fromkeys(options, "option"))


def issue(sampled_response, reference_answer):
    return sampled_response, reference_answer


def verl(solution_str, ground_truth, extra_info=None):
    return solution_str, ground_truth, extra_info


def turned(answer, completion, question):
    return answer, completion, question


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (issue, ("R", "A")),
        (verl, ("R", "A", {"level": 3})),
        (turned, ("A", "R", "P")),
        (lambda text: text, "R"),
        (lambda text, right: (text, right), ("R", "A")),
        (lambda task, text, right: (task, text, right), ("P", "R", "A")),
        (lambda a, b, c, d: (a, b, c, d), GIVEN),
        (lambda *columns: columns, GIVEN),
        (lambda response, /, reference: (response, reference), ("R", "A")),
        (lambda text, *, reference: (text, reference), ("R", "A")),
        (lambda extra, response: (extra, response), ({"level": 3}, "R")),
        (lambda prompt, response, references: references, "A"),
        # with a default: an option, unless it waits for a value that it names
        (lambda response, reference="none": reference, "A"),
        (lambda response, answer=None: answer, "A"),
        (lambda response, target=5.0: target, 5.0),
        (lambda response, reference, target=None: target, None),
        (lambda text, limit=3: (text, limit), ("R", 3)),
        (lambda response, **more: more, {}),
    ],
)
def test_bound_by_name_or_by_count(function: Callable[..., Any], expected: Any) -> None:
    assert seen(function) == expected


def test_options_are_not_bound() -> None:
    assert seen(lambda response, target: (response, target), "target") == ("R", "option")
    assert seen(lambda a, b, limit: (a, b, limit), "limit") == ("R", "A", "option")


def test_lists_are_bound_by_the_same_names() -> None:
    for function in (
        lambda completions, ground_truths: (completions, ground_truths),
        lambda response, reference: (response, reference),
    ):
        assert seen(function, batched=True) == ("R", "A")


@given(st.permutations(VALUES), st.integers(0, 4), st.data())
def test_every_name_in_every_order(order: list[str], count: int, data: st.DataObject) -> None:
    """Whatever the names and their order, each parameter gets the value that its name stands for."""
    names = [data.draw(st.sampled_from(NAMES[value])) for value in order[:count]]
    if not names:
        return
    function = eval(f"lambda {', '.join(names)}: ({', '.join(names)},)")
    assert seen(function) == tuple(GIVEN[VALUES.index(value)] for value in order[:count])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda question, reply: 0, "what reply stands for cannot be told"),
        (lambda response, completion: 0, "what response, completion stands for cannot be told"),
        (lambda reference, text: 0, "what text stands for cannot be told"),
        (lambda a, b, c, d, e: 0, "5 parameters need a value, and there are 4: prompt, response, reference, extra"),
        (lambda: 0, "0 parameters need a value"),
        (lambda text, *, pattern: 0, "pattern is neither bound nor among the options"),
        (lambda prompts, completions: 0, "prompts, completions is of whole lists, which needs batched: true"),
        (lambda samples: 0, "samples is of whole lists, which needs batched: true"),
        (lambda response, sample: 0, "sample stands first, or, with batched: true, samples"),
    ],
)
def test_what_cannot_be_bound_is_said(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bind(function, (), batched=False)


def test_no_name_means_two_things() -> None:
    assert [a & b for a, b in itertools.combinations(map(set, NAMES.values()), 2) if a & b] == []
