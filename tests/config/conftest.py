"""A model folder and data files that a configuration can name: only what the checks read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaverl.config import Config, InvalidConfig, load_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def write_files(folder: Path) -> list[str]:
    """Write a model folder, training and validation files; return overrides that name them, and a reward."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return [
        f"model.path={model}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.validation={folder / 'validation.jsonl'}",
        "reward=exact_match",
    ]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that name a model folder, training and validation files that are there, and a reward."""
    return write_files(tmp_path)


@pytest.fixture
def load(files: list[str]) -> Callable[..., Config]:
    """`load("key=value", ...)`: a configuration that is right but for these."""
    return lambda *overrides, **options: load_config(
        None, [*files, *overrides], **options
    )


@pytest.fixture
def mistakes(files: list[str]) -> Callable[..., dict[str, str]]:
    """`mistakes("key=value", ...)`: key -> message of every mistake that these bring in; at least one."""

    def refused(*overrides: str, **options: object) -> dict[str, str]:
        with pytest.raises(InvalidConfig) as caught:
            load_config(None, [*files, *overrides], **options)  # type: ignore[arg-type]
        return {mistake.key: mistake.message for mistake in caught.value.mistakes}

    return refused
