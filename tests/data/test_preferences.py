"""Pairs of responses: read from rows, and found among the responses to one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.data.datasets import PromptDataset
from megaverl.data.preferences import (
    PreferenceColumns,
    PreferenceReader,
    best_and_worst,
    best_of_each,
)
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError
from megaverl.workers.pairs import rows_of_next_group


def read(
    tmp_path: Path,
    tokenizer: Tokenizer,
    *rows: dict[str, Any],
    margin: str | None = None,
    most: int = 99,
    pairs_only: bool = True,
) -> Any:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "What?", **row}) + "\n" for row in rows)
    )
    encoder = PromptEncoder(tokenizer, PromptFormat())
    dataset = PromptDataset.load(path, encoder, Columns(answer=None))
    columns = PreferenceColumns(margin=margin)
    reader = PreferenceReader(encoder, columns, max_tokens=most, pairs_only=pairs_only)
    reader.check(dataset)
    return reader.batch([dataset[i] for i in range(len(dataset))])


def texts(tokenizer: Tokenizer, batch: Any) -> list[str]:
    rows = zip(batch.generated_ids, batch.response_lengths, strict=True)
    return [tokenizer.decode(ids[:n].tolist()).strip() for ids, n in rows]


def test_better_and_worse_in_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "no"},
    ]
    rows = [
        {"chosen": "yes, yes", "rejected": messages, "m": 2},
        {"chosen": "1", "rejected": "22", "m": 0.5},
    ]
    batch = read(tmp_path, tokenizer, *rows, margin="m")
    assert texts(tokenizer, batch) == ["yes, yes", "no", "1", "22"]
    assert batch.desirable.tolist() == [True, False] * 2
    assert batch.margins.tolist() == [
        2.0,
        2.0,
        0.5,
        0.5,
    ] and batch.group_ids.tolist() == [0, 0, 1, 1]
    ends = batch.generated_ids[torch.arange(4), batch.response_lengths - 1]
    assert (ends == tokenizer.eos_token_id).all(), "each with its end of sequence"


def test_single_responses_beside_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "assistant", "content": "no"}]
    rows = [
        {"completion": "yes", "label": True},
        {"chosen": "1", "rejected": "22"},
        {"completion": messages, "label": 0},
    ]
    batch = read(tmp_path, tokenizer, *rows, pairs_only=False)
    assert texts(tokenizer, batch) == ["yes", "1", "22", "no"]
    assert batch.desirable.tolist() == [
        True,
        True,
        False,
        False,
    ] and batch.group_ids.tolist() == [0, 1, 1, 2]
    assert rows_of_next_group(batch.group_ids.tolist()) == [1, 3, 3, 0]
    assert rows_of_next_group([0, 0, 1, 1, 2, 2]) == [2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        (
            {"completion": "a", "label": True},
            {},
            "line 1: it has a single response .* Use preference.loss=kto",
        ),
        (
            {"completion": "a"},
            {"pairs_only": False},
            "'label' is None; it says whether .* preference.label_key",
        ),
        ({"completion": "a", "label": 2}, {"pairs_only": False}, "'label' is 2"),
        (
            {"completion": "a", "label": True, "chosen": "b"},
            {"pairs_only": False},
            "and a pair as well",
        ),
        (
            {"completion": 3, "label": True},
            {"pairs_only": False},
            "the single response is int",
        ),
        (
            {"chosen": "a"},
            {},
            "line 1: no 'rejected' in this row.*preference.rejected_key",
        ),
        ({"chosen": "a", "rejected": 3}, {}, "the rejected response is int"),
        (
            {"chosen": "a " * 50, "rejected": "b"},
            {"most": 9},
            "the chosen response is .* at most 9 are allowed",
        ),
        (
            {"chosen": "a", "rejected": "b", "m": -1},
            {"margin": "m"},
            "'m' is -1; a margin is a number of at least 0",
        ),
        ({"chosen": "a", "rejected": "b"}, {"margin": "m"}, "'m' is None"),
    ],
)
def test_rows_that_are_no_pairs(
    tmp_path: Path,
    tokenizer: Tokenizer,
    row: dict[str, Any],
    options: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, tokenizer, row, **options)


def test_pairs_among_the_responses_to_one_prompt() -> None:
    scores = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.3, 0.3, 2.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert best_and_worst(scores, groups) == [1, 2], (
        "a group whose responses are all alike has no pair"
    )
    assert best_of_each(scores, groups) == [1, 4, 6]
