"""Many weights in few lines of a message, none left out."""

from __future__ import annotations

import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.weight import as_block, listed


def test_layers_and_experts_become_ranges() -> None:
    lines = [f"layers.{i}.experts.{j}.up: gone" for i in (0, 1, 2, 5) for j in range(3)]
    assert listed([*lines, "norm: gone"]) == [
        "layers.0-2,5.experts.0-2.up: gone",
        "norm: gone",
    ]


def test_what_is_not_a_full_range_is_said_one_by_one() -> None:
    assert listed(["a.0.1", "a.1.0", "b#1", "b#2"]) == ["a.0.1", "a.1.0", "b#1-2"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a{}", "b.{}"]),
            st.integers(0, 4),
            st.sampled_from(["", ".c7"]),
        ),
        min_size=1,
    )
)
def test_nothing_is_left_out_or_added(parts: list[tuple[str, int, str]]) -> None:
    lines = [name.format(number) + end for name, number, end in parts]
    assert {line for text in listed(lines) for line in expand(text)} == set(lines)


def expand(text: str) -> list[str]:
    parts = re.split(r"(\d[\d,-]*)", text)
    choices = [numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def numbers(ranges: str) -> list[str]:
    edges = [run.split("-") for run in ranges.split(",")]
    return [str(n) for run in edges for n in range(int(run[0]), int(run[-1]) + 1)]


def test_a_block_says_how_many_lines_it_leaves_out() -> None:
    problems = [f"{letter}: shape" for letter in "abcd"]
    assert as_block(problems, 4) == "\n  a: shape\n  b: shape\n  c: shape\n  d: shape"
    assert as_block(problems, 3) == "\n  a: shape\n  b: shape\n  c: shape\n  and 1 more"
    assert (
        as_block([f"layers.{i}: shape" for i in range(9)], 1) == "\n  layers.0-8: shape"
    )
