"""Source of a conversion, opened and checked by its headers: a Hugging Face folder or a
Megatron distributed checkpoint.

The module also handles what accompanies the weights (configuration, tokenizer, chat
template), and the record of a conversion.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megaverl.checkpoint import MANIFEST_FILE, Manifest, newest_whole
from megaverl.checkpoint.convert import transposed_name
from megaverl.config.typed_yaml import read_untyped
from megaverl.data.tokenizers import Tokenizer, check_fits, load_tokenizer
from megaverl.errors import CheckpointError, DataError, ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.folder import read_model
from megaverl.outside import read_json_file
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.quantization import compressed_config
from megaverl.sharding.weight import TRANSPOSED, Split, Weight
from megaverl.weights.expert_arrays import separate_experts
from megaverl.weights.export import model_files
from megaverl.weights.load import (
    IGNORED_SUFFIXES,
    LM_HEAD,
    check_stored,
    open_checkpoint,
)
from megaverl.weights.safetensors_writer import entries_of, framed
from megaverl.weights.stored import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredArray,
    folder_layout,
    read_folder,
    stored_arrays,
)
from megaverl.weights.torch_dist_index import COPY_AGAIN, FORMAT_FILE, is_torch_dist

LATEST_FILE = "latest_checkpointed_iteration.txt"
CONVERSION_FILE = "conversion.json"
CONVERSION_FORMAT = 1
PICKLED = (".bin", ".pt", ".pth")
# JSON files that belong to a checkpoint or to one set of weights, not to the model.
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


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model in files.

    Attributes:
        kind: `megatron` or `hugging_face`.
        folder: folder of the weights.
        model_folder: folder of config.json and the tokenizer.
        tokenizer: folder or sentencepiece file of the tokenizer that a run used instead of the model's own.
        config: config.json.
        layout: places of the model's weights (Hugging Face's names) in the stored arrays.
        arrays: stored arrays and their views by local name; arrays that a target may hold transposed also appear under
            `transposed_name`.
        twins: stored copies of tied weights: name -> the weight that it equals.
        left_out: names of stored arrays that are not weights: optimizer states, buffers.
        file_headers: headers of the safetensors files that the model came from, if known.
        buffers: bytes of tensors in those files that no model reads (`IGNORED_SUFFIXES`).
    """

    kind: str
    folder: Path
    model_folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    value_head: bool
    weights: Sequence[Weight]
    layout: Layout
    arrays: Mapping[str, StoredArray]
    twins: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    file_headers: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    buffers: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Stored dtype of each weight; the widest one for a weight in several arrays."""
        by_tensor: dict[str, torch.dtype] = {}
        for piece in self.layout.pieces:
            dtype = self.arrays[piece.local].dtype
            by_tensor[piece.tensor] = torch.promote_types(
                by_tensor.get(piece.tensor, dtype), dtype
            )
        return by_tensor


def kind_of(path: Path) -> str:
    """Return `gguf`, `hugging_face` or `megatron`.

    Raises:
        ModelError: the folder does not exist, or holds no model that can be read.
        CheckpointError: the checkpoint is damaged.
    """
    if path.suffix == ".gguf":
        return "gguf"
    if not path.is_dir():
        description = "a file, not a folder" if path.exists() else "no such folder"
        raise ModelError(
            f"{path}: {description}. Name a Hugging Face folder, a Megatron checkpoint, or a .gguf file."
        )
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        return "hugging_face"
    if _checkpoint_folder(path) is not None:
        return "megatron"
    pickled = sorted(
        file.name for suffix in PICKLED for file in path.glob(f"*{suffix}")
    )
    # A Megatron checkpoint without its index.
    is_distributed = any(path.glob("*.distcp"))
    if pickled and not is_distributed:
        raise ModelError(
            f"{path}: holds {pickled[0]}, whose weights are pickled. Such files can run code and are not read. Write "
            f"them as safetensors once: transformers' AutoModelForCausalLM.from_pretrained({str(path)!r}, dtype='auto')"
            ".save_pretrained(FOLDER), and copy the tokenizer's files."
        )
    raise ModelError(
        f"{path}: holds no model: neither {SINGLE_FILE} nor {INDEX_FILE} (Hugging Face), nor .metadata "
        "(Megatron's torch_dist format), nor checkpoints of a run."
    )


def open_source(
    path: str | Path, *, role: str | None = None, model_folder: str | Path | None = None
) -> ModelSource:
    """Open a Hugging Face folder, a distributed checkpoint, or a run's folder (its newest complete checkpoint).

    Args:
        role: role whose weights to take from a run's checkpoint with several roles.
        model_folder: folder of config.json and tokenizer, if they are not with the weights.

    Raises:
        ModelError, CheckpointError: there is nothing to open, or it is damaged, incomplete, or another model than
            config.json describes; lists every tensor concerned.
    """
    path = Path(path)
    if path.is_file():
        raise ModelError(
            f"{path}: a file, not a folder. Name a Hugging Face folder, a Megatron checkpoint, or a .gguf file."
        )
    if kind_of(path) == "hugging_face":
        return _open_hugging_face(path, Path(model_folder) if model_folder else path)
    folder = _checkpoint_folder(path)
    assert folder is not None, "kind_of() has found it"
    return _open_megatron(folder, role, Path(model_folder) if model_folder else None)


def _open_hugging_face(folder: Path, model_folder: Path) -> ModelSource:
    config, spec, value_head = read_model(model_folder)
    stored = read_folder(folder)
    if "score.weight" in stored and LM_HEAD not in stored and not value_head:
        # A critic may still have the config.json of the model that it was trained from.
        value_head = True
    weights = weights_of(spec, value_head=value_head)
    stored = separate_experts(stored, weights)
    # Headers alone are read: a wrong model is refused before any weight is.
    check_stored(folder, stored, weights, ())
    names = {weight.name for weight in weights}
    extra = [name for name in stored if name not in names]
    if LM_HEAD in extra and (value_head or not spec.tie_embeddings):
        raise ModelError(
            f"{folder}: {LM_HEAD} and a value head: a model can have only one of the two. Remove one of them."
        )
    arrays = stored_arrays(stored)
    # gpt-oss's files hold experts as [experts, in, out], and targets as [experts, out,
    # in]. These are views, and copy nothing.
    arrays |= {
        transposed_name(weight.name): arrays[weight.name].transposed((0, 2, 1))
        for weight in weights
        if weight.split in TRANSPOSED and len(weight.shape) == 3
    }
    embedding = next(weight for weight in weights if weight.split is Split.VOCAB)
    headers = _file_headers(folder, {tensor.file.name for tensor in stored.values()})
    return ModelSource(
        "hugging_face",
        folder,
        model_folder,
        config,
        spec,
        value_head,
        weights,
        folder_layout({weight.name: stored[weight.name] for weight in weights}),
        {
            name: array
            for name, array in arrays.items()
            if not name.endswith(IGNORED_SUFFIXES)
        },
        {LM_HEAD: embedding.name} if LM_HEAD in extra else {},
        [
            name
            for name in extra
            if name != LM_HEAD and not name.endswith(IGNORED_SUFFIXES)
        ],
        headers,
        buffers=_buffers(folder, headers),
    )


def _file_headers(folder: Path, files: set[str]) -> dict[str, str]:
    """Return the JSON headers of safetensors files and the index, unchanged."""
    headers = {}
    for name in sorted(files):
        with (folder / name).open("rb") as file:
            # A safetensors file starts with the length of its header, in eight bytes.
            headers[name] = file.read(int.from_bytes(file.read(8), "little")).decode()
    if (folder / INDEX_FILE).is_file():
        headers[INDEX_FILE] = (folder / INDEX_FILE).read_text(encoding="utf-8")
    return headers


def _buffers(folder: Path, headers: Mapping[str, str]) -> dict[str, bytes]:
    """Return the bytes of tensors that are computed from config.json. They are small: one frequency per dimension."""
    buffers = {}
    for file_name, header in headers.items():
        if file_name == INDEX_FILE:
            continue
        # `data_offsets` count from the end of the header.
        start = len(framed(header))
        for name, entry in entries_of(header).items():
            if name.endswith(IGNORED_SUFFIXES):
                first, end = entry["data_offsets"]
                with (folder / file_name).open("rb") as file:
                    file.seek(start + first)
                    buffers[name] = file.read(end - first)
    return buffers


def _checkpoint_folder(path: Path) -> Path | None:
    """Return the checkpoint in a folder: the folder itself, or the newest complete one
    of a run or of Megatron-LM's `--save`.
    """
    if is_torch_dist(path):
        return path
    if (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path}: damaged: a checkpoint without its index (.metadata). Take another one."
        )
    latest = path / LATEST_FILE
    if latest.is_file():
        name = latest.read_text(encoding="utf-8").strip()
        # Megatron-LM names its folders like this; `release` is the other name.
        folder = path / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if not is_torch_dist(folder):
            raise CheckpointError(
                f"{folder}: not a torch_dist checkpoint, but {LATEST_FILE} names it."
            )
        return folder
    # A run folder has `checkpoints`; the user may also name that folder itself.
    return newest_whole(
        path / "checkpoints" if (path / "checkpoints").is_dir() else path
    )[0]


def _open_megatron(
    folder: Path, role: str | None, model_folder: Path | None
) -> ModelSource:
    # Only checkpoints of a run have a manifest. Conversions and Megatron-LM write none.
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
    conversion = read_conversion(folder)
    if conversion is not None:
        check_conversion(folder, conversion)
    opened = open_checkpoint(folder, role)
    model_folder, tokenizer = (
        (model_folder, None) if model_folder else _model_folder(folder, role)
    )
    config, spec, value_head = read_model(model_folder)
    # config.json of a critic may be that of the language model that it started from.
    value_head = value_head or opened.has_value_head
    weights = weights_of(spec, value_head=value_head)
    layout = opened.layout(weights, spec)
    return ModelSource(
        "megatron",
        folder,
        model_folder,
        config,
        spec,
        value_head,
        weights,
        layout,
        opened.arrays(layout),
        conversion.twins if conversion else {},
        [
            name
            for name in opened.index
            if name not in layout.local_shapes and name.startswith(opened.prefix)
        ],
        conversion.file_headers if conversion else {},
        tokenizer,
        {name: base64.b64decode(text) for name, text in conversion.buffers.items()}
        if conversion
        else {},
    )


def _model_folder(folder: Path, role: str | None) -> tuple[Path, Path | None]:
    """Return the folder of config.json (the checkpoint's own, or the one in the run's
    configuration), and its tokenizer.
    """
    if (folder / "config.json").is_file():
        return folder, None
    # RUN/checkpoints/step_*: the configuration is two levels up.
    run, named = folder.parent.parent, ""
    for file in ("train.yaml", "sft.yaml", "quickstart.yaml"):
        if (run / file).is_file():
            config = read_untyped((run / file).read_text(encoding="utf-8")) or {}
            model = config.get("model") or {}
            path = str(
                (config.get(role or "actor") or {}).get("path") or model.get("path")
            )
            if (Path(path) / "config.json").is_file():
                return Path(path), Path(model["tokenizer"]) if model.get(
                    "tokenizer"
                ) else None
            named = f", which {file} of its run names as {path},"
    raise ModelError(
        f"{folder}: has no config.json, and that of its model{named} is not here. Name the model's Hugging Face folder "
        "(or org/name on a hub) with --model."
    )


@dataclass(frozen=True)
class Conversion:
    """Contents of `conversion.json` in a converted distributed checkpoint.

    Attributes:
        files: every other file of the folder -> bytes.
        twins, file_headers, buffers: as in `ModelSource`, the last one in base64. With them, converting back reproduces
            the same files byte for byte.
    """

    format: int
    files: Mapping[str, int]
    twins: Mapping[str, str] = field(default_factory=dict)
    file_headers: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)


def read_conversion(folder: Path) -> Conversion | None:
    """Read the record of a folder; None if there is none.

    Raises:
        CheckpointError: the record is damaged, or written by a newer megaverl.
    """
    path = folder / CONVERSION_FILE
    if not path.is_file():
        return None
    try:
        content = read_json_file(path)
        if content["format"] <= CONVERSION_FORMAT:
            # megaverl 0.2 did not write this field.
            content.setdefault("buffers", {})
            return Conversion(
                **{field.name: content[field.name] for field in fields(Conversion)}
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {error}). {COPY_AGAIN}"
        ) from error
    raise CheckpointError(
        f"{path}: format {content['format']}, written by a newer megaverl; this one reads up to {CONVERSION_FORMAT}. "
        "Install a newer one."
    )


def write_conversion(folder: Path, source: ModelSource) -> None:
    """Write the record of a conversion."""
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    buffers = {
        name: base64.b64encode(data).decode() for name, data in source.buffers.items()
    }
    record = Conversion(
        CONVERSION_FORMAT, files, dict(source.twins), dict(source.file_headers), buffers
    )
    (folder / CONVERSION_FILE).write_text(
        json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8"
    )


def check_conversion(folder: Path, conversion: Conversion) -> None:
    """Raise a CheckpointError that lists every file that is missing or has another size than recorded."""
    wrong = []
    for name, size in conversion.files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        # Users may edit the configuration or the tokenizer, but not weights.
        elif path.suffix == ".distcp" and path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
    if wrong:
        raise CheckpointError(f"{folder}: damaged: {'; '.join(wrong)}. {COPY_AGAIN}")


def carried_files(folder: Path) -> list[Path]:
    """List the small files of a model's folder."""
    return [file for file in model_files(folder) if file.name not in NOT_CARRIED]


def carry_files(model_folder: Path, tokenizer: Path | None, output: Path) -> None:
    """Copy the model's small files; take the tokenizer's files from `tokenizer` (a folder or a file) if it is given."""
    # Files of the old tokenizer are left out, since some of them would be read beside
    # the new ones.
    for file in carried_files(model_folder):
        if tokenizer is None or file.name not in TOKENIZER_FILES:
            shutil.copyfile(file, output / file.name)
    if tokenizer is not None and not tokenizer.is_dir():
        load_tokenizer(tokenizer).save(output)
    for file in (
        carried_files(tokenizer) if tokenizer is not None and tokenizer.is_dir() else ()
    ):
        if file.name in TOKENIZER_FILES:
            shutil.copyfile(file, output / file.name)


def check_tokenizer(path: Path, spec: ModelSpec, model_folder: Path) -> None:
    """Check that a tokenizer gives every id that it shares with the model's own tokenizer the same meaning.

    Raises:
        DataError: it cannot be read, does not fit the model, or assigns other tokens to the model's ids.
    """
    tokenizer = load_tokenizer(path)
    check_fits(tokenizer, spec.vocab_size, model=model_folder)
    if not any((model_folder / name).is_file() for name in VOCABULARY_FILES):
        return
    check_same_ids(
        tokenizer, load_tokenizer(model_folder).backend.get_vocab(), model_folder
    )


def check_same_ids(
    tokenizer: Tokenizer, vocabulary: Mapping[str, int], model: Path
) -> None:
    """Raise a DataError if `tokenizer` assigns another token to an id of the model's own vocabulary."""
    # Only ids that both have are compared. The new tokenizer may have more of them.
    token_of = {number: token for token, number in vocabulary.items()}
    differing = [
        (number, token, token_of[number])
        for token, number in sorted(
            tokenizer.backend.get_vocab().items(), key=lambda entry: entry[1]
        )
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
    config: Mapping[str, Any],
    *,
    value_head: bool,
    dtype: torch.dtype | None,
    quantization: str | None = None,
) -> dict[str, Any] | None:
    """Return config.json of the target, or None if the source's own is right byte for byte.

    For Hugging Face, a model with a value head is a classifier with one label.
    """
    changed = dict(config)
    architecture = str(config["architectures"][0])
    if value_head and architecture.endswith("ForCausalLM"):
        changed["architectures"] = [
            architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"
        ]
        changed |= {
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        changed[key] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        changed["quantization_config"] = compressed_config(quantization)
    return changed if changed != dict(config) else None
