"""Merging low-rank adapters into weights that arrive in another layout: W + alpha / rank * B A, where they land.

The base weights and the factors travel by one plan; a rank that holds a box of a weight gets the rows of B and the
columns of A that belong to it, a few hundredths of the weight's bytes. The product is added in place after all has
landed, some rows at a time: no second copy of anything, and the source's weights stay as they are to the last bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megaverl.distributed.collectives import on_first_rank
from megaverl.errors import ModelError
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.files import folder_layout, read_header
from megaverl.sharding.layout import EMPTY, Layout, whole_layout
from megaverl.sharding.low_rank import PEFT_PREFIX, LowRank, factor_layout, names_of_factors, written_to
from megaverl.sharding.plan import make_plan
from megaverl.sharding.weight import Weight
from megaverl.weights.load import check_names, check_shapes, fill
from megaverl.weights.reshard import Resharder
from megaverl.weights.safetensors_writer import cannot_write
from megaverl.weights.stored import stored_arrays
from megaverl.weights.tensors import Tensors, check_tensors, view

CHUNK = 1 << 22  # elements that are computed in float32 at a time, for weights of 16 bits


class Merge:
    """Adds adapters to the weights of one rank, in place, as often as they have arrived anew.

    Args:
        layout: of the weights there.
        scaling: alpha / rank.
        dtype: of the factors.

    Attributes:
        factors: the tensors in which the factors arrive, by their global names.
        brought: weights and factors, by their global names, that must come anew before each `apply`.
        written: local tensors that are written to: no other tensor may share their storage.
    """

    def __init__(
        self,
        layout: Layout,
        adapters: Mapping[str, LowRank],
        scaling: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._adapters, self.scaling = adapters, scaling
        self.written = written_to(layout, adapters)
        self.brought = frozenset(name for key, adapter in adapters.items() for name in (key, adapter.a, adapter.b))
        held = factor_layout(layout, adapters, names_of_factors)
        self.factors = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in held.local_shapes.items()
        }
        self._boxes = {piece.tensor: piece.box for piece in held.pieces}
        self._pieces = [piece for piece in layout.pieces if piece.tensor in adapters]

    @torch.no_grad()
    def apply(self, tensors: Tensors) -> None:
        """Add alpha / rank * B A to every weight that has an adapter; each must hold its base value."""
        for piece in self._pieces:
            adapter = self._adapters[piece.tensor]
            target = view(tensors[piece.local], piece.local_box)
            add_product(target, *self._factors_of(adapter, piece.box), self.scaling)

    def _factors_of(self, adapter: LowRank, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) of a box of the weight."""
        left = box.start[1] - self._boxes[adapter.a].start[1]
        top = box.start[0] - self._boxes[adapter.b].start[0]
        rows, columns = box.shape
        return self.factors[adapter.a][:, left : left + columns], self.factors[adapter.b][top : top + rows]


def add_product(target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """target += scaling * b a, computed in float32 at least and rounded once.

    Args:
        target: [rows, columns], up to axes of size one.
        a: [rank, columns].
        b: [rows, rank].
    """
    matrix = target.view(b.shape[0], a.shape[1])
    if target.dtype in (torch.float32, torch.float64):
        matrix.addmm_(b.to(target.dtype), a.to(target.dtype), alpha=scaling)
        return
    a, b = a.float(), b.float()
    for part in split(whole(tuple(matrix.shape)), CHUNK):
        rows, columns = part.slices
        place = matrix[rows, columns]
        place.copy_(torch.addmm(place.float(), b[rows], a[:, columns], alpha=scaling))


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# What this reads and writes is plain LoRA: these of peft's fields must say so.
PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def save_adapter(
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    weights: Sequence[Weight],
    layouts: Callable[[int], Layout],
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write an adapter folder, which takes its name when it is whole. Every rank of the group takes part.

    Args:
        config: fields of peft's LoraConfig, besides those that make it plain LoRA.
        weights: the factors, and what else is trained, as global arrays.
        layouts: rank -> where they lie in `tensors`; the first rank of the group gathers them all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder, rank = Path(folder), dist.get_rank(group)
    everything = whole_layout([(weight.name, weight.shape) for weight in weights])
    plan = make_plan(layouts, lambda other: everything if other == 0 else EMPTY, dist.get_world_size(group), rank)
    dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
    shapes = everything.local_shapes if rank == 0 else {}
    landed = {name: torch.empty(shape, dtype=dtype, device=platform.device) for name, shape in shapes.items()}
    Resharder(plan, tensors, landed, group).run()
    on_first_rank(lambda: _write(folder, config, landed), group)


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    fields = {"peft_type": "LORA", **PLAIN, "inference_mode": True, "init_lora_weights": True, **config}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        named = {_stored_name(name): tensor.cpu() for name, tensor in tensors.items()}
        save_file(named, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise cannot_write(folder, OSError(error)) from error


def _stored_name(name: str) -> str:
    """Factors are called as peft calls them; a module that is trained whole gets peft's prefix."""
    return name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def load_adapter(
    folder: str | Path,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    weights: Sequence[Weight],
    rank: int,
    alpha: float,
    key: str,
) -> None:
    """Fill this rank's factors from an adapter folder, reading only its own parts.

    Args:
        weights: as of `save_adapter`.
        rank, alpha: what the run has been given; the folder must say the same.
        key: the setting that messages name.

    Raises:
        ModelError: no such folder, no plain LoRA, another rank or alpha, or adapters of other layers: names them all.
    """
    folder = Path(folder)
    config = read_config(folder)
    wrong = [f"{name} is {config[name]!r}" for name, plain in PLAIN.items() if (config.get(name) or plain) != plain]
    if config.get("peft_type") != "LORA" or wrong:
        what = "; ".join([f"peft_type is {config.get('peft_type')!r}", *wrong])
        raise ModelError(f"{folder / CONFIG_FILE}: {what}. Only plain LoRA adapters can be trained on.")
    if (found := (config.get("r"), config.get("lora_alpha"))) != (rank, alpha):
        raise ModelError(
            f"{folder / CONFIG_FILE}: r is {found[0]} and lora_alpha {found[1]}, this run has {key}.rank={rank} and "
            f"{key}.alpha={alpha:g}. Give the adapter's."
        )
    check_tensors(layout, tensors, "the model", ModelError)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise ModelError(f"{file}: not found. An adapter folder has {CONFIG_FILE} and {WEIGHTS_FILE}.")
    names = {_stored_name(weight.name): weight.name for weight in weights}
    stored = {names.get(name, name): tensor for name, tensor in read_header(file).items()}
    try:
        check_names(folder, dict.fromkeys(stored, file.name), weights, ())
        check_shapes(folder, stored, weights)
    except ModelError as error:
        raise ModelError(f"{error}\n(It is an adapter: {key}.targets must name the same layers.)") from error
    fill(folder_layout(stored), stored_arrays(stored), layout, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    file = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}). Name the folder of a peft adapter.") from error
    return config
