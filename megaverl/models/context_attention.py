"""Context parallelism: the tokens of a row that each rank holds, and their attention over the whole row.

A row is cut into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i. In a causal
sequence every rank then has the same amount of attention to compute (Llama 3, arXiv
2407.21783, section 3.3.2; ring attention's "zigzag"):

    cp = 2, chunks of a row:   0 | 1 | 2 | 3
    rank that holds the chunk: 0 | 1 | 1 | 0

All layers except attention treat tokens independently. Attention gathers the keys and
values of the whole row, and a rank's queries attend to earlier tokens of their
sequences. In the backward pass each rank receives the sum over all ranks of the
gradients of its keys and values. A packed row is cut regardless of where sequences
begin, so shared tokens stay in the row once.

Transformer Engine's attention exchanges keys and values itself (`engine_attention.py`).
It needs each sequence of a packed row cut separately, and supports no shared tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from megaverl.data.prefix_tree import PrefixTree
from megaverl.models.attention import CausalAttention, attend_packed, attend_rows
from megaverl.models.packing import (
    DensePacking,
    Packing,
    RowOrder,
    Segment,
    VarlenPacking,
    WholeRow,
    Window,
    laid_out,
    own_keys,
    pack,
    pack_segments,
    pack_varlen,
    padded,
    places_of_sequences,
)
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402


class Part(NamedTuple):
    """Rank within a context-parallel group, and the group's size."""

    rank: int
    size: int


def own_places(length: int, part: Part) -> torch.Tensor:
    """Return the places of a rank's tokens in a row, [length / cp] int64.

    Args:
        length: length of the row, divisible by 2 cp.
    """
    return torch.cat([torch.arange(begin, end) for begin, end in _halves(length, part)])


def places_by_rank(length: int, size: int) -> list[torch.Tensor]:
    """Return `own_places` of every rank."""
    return [own_places(length, Part(rank, size)) for rank in range(size)]


def _halves(length: int, part: Part) -> list[tuple[int, int]]:
    """Return (begin, end) of the rank's two chunks."""
    num_chunks = 2 * part.size
    chunk = length // num_chunks
    # One from the front and one from the back: early tokens see few others and late
    # ones many.
    numbers = (part.rank, num_chunks - 1 - part.rank)
    return [(number * chunk, (number + 1) * chunk) for number in numbers]


class ContextAttention(CausalAttention):
    """`CausalAttention` of a context-parallel rank's queries, [s / cp, ...], over the whole row.

    A packed row is given as a `CutPacking`, or as a `VarlenPacking` if FlashAttention
    computes it. Collective over the context-parallel group.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group: dist.ProcessGroup = options["pg_collection"].cp
        self._part = Part(self._group.rank(), self._group.size())

    def _attend_packed_row(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        return attend_packed_part(
            q,
            k,
            v,
            packing,
            self.softmax_scale,
            self.window,
            self.softmax_offset,
            self.softcap,
        )

    def _attend_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        look: torch.Tensor | None,
    ) -> torch.Tensor:
        assert look is None
        return attend_rows_part(
            q,
            k,
            v,
            self._part,
            self.softmax_scale,
            self.window,
            self.softmax_offset,
            self.softcap,
        )

    def _whole_row(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_row(key, value, self._group)


def gather_row(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of all ranks, in the row's order: [s / cp, b, kv_heads, d] -> [s, b, kv_heads, d].

    Collective over the context-parallel group, also in the backward pass.
    """
    both = gather_from_sequence_parallel_region(
        torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=group
    )
    # The second chunks are held in reverse order of ranks; see the drawing above.
    first, second = both.unflatten(0, (group.size(), 2, -1)).unbind(1)
    whole = torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])
    keys, values = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values


def attend_packed_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    scale: float | None,
    window: Window | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `attend_packed` of a rank's queries [t / cp, heads, d] over the keys and values of the whole row."""
    if not isinstance(packing, CutPacking):
        return attend_packed(q, k, v, packing, scale, window, sinks, softcap)
    query_halves = zip(packing.halves, q.chunk(2), strict=True)
    outputs = [
        attend_packed(queries, k, v, half, scale, window, sinks, softcap)
        for half, queries in query_halves
    ]
    return torch.cat(outputs)


def attend_rows_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
    scale: float | None,
    window: Window | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `attend_rows` of a rank's queries [b, heads, s / cp, d] over the keys and values of whole rows."""
    outputs = []
    halves = _halves(k.shape[2], part)
    for half, (begin, end) in zip(q.chunk(2, dim=2), halves, strict=True):
        look = None
        # The first chunk of a row sees itself alone, so the kernel's own causal mask
        # does. Later queries see earlier keys too.
        if begin:
            query_places = torch.arange(begin, end, device=k.device)[:, None]
            key_places = torch.arange(end, device=k.device)
            look = key_places <= query_places
            if window is not None:
                look &= key_places >= window.first_key(query_places)
        keys = k[:, :, :end]
        values = v[:, :, :end]
        outputs.append(
            attend_rows(half, keys, values, look, scale, window, sinks, softcap)
        )
    return torch.cat(outputs, dim=2)


@dataclass
class CutPacking(Packing):
    """A context-parallel rank's part of a packed row, for kernels that take a mask.

    Attributes:
        halves: for each of the rank's two chunks, the parts of sequences in it, with keys from the whole row.
    """

    halves: tuple[DensePacking, ...] = ()

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        return replace(
            super().to(device), halves=tuple(half.to(device) for half in self.halves)
        )


def _cut_segments(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """Return the segments with queries between `begin` and `end`, without later queries and keys."""
    pieces = []
    for segment in segments:
        first = int(segment.keys[segment.num_shared])
        last = min(first + segment.num_queries, end)
        num_queries = last - max(first, begin)
        # A segment without a query in this chunk is not computed here, even if its keys
        # are.
        if num_queries > 0:
            pieces.append(
                Segment(segment.keys[: segment.num_shared + last - first], num_queries)
            )
    return pieces


def pack_part(
    lengths: Sequence[int],
    tree: PrefixTree,
    *,
    width: int,
    multiple_of: int,
    part: Part,
    with_whole: bool = False,
) -> CutPacking:
    """Pack sequences like `pack`, and return the part of a context-parallel rank.

    Args:
        multiple_of: divisible by 2 cp.
        part: the rank.
        with_whole: set `Packing.whole`, which layers with a state need.
    """
    tensors, chunks = _cut(lengths, tree, width, multiple_of, part)
    whole = None
    if with_whole:
        whole = _whole(pack(lengths, tree, width=width, multiple_of=multiple_of), part)
    longest = int(tensors["positions"].max()) + 1
    halves = []
    bounds = _halves(len(tensors["source"]), part)
    for (begin, end), pieces in zip(bounds, chunks, strict=True):
        # Keys come from the whole row, queries only from this chunk.
        keys, _ = padded([piece.keys for piece in pieces])
        queries, query_mask = padded([own_keys(piece) - begin for piece in pieces])
        # Where each query's output lies among the segments' outputs.
        place = torch.zeros(end - begin, dtype=torch.int64)
        place[queries[query_mask]] = query_mask.flatten().nonzero()[:, 0]
        # Keys before the segment's first query in this chunk.
        offsets = [piece.num_shared for piece in pieces]
        halves.append(
            DensePacking(
                wholes=torch.zeros(0, 0, dtype=torch.int64),
                later_queries=queries,
                later_keys=keys,
                later_offsets=torch.tensor(offsets, dtype=torch.int64),
                place=place,
            )
        )
    return CutPacking(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **tensors,
        halves=tuple(halves),
        whole=whole,
    )


def _whole(row: Packing, part: Part) -> WholeRow:
    """Return a row that is cut regardless of where its sequences begin."""
    places = places_by_rank(len(row.source), part.size)
    return WholeRow(row, RowOrder.from_ranks(places))


def pack_part_varlen(
    lengths: Sequence[int],
    tree: PrefixTree,
    *,
    width: int,
    multiple_of: int,
    part: Part,
    chunk: int | None = None,
    with_whole: bool = False,
) -> VarlenPacking:
    """Pack sequences like `pack_part`, for kernels that take sequences of any lengths.

    Args:
        chunk: tokens of a chunk, if some layers attend within chunks.
        with_whole: set `Packing.whole`, which layers with a state need.
    """
    tensors, (first, second) = _cut(lengths, tree, width, multiple_of, part)
    whole = None
    if with_whole:
        row = pack_varlen(lengths, tree, width=width, multiple_of=multiple_of)
        whole = _whole(row, part)
    return pack_segments(tensors, first + second, chunk, whole)


def _cut(
    lengths: Sequence[int], tree: PrefixTree, width: int, multiple_of: int, part: Part
) -> tuple[dict[str, torch.Tensor], list[list[Segment]]]:
    """Return `Packing`'s fields for a rank, and the segments of each of its two chunks."""
    tensors, segments = laid_out(lengths, tree, width=width, multiple_of=multiple_of)
    total = len(tensors["source"])
    tensors["local_places"] = own_places(total, part)
    # Rotary embeddings need positions of this rank's tokens alone.
    tensors["positions"] = tensors["positions"][tensors["local_places"]]
    return tensors, [
        _cut_segments(segments, begin, end) for begin, end in _halves(total, part)
    ]


def pack_for_engine(
    lengths: Sequence[int],
    tree: PrefixTree,
    *,
    width: int,
    multiple_of: int,
    part: Part,
    with_whole: bool = False,
) -> VarlenPacking:
    """Pack sequences for Transformer Engine's context parallelism.

    Each sequence is padded to a multiple of 2 cp and cut by itself; lengths are those of
    the whole row. Padding follows a sequence's own tokens, which therefore never see it.

    Args:
        tree: tree in which no sequences share tokens (`TrainingModel.sequence_multiple`).
        with_whole: set `Packing.whole`, which layers with a state need.
    """
    assert not any(tree.shared), "sequences that are cut by themselves share nothing"
    multiple = 2 * part.size
    # An empty batch still needs one sequence, because every rank takes part.
    filled = [-(-length // multiple) * multiple for length in lengths if length] or [
        multiple
    ]
    total = sum(filled)
    # Padding of the row is one more sequence.
    filled += [-total % multiple_of] if total % multiple_of else []
    begins = [sum(filled[:number]) for number in range(len(filled))]
    source = torch.zeros(sum(filled), dtype=torch.int64)
    sequence_begins = iter(begins)
    places = []
    for number, length in enumerate(lengths):
        begin = next(sequence_begins) if length else 0
        source[begin : begin + length] = number * width + torch.arange(length)
        places.append(torch.arange(begin, begin + length))
    cumulative = _cumulative(filled)
    row = VarlenPacking(
        qkv_format="sbhd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(filled),
        max_seqlen_kv=max(filled),
        source=source,
        # Positions count within each sequence, including its padding.
        positions=torch.cat([torch.arange(length) for length in filled]),
        places=places_of_sequences(places, width),
    )
    by_rank = [
        torch.cat(
            [
                begin + own_places(length, Part(rank, part.size))
                for begin, length in zip(begins, filled, strict=True)
            ]
        )
        for rank in range(part.size)
    ]
    own = by_rank[part.rank]
    return replace(
        row,
        positions=row.positions[own],
        local_places=own,
        whole=WholeRow(row, RowOrder.from_ranks(by_rank)) if with_whole else None,
    )


def _cumulative(counts: Sequence[int]) -> torch.Tensor:
    """Return the cumulative sums of `counts` from 0 on, [n + 1] int32."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
