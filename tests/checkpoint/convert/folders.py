"""Tiny models in folders, as they come from elsewhere: with tokenizer, chat template and files of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megaverl.checkpoint.convert.run import ConversionRequest, convert, process_group
from megaverl.distributed.grid import GridShape
from megaverl.models.tiny import make_tiny_folder


def make_tokenizer(folder: Path, words: int = 90, first: str = "w") -> None:
    """A tokenizer of so many words, with a chat template of its own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"</s>": 0, "<unk>": 1} | {
        f"{first}{number}": number for number in range(2, words)
    }
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def make_model(
    folder: Path, architecture: str = "Qwen2ForCausalLM", **options: Any
) -> Path:
    """A model with all that may lie beside its weights."""
    make_tiny_folder(folder, architecture, **options)
    (folder / "README.md").write_text("not carried\n")
    (folder / "LICENSE").write_text("as it came\n")
    (folder / "pytorch_model.bin").write_bytes(b"not carried")
    return folder


def as_reward_model(
    folder: Path, output: Path, *, dtype: torch.dtype = torch.float32
) -> Path:
    """The same backbone with a value head, as transformers' `...ForSequenceClassification` with one label."""
    output.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [
        config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    ]
    config |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    (output / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.linspace(
        -1, 1, tensors["model.norm.weight"].numel(), dtype=dtype
    )[None]
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def converted(source: Path, output: Path, to: str, **options: Any) -> Path:
    """Convert in this process, quietly."""
    options = {"shape": GridShape(**options.pop("grid", {})), "quiet": True} | options
    with process_group():
        convert(ConversionRequest(source, output, to, **options))
    return output


def assert_same_files(
    folder: Path,
    other: Path,
    *,
    but: tuple[str, ...] = ("README.md", "pytorch_model.bin"),
) -> None:
    """The same files with the same bytes."""
    files = {file.name for file in folder.iterdir()}.difference(but)
    assert {file.name for file in other.iterdir()} == files
    differing = [
        name
        for name in sorted(files)
        if (folder / name).read_bytes() != (other / name).read_bytes()
    ]
    assert not differing


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    """What lies below a folder, hidden drafts included, is the same before and after."""

    def content() -> dict[str, bytes]:
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }

    before = content()
    yield
    after = content()
    assert after.keys() == before.keys()
    assert after == before
