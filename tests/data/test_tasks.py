"""The built-in tasks: right answers, no overlap, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.datasets import PromptDataset
from megaverl.data.prompts import PromptEncoder
from megaverl.data.tasks import TASKS, make_task
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError


def solve(prompt: str) -> str:
    """The answer, worked out from the prompt alone."""
    kind, *numbers, sign = prompt.split()
    assert sign == "="
    if kind == "add":
        total = str(sum(map(int, numbers)))
        return "".join(reversed(total.rjust(len(numbers[0]) + 1, "0")))
    return "".join(sorted(numbers[0]) if kind == "sort" else reversed(numbers[0]))


@given(
    name=st.sampled_from(sorted(TASKS)),
    num_digits=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_answers_are_right_and_held_out_prompts_are_not_trained_on(
    name: str, num_digits: int, seed: int
) -> None:
    data = make_task(
        name, num_train=40, num_held_out=15, num_digits=num_digits, seed=seed
    )
    rows = data.train + data.held_out
    assert (len(data.train), len(data.held_out)) == (40, 15)
    assert all(row["answer"] == solve(row["prompt"]) for row in rows)
    assert len({row["prompt"] for row in rows}) == 55
    assert data == make_task(
        name, num_train=40, num_held_out=15, num_digits=num_digits, seed=seed
    )
    assert data != make_task(
        name, num_train=40, num_held_out=15, num_digits=num_digits, seed=seed + 1
    )


def test_a_sum_is_not_held_out_in_one_order_and_trained_in_the_other() -> None:
    data = make_task("add", num_train=45, num_held_out=10, num_digits=1)
    pairs = [
        frozenset(row["prompt"].split()[1:3]) for row in data.train + data.held_out
    ]
    assert len(set(pairs)) == 55


def test_more_prompts_than_there_are_is_an_error() -> None:
    assert (
        len(make_task("sort_digits", num_train=90, num_held_out=10, num_digits=2).train)
        == 90
    )
    with pytest.raises(
        DataError, match="101 different prompts .*num_digits=2.* only 100"
    ):
        make_task("sort_digits", num_train=91, num_held_out=10, num_digits=2)
    with pytest.raises(DataError, match="only 55"):
        make_task("add", num_train=46, num_held_out=10, num_digits=1)
    with pytest.raises(
        DataError, match="no task 'sort'; there are: sort_digits, reverse, add"
    ):
        make_task("sort")
    with pytest.raises(DataError, match="at least 1"):
        make_task("sort_digits", num_digits=0)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_digit_is_one_token_and_all_prompts_are_equally_long(
    tmp_path: Path, name: str
) -> None:
    data = make_task(name, num_train=300, num_held_out=50, num_digits=4)
    tokenizer = load_tokenizer(data.train_tokenizer(tmp_path / "task.model"))
    assert tokenizer.vocab_size <= 64
    train_path, held_out_path = data.save(tmp_path)
    encoder = PromptEncoder(tokenizer)
    for path, rows in ((train_path, data.train), (held_out_path, data.held_out)):
        dataset = PromptDataset.load(path, encoder)
        assert [record.reference for record in dataset] == [
            row["answer"] for row in rows
        ]
        assert len({len(record.token_ids) for record in dataset}) == 1
    for row in data.held_out:
        assert len(tokenizer.encode(row["answer"])) == len(row["answer"])
        joined = tokenizer.encode(row["prompt"]) + tokenizer.encode(row["answer"])
        assert joined == tokenizer.encode(row["prompt"] + row["answer"])
        assert 1 not in joined  # no unknown piece
