"""A small tokenizer for the tests of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece

TEXTS = [
    f"What is {a} plus {b}? The sum is {a + b}.\n" for a in range(30) for b in range(30)
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    symbols = ["<|im_start|>", "<|im_end|>"]
    return train_sentencepiece(
        TEXTS, path, vocab_size=300, byte_fallback=True, symbols=symbols
    )


@pytest.fixture
def tokenizer(sentencepiece_path: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_path)


@pytest.fixture
def chat_tokenizer(sentencepiece_path: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_path, chat_template=CHATML)
