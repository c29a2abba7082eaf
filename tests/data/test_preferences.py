"""Pairs of responses: read from rows, and found among the responses to one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.data.columns import Columns
from megaverl.data.datasets import PromptDataset
from megaverl.data.preferences import PairReader, best_and_worst, best_of_each
from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError


def read(tmp_path: Path, tokenizer: Tokenizer, *rows: dict[str, Any], margin: str | None = None, most: int = 99) -> Any:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "What?", **row}) + "\n" for row in rows))
    encoder = PromptEncoder(tokenizer, PromptFormat())
    dataset = PromptDataset.load(path, encoder, Columns(answer="chosen"))
    reader = PairReader(encoder, rejected_key="rejected", margin_key=margin, max_tokens=most)
    return reader.batch([dataset[i] for i in range(len(dataset))])


def test_better_and_worse_in_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "no"}]
    rows = [{"chosen": "yes, yes", "rejected": messages, "m": 2}, {"chosen": "1", "rejected": "22", "m": 0.5}]
    batch = read(tmp_path, tokenizer, *rows, margin="m")
    texts = [
        tokenizer.decode(ids[:n].tolist()) for ids, n in zip(batch.generated_ids, batch.response_lengths, strict=True)
    ]
    assert [text.strip() for text in texts] == ["yes, yes", "no", "1", "22"]
    assert batch.margins.tolist() == [2.0, 2.0, 0.5, 0.5] and batch.group_ids.tolist() == [0, 0, 1, 1]
    ends = batch.generated_ids[torch.arange(4), batch.response_lengths - 1]
    assert (ends == tokenizer.eos_token_id).all(), "each with its end of sequence"


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"chosen": "a"}, {}, "line 1: no 'rejected' in this row.*preference.rejected_key"),
        ({"chosen": "a", "rejected": 3}, {}, "the rejected response is int"),
        ({"chosen": "a " * 50, "rejected": "b"}, {"most": 9}, "the chosen response is .* at most 9 are allowed"),
        ({"chosen": "a", "rejected": "b", "m": -1}, {"margin": "m"}, "'m' is -1; a margin is a number of at least 0"),
        ({"chosen": "a", "rejected": "b"}, {"margin": "m"}, "'m' is None"),
    ],
)
def test_rows_that_are_no_pairs(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, tokenizer, row, **options)


def test_pairs_among_the_responses_to_one_prompt() -> None:
    scores = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.3, 0.3, 2.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert best_and_worst(scores, groups) == [1, 2], "a group whose responses are all alike has no pair"
    assert best_of_each(scores, groups) == [1, 4, 6]
