"""LoRA (arXiv 2106.09685) on megatron-core's linear layers: h = W x + alpha / rank * B A x, with W frozen.

An adapter stands beside the layer that it belongs to, whose own parameters, names and code stay as they are. A fused
layer (`linear_qkv`, `linear_fc1`) has the factors of each of its Hugging Face projections, as `peft` stores them;
which of its rows are whose, the layout says. Under tensor parallelism a factor is cut where the weight is: B of a
column-parallel layer, A of a row-parallel one; the other is whole on every rank, and its gradient too:

- column parallel: y = A x on the whole input, B's rows are this rank's. Backward, y's gradient is summed over the
  ranks (with sequence parallelism: y is gathered, and its gradient scattered in sums).
- row parallel: the ranks' A x are summed (or scattered in sums), then B maps the sum.
- replicated (the down-projections of latent attention): nothing travels.

So what adapters send is `rank` numbers a token and projection.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megaverl.config.roles import LoraConfig
from megaverl.distributed.groups import Grid
from megaverl.models.layers import sum_gradients
from megaverl.models.lora.low_rank import (
    ADAPTER,
    LowRank,
    adapter_names,
    factor_layout,
    factor_weights,
    follow,
    held_span,
    low_ranks,
    names_of_factors,
    written_to,
)
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.weight import Split, Weight

platform.adapt_megatron()

from megatron.core.tensor_parallel import (  # noqa: E402
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CHUNK = 1 << 22  # elements that are merged in float32 at a time, into weights of 16 bits


class AdaptedProjection(NamedTuple):
    """One projection of a layer: its adapter, the pieces of its weight on this rank, and the box that they fill."""

    low_rank: LowRank
    pieces: Sequence[Piece]
    box: tuple[tuple[int, ...], tuple[int, ...]]


class Adapter(nn.Module):
    """The adapters of one linear layer, added to what it returns.

    Args:
        parts: its projections that have one, in the order of the layer's rows.
        num_rows: of the layer's weight on this rank.
        seed: of A's initial values, which do not depend on the grid; B starts at zero.
    """

    def __init__(
        self,
        parts: Sequence[AdaptedProjection],
        num_rows: int,
        lora: LoraConfig,
        config: TransformerConfig,
        grid: Grid,
        seed: int,
    ) -> None:
        super().__init__()
        self.split = parts[0].low_rank.weight.split
        self.scaling, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.sequence_parallel = bool(config.sequence_parallel) and grid.shape.tp > 1
        self.tp_group: dist.ProcessGroup = grid.tp_group
        self.active = True
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        shared = self.sequence_parallel  # a factor that is whole on every rank sees its part of the sequence
        is_row, is_column = self.split is Split.ROW, self.split not in (Split.ROW, Split.REPLICATED)
        for low_rank, _, ((top, left), (bottom, right)) in parts:
            a = _initial(low_rank, seed)[:, left:right]
            b = torch.zeros(bottom - top, lora.rank)
            for factors, values, cut in ((self.lora_A, a, is_row), (self.lora_B, b, is_column)):
                parameter = nn.Parameter(values.to(platform.device, config.params_dtype, copy=True).contiguous())
                parameter.tensor_model_parallel = cut  # type: ignore[attr-defined]
                parameter.partition_dim = int(factors is self.lora_A) if cut else -1  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
                parameter.sequence_parallel = shared and not cut  # type: ignore[attr-defined]
                factors[low_rank.projection] = parameter
        self.order: torch.Tensor | None
        self.register_buffer("order", _row_order(parts, num_rows), persistent=False)
        self.to(platform.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, columns on this rank] -> [s, b, rows on this rank]: what the adapters add."""
        hidden = self._dropped(hidden)
        low = F.linear(hidden, torch.cat(list(self.lora_A.values())))  # [s, b, rank * projections]
        group = self.tp_group
        if self.split is Split.ROW:
            if self.sequence_parallel:
                low = reduce_scatter_to_sequence_parallel_region(low, group=group)
            else:
                low = reduce_from_tensor_model_parallel_region(low, group=group)
        elif self.split is not Split.REPLICATED:
            if self.sequence_parallel:
                low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
            else:
                low = sum_gradients(low, group)
        return F.linear(low * self.scaling, self._rows())

    def add_to(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> Any:
        """A forward hook of the linear layer: adds what is computed from the same input.

        `output` is (out, bias). Transformer Engine's layers with a norm inside give ((out, normalised), bias), or
        (out, bias, normalised) where they leave the bias to the caller.
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
        """[rows, rank * projections]: each row of the layer against its own projection's part of A x."""
        rows = torch.block_diag(*self.lora_B.values())
        if self.order is None:
            return rows
        if len(self.order) > len(rows):
            rows = F.pad(rows, (0, 0, 0, 1))  # for rows of projections without an adapter
        return rows.index_select(0, self.order)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        """With dropout, as in peft: of the adapter's input. Ranks that see the same input drop the same."""
        if not self.dropout or not self.training:
            return hidden
        if self.split is Split.ROW or self.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return F.dropout(hidden, self.dropout)
        return F.dropout(hidden, self.dropout)


def _initial(low_rank: LowRank, seed: int) -> torch.Tensor:
    """A [rank, columns] as peft initialises it: uniform, as of `nn.Linear`; from the seed and its name alone."""
    shape = low_rank.shapes[low_rank.a]
    digest = hashlib.blake2b(f"lora/{seed}/{low_rank.a}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.empty(shape).uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(shape[1]))


def _row_order(parts: Sequence[AdaptedProjection], num_rows: int) -> torch.Tensor | None:
    """[rows of the layer]: which row of the stacked B's each is; the one behind them all for rows that have none.

    None where they stand in the same order.
    """
    stacked = sum(bottom - top for _, _, ((top, _), (bottom, _)) in parts)
    order = torch.full((num_rows,), stacked, dtype=torch.int64)
    first = 0
    for _, pieces, ((top, _), (bottom, _)) in parts:
        for piece in pieces:
            rows = torch.arange(piece.box.start[0], piece.box.stop[0]) - top + first
            order[piece.local_box.start[0] : piece.local_box.stop[0]] = rows
        first += bottom - top
    return None if torch.equal(order, torch.arange(stacked)) else order


class Adapters:
    """All adapters of a model on this rank.

    Attributes:
        trained: weights of the model itself that are trained beside them: a critic's head.
        low_ranks: adapter by the name of its weight, of the whole model.
        weights: the factors and what else is trained (a critic's head), as global arrays.
        parameters: the same on this rank, by local name.
        layout_of: rank -> where they lie.
    """

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
        self.config, self.grid, self.role = lora, grid, role
        self.low_ranks = low_ranks(model_weights, lora.targets, lora.rank, f"{role}.lora")
        self.trained = tuple(trained)
        self.weights = [*factor_weights(self.low_ranks), *(w for w in model_weights if w.name in self.trained)]
        self.layout_of = follow(layouts, self._layout)
        self._adapters: dict[str, Adapter] = {}
        self._attach(chunks, layouts(grid.rank), config, seed)
        held = self.layout_of(grid.rank).local_shapes
        known = dict(parameters)
        for layer, adapter in self._adapters.items():
            known |= {f"{layer}.{ADAPTER}.{name}": parameter for name, parameter in adapter.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = {name: known[name] for name in held}
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        if config.recompute_granularity is not None:
            _keep_graph(chunks)

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without its adapters, which is the one that training started from."""
        for adapter in self._adapters.values():
            adapter.active = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.active = True

    def _layout(self, layout: Layout) -> Layout:
        factors = factor_layout(layout, self.low_ranks, adapter_names)
        more = tuple(piece for piece in layout.pieces if piece.tensor in self.trained)
        return Layout(
            factors.pieces + more,
            factors.local_shapes | {piece.local: layout.local_shapes[piece.local] for piece in more},
            factors.global_shapes | {piece.tensor: layout.global_shapes[piece.tensor] for piece in more},
        )

    def _attach(self, chunks: Sequence[nn.Module], layout: Layout, config: TransformerConfig, seed: int) -> None:
        by_layer: dict[str, list[AdaptedProjection]] = {}
        for name, pieces in layout.by_tensor.items():
            if name in self.low_ranks:
                part = AdaptedProjection(self.low_ranks[name], pieces, held_span(pieces))
                by_layer.setdefault(pieces[0].local.removesuffix(".weight"), []).append(part)
        for name, parts in by_layer.items():
            layer = _layer(chunks, name)
            rows = layout.local_shapes[f"{name}.weight"][0]
            adapter = Adapter(parts, rows, self.config, config, self.grid, seed)
            layer.add_module(ADAPTER, adapter)
            if hasattr(layer, "return_layernorm_output"):
                # Transformer Engine normalises inside the layer: the adapter's input is the normalised one
                vars(layer).update(return_layernorm_output=True, return_layernorm_output_gathered=False)
            layer.register_forward_hook(adapter.add_to)
            self._adapters[name] = adapter


def _layer(chunks: Sequence[nn.Module], name: str) -> nn.Module:
    if len(chunks) == 1:
        return chunks[0].get_submodule(name)
    chunk, _, rest = name.partition(".")
    return chunks[int(chunk.removeprefix("chunk"))].get_submodule(rest)


def _keep_graph(chunks: Sequence[nn.Module]) -> None:
    """Embeddings are frozen, and a checkpointed layer whose input needs no gradient would give its adapters none."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    for chunk in chunks:
        if getattr(chunk, "pre_process", False):
            chunk.get_submodule("embedding").register_forward_hook(hook)


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
