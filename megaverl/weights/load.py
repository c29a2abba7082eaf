"""Load a model from files: read a rank's boxes of safetensors files or a distributed checkpoint into its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megaverl.errors import CheckpointError, ModelError
from megaverl.outside import read_json_file
from megaverl.sharding.boxes import carry, split
from megaverl.sharding.layout import Layout, padded_tensors
from megaverl.sharding.megatron import checkpoint_layout
from megaverl.sharding.model_config import WITH_DELTA_NET
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import MAX_NAMED, intersect_layouts
from megaverl.sharding.weight import Weight, as_block
from megaverl.weights.expert_arrays import separate_experts, separate_names
from megaverl.weights.stored import (
    INDEX_FILE,
    StoredArray,
    StoredArrayReader,
    StoredTensor,
    folder_layout,
    read_folder,
    read_header,
    read_weight_map,
    stored_arrays,
    with_views,
)
from megaverl.weights.torch_dist import locate
from megaverl.weights.torch_dist_index import IndexedArray, is_torch_dist, read_arrays
from megaverl.weights.transports import check_tensors, view, viewed

MAX_READ = 1 << 24  # elements per read if they cannot be read directly into their place
# Tensors in some files that no model reads: buffers that are computed from the
# configuration.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
LM_HEAD = "lm_head.weight"


def load_folder(
    folder: str | Path,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    weights: Sequence[Weight],
    optional: Collection[str] = (),
) -> list[str]:
    """Fill this rank's tensors from a folder, reading only the boxes that the layout names.

    Values are converted to the tensors' dtype. Padding (vocabulary rows beyond the
    model's) becomes zero.

    Args:
        folder: a Hugging Face folder with one or several safetensors files, or a Megatron distributed checkpoint with a
            config.json, as `megaverl convert` writes it.
        layout: this rank's layout, from `megatron_layouts` or another function.
        tensors: local name -> tensor or parameter, on any device and in any floating dtype; extra entries are ignored.
        weights: all weights of the model, so that every rank finds the same mistakes.
        optional: names that the folder may lack, such as a critic's `score.weight`.

    Returns:
        The optional names that the folder lacks. The caller initialises them.

    Raises:
        ModelError: files are missing or damaged, tensors are missing or unknown, or shapes are wrong; lists all
            problems.
        CheckpointError: the same for a distributed checkpoint.
    """
    folder = Path(folder)
    check_tensors(layout, tensors, "the model", ModelError)
    if is_torch_dist(folder):
        return _load_checkpoint(folder, layout, tensors, weights, optional)
    stored = separate_experts(read_folder(folder), weights)
    absent = [
        weight.name
        for weight in weights
        if weight.name in optional and weight.name not in stored
    ]
    check_stored(folder, stored, weights, absent)
    # Read only the model's weights. Some folders also store an output layer that is
    # tied to the embedding.
    held = {
        weight.name: stored[weight.name] for weight in weights if weight.name in stored
    }
    wanted = layout.without(absent)
    # Padding first: the weights that are read next do not touch it.
    clear_padding(wanted, tensors)
    fill(folder_layout(held), stored_arrays(held), wanted, tensors)
    return absent


class ArrivingFolder:
    """Load a folder file by file, so that one file is read while the next is downloaded.

    For arguments and errors, see `load_folder`. With an index, names are checked
    before the first file; shapes are checked with each file.
    """

    def __init__(
        self,
        folder: str | Path,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        *,
        weights: Sequence[Weight],
        optional: Collection[str] = (),
    ) -> None:
        self._folder, self._layout, self._tensors = Path(folder), layout, tensors
        self._weights, self._optional = weights, optional
        self._names = {weight.name for weight in weights}
        self._seen: set[str] = set()
        check_tensors(layout, tensors, "the model", ModelError)
        index = self._folder / INDEX_FILE
        if index.is_file():
            files = separate_names(read_weight_map(index), weights)
            check_names(self._folder, files, weights, optional)
        clear_padding(layout, tensors)

    def read(self, file: Path) -> None:
        """Read this rank's parts of a file that has arrived."""
        stored = separate_experts(read_header(file), self._weights)
        check_shapes(self._folder, stored, self._weights)
        held = {name: tensor for name, tensor in stored.items() if name in self._names}
        # A file holds some of the tensors. The others are filled when their file
        # arrives.
        fill(
            folder_layout(held),
            stored_arrays(held),
            self._layout.without(self._layout.global_shapes.keys() - held.keys()),
            self._tensors,
        )
        self._seen.update(stored)

    def finish(self) -> list[str]:
        """Check after the last file that nothing is missing; return the optional names that the files lack."""
        absent = [
            weight.name
            for weight in self._weights
            if weight.name in self._optional and weight.name not in self._seen
        ]
        check_names(
            self._folder,
            dict.fromkeys(self._seen, self._folder.name),
            self._weights,
            absent,
        )
        return absent


def _load_checkpoint(
    folder: Path,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    weights: Sequence[Weight],
    optional: Collection[str],
) -> list[str]:
    opened = open_checkpoint(folder)
    absent = without_head(weights, opened, optional)
    source = opened.layout(
        [weight for weight in weights if weight.name not in absent],
        ModelSpec.from_folder(folder),
    )
    wanted = layout.without(absent)
    clear_padding(wanted, tensors)
    fill(source, opened.arrays(source), wanted, tensors)
    return absent


def fill(
    source: Layout,
    arrays: Mapping[str, StoredArray],
    wanted: Layout,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Read the boxes that `wanted` names from stored arrays into their places."""
    tensors = viewed(wanted, tensors)
    with torch.no_grad(), StoredArrayReader(arrays) as reader:
        for transfer in intersect_layouts(source, wanted):
            # Large boxes are read in parts, so that a part that must be converted needs
            # little memory.
            for box in split(transfer.dest_box, MAX_READ):
                target = view(tensors[transfer.dest_local], box)
                # A read into host memory goes straight into place. Devices need a host
                # buffer.
                read = (
                    target
                    if target.device.type == "cpu"
                    else torch.empty(box.shape, dtype=target.dtype)
                )
                reader.read(
                    transfer.source_local,
                    carry(box, transfer.dest_box, transfer.source_box),
                    read,
                )
                if read is not target:
                    target.copy_(read)


def clear_padding(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Zero the tensors that contain padding, before weights are read into them."""
    with torch.no_grad():
        for name in padded_tensors(layout):
            tensors[name].zero_()


def check_names(
    folder: Path,
    files: Mapping[str, str],
    weights: Sequence[Weight],
    absent: Collection[str],
) -> None:
    """Check that every weight exists, and that every stored tensor is a weight of the model.

    Args:
        files: tensor -> the file that holds it.
        absent: weights that may be missing.

    Raises:
        ModelError: lists every tensor that is missing or unknown.
    """
    names = {weight.name for weight in weights}
    # DeepSeek-V3 and GLM-4.5 store further predictors as layers behind the last one.
    ignored = further_predictors(folder, weights)
    problems = [
        f"{weight.name}: missing, expected with shape {list(weight.shape)}"
        for weight in weights
        if weight.name not in files and weight.name not in absent
    ]
    problems += [
        f"{name}: in {file}, but config.json describes a model without it"
        for name, file in files.items()
        # Some folders of tied models and of critics store an output layer that the
        # model does not use.
        if name not in names
        and name != LM_HEAD
        and not name.endswith(IGNORED_SUFFIXES)
        and not name.startswith(ignored)
    ]
    _refuse(folder, problems)


def further_predictors(folder: Path, weights: Sequence[Weight]) -> tuple[str, ...]:
    """Return the name prefixes of layers for multi-token prediction, which a policy does not use.

    DeepSeek-V3 and GLM-4.5 have `num_nextn_predict_layers` of them behind the last
    decoder layer. The names of Ernie 4.5 and MiMo start with `model.mtp_`, those of
    Nemotron-H with `mtp.`. So do those of models with gated delta nets, whose config.json
    does not count them.
    """
    file = folder / "config.json"
    config = read_json_file(file) if file.is_file() else {}
    first = 1 + max(
        (weight.stage for weight in weights if isinstance(weight.stage, int)),
        default=-1,
    )
    number = config.get("num_nextn_predict_layers") or 0
    behind = (f"model.layers.{layer}." for layer in range(first, first + number))
    counted = (*behind, "model.mtp_", "mtp.") if number else ()
    has_delta_nets = set(config.get("architectures") or ()) & set(WITH_DELTA_NET)
    return (*counted, "mtp.") if has_delta_nets else counted


def check_shapes(
    folder: Path, stored: Mapping[str, StoredTensor], weights: Sequence[Weight]
) -> None:
    """Raise a ModelError that lists every stored tensor whose shape differs from the model's weight."""
    _refuse(
        folder,
        [
            f"{weight.name}: shape {list(stored[weight.name].shape)} in {stored[weight.name].file.name}, "
            f"expected {list(weight.shape)}"
            for weight in weights
            if weight.name in stored and stored[weight.name].shape != weight.shape
        ],
    )


def check_stored(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    weights: Sequence[Weight],
    absent: Collection[str],
) -> None:
    """Run `check_names`, then `check_shapes`."""
    check_names(
        folder,
        {name: tensor.file.name for name, tensor in stored.items()},
        weights,
        absent,
    )
    check_shapes(folder, stored, weights)


def _refuse(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        raise ModelError(
            f"{folder}: its weights do not fit its config.json:{as_block(problems, MAX_NAMED)}"
            "\nCopy config.json and weights from the same source."
        )


EMBEDDING_KEY = "embedding.word_embeddings.weight"
HEAD_KEY = "output_layer.weight"
# Files that runs and conversions of megaverl write beside an index.
RECORDS = ("manifest.json", "conversion.json")
# Value head of a critic that shares the actor's backbone.
BESIDE_KEY = "value_head.weight"


@dataclass(frozen=True, eq=False)
class OpenedCheckpoint:
    """The index of a checkpoint, with the key prefix of the wanted model.

    Attributes:
        as_critic: whether the wanted model is the actor's backbone with its value head.
    """

    folder: Path
    index: Mapping[str, IndexedArray]
    prefix: str
    as_critic: bool = False

    @property
    def has_value_head(self) -> bool:
        """True if the wanted model is a critic, with one value per position."""
        if self.as_critic:
            return self.index[self.prefix + BESIDE_KEY].shape[0] == 1
        # A critic's head has one row. A language model with a vocabulary of one would
        # look the same, so the embedding must have more.
        head = self.index.get(self.prefix + HEAD_KEY)
        return (
            head is not None
            and head.shape[0] == 1 < self.index[self.prefix + EMBEDDING_KEY].shape[0]
        )

    def layout(self, weights: Sequence[Weight], spec: ModelSpec) -> Layout:
        """Return the places of the weights in the arrays.

        Raises:
            CheckpointError: arrays are missing, have other shapes or belong to another model (all are listed), or
                another program wrote the checkpoint and orders its experts differently.
        """
        if spec.activation == "clamped_swiglu" and not any(
            (self.folder / name).is_file() for name in RECORDS
        ):
            raise CheckpointError(
                f"{self.folder}: neither a run nor a conversion of megaverl wrote it. Other programs store an "
                f"expert's gates first; {spec.architecture} alternates gate and up rows. Take the model's Hugging "
                "Face folder."
            )
        if self.as_critic:
            weights = [
                w._replace(megatron=BESIDE_KEY) if w.megatron == HEAD_KEY else w
                for w in weights
            ]
        # The embedding's own rows decide, since a checkpoint may be padded for another
        # grid than this run's.
        layout = checkpoint_layout(
            weights,
            spec,
            padded_vocab_size=max(
                self.index[self.prefix + EMBEDDING_KEY].shape[0], spec.vocab_size
            ),
            prefix=self.prefix,
            present=self.index.keys(),
        )
        self._check(layout)
        return layout

    def arrays(self, layout: Layout) -> dict[str, StoredArray]:
        """Return the arrays that the layout names, and their views, with the places of their elements."""
        return with_views(
            locate({name: self.index[name] for name in layout.local_shapes}), layout
        )

    def _check(self, layout: Layout) -> None:
        shapes = layout.local_shapes
        problems = [
            f"{key}: missing, expected with shape {list(shape)}"
            for key, shape in shapes.items()
            if key not in self.index
        ]
        problems += [
            f"{key}: shape {list(self.index[key].shape)}, expected {list(shape)}"
            for key, shape in shapes.items()
            if key in self.index and self.index[key].shape != shape
        ]
        # Other keys, such as optimizer states, are none of the model's business.
        parts = (f"{self.prefix}decoder.", f"{self.prefix}embedding.")
        problems += [
            f"{key}: not a weight of the model that config.json describes"
            for key in self.index
            if key.startswith(parts) and key not in shapes
        ]
        if problems:
            raise CheckpointError(
                f"{self.folder}: its weights do not match its config.json:{as_block(problems, MAX_NAMED)}"
                "\nUse the config.json of the model that was trained."
            )


def open_checkpoint(folder: Path, role: str | None = None) -> OpenedCheckpoint:
    """Read the index of a checkpoint and find a model in it: `role`'s, or the only one, or the actor's.

    Raises:
        CheckpointError: as `read_arrays`; or no model has that role, or several could be meant.
    """
    index = read_arrays(folder)
    prefixes = [
        key.removesuffix(EMBEDDING_KEY) for key in index if key.endswith(EMBEDDING_KEY)
    ]
    # Optimizer states repeat the model's keys under prefixes of their own.
    prefixes = [prefix for prefix in prefixes if "optimizer." not in prefix]
    if not prefixes and any(".lora_" in key for key in index):
        raise CheckpointError(
            f"{folder}: holds adapters alone, of a run with `lora`. Take what the run exported: hf is the merged "
            "model, hf_adapter a peft adapter; or resume the run for its last steps."
        )
    if not prefixes:
        raise CheckpointError(
            f"{folder}: holds no GPT model: none of its {len(index)} arrays is an {EMBEDDING_KEY}."
        )
    # A critic that shares the actor's backbone has no keys of its own, except for its
    # value head.
    if (
        role == "critic"
        and "critic." not in prefixes
        and f"actor.{BESIDE_KEY}" in index
    ):
        return OpenedCheckpoint(folder, index, "actor.", as_critic=True)
    return OpenedCheckpoint(folder, index, _choose(folder, prefixes, role))


def _choose(folder: Path, prefixes: Sequence[str], role: str | None) -> str:
    roles = [prefix.removesuffix(".") for prefix in prefixes]
    if role is None and len(prefixes) == 1:
        return prefixes[0]
    wanted = "actor" if role is None else role
    if wanted in roles:
        return prefixes[roles.index(wanted)]
    held = ", ".join(name or "(unnamed)" for name in roles)
    if role is None:
        raise CheckpointError(
            f"{folder}: holds several models; choose one with --role: {held}."
        )
    raise CheckpointError(f"{folder}: no role {role!r} in it. It holds: {held}.")


def without_head(
    weights: Sequence[Weight], opened: OpenedCheckpoint, optional: Collection[str]
) -> list[str]:
    """List the optional weights (a critic's head) that the checkpoint does not have."""
    absent = {
        HEAD_KEY: not opened.has_value_head,
        BESIDE_KEY: opened.prefix + BESIDE_KEY not in opened.index,
    }
    return [
        weight.name
        for weight in weights
        if weight.name in optional and absent.get(weight.megatron, False)
    ]
