"""Which of a sample's values a reward function's parameters get."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.rewards.binding import (
    NAMES,
    TRL_PROMPT,
    TRL_RESPONSE,
    VALUES,
    RowNames,
    bind,
)

ROW: dict[str, Any] = {"level": 3, "data_source": "gsm8k", "extra_info": {"index": 7}}
GIVEN: dict[str, Any] = {
    "prompt": "P",
    "response": "R",
    "reference": "A",
    "token_ids": [5, 6],
    "log_metric": print,
}
GIVEN |= {TRL_PROMPT: "P", TRL_RESPONSE: "R", "log_extra": "L", "trainer_state": "S"}
FOUR = ("P", "R", "A", {"level": 3})


def seen(
    function: Callable[..., Any],
    *options: str,
    batched: bool = False,
    row: dict[str, Any] | None = None,
    **names: Any,
) -> Any:
    """Call the function as it is bound, and return its result."""
    row = {"level": 3} if row is None else row

    def value_of(name: str) -> Any:
        if name.startswith("column "):
            return row[name.removeprefix("column ")]
        return {**GIVEN, "extra": row}[name]

    binding = bind(
        function, options, batched=batched, row=RowNames(frozenset(row), **names)
    )
    arguments, keywords = binding.arguments(value_of, row)
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
        (lambda a, b, c, d: (a, b, c, d), FOUR),
        (lambda *columns: columns, FOUR),
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
        (lambda response, **more: more, {"level": 3, "answer": "A"}),
        (lambda response, *more, **others: (response, more), ("R", ())),
    ],
)
def test_bound_by_name_or_by_count(function: Callable[..., Any], expected: Any) -> None:
    assert seen(function) == expected


def test_options_are_not_bound() -> None:
    assert seen(lambda response, target: (response, target), "target") == (
        "R",
        "option",
    )
    assert seen(lambda a, b, limit: (a, b, limit), "limit") == ("R", "A", "option")


def test_lists_are_bound_by_the_same_names() -> None:
    for function in (
        lambda completions, ground_truths: (completions, ground_truths),
        lambda response, reference: (response, reference),
    ):
        assert seen(function, batched=True) == ("R", "A")


@given(st.permutations(VALUES), st.integers(0, 4), st.data())
def test_every_name_in_every_order(
    order: list[str], count: int, data: st.DataObject
) -> None:
    """Whatever the names and their order, each parameter gets the value that its name stands for."""
    names = [data.draw(st.sampled_from(NAMES[value])) for value in order[:count]]
    if not names:
        return
    function = eval(f"lambda {', '.join(names)}: ({', '.join(names)},)")
    assert seen(function) == tuple(FOUR[VALUES.index(value)] for value in order[:count])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda question, reply: 0, "cannot bind reply"),
        (
            lambda text, level: 0,
            "cannot bind text: the data has the columns answer, level, prompt",
        ),
        (lambda completions_of, completion: 0, "cannot bind completions_of"),
        (
            lambda response, environments: 0,
            "environments is not given: environments are closed before rewards are",
        ),
        (
            lambda response, **kwargs: kwargs["environments"],
            "environments, which the function reads from its keyword",
        ),
        (
            lambda response, log_extra: 0,
            "log_extra holds whole lists, which needs batched: true",
        ),
        (lambda response, completion: 0, "cannot bind response, completion"),
        (lambda reference, text: 0, "cannot bind text"),
        (
            lambda a, b, c, d, e: 0,
            "5 parameters, but only 4 values: prompt, response, reference, extra",
        ),
        (lambda: 0, "the function has no parameters"),
        (lambda text, *, pattern: 0, "cannot bind pattern"),
        (
            lambda prompts, completions: 0,
            "prompts, completions holds whole lists, which needs batched: true",
        ),
        (lambda samples: 0, "samples holds whole lists, which needs batched: true"),
        (
            lambda response, sample: 0,
            "sample stands first, or, with batched: true, samples",
        ),
    ],
)
def test_what_cannot_be_bound_is_said(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bind(function, (), batched=False, row=RowNames(frozenset({"level"})))


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **kwargs: kwargs.get("environments"),
        lambda completions, **kwargs: (
            "environments" in kwargs and kwargs["environments"]
        ),
        lambda completions, environments=None: environments,
        lambda completions, options={"environments": 1}, **kwargs: options[
            "environments"
        ],  # noqa: B006
    ],
)
def test_a_function_that_does_without_environments_is_not_refused(
    function: Callable[..., Any],
) -> None:
    assert "environments" not in bind(function, (), batched=True).keywords


def test_a_column_may_be_named_environments() -> None:
    row = RowNames(frozenset({"environments"}))
    assert bind(
        lambda completions, environments: 0, (), batched=True, row=row
    ).keywords["environments"] == ("column environments")
    bind(
        lambda completions, **kwargs: kwargs["environments"], (), batched=True, row=row
    )


def test_no_name_means_two_things() -> None:
    assert [
        a & b for a, b in itertools.combinations(map(set, NAMES.values()), 2) if a & b
    ] == []


def by_level(completions, level, **kwargs):
    return completions, level


def trl_length(completion_ids, **kwargs):
    return completion_ids


def trl_math(prompts, completions, task, **kwargs):
    return prompts, completions, task


def trl_accuracy(completions: list[str], solution: list[str], **kwargs) -> Any:
    return completions, solution


def trl_logs(completions, answer, log_extra=None, log_metric=None, **kwargs):
    return completions, answer, log_extra, log_metric is print


def trl_state(completions, trainer_state, log_extra, **kwargs):
    return completions, trainer_state, log_extra


def trl_rest(**kwargs):
    return kwargs


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return data_sources, solution_strs, ground_truths, extra_infos


@pytest.mark.parametrize(
    ("function", "batched", "row", "expected"),
    [
        (by_level, True, ROW, ("R", 3)),
        (trl_length, True, ROW, [5, 6]),
        (trl_math, True, {"task": "math"}, ("P", "R", "math")),
        (trl_accuracy, True, {}, ("R", "A")),
        (trl_accuracy, True, {"solution": "S"}, ("R", "A")),  # the answer's own column
        (trl_logs, True, {}, ("R", "A", "L", True)),
        (trl_state, True, {}, ("R", "S", "L")),
        (
            lambda response, trainer_state: (response, trainer_state),
            False,
            {},
            ("R", "S"),
        ),
        (
            lambda response, log_extra=None: (response, log_extra),
            False,
            {},
            ("R", None),
        ),
        (lambda completions, **kwargs: kwargs["level"], True, ROW, 3),
        (
            lambda completions, response: (completions, response),
            True,
            {"response": "theirs"},
            ("R", "theirs"),
        ),
        (verl_score, False, ROW, ("gsm8k", "R", "A", {"index": 7})),
        (
            verl_score,
            False,
            {"data_source": "x"},
            ("x", "R", "A", {"data_source": "x"}),
        ),
        (verl_batch, True, ROW, ("gsm8k", "R", "A", {"index": 7})),
        (
            lambda output, level=1: (output, level),
            False,
            {"level": 3, "output": "column"},
            ("column", 3),
        ),
        (lambda response, target=5.0: target, False, {"target": 6.0}, 6.0),
        (lambda level: level, False, ROW, 3),
    ],
)
def test_signatures_of_trl_and_of_verl(
    function: Callable[..., Any], batched: bool, row: dict[str, Any], expected: Any
) -> None:
    """What both projects document: TRL calls with keywords named like columns, verl with four of its own names."""
    answer = "solution" if function is trl_accuracy else "answer"
    assert seen(function, batched=batched, row=row, answer=answer) == expected


def test_kwargs_of_trl_has_what_trl_gives() -> None:
    given = seen(trl_rest, batched=True, row={"level": 3}, answer="solution")
    assert given == {
        "prompts": "P",
        "completions": "R",
        "completion_ids": [5, 6],
        "log_metric": print,
        "log_extra": "L",
        "trainer_state": "S",
        "level": 3,
        "solution": "A",
    }


def test_a_name_is_a_column_as_long_as_no_row_is_known() -> None:
    keywords = bind(lambda completions, level: 0, (), batched=True).keywords
    assert keywords == {"completions": TRL_RESPONSE, "level": "column level"}
