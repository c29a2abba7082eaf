"""A model's adapters, whoever computes them."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.groups import Grid
from megaverl.models.lora.low_rank import Layouts, LowRank, factor_weights
from megaverl.sharding.weight import Weight


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
