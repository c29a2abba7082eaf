"""What a run cannot go on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.errors import CheckpointError
from megaverl.trainer.saving import check_origin, tokenizer_digest


def tokenizer(*words: str) -> Any:
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = SimpleNamespace(get_vocab=lambda: vocabulary)
    return SimpleNamespace(
        backend=backend, stop_token_ids=[0], chat_template=None, source="here"
    )


@pytest.mark.parametrize(
    ("state", "stage", "said"),
    [
        (
            {"stage": "sft"},
            "dpo",
            "written by `megaverl sft`, and this is `megaverl dpo`.*run.name.*model.path",
        ),
        (
            {"stage": "reward_model"},
            "train",
            "written by `megaverl reward`, and this is `megaverl train`",
        ),
        ({}, "sft", "written by `megaverl train`, and this is `megaverl sft`"),
        (
            {"tokenizer": "other"},
            "train",
            "another tokenizer .other; this run's, of here, is .*model.tokenizer",
        ),
    ],
)
def test_a_checkpoint_of_another_command_or_tokenizer(
    state: dict[str, Any], stage: str, said: str
) -> None:
    mine = tokenizer("a", "b")
    with pytest.raises(CheckpointError, match=said):
        check_origin(
            Path("step_1"), {"tokenizer": tokenizer_digest(mine), **state}, stage, mine
        )
    check_origin(
        Path("step_1"),
        {"tokenizer": tokenizer_digest(mine), "stage": "sft"},
        "sft",
        mine,
    )
