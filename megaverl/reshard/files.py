"""The file mover: a rank's own slices out of a Hugging Face folder, straight into its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megaverl.errors import ModelError
from megaverl.layout.files import AGAIN, StoredTensor, folder_layout, read_folder
from megaverl.layout.layout import Layout, padded_tensors
from megaverl.layout.weights import Weight
from megaverl.reshard.plan import MAX_NAMED, Transfer, intersect_layouts
from megaverl.reshard.views import check_tensors, view

# Tensors that some files hold though no model reads them: buffers that are computed from the configuration.
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

    Values are converted to the tensors' dtype; padding (vocabulary rows beyond the model's) becomes zero.

    Args:
        folder: a Hugging Face folder, one safetensors file or sharded with an index.
        layout: this rank's layout, from `megatron_layout` or another.
        tensors: local name -> tensor or parameter, any device and floating dtype; more may be in it.
        weights: all weights of the model, so that every rank finds the same mistakes.
        optional: names that the folder may lack, such as a critic's `score.weight`.

    Returns:
        The optional names that the folder lacks: the caller initialises them.

    Raises:
        ModelError: a missing or damaged file, missing or left-over tensors, wrong shapes: names them all.
    """
    stored = read_folder(folder)
    absent = [weight.name for weight in weights if weight.name in optional and weight.name not in stored]
    _check_names(Path(folder), stored, weights, absent)
    check_tensors(layout, tensors, "the model", ModelError)
    wanted = _without(layout, absent)
    # the weights decide which tensors are read: a second head stored beside tied embeddings is none of them
    source = folder_layout({weight.name: stored[weight.name] for weight in weights if weight.name in stored})
    by_file: dict[Path, list[Transfer]] = {}
    for transfer in intersect_layouts(source, wanted):
        by_file.setdefault(stored[transfer.tensor].file, []).append(transfer)
    with torch.no_grad():
        for name in padded_tensors(wanted):
            tensors[name].zero_()
        for file, transfers in by_file.items():
            _read_file(file, transfers, tensors)
    return absent


def _read_file(file: Path, transfers: Sequence[Transfer], tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        with safe_open(file, framework="pt", device="cpu") as stream:
            for transfer in transfers:
                box = stream.get_slice(transfer.tensor)[transfer.source_box.slices]
                target = view(tensors[transfer.dest_local], transfer.dest_box)
                target.copy_(box.reshape(target.shape))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read ({error}). {AGAIN}") from error


def _without(layout: Layout, absent: Collection[str]) -> Layout:
    if not absent:
        return layout
    pieces = tuple(piece for piece in layout.pieces if piece.tensor not in absent)
    locals_used = {piece.local for piece in pieces}
    return Layout(
        pieces,
        {name: shape for name, shape in layout.local_shapes.items() if name in locals_used},
        {name: shape for name, shape in layout.global_shapes.items() if name not in absent},
    )


def _check_names(
    folder: Path, stored: Mapping[str, StoredTensor], weights: Sequence[Weight], absent: Collection[str]
) -> None:
    """Every weight is there with its shape, and every tensor of the folder is a weight of the model."""
    shapes = {weight.name: weight.shape for weight in weights}
    problems = [
        f"{name}: missing, expected with shape {list(shape)}"
        for name, shape in shapes.items()
        if name not in stored and name not in absent
    ]
    problems += [
        f"{name}: shape {list(stored[name].shape)} in {stored[name].file.name}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    problems += [
        f"{name}: in {tensor.file.name}, but config.json describes a model without it"
        for name, tensor in stored.items()
        # tied models and critics have no head of their own, yet some folders store one
        if name not in shapes and name != LM_HEAD and not name.endswith(IGNORED_SUFFIXES)
    ]
    if problems:
        more = f"\n  and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ModelError(
            f"{folder}: its weights do not fit its config.json:\n  "
            + "\n  ".join(problems[:MAX_NAMED])
            + more
            + "\nCopy config.json and weights from the same source."
        )
