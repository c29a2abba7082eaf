"""What goes along with the weights: configuration, tokenizer, chat template; and the record of a conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megaverl.data.tokenizers import Tokenizer, check_fits, load_tokenizer
from megaverl.errors import CheckpointError, DataError
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.export import COPIED_SUFFIXES
from megaverl.weights.torch_dist import FORMAT_FILE, MEND

CONVERSION_FILE = "conversion.json"
CONVERSION_FORMAT = 1
# JSON files that belong to a checkpoint or to one set of weights, not to the model
NOT_CARRIED = {CONVERSION_FILE, FORMAT_FILE, "manifest.json", "state.json", "best.json"}
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
}


@dataclass(frozen=True)
class Conversion:
    """`conversion.json` of a converted distributed checkpoint.

    Attributes:
        files: every other file of the folder -> bytes.
        twins, file_headers: as in `Source`: with them the way back gives the same files again, to the byte.
    """

    format: int
    files: Mapping[str, int]
    twins: Mapping[str, str] = field(default_factory=dict)
    file_headers: Mapping[str, str] = field(default_factory=dict)


def read_conversion(folder: Path) -> Conversion | None:
    """The record of a folder; None where there is none.

    Raises:
        CheckpointError: damaged, or written by a newer megaverl.
    """
    path = folder / CONVERSION_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] <= CONVERSION_FORMAT:
            return Conversion(**{each.name: content[each.name] for each in fields(Conversion)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error}). {MEND}") from error
    raise CheckpointError(
        f"{path}: format {content['format']}, written by a newer megaverl; this one reads up to {CONVERSION_FORMAT}. "
        "Install a newer one."
    )


def write_conversion(folder: Path, twins: Mapping[str, str], file_headers: Mapping[str, str]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    record = Conversion(CONVERSION_FORMAT, files, dict(twins), dict(file_headers))
    (folder / CONVERSION_FILE).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def check_conversion(folder: Path, conversion: Conversion) -> None:
    """Raise a CheckpointError that lists every file that is missing or has another size than was recorded."""
    wrong = []
    for name, size in conversion.files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        # a person may mend configuration or tokenizer; weights are as they were written
        elif path.suffix == ".distcp" and path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
    if wrong:
        raise CheckpointError(f"{folder}: damaged: {'; '.join(wrong)}. {MEND}")


def carried_files(folder: Path) -> Iterator[Path]:
    """The small files of a model's folder."""
    for file in sorted(folder.iterdir()):
        is_model_file = file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")
        wanted = is_model_file or file.name.startswith(("LICENSE", "NOTICE"))
        if file.is_file() and wanted and file.name not in NOT_CARRIED:
            yield file


def carry_files(model_folder: Path, tokenizer: Path | None, output: Path) -> None:
    """Copy what belongs to the model; the tokenizer's files from `tokenizer`, a folder or a file, where it is given."""
    for file in carried_files(model_folder):
        if tokenizer is None or file.name not in TOKENIZER_FILES:
            shutil.copyfile(file, output / file.name)
    if tokenizer is not None and not tokenizer.is_dir():
        load_tokenizer(tokenizer).save(output)
    for file in carried_files(tokenizer) if tokenizer is not None and tokenizer.is_dir() else ():
        if file.name in TOKENIZER_FILES:
            shutil.copyfile(file, output / file.name)


def check_tokenizer(path: Path, spec: ModelSpec, model_folder: Path) -> None:
    """A tokenizer to carry instead of the model's own must mean the same by every id that both have.

    Raises:
        DataError: it cannot be read, does not fit the model, or gives other tokens the ids that the model knows.
    """
    tokenizer = load_tokenizer(path)
    check_fits(tokenizer, spec, model=model_folder)
    if not any((model_folder / name).is_file() for name in VOCABULARY_FILES):
        return
    check_same_ids(tokenizer, load_tokenizer(model_folder).backend.get_vocab(), model_folder)


def check_same_ids(tokenizer: Tokenizer, own: Mapping[str, int], model: Path) -> None:
    """Raise a DataError where `tokenizer` gives an id of the model's own vocabulary to another token."""
    token_of = {number: token for token, number in own.items()}
    differing = [
        (number, token, token_of[number])
        for token, number in sorted(tokenizer.backend.get_vocab().items(), key=lambda entry: entry[1])
        if token_of.get(number, token) != token
    ]
    if differing:
        number, token, expected = differing[0]
        raise DataError(
            f"{tokenizer.source}: not the tokenizer of {model}: {len(differing)} of its ids mean another token, the "
            f"first is {number}: {token!r} instead of {expected!r}. The model would read other words than were "
            "written. Give a tokenizer with the model's own vocabulary (it may have more tokens)."
        )


def converted_config(
    config: Mapping[str, Any], *, value_head: bool, dtype: torch.dtype | None
) -> dict[str, Any] | None:
    """config.json of the target, or None when the source's own serves as it stands, byte for byte.

    A model with a value head is a classifier with one label to Hugging Face.
    """
    changed = dict(config)
    architecture = str(config["architectures"][0])
    if value_head and architecture.endswith("ForCausalLM"):
        changed["architectures"] = [architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"]
        changed |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        changed[key] = str(dtype).removeprefix("torch.")
    return changed if changed != dict(config) else None
