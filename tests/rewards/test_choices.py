"""Multiple choice: the ways to write one, and what is no choice."""

from __future__ import annotations

import time

import pytest

from megaverl.errors import RewardError
from megaverl.rewards import RewardSample, build_reward
from megaverl.rewards.choices import extract_choice, reference_letter

OPTIONS = ("the sun", "the moon", "5 m/s", "red dwarf")


@pytest.mark.parametrize(
    "response",
    [
        "Answer: C",
        "ANSWER: C",
        "answer: c",
        "**Answer:** C",
        "Answer: **C**",
        "Answer: $C$",
        "Answer: C.",
        "Final answer: [C]",
        "(C)",
        "C.",
        "C",
        "**C**",
        "C) 5 m/s",
        "So the correct choice is:\n\n(C) 5 m/s",
        "The answer is (C).",
        "The correct answer is option C",
        "Option C is right",
        "\\boxed{C}",
        "The answer is $\\boxed{\\text{(C)}}$.",
        "5 m/s",
        "Answer: 5 m/s",
        "Answer: C. 5 M/S",
        "The answer is 5 m/s.",
        "Answer: A\nNo, that was wrong.\nAnswer: C",
        "The sun is (A), the moon is (B).\n(C)",
        "Answer: the sun\nThis cannot be. Answer: C",
    ],
)
def test_a_choice(response: str) -> None:
    assert extract_choice(response, 4, OPTIONS) == "C"


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I think (A) or (C)",
        "The answer is a prime",
        "Answer: E",
        "Answer: Cats",
        "A cat",
        "Can it be C?",
        "5 m",
    ],
)
def test_no_choice(response: str) -> None:
    assert extract_choice(response, 4, OPTIONS) is None


def test_an_option_that_stands_twice_is_no_choice_by_its_text() -> None:
    assert extract_choice("the sun", 2, ["the sun", "The sun"]) is None


@pytest.mark.parametrize(
    "text",
    ["answer" + " " * 50_000, "answer (" * 20_000, "\\boxed{" * 20_000, "(" * 100_000],
)
def test_no_response_makes_the_search_slow(text: str) -> None:
    begin = time.process_time()
    assert extract_choice(text, 4, OPTIONS) is None
    assert time.process_time() - begin < 5, "hours with an unbounded repetition"


@pytest.mark.parametrize(
    ("reference", "letter"),
    [("C", "C"), ("(C)", "C"), ("C.", "C"), ("5 m/s", "C"), ("E", None)],
)
def test_references(reference: str, letter: str | None) -> None:
    assert reference_letter(reference, OPTIONS) == letter


def test_the_reward() -> None:
    reward = build_reward({"name": "multiple_choice"})
    row = {"choices": list(OPTIONS)}
    samples = [
        RewardSample("?", text, "C", row) for text in ("(C)", "5 m/s", "(A)", "no idea")
    ]
    assert reward.score(samples).total == [1.0, 1.0, 0.0, 0.0]
    assert reward.score([RewardSample("?", "Answer: E", "E")]).total == [1.0], (
        "without options, five letters"
    )
    with pytest.raises(
        RewardError, match="'12' is neither a letter nor the text of an option"
    ):
        reward.score([RewardSample("?", "C", "12", row)])
    with pytest.raises(RewardError, match="num_choices is 1"):
        build_reward({"name": "multiple_choice", "num_choices": 1})


def test_math_verify_reads_a_choice_where_the_reference_is_one() -> None:
    reward = build_reward({"name": "math_verify"})
    pairs = [
        ("(C)", "C"),
        ("C.", "(C)"),
        ("The answer is $\\boxed{C}$", "C"),
        ("(B)", "C"),
        ("$x = 2$", "2"),
    ]
    samples = [RewardSample("?", response, reference) for response, reference in pairs]
    assert reward.score(samples).total == [1.0, 1.0, 1.0, 0.0, 1.0]
