"""Adapters of a model, independent of the engine: merging them into weights in another layout, and peft folders.

An adapter folder holds adapter_config.json and adapter_model.safetensors, as the `peft`
library writes and reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.collectives import on_first_rank, together
from megaverl.distributed.groups import Grid
from megaverl.errors import ModelError
from megaverl.models.lora.low_rank import (
    ALL_LINEAR,
    PEFT_PREFIX,
    Layouts,
    LowRank,
    factor_weights,
    held_columns,
    held_rows,
    landed_factors,
    written_to,
)
from megaverl.outside import read_json_file
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import EMPTY, Layout, whole_layout
from megaverl.sharding.plan import make_plan
from megaverl.sharding.weight import Weight
from megaverl.weights.load import check_names, check_shapes, fill
from megaverl.weights.reshard import Resharder
from megaverl.weights.safetensors_writer import cannot_write, replace_folder
from megaverl.weights.stored import folder_layout, read_header, stored_arrays
from megaverl.weights.transports import check_tensors

# Number of elements merged at a time: 16-bit weights are added to in float32, which
# takes memory for a copy.
CHUNK = 1 << 22


class AdapterSet(ABC):
    """All adapters of a model on this rank.

    Args:
        low_ranks: adapter by the name of its weight.
        lora: the role's settings.
        grid: the model's grid.
        role: role name, for messages.
        trained: weights of the model itself that are trained as well, such as a critic's head.

    Attributes:
        trained: names of these weights.
        low_ranks: adapter by the name of its weight, for the whole model.
        weights: factors and other trained weights, as global arrays.
        parameters: the same on this rank, by local name.
        layout_of: rank -> their layout.
    """

    layout_of: Layouts
    parameters: Mapping[str, torch.Tensor]

    def __init__(
        self,
        low_ranks: Mapping[str, LowRank],
        lora: LoraConfig,
        grid: Grid,
        role: str,
        trained: Sequence[Weight],
    ) -> None:
        self.config = lora
        self.grid = grid
        self.role = role
        self.low_ranks = low_ranks
        self.trained = tuple(weight.name for weight in trained)
        self.weights = [*factor_weights(low_ranks), *trained]

    # Order of the stored tensors: factors first, then weights that are trained as a
    # whole.
    @property
    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """Modules that add the adapters' output while their attribute `active` is true."""

    @abstractmethod
    def beside(self, layouts: Layouts) -> Layouts:
        """Return layouts of the model's weights, each extended by the factors that the rank holds."""

    @property
    def scaling(self) -> float:
        """Factor on the adapters' output, alpha / rank."""
        return self.config.alpha / self.config.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters inside, which gives the model that training started from."""
        for adapter in self.modules:
            adapter.active = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for adapter in self.modules:
                adapter.active = True  # type: ignore[assignment]


def initial_factor(low_rank: LowRank, seed: int) -> torch.Tensor:
    """Return the initial A [rank, columns], uniform as in peft. It depends on the seed and the factor's name only."""
    shape = low_rank.shapes[low_rank.a]
    # A seed of name and run, so that A does not depend on the grid or on the order of
    # layers.
    digest = hashlib.blake2b(
        f"lora/{seed}/{low_rank.a}".encode(), digest_size=8
    ).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return (
        torch.empty(shape)
        .uniform_(-1.0, 1.0, generator=generator)
        .div_(math.sqrt(shape[1]))
    )


@torch.no_grad()
def reset_factors(adapters: AdapterSet, seed: int) -> None:
    """Set the factors to the initial values of new adapters: A from the seed, B to zero.

    The values do not depend on the grid. Other trained weights stay as they are.
    """
    by_a = {low_rank.a: low_rank for low_rank in adapters.low_ranks.values()}
    names_of_b = {low_rank.b for low_rank in adapters.low_ranks.values()}
    for piece in adapters.layout_of(adapters.grid.rank).pieces:
        place = adapters.parameters[piece.local][piece.local_box.slices]
        if piece.tensor in by_a:
            values = initial_factor(by_a[piece.tensor], seed)
            place.copy_(values[piece.box.slices])
        elif piece.tensor in names_of_b:
            place.zero_()


class Merge:
    """Merges adapters into weights in another layout, in place, each time the base weights have arrived.

    Base weights and factors arrive by one plan. A rank that holds a box of a weight
    gets the matching rows of B and columns of A. The product is added after everything
    has arrived, in chunks. No tensor is copied as a whole, and the source's weights
    stay bitwise unchanged.

    Args:
        layout: layout of the weights at the destination.
        adapters: adapter by the name of its weight.
        scaling: alpha / rank.
        dtype: dtype of the factors.

    Attributes:
        factors: tensors that receive the factors, by global name.
        brought: global names of weights and factors that must arrive again before each `apply`.
        written: local tensors that are modified, so no other tensor may share their storage.
    """

    def __init__(
        self,
        layout: Layout,
        adapters: Mapping[str, LowRank],
        scaling: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._adapters = adapters
        self.scaling = scaling
        self.written = written_to(layout, adapters)
        self.brought = frozenset(
            name
            for key, adapter in adapters.items()
            for name in (key, adapter.a, adapter.b)
        )
        all_factors = landed_factors(layout, adapters)
        self.factors = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, shape in all_factors.local_shapes.items()
        }
        held = {
            name: pieces
            for name, pieces in layout.by_tensor.items()
            if name in adapters
        }
        self._rows = {name: held_rows(pieces) for name, pieces in held.items()}
        self._columns = {
            name: held_columns(adapters[name].weight, pieces)
            for name, pieces in held.items()
        }
        # Pieces of the destination, each of which gets the product of its own rows and
        # columns.
        self._pieces = [piece for piece in layout.pieces if piece.tensor in adapters]

    @torch.no_grad()
    def apply(
        self,
        view_of: Callable[[str, Box], torch.Tensor],
        only: Collection[str] | None = None,
    ) -> None:
        """Add alpha / rank * B A to every weight with an adapter. Each must hold its base value.

        Args:
            view_of: (local tensor, box) -> writable view of these elements.
            only: global names of the weights to change. None: all.
        """
        for piece in self._pieces:
            if only is None or piece.tensor in only:
                target = view_of(piece.local, piece.local_box)
                add_product(
                    target,
                    *self._factors_of(self._adapters[piece.tensor], piece.box),
                    self.scaling,
                )

    def _factors_of(
        self, adapter: LowRank, box: Box
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (A, B) for a box of the weight."""
        name = adapter.weight.name
        # Factors hold only the rows and columns that this rank needs.
        left = box.start[1] - self._columns[name].start
        top = self._rows[name].position(box.start[0])
        rows, columns = box.shape
        a = self.factors[adapter.a][:, left : left + columns]
        b = self.factors[adapter.b][top : top + rows]
        return a, b


def add_product(
    target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> None:
    """Compute target += scaling * b a in float32 or wider, rounding once.

    Args:
        target: [rows, columns], possibly with axes of size one.
        a: [rank, columns].
        b: [rows, rank].
    """
    # The weight may be one expert of a larger tensor, with axes of size one.
    matrix = target.view(b.shape[0], a.shape[1])
    if target.dtype in (torch.float32, torch.float64):
        matrix.addmm_(b.to(target.dtype), a.to(target.dtype), alpha=scaling)
        return
    a = a.float()
    b = b.float()
    # Chunks bound the float32 copies of 16-bit weights.
    for part in split(whole(tuple(matrix.shape)), CHUNK):
        rows, columns = part.slices
        place = matrix[rows, columns]
        place.copy_(torch.addmm(place.float(), b[rows], a[:, columns], alpha=scaling))


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Fields of peft's configuration that must have these values: only plain LoRA is
# supported.
PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def save_adapters(adapters: AdapterSet, folder: str | Path, *, base: str) -> None:
    """Write an adapter folder. It gets its name when it is complete. Collective over the grid.

    Args:
        base: the base model, for peft's `base_model_name_or_path`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    group = adapters.grid.world
    rank = adapters.grid.rank
    folder = Path(folder)
    everything = whole_layout(
        [(weight.name, weight.shape) for weight in adapters.weights]
    )
    # Everything goes to the first rank. The plan is computed alike on all ranks.
    plan = make_plan(
        adapters.layout_of,
        lambda dest: everything if dest == 0 else EMPTY,
        adapters.grid.shape.world_size,
        rank,
    )
    tensors = adapters.parameters
    dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
    shapes = everything.local_shapes if rank == 0 else {}
    landed = {
        name: torch.empty(shape, dtype=dtype, device=platform.device)
        for name, shape in shapes.items()
    }
    Resharder(plan, tensors, landed, group).run()
    fields = {
        "peft_type": "LORA",
        **PLAIN,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    # The first rank writes, and all ranks raise its errors.
    on_first_rank(
        lambda: _write(folder, fields | _own_fields(adapters, base), landed), group
    )


def _own_fields(adapters: AdapterSet, base: str) -> dict[str, Any]:
    """Return the fields of peft's LoraConfig that this run decides."""
    lora = adapters.config
    targets: Any = lora.targets
    if targets == ALL_LINEAR:
        targets = sorted(
            {low_rank.projection for low_rank in adapters.low_ranks.values()}
        )
    return {
        "base_model_name_or_path": base,
        "task_type": "TOKEN_CLS" if adapters.trained else "CAUSAL_LM",
        "r": lora.rank,
        # peft has a whole number here, and writes one.
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "modules_to_save": ["score"] if adapters.trained else None,
    }


def _write(
    folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write a folder under a temporary name, then rename it."""
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        named = {_stored_name(name): tensor.cpu() for name, tensor in tensors.items()}
        save_file(named, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(folder, OSError(error)) from error
    replace_folder(temporary, folder)


def _stored_name(name: str) -> str:
    """Return a tensor's name in the file: peft's for factors, and peft's prefix before other trained weights."""
    return name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def load_adapters(adapters: AdapterSet, folder: str | Path) -> None:
    """Load a peft folder into a model's adapters, each rank its own parts. Collective over the grid.

    Raises:
        ModelError: on every rank: the folder is missing, is not plain LoRA, or has another rank, alpha or other layers.
    """
    with together(adapters.grid.world):
        _load(adapters, Path(folder))


def _load(adapters: AdapterSet, folder: Path) -> None:
    """Load a peft folder into this rank's parts of the adapters."""
    config = read_config(folder)
    lora = adapters.config
    key = f"{adapters.role}.lora"
    wrong = [
        f"{name} is {config[name]!r}"
        for name, plain in PLAIN.items()
        if (config.get(name) or plain) != plain
    ]
    if config.get("peft_type") != "LORA" or wrong:
        differences = "; ".join([f"peft_type is {config.get('peft_type')!r}", *wrong])
        raise ModelError(
            f"{folder / CONFIG_FILE}: {differences}. Only plain LoRA adapters can be trained on."
        )
    if (sizes := (config.get("r"), config.get("lora_alpha"))) != (
        lora.rank,
        lora.alpha,
    ):
        raise ModelError(
            f"{folder / CONFIG_FILE}: r is {sizes[0]} and lora_alpha {sizes[1]}, this run has {key}.rank={lora.rank} "
            f"and {key}.alpha={lora.alpha:g}. Give the adapter's."
        )
    layout = adapters.layout_of(adapters.grid.rank)
    check_tensors(layout, adapters.parameters, "the model", ModelError)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise ModelError(
            f"{file}: not found. An adapter folder has {CONFIG_FILE} and {WEIGHTS_FILE}."
        )
    # Factors have peft's names already, others get its prefix.
    names = {_stored_name(weight.name): weight.name for weight in adapters.weights}
    stored = {
        names.get(name, name): tensor for name, tensor in read_header(file).items()
    }
    try:
        check_names(folder, dict.fromkeys(stored, file.name), adapters.weights, ())
        check_shapes(folder, stored, adapters.weights)
    except ModelError as error:
        raise ModelError(
            f"{error}\n(It is an adapter: {key}.targets must name the same layers.)"
        ) from error
    fill(folder_layout(stored), stored_arrays(stored), layout, adapters.parameters)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter folder.

    Raises:
        ModelError: it is missing or damaged.
    """
    file = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = read_json_file(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file}: cannot be read ({error}). Name the folder of a peft adapter."
        ) from error
    return config
