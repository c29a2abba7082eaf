"""LoRA (arXiv 2106.09685) on the linear layers of a model: h = W x + alpha / rank * B A x, with W frozen.

On megatron-core's layers an adapter is a separate module beside its layer, whose
parameters, names and code stay unchanged. A fused layer (`linear_qkv`, `linear_fc1`)
has factors for each of its Hugging Face projections, as `peft` stores them; the layout
says which rows belong to which projection. Under tensor parallelism a factor is split
where the weight is split: B of a column-parallel layer, A of a row-parallel one. The
other factor and its gradient are whole on every rank:

- column parallel: y = A x on the whole input, and B holds this rank's rows. In the backward pass y's gradient is summed
  over the ranks. With sequence parallelism y is gathered, and its gradient is reduce-scattered. A gated delta net sums
  the gradient of its projections' input itself; then A's gradient is summed in place of y's.
- row parallel: the ranks' A x are summed (or reduce-scattered), then B maps the sum.
- replicated (the down-projections of latent attention): no communication.

So adapters communicate `rank` numbers per token and projection.

On a Hugging Face model's layers an adapter is a child module of its layer, so FSDP
gathers and shards the factors with the layer's block. Each factor is sharded by rows,
like every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.groups import Grid
from megaverl.models.freezing import keep_graph
from megaverl.models.hf_shards import ShardedWeights
from megaverl.models.layers import sum_gradients
from megaverl.models.lora.adapter_set import AdapterSet, initial_factor
from megaverl.models.lora.low_rank import (
    ADAPTER,
    Layouts,
    LowRank,
    StackedRows,
    follow,
    held_columns,
    held_rows,
    low_ranks,
    parameter_beside,
    trained_factors,
    with_trained_factors,
)
from megaverl.platform import platform
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout, Piece, join_layouts, shard_box
from megaverl.sharding.weight import Split, Weight

platform.adapt_megatron()

from megatron.core.tensor_parallel import (  # noqa: E402
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class AdaptedProjection(NamedTuple):
    """One projection of a layer.

    Attributes:
        low_rank: its adapter.
        pieces: pieces of its weight on this rank.
        rows: rows of the weight that they cover.
        columns: columns of the weight that each of them has.
    """

    low_rank: LowRank
    pieces: Sequence[Piece]
    rows: StackedRows
    columns: range


class Adapter(nn.Module):
    """Adapters of one linear layer, whose output is added to the layer's.

    Args:
        parts: projections with an adapter, in the order of the layer's rows.
        num_rows: rows of the layer's weight on this rank.
        layer: the linear layer.
        seed: seed of A's initial values, which do not depend on the grid. B starts at zero.
    """

    def __init__(
        self,
        parts: Sequence[AdaptedProjection],
        num_rows: int,
        layer: nn.Module,
        lora: LoraConfig,
        config: TransformerConfig,
        grid: Grid,
        seed: int,
    ) -> None:
        super().__init__()
        self.split = parts[0].low_rank.weight.split
        self.scaling = lora.alpha / lora.rank
        self.dropout = lora.dropout
        # The caller sums the gradients of the layer's input, and has gathered the input.
        self.has_whole_input = bool(getattr(layer, "disable_grad_reduce", False))
        self.sequence_parallel = (
            bool(config.sequence_parallel)
            and grid.shape.tp > 1
            and not self.has_whole_input
        )
        self.tp_group: dist.ProcessGroup = grid.tp_group
        self.context_rank = grid.coords.cp
        self.context_size = grid.shape.cp
        self.active = True
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        shared = self.sequence_parallel
        is_row = self.split is Split.ROW
        is_column = self.split not in (Split.ROW, Split.REPLICATED)
        # With sequence parallelism a whole factor sees only a part of the sequence, so
        # its gradient must be summed.
        # A rank without a row of a projection has its A alone.
        for low_rank, _, rows, columns in parts:
            a = initial_factor(low_rank, seed)[:, columns.start : columns.stop]
            b = torch.zeros(rows.number, lora.rank)
            for factors, values, cut in (
                (self.lora_A, a, is_row),
                (self.lora_B, b, is_column),
            ):
                if not len(values):
                    continue
                # A copy: `to` could return a view of the factor, whose other part
                # belongs to another rank.
                parameter = nn.Parameter(
                    values.to(
                        platform.device, config.params_dtype, copy=True
                    ).contiguous()
                )
                parameter.tensor_model_parallel = cut  # type: ignore[attr-defined]
                parameter.partition_dim = int(factors is self.lora_A) if cut else -1  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
                parameter.sequence_parallel = shared and not cut  # type: ignore[attr-defined]
                factors[low_rank.projection] = parameter
        self.order: torch.Tensor | None
        # An index without values of its own, so it is not saved.
        self.register_buffer("order", _row_order(parts, num_rows), persistent=False)
        self.to(platform.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the adapters' output: [s, b, columns on this rank] -> [s, b, rows on this rank]."""
        low = self._low(self._dropped(hidden))
        # Scaled between the factors, where there are only `rank` numbers per token.
        return F.linear(low * self.scaling, self._rows())

    def _low(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return A x for all projections of the layer, [s, b, rank * projections]."""
        # All of them read the same input, so one product serves them.
        a = torch.cat(list(self.lora_A.values()))
        group = self.tp_group
        if self.has_whole_input:
            return F.linear(hidden, sum_gradients(a, group))
        low = F.linear(hidden, a)
        if self.split is Split.REPLICATED:
            return low
        if self.split is Split.ROW:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            low = reduce(low, group=group)
        elif self.sequence_parallel:
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=group
            )
        else:
            low = sum_gradients(low, group)
        return low

    def add_to(
        self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: Any
    ) -> Any:
        """Forward hook of the linear layer that adds the adapters' output for the same input.

        `output` is (out, bias). Transformer Engine's layers with a norm inside give
        ((out, normalized), bias), or (out, bias, normalized) if the caller adds the
        bias.
        """
        hidden = args[0]
        if len(output) == 3:
            out, bias, hidden = output
        else:
            out, bias = output
            if isinstance(out, tuple):
                out, hidden = out
        return (out + self(hidden) if self.active else out), bias

    def _rows(self) -> torch.Tensor:
        """Return the combined B, [rows, rank * projections]. Each row reads its own projection's part of A x."""
        # Block-diagonal: every projection reads its own `rank` numbers.
        rows: torch.Tensor = torch.block_diag(
            *(
                self.lora_B[name] if name in self.lora_B else a.new_zeros(0, len(a))
                for name, a in self.lora_A.items()
            )
        )
        if self.order is None:
            return rows
        # Some projections of the fused layer have no adapter.
        if len(self.order) > len(rows):
            # The index one past the last row selects zeros, for projections without an
            # adapter.
            rows = F.pad(rows, (0, 0, 0, 1))
        return rows.index_select(0, self.order)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply dropout to the adapter's input, as in peft.

        Ranks with the same input drop the same elements. Ranks with parts of a row draw
        once for every part, so that each token has its own mask and the random
        generators stay in step.
        """
        if not self.dropout or not self.training:
            return hidden
        kept = hidden
        # Each rank draws for all parts of the row, and keeps the draw for its own.
        for part in range(self.context_size):
            with (
                get_cuda_rng_tracker().fork()
                if self.split is Split.ROW or self.sequence_parallel
                else nullcontext()
            ):
                dropped = F.dropout(hidden, self.dropout)
            kept = dropped if part == self.context_rank else kept
        return kept


def _row_order(
    parts: Sequence[AdaptedProjection], num_rows: int
) -> torch.Tensor | None:
    """Return for each row of the layer its row in the stacked B's, [rows of the layer].

    A row without an adapter gets the index after the last one. Returns None if the
    order is the same.
    """
    stacked = sum(rows.number for _, _, rows, _ in parts)
    order = torch.full((num_rows,), stacked, dtype=torch.int64)
    first = 0
    for _, pieces, rows, _ in parts:
        for piece in pieces:
            start = first + rows.position(piece.box.start[0])
            here = slice(piece.local_box.start[0], piece.local_box.stop[0])
            order[here] = torch.arange(start, start + piece.box.shape[0])
        first += rows.number
    return None if torch.equal(order, torch.arange(stacked)) else order


class Adapters(AdapterSet):
    """Adapters of megatron-core's layers, with each factor split where its weight is."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        model_weights: Sequence[Weight],
        layouts: Callable[[int], Layout],
        lora: LoraConfig,
        config: TransformerConfig,
        grid: Grid,
        *,
        parameters: Mapping[str, nn.Parameter],
        trained: Sequence[str] = (),
        role: str,
        seed: int,
    ) -> None:
        super().__init__(
            low_ranks(model_weights, lora.targets, lora.rank, f"{role}.lora"),
            lora,
            grid,
            role,
            trained=[weight for weight in model_weights if weight.name in trained],
        )
        self.layout_of = follow(layouts, self._layout)
        self._adapters: dict[str, Adapter] = {}
        self._attach(chunks, layouts(grid.rank), config, seed)
        local_shapes = self.layout_of(grid.rank).local_shapes
        known = dict(parameters)
        for layer, adapter in self._adapters.items():
            # Names under which the layout and the optimizer know the adapters.
            known |= {
                f"{layer}.{ADAPTER}.{name}": parameter
                for name, parameter in adapter.named_parameters()
            }
        self.parameters: dict[str, nn.Parameter] = {
            name: known[name] for name in local_shapes
        }
        # The model's own weights are frozen, then everything that is trained is
        # released.
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        if config.recompute_granularity is not None:
            keep_graph(chunks)

    @property
    def modules(self) -> Sequence[Adapter]:
        """Adapter modules of all layers on this rank."""
        return list(self._adapters.values())

    def beside(self, layouts: Layouts) -> Layouts:
        """Return layouts of the model's weights, each extended by the factors beside them."""
        return with_trained_factors(layouts, self.low_ranks)

    def _layout(self, layout: Layout) -> Layout:
        """Return the layout of everything that is trained on a rank with `layout` of the weights."""
        factors = trained_factors(layout, self.low_ranks)
        more = tuple(piece for piece in layout.pieces if piece.tensor in self.trained)
        return Layout(
            factors.pieces + more,
            factors.local_shapes
            | {piece.local: layout.local_shapes[piece.local] for piece in more},
            factors.global_shapes
            | {piece.tensor: layout.global_shapes[piece.tensor] for piece in more},
        )

    def _attach(
        self,
        chunks: Sequence[nn.Module],
        layout: Layout,
        config: TransformerConfig,
        seed: int,
    ) -> None:
        """Create the adapters of this rank's layers and register their hooks."""
        by_layer: dict[str, list[AdaptedProjection]] = {}
        # In the order of the table, so that fused projections keep their order.
        for name, low_rank in self.low_ranks.items():
            local = parameter_beside(low_rank, layout)
            if local is None:
                continue
            pieces = layout.by_tensor.get(name, [])
            columns = held_columns(low_rank.weight, pieces)
            part = AdaptedProjection(low_rank, pieces, held_rows(pieces), columns)
            by_layer.setdefault(local.removesuffix(".weight"), []).append(part)
        for name, parts in by_layer.items():
            layer = _layer(chunks, name)
            rows = layout.local_shapes[f"{name}.weight"][0]
            adapter = Adapter(parts, rows, layer, self.config, config, self.grid, seed)
            layer.add_module(ADAPTER, adapter)
            if hasattr(layer, "return_layernorm_output"):
                # Transformer Engine normalizes inside the layer, and the adapter needs
                # the normalized input.
                vars(layer).update(
                    return_layernorm_output=True, return_layernorm_output_gathered=False
                )
            layer.register_forward_hook(adapter.add_to)
            self._adapters[name] = adapter


def _layer(chunks: Sequence[nn.Module], name: str) -> nn.Module:
    """Return the linear layer of a name in the layout."""
    if len(chunks) == 1:
        return chunks[0].get_submodule(name)
    chunk, _, rest = name.partition(".")
    return chunks[int(chunk.removeprefix("chunk"))].get_submodule(rest)


FACTORS = ("lora_A", "lora_B")


class LinearAdapter(nn.Module):
    """Factors of one linear layer of a Hugging Face model, in float32."""

    def __init__(self, layer: nn.Linear, low_rank: LowRank, lora: LoraConfig) -> None:
        super().__init__()
        self.scaling = lora.alpha / lora.rank
        self.dropout = lora.dropout
        self.active = True
        device = layer.weight.device
        for name, shape in zip(FACTORS, low_rank.shapes.values(), strict=True):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device))
            )

    def add_to(
        self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """Forward hook of the layer that adds the adapter's output."""
        if not self.active:
            return output
        hidden = (
            F.dropout(args[0], self.dropout)
            if self.dropout and self.training
            else args[0]
        )
        # Factors are kept in float32 and computed in the model's dtype.
        a, b = (self.get_parameter(name).to(hidden.dtype) for name in FACTORS)
        return output + F.linear(F.linear(hidden, a) * self.scaling, b)


class LayerFactors(NamedTuple):
    """Layers of a Hugging Face model that have adapters.

    Attributes:
        low_ranks: adapter by the name of its weight in the files.
        layers: adapter by the name of its layer in the module.
    """

    low_ranks: dict[str, LowRank]
    layers: dict[str, LowRank]

    @property
    def factors(self) -> dict[str, tuple[str, LowRank]]:
        """Global name and adapter of each factor, by its local name."""
        return {
            f"{layer}.{ADAPTER}.{local}": (factor, low_rank)
            for layer, low_rank in self.layers.items()
            for local, factor in zip(FACTORS, (low_rank.a, low_rank.b), strict=True)
        }

    def layout(self, shard: int, num_shards: int) -> Layout:
        """Return what shard number `shard` holds of the factors."""
        shapes: dict[str, tuple[int, ...]] = {
            local: low_rank.shapes[factor]
            for local, (factor, low_rank) in self.factors.items()
        }
        names = {local: factor for local, (factor, _) in self.factors.items()}
        boxes = {local: whole(shape) for local, shape in shapes.items()}
        pieces = tuple(
            Piece(names[local], box, local, box) for local, box in boxes.items()
        )
        unsharded = Layout(
            pieces, shapes, {names[local]: shape for local, shape in shapes.items()}
        )
        return unsharded.shard(
            {local: shard_box(box, shard, num_shards) for local, box in boxes.items()}
        )

    def beside(self, layouts: Layouts, num_shards: int) -> Layouts:
        """Return layouts of the model's weights, each extended by the factors that the rank holds."""

        @cache
        def layout_of_shard(shard: int) -> Layout:
            return join_layouts(layouts(shard), self.layout(shard, num_shards))

        return lambda rank: layout_of_shard(rank % num_shards)


def layer_factors(
    model: nn.Module, sharded: ShardedWeights, lora: LoraConfig, role: str
) -> LayerFactors:
    """Select the layers with adapters in an unsharded model, which may be on the meta device.

    Raises:
        ModelError: a target matches no linear layer.
    """
    # Only layers that lie in the files as they are in the module can have adapters.
    name_of = {file: name.rpartition(".")[0] for name, file in sharded.renamed.items()}
    linear = [
        weight
        for weight in sharded.weights
        if weight.name in name_of
        and isinstance(model.get_submodule(name_of[weight.name]), nn.Linear)
    ]
    chosen = low_ranks(linear, lora.targets, lora.rank, f"{role}.lora")
    return LayerFactors(
        chosen, {name_of[file]: low_rank for file, low_rank in chosen.items()}
    )


class HFAdapters(AdapterSet):
    """Adapters of a model of transformers. Created before the model is sharded, and filled by `attach` afterwards.

    Args:
        model: unsharded model. All its parameters get frozen.
        held: its weights and shards.
        num_shards: number of shards.
        trained: names of weights that are trained as well.

    Raises:
        ModelError: as `layer_factors`.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: ShardedWeights,
        lora: LoraConfig,
        grid: Grid,
        num_shards: int,
        *,
        trained: Sequence[str] = (),
        role: str,
        seed: int,
    ) -> None:
        self._chosen = layer_factors(model, sharded, lora, role)
        other_trained = [weight for weight in sharded.weights if weight.name in trained]
        super().__init__(self._chosen.low_ranks, lora, grid, role, other_trained)
        self._seed = seed
        self._num_shards = num_shards
        self._adapters: list[LinearAdapter] = []
        # Everything is frozen before the adapters' own parameters exist.
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, low_rank in self._chosen.layers.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapter = LinearAdapter(layer, low_rank, lora)
            layer.add_module(ADAPTER, adapter)
            layer.register_forward_hook(adapter.add_to)
            self._adapters.append(adapter)
        self.layout_of = self.beside(follow(sharded.layout_of, self._trained_layout))

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Initialize the factors after the model was sharded.

        Args:
            parameters: this rank's parameters, by their names in the model's `state_dict`.
        """
        layout = self.layout_of(self.grid.rank)
        factors = self._chosen.factors
        self.parameters = {name: parameters[name] for name in layout.local_shapes}
        with torch.no_grad():
            # Shards start at their own rows, so that the factors do not depend on the
            # number of ranks.
            for piece in layout.pieces:
                place = self.parameters[piece.local]
                if piece.local in factors and piece.tensor == factors[piece.local][1].a:
                    place.copy_(
                        initial_factor(factors[piece.local][1], self._seed)[
                            piece.box.slices
                        ]
                    )
                elif piece.local in factors:
                    place.zero_()

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Adapter modules of all layers."""
        return self._adapters

    def beside(self, layouts: Layouts) -> Layouts:
        """Return layouts of the model's weights, each extended by the factors that the rank holds."""
        return self._chosen.beside(layouts, self._num_shards)

    def _trained_layout(self, layout: Layout) -> Layout:
        """Return the part of a layout that holds other trained weights."""
        return layout.without(layout.global_shapes.keys() - set(self.trained))
