"""What is converted: a Hugging Face folder or a Megatron distributed checkpoint, opened and checked by its headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megaverl.checkpoint.convert.carried import check_conversion, read_conversion
from megaverl.checkpoint.manifest import MANIFEST_FILE, Manifest, newest_whole
from megaverl.errors import CheckpointError, ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.classifier import read_model
from megaverl.sharding.files import INDEX_FILE, SINGLE_FILE, folder_layout, read_folder
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight
from megaverl.weights.checkpoints import open_checkpoint
from megaverl.weights.load import IGNORED_SUFFIXES, LM_HEAD, check_stored
from megaverl.weights.stored import StoredArray, stored_arrays
from megaverl.weights.torch_dist import is_torch_dist

EMBEDDING = "model.embed_tokens.weight"
LATEST_FILE = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model in files.

    Attributes:
        kind: `megatron` or `hugging_face`.
        folder: where the weights are.
        model_folder: where config.json and the tokenizer are.
        tokenizer: a folder or sentencepiece file with the tokenizer that a run used instead of the model's own.
        config: config.json.
        layout: the model's weights (Hugging Face's names) in the stored arrays.
        arrays: the stored arrays by local name.
        twins: tensors that a folder stores besides, as copies: name -> the weight that it equals.
        left_out: names of stored arrays that are no weights: optimizer states, buffers.
        file_headers: the headers of the safetensors files that the model came from, where known.
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

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each weight is stored; of a weight in several arrays, the widest."""
        found: dict[str, torch.dtype] = {}
        for piece in self.layout.pieces:
            dtype = self.arrays[piece.local].dtype
            found[piece.tensor] = torch.promote_types(found.get(piece.tensor, dtype), dtype)
        return found


def kind_of(path: Path) -> str:
    """`gguf`, `hugging_face` or `megatron`; a folder that is neither counts as the last."""
    if path.suffix == ".gguf":
        return "gguf"
    is_folder = (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()
    return "hugging_face" if is_folder else "megatron"


def open_source(path: str | Path, *, role: str | None = None, model_folder: str | Path | None = None) -> ModelSource:
    """Open a Hugging Face folder, a distributed checkpoint, or a run's folder (the newest whole checkpoint in it).

    Args:
        role: whose weights to take, of a run's checkpoint with several.
        model_folder: where config.json and tokenizer are, if not where the weights are.

    Raises:
        ModelError, CheckpointError: nothing that can be opened, or what is there is damaged, incomplete, or of
            another model than config.json says; names every tensor concerned.
    """
    path = Path(path)
    if not path.is_dir():
        what = "a file, not a folder" if path.exists() else "no such folder"
        raise ModelError(f"{path}: {what}. Name a Hugging Face folder, a Megatron checkpoint, or a .gguf file.")
    if kind_of(path) == "hugging_face":
        return _open_hugging_face(path, Path(model_folder) if model_folder else path)
    folder = _checkpoint_folder(path)
    if folder is None:
        raise ModelError(
            f"{path}: holds no model: neither {SINGLE_FILE} nor {INDEX_FILE} (Hugging Face), nor .metadata "
            "(Megatron's torch_dist format), nor checkpoints of a run."
        )
    return _open_megatron(folder, role, Path(model_folder) if model_folder else None)


def _open_hugging_face(folder: Path, model_folder: Path) -> ModelSource:
    config, spec, value_head = read_model(model_folder)
    stored = read_folder(folder)
    if "score.weight" in stored and LM_HEAD not in stored and not value_head:
        value_head = True  # a critic whose config.json is that of the model it began as
    weights = weights_of(spec, value_head=value_head)
    check_stored(folder, stored, weights, ())
    names = {weight.name for weight in weights}
    extra = [name for name in stored if name not in names]
    if LM_HEAD in extra and (value_head or not spec.tie_embeddings):
        raise ModelError(f"{folder}: {LM_HEAD} beside a value head: a model has one of the two. Remove one of them.")
    arrays = stored_arrays(stored)
    return ModelSource(
        "hugging_face",
        folder,
        model_folder,
        config,
        spec,
        value_head,
        weights,
        folder_layout({weight.name: stored[weight.name] for weight in weights}),
        {name: array for name, array in arrays.items() if not name.endswith(IGNORED_SUFFIXES)},
        {LM_HEAD: EMBEDDING} if LM_HEAD in extra else {},
        [name for name in extra if name != LM_HEAD],
        _file_headers(folder, {tensor.file.name for tensor in stored.values()}),
    )


def _file_headers(folder: Path, files: set[str]) -> dict[str, str]:
    """The JSON headers of safetensors files and the index, as they stand."""
    headers = {}
    for name in sorted(files):
        with (folder / name).open("rb") as file:
            headers[name] = file.read(int.from_bytes(file.read(8), "little")).decode()
    if (folder / INDEX_FILE).is_file():
        headers[INDEX_FILE] = (folder / INDEX_FILE).read_text(encoding="utf-8")
    return headers


def _checkpoint_folder(path: Path) -> Path | None:
    """The checkpoint that a folder is, or the newest whole one of a run or of Megatron-LM's `--save` folder."""
    if is_torch_dist(path):
        return path
    if (path / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{path}: damaged: a checkpoint without its index (.metadata). Take another one.")
    latest = path / LATEST_FILE
    if latest.is_file():
        name = latest.read_text(encoding="utf-8").strip()
        folder = path / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if not is_torch_dist(folder):
            raise CheckpointError(f"{folder}: not a torch_dist checkpoint, but {LATEST_FILE} names it.")
        return folder
    return newest_whole(path / "checkpoints" if (path / "checkpoints").is_dir() else path)[0]


def _open_megatron(folder: Path, role: str | None, model_folder: Path | None) -> ModelSource:
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
    conversion = read_conversion(folder)
    if conversion is not None:
        check_conversion(folder, conversion)
    opened = open_checkpoint(folder, role)
    model_folder, tokenizer = (model_folder, None) if model_folder else _model_folder(folder, role)
    config, spec, value_head = read_model(model_folder)
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
        [name for name in opened.index if name not in layout.local_shapes and name.startswith(opened.prefix)],
        conversion.file_headers if conversion else {},
        tokenizer,
    )


def _model_folder(folder: Path, role: str | None) -> tuple[Path, Path | None]:
    """Where config.json is: in the checkpoint itself, or where the run's configuration says; and its tokenizer.

    Raises:
        ModelError: neither leads to one.
    """
    if (folder / "config.json").is_file():
        return folder, None
    run, named = folder.parent.parent, ""
    for file in ("train.yaml", "sft.yaml", "quickstart.yaml"):
        if (run / file).is_file():
            config = yaml.safe_load((run / file).read_text(encoding="utf-8")) or {}
            model = config.get("model") or {}
            path = str((config.get(role or "actor") or {}).get("path") or model.get("path"))
            if (Path(path) / "config.json").is_file():
                return Path(path), Path(model["tokenizer"]) if model.get("tokenizer") else None
            named = f", which {file} of its run names as {path},"
    raise ModelError(
        f"{folder}: has no config.json, and that of its model{named} is not here. Name the model's Hugging Face folder "
        "(or org/name on a hub) with --model."
    )
