"""Tokenizers: Hugging Face folders and sentencepiece `.model` files behind one small class."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megaverl.data.sentencepiece_model import load_sentencepiece
from megaverl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The class names of tokenizers that are whatever their tokenizer.json says. transformers 5 replaces them in a
# Qwen2 folder by Qwen2Tokenizer, which then splits and normalises as Qwen2 does, so they are loaded by name.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class HasVocabulary(Protocol):
    """What `check_fits` reads of a `models.spec.ModelSpec`."""

    @property
    def vocab_size(self) -> int: ...


class Tokenizer:
    """What the rest of the house asks of a tokenizer.

    Attributes:
        backend: the Hugging Face tokenizer.
        source: where it came from, for messages.
        vocab_size: highest id + 1.
        eos_token_id: ends a response. `stop_token_ids`: all that do, as a model's generation_config.json may
            name more.
        pad_token_id: fills up a batch; the end of sequence where the tokenizer has no padding.
        bos_token_id: or None.
        chat_template: Jinja text, or None.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, source: str, *, stop_token_ids: Sequence[int] = ()) -> None:
        if backend.eos_token_id is None:
            raise DataError(
                f"{source}: the tokenizer has no end-of-sequence token, so a response could never end. "
                "Name one as eos_token in its tokenizer_config.json."
            )
        if len(backend) <= len(backend.all_special_tokens):
            # transformers 5 makes an empty tokenizer for a folder without tokenizer files
            raise DataError(
                f"{source}: the tokenizer holds no tokens but special ones. Copy tokenizer.json and "
                "tokenizer_config.json from the model's source, or name another tokenizer with model.tokenizer."
            )
        self.backend = backend
        self.source = source
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        self.eos_token_id: int = backend.eos_token_id
        self.pad_token_id: int = backend.eos_token_id if backend.pad_token_id is None else backend.pad_token_id
        self.bos_token_id: int | None = backend.bos_token_id
        self.stop_token_ids: list[int] = sorted({self.eos_token_id, *stop_token_ids})
        self.chat_template: str | None = backend.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `add_special_tokens`: with those that the tokenizer puts around a text."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; by default without special tokens such as the end of sequence."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        where: str = "prompt",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """A conversation as the chat template writes it, up to where the assistant's answer begins or, where the last
        message is an answer, to its end.

        Args:
            tools: JSON schemas of functions, for templates that show them.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise DataError(f"{where}: the tokenizer {self.source} has no chat template to write chat messages with.")
        try:
            return self.backend.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=messages[-1]["role"] != "assistant",
            )
        except Exception as error:  # a template is a program: jinja2's errors, TypeError, KeyError, ...
            raise DataError(
                f"{where}: the chat template of {self.source} refuses these messages "
                f"({type(error).__name__}: {error}). Correct the roles or their order in the row, or the "
                "template."
            ) from error

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`, for AutoTokenizer of transformers 4 and 5.

        One trap is left: with a tokenizer of its own kind in a Qwen2 folder, AutoTokenizer of transformers 5
        ignores how that one splits text. `load_tokenizer` does not; Llama and Qwen3 folders are free of it.
        """
        save_backend(self.backend, folder)


def save_backend(backend: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face tokenizer into `folder`, naming a class that transformers 4 knows as well as 5."""
    backend.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for leftover in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        config.pop(leftover, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(path: str | Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a Hugging Face folder, a sentencepiece `.model` file (with a `chat_template.jinja` beside it, if
            there is one), or a model's name on a hub.
        chat_template: Jinja text to use instead of the tokenizer's own.
        trust_remote_code: run Python code that a Hugging Face folder or repository brings along.

    Raises:
        DataError: not found, unreadable, or without an end of sequence.
    """
    source = str(path)
    if source.endswith(".model"):
        backend: Any = load_sentencepiece(path)
        beside = Path(path).with_name("chat_template.jinja")
        if chat_template is None and beside.is_file():
            chat_template = beside.read_text(encoding="utf-8")
        stops: list[int] = []
    else:
        backend = _load_hugging_face(source, trust_remote_code)
        stops = _stop_tokens(Path(path))
    if chat_template is not None:
        backend.chat_template = chat_template
    return Tokenizer(backend, source, stop_token_ids=stops)


def _load_hugging_face(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    import transformers

    folder = Path(source)
    if not folder.is_dir() and (folder.exists() or source.count("/") > 1 or source[:1] in "./~"):
        raise DataError(
            f"{source}: not a folder (looked in {os.getcwd()}). model.tokenizer must name a Hugging Face "
            "folder, a sentencepiece .model file, or a model on a hub, such as Qwen/Qwen3-0.6B."
        )
    loader: Any = transformers.AutoTokenizer
    options: dict[str, Any] = {"local_files_only": folder.is_dir()}
    if (folder / "tokenizer.json").is_file() and _class_in(folder) in GENERIC_CLASSES:
        loader = transformers.PreTrainedTokenizerFast
    else:
        options["trust_remote_code"] = trust_remote_code
    try:
        return loader.from_pretrained(source, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and bare Exception for bad files
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{source}: no tokenizer could be loaded from it ({type(error).__name__}: {reason}). A folder "
            "needs tokenizer.json and tokenizer_config.json; copy them from the model's source, or name "
            "another tokenizer with model.tokenizer."
        ) from error


def _class_in(folder: Path) -> str | None:
    return _read_json(folder / "tokenizer_config.json").get("tokenizer_class")


def _stop_tokens(folder: Path) -> list[int]:
    """Further ends of a response that the model's generation_config.json names."""
    found = _read_json(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid JSON ({error}). Copy the file again from its source.") from error


def check_fits(tokenizer: Tokenizer, spec: HasVocabulary, *, model: str | Path = "the model") -> None:
    """Every id of the tokenizer must have a row in the model's embedding.

    Raises:
        DataError: names both numbers.
    """
    if tokenizer.vocab_size > spec.vocab_size:
        raise DataError(
            f"{tokenizer.source}: this tokenizer does not fit {model}: its ids reach "
            f"{tokenizer.vocab_size - 1}, but the model's vocabulary (vocab_size in config.json) is "
            f"{spec.vocab_size}, ids 0 to {spec.vocab_size - 1}. Use the tokenizer that the model was "
            "trained with."
        )
    beyond = [number for number in tokenizer.stop_token_ids if number >= spec.vocab_size]
    if beyond:
        raise DataError(
            f"{tokenizer.source}: generation_config.json names the end-of-sequence ids {beyond}, but the "
            f"vocabulary of {model} is {spec.vocab_size}. Correct eos_token_id there."
        )
