"""LoRA (arXiv 2106.09685) on the linear layers of a Hugging Face model: h = W x + alpha / rank * B A x, with W frozen.

An adapter is a module below its layer, so that FSDP gathers and cuts its factors with the layer's block; each factor
is cut by rows, as every parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.groups import Grid
from megaverl.models.hf_shards import ShardedWeights, shard_box
from megaverl.models.lora.adapter_set import AdapterSet, initial_factor
from megaverl.models.lora.low_rank import ADAPTER, Layouts, LowRank, follow, low_ranks
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout, Piece, join_layouts

FACTORS = ("lora_A", "lora_B")


class LinearAdapter(nn.Module):
    """The factors of one linear layer, in float32."""

    def __init__(self, layer: nn.Linear, low_rank: LowRank, lora: LoraConfig) -> None:
        super().__init__()
        self.scaling, self.dropout, self.active = lora.alpha / lora.rank, lora.dropout, True
        device = layer.weight.device
        for name, shape in zip(FACTORS, low_rank.shapes.values(), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device)))

    def add_to(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """A forward hook of the layer."""
        if not self.active:
            return output
        hidden = F.dropout(args[0], self.dropout) if self.dropout and self.training else args[0]
        a, b = (self.get_parameter(name).to(hidden.dtype) for name in FACTORS)
        return output + F.linear(F.linear(hidden, a) * self.scaling, b)


class LayerFactors(NamedTuple):
    """Which layers of a model have adapters.

    Attributes:
        low_ranks: adapter by the name of its weight in the files.
        layers: name of the layer in the module -> its adapter.
    """

    low_ranks: dict[str, LowRank]
    layers: dict[str, LowRank]

    @property
    def factors(self) -> dict[str, tuple[str, LowRank]]:
        """Local name -> a factor's global name, and its adapter."""
        return {
            f"{layer}.{ADAPTER}.{local}": (factor, low_rank)
            for layer, low_rank in self.layers.items()
            for local, factor in zip(FACTORS, (low_rank.a, low_rank.b), strict=True)
        }

    def layout(self, shard: int, num_shards: int) -> Layout:
        """What a shard holds of the factors."""
        pieces: list[Piece] = []
        local_shapes: dict[str, tuple[int, ...]] = {}
        global_shapes: dict[str, tuple[int, ...]] = {}
        for local, (factor, low_rank) in self.factors.items():
            box = shard_box(whole(low_rank.shapes[factor]), shard, num_shards)
            if box.numel:
                pieces.append(Piece(factor, box, local, whole(box.shape)))
                local_shapes[local], global_shapes[factor] = box.shape, low_rank.shapes[factor]
        return Layout(tuple(pieces), local_shapes, global_shapes)

    def beside(self, layouts: Layouts, num_shards: int) -> Layouts:
        """Layouts of the model's weights, each with the factors that the rank holds."""

        @cache
        def of_shard(shard: int) -> Layout:
            return join_layouts(layouts(shard), self.layout(shard, num_shards))

        return lambda rank: of_shard(rank % num_shards)


def layer_factors(model: nn.Module, held: ShardedWeights, lora: LoraConfig, role: str) -> LayerFactors:
    """Of a model that is still whole, with or without data.

    Raises:
        ModelError: targets that name no linear layer.
    """
    name_of = {file: name.rpartition(".")[0] for name, file in held.renamed.items()}
    linear = [
        weight
        for weight in held.weights
        if weight.name in name_of and isinstance(model.get_submodule(name_of[weight.name]), nn.Linear)
    ]
    found = low_ranks(linear, lora.targets, lora.rank, f"{role}.lora")
    return LayerFactors(found, {name_of[file]: low_rank for file, low_rank in found.items()})


class HFAdapters(AdapterSet):
    """All adapters of a model of transformers; made before it is cut, filled by `attach` afterwards.

    Args:
        model: still whole; everything in it is frozen.
        trained: names of weights that are trained besides.

    Raises:
        ModelError: as `layer_factors`.
    """

    def __init__(
        self,
        model: nn.Module,
        held: ShardedWeights,
        lora: LoraConfig,
        grid: Grid,
        num_shards: int,
        *,
        trained: Sequence[str] = (),
        role: str,
        seed: int,
    ) -> None:
        self._chosen = layer_factors(model, held, lora, role)
        more = [weight for weight in held.weights if weight.name in trained]
        super().__init__(self._chosen.low_ranks, lora, grid, role, more)
        self._seed, self._num_shards = seed, num_shards
        self._adapters: list[LinearAdapter] = []
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, low_rank in self._chosen.layers.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapter = LinearAdapter(layer, low_rank, lora)
            layer.add_module(ADAPTER, adapter)
            layer.register_forward_hook(adapter.add_to)
            self._adapters.append(adapter)
        self.layout_of = self.beside(follow(held.layout_of, self._trained_layout))

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """The model has been cut: `parameters` are this rank's, by the names of its `state_dict`. Fills the factors."""
        layout, factors = self.layout_of(self.grid.rank), self._chosen.factors
        self.parameters = {name: parameters[name] for name in layout.local_shapes}
        with torch.no_grad():
            for piece in layout.pieces:
                place = self.parameters[piece.local]
                if piece.local in factors and piece.tensor == factors[piece.local][1].a:
                    place.copy_(initial_factor(factors[piece.local][1], self._seed)[piece.box.slices])
                elif piece.local in factors:
                    place.zero_()

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._adapters

    def beside(self, layouts: Layouts) -> Layouts:
        return self._chosen.beside(layouts, self._num_shards)

    def _trained_layout(self, layout: Layout) -> Layout:
        return layout.without(layout.global_shapes.keys() - set(self.trained))
