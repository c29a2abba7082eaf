"""A model's adapters, whoever computes them, and their way into weights elsewhere."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.groups import Grid
from megaverl.models.lora.low_rank import (
    Layouts,
    LowRank,
    factor_layout,
    factor_weights,
    names_of_factors,
    written_to,
)
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import Weight

CHUNK = 1 << 22  # elements that are merged in float32 at a time, into weights of 16 bits


class AdapterSet(ABC):
    """All adapters of a model on this rank.

    Args:
        trained: weights of the model itself that are trained beside them: a critic's head.

    Attributes:
        trained: their names.
        low_ranks: adapter by the name of its weight, of the whole model.
        weights: the factors and what else is trained, as global arrays.
        parameters: the same on this rank, by local name.
        layout_of: rank -> where they lie.
    """

    layout_of: Layouts
    parameters: Mapping[str, torch.Tensor]

    def __init__(
        self, low_ranks: Mapping[str, LowRank], lora: LoraConfig, grid: Grid, role: str, trained: Sequence[Weight]
    ) -> None:
        self.config, self.grid, self.role, self.low_ranks = lora, grid, role, low_ranks
        self.trained = tuple(weight.name for weight in trained)
        self.weights = [*factor_weights(low_ranks), *trained]

    @property
    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """Each adds what its adapter gives while it is `active`."""

    @abstractmethod
    def beside(self, layouts: Layouts) -> Layouts:
        """Layouts of the model's weights, each with the factors that the rank holds."""

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without its adapters, which is the one that training started from."""
        for adapter in self.modules:
            adapter.active = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for adapter in self.modules:
                adapter.active = True  # type: ignore[assignment]


def initial_factor(low_rank: LowRank, seed: int) -> torch.Tensor:
    """A [rank, columns] as peft initialises it: uniform, as of `nn.Linear`; from the seed and its name alone."""
    shape = low_rank.shapes[low_rank.a]
    digest = hashlib.blake2b(f"lora/{seed}/{low_rank.a}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.empty(shape).uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(shape[1]))


class Merge:
    """Adds adapters to weights that arrive in another layout, in place, as often as they have arrived anew.

    The base weights and the factors travel by one plan; a rank that holds a box of a weight gets the rows of B and the
    columns of A that belong to it. The product is added after all has landed, some rows at a time: no second copy of
    anything, and the source's weights stay as they are to the last bit.

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
    def apply(self, view_of: Callable[[str, Box], torch.Tensor], only: Collection[str] | None = None) -> None:
        """Add alpha / rank * B A to every weight that has an adapter; each must hold its base value.

        Args:
            view_of: the box of a local tensor -> its elements, to be written to.
            only: to these, by their global names.
        """
        for piece in self._pieces:
            if only is None or piece.tensor in only:
                target = view_of(piece.local, piece.local_box)
                add_product(target, *self._factors_of(self._adapters[piece.tensor], piece.box), self.scaling)

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
