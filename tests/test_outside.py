"""Text, JSON and numbers that models, tools and services write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.outside import clean, read_json, read_number

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # surrogates too


@given(ANY_TEXT)
def test_clean_text_can_be_encoded_and_clean_text_stays(text: str) -> None:
    cleaned = clean(text)
    assert "\0" not in cleaned and cleaned.encode().decode() == cleaned
    if "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert cleaned == text


def test_halves_of_a_pair_that_stand_together_are_joined() -> None:
    assert clean("\ud83d\ude00, \ud83d, \ude00") == "\U0001f600, \ufffd, \ufffd"


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**60), 2**60) | ANY_TEXT, st.lists))
def test_json_is_read_as_it_is_but_for_its_texts(value: Any) -> None:
    def cleaned(item: Any) -> Any:
        return (
            [cleaned(each) for each in item]
            if isinstance(item, list)
            else clean(item)
            if isinstance(item, str)
            else item
        )

    assert read_json(json.dumps(value)) == read_json(json.dumps(value).encode()) == cleaned(value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000 + "]" * 3000,
        '{"a":' * 100_000,
        "[" * 101 + "]" * 101,
        "NaN",
        "[Infinity]",
        "1e999",
        "1" * 400,
        "1" * 10_000,
        "",
        "{",
        b"\xff\xfe",
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


@pytest.mark.parametrize("value", [None, True, "1", [1], 10**400, float("nan"), float("-inf")])
def test_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a"):
        read_number(value)


def test_numbers() -> None:
    assert read_number(3) == 3.0 and read_number(-0.5) == -0.5
