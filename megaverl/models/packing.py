"""Micro-batches: samples that pass through a model together, each in its own row or packed end to end into one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch

from megaverl.data.prefix_tree import PrefixTree
from megaverl.models.vision import VisionInputs
from megaverl.platform import platform, to_device

platform.adapt_megatron()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

# A sequence looks back at shared tokens if they are more than this times its own.
# Otherwise its attention computes them anew, which the causal kernel does faster.
LONG_BEGINNING = 1.5

# Kernel: (queries [n, heads, q, d], keys and values [n, kv_heads, k, d], mask [n, 1, q,
# k] bool, None for causal).
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor
]


class Window(NamedTuple):
    """Keys that a query sees, besides the causal mask: the last `size` ones, its own included, or those of its chunk.

    Attributes:
        size: number of keys of the window, or of a chunk.
        in_chunks: each sample is cut into chunks of `size` tokens, and a query sees the keys of its own chunk alone.
    """

    size: int
    in_chunks: bool = False

    def first_key(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the position of the first key that queries at these positions of a sample may see."""
        if self.in_chunks:
            return positions - positions % self.size
        return positions - (self.size - 1)


class RowOrder(NamedTuple):
    """Order of a row's tokens, and their order on context-parallel ranks laid end to end.

    Attributes:
        by_rank: [t] int64: place in the row of each token, rank by rank.
        of_tokens: [t] int64: the inverse: where each of the row's tokens is among those of all ranks.
    """

    by_rank: torch.Tensor
    of_tokens: torch.Tensor

    @classmethod
    def from_ranks(cls, places: Sequence[torch.Tensor]) -> RowOrder:
        """Return the order from the places of each rank's tokens."""
        by_rank = torch.cat([*places])
        return cls(by_rank, by_rank.argsort())

    def to(self, device: torch.device) -> RowOrder:
        """Return a copy on another device."""
        return RowOrder(*(to_device(places, device) for places in self))


@dataclass(frozen=True)
class WholeRow:
    """The row of which a context-parallel rank has a part, for layers that carry a state along it.

    Attributes:
        packing: layout of the whole row.
        order: order of the ranks' tokens in it.
    """

    packing: Packing
    order: RowOrder

    def to(self, device: torch.device) -> WholeRow:
        """Return a copy on another device."""
        return WholeRow(self.packing.to(device), self.order.to(device))


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no complete types
    """Layout of several sequences in one row of `t` tokens.

    All layers except attention treat tokens independently, so tokens that several
    sequences share cost them once. Attention (arXiv 1706.03762, eq. 1) sees the keys and values that each
    sequence would have by itself, and gradients of shared ones add up. The subclass
    decides the kernel: `DensePacking` for PyTorch's, `VarlenPacking` for those of
    FlashAttention and Transformer Engine.

    It travels through megatron-core in place of `PackedSeqParams`, also into recomputed
    layers. Its format is "sbhd", for which megatron-core does nothing. For "thd"
    megatron-core would rotate queries and keys by positions in sequences that share
    nothing. Instead `AtPositions` gives each token its own position, in the fused
    kernels as well, which take an embedding per token.

    Attributes:
        source: [t] int64: index of each token in the flattened padded sequences [b, s].
        positions: [t] int64: position of each token in its sequence, for rotary embeddings; only of the tokens in
            `local_places`.
        places: [b, s] int64: place in the row of each token of the padded sequences; 0 for padding.
        local_places: [t / cp] int64: places of the tokens of this context-parallel rank. None: all.
        whole: the row that these are a part of. None: this is the row, or no layer carries a state.
    """

    source: torch.Tensor = None  # type: ignore[assignment]  # the base class has defaults
    positions: torch.Tensor = None  # type: ignore[assignment]
    places: torch.Tensor = None  # type: ignore[assignment]
    local_places: torch.Tensor | None = None
    whole: WholeRow | None = None

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            whole=None if self.whole is None else self.whole.to(device),
            **{
                name: to_device(x, device)
                for name, x in values.items()
                if isinstance(x, torch.Tensor)
            },
        )


@dataclass
class DensePacking(Packing):
    """Packing for a kernel of equally long sequences, causal or with a mask (`scaled_dot_product_attention`).

    A sequence that shares few tokens computes them anew, because the causal kernel is
    fast and duplicate outputs are dropped. One that shares many (`LONG_BEGINNING`)
    computes its own tokens alone, which look back at the shared ones with a mask.

    Attributes:
        wholes: [m, a] int64: places of the tokens of sequences that are computed whole. Short rows repeat a token.
        later_queries: [n, q] int64: places of the own tokens of sequences that look back.
        later_keys: [n, k] int64: places of their keys, which begin with the shared tokens.
        later_offsets: [n] int64: number of the shared tokens.
        place: [t] int64: index of each token in the concatenated outputs [m * a + n * q].
    """

    wholes: torch.Tensor = None  # type: ignore[assignment]
    later_queries: torch.Tensor = None  # type: ignore[assignment]
    later_keys: torch.Tensor = None  # type: ignore[assignment]
    later_offsets: torch.Tensor = None  # type: ignore[assignment]
    place: torch.Tensor = None  # type: ignore[assignment]

    def attend(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: Window | None,
    ) -> torch.Tensor:
        """Compute attention within the sequences.

        Args:
            attend: the kernel.
            query: [t, heads, d].
            key, value: [t, kv_heads, d].
            window: keys that a query sees. None: all before it.

        Returns:
            [t, heads * d of the values].
        """
        outputs = []
        if len(self.wholes):
            width = self.wholes.shape[1]
            mask = (
                # Without a window inside the row, the kernel's own causal mask does.
                None
                if window is None or window.size >= width
                else self._mask(width, width, None, window)
            )
            keys = _gather(key, self.wholes)
            values = _gather(value, self.wholes)
            outputs.append(attend(_gather(query, self.wholes), keys, values, mask))
        if len(self.later_queries):
            mask = self._mask(
                self.later_queries.shape[1],
                self.later_keys.shape[1],
                self.later_offsets,
                window,
            )
            keys = _gather(key, self.later_keys)
            values = _gather(value, self.later_keys)
            outputs.append(
                attend(_gather(query, self.later_queries), keys, values, mask)
            )
        # [m, heads, a, d] and [n, heads, q, d] become [places, heads * d], whole
        # sequences first.
        flat = torch.cat(
            [out.transpose(1, 2).flatten(2).flatten(0, 1) for out in outputs]
        )
        return flat.index_select(0, self.place)

    def _mask(
        self,
        queries: int,
        keys: int,
        offsets: torch.Tensor | None,
        window: Window | None,
    ) -> torch.Tensor:
        """Return a [n, 1, queries, keys] mask, in which query i of segment n sees keys up to `offsets[n]` + i."""
        device = self.place.device
        last_seen = torch.arange(queries, device=device)[:, None]
        last_seen = (
            last_seen[None] if offsets is None else last_seen + offsets[:, None, None]
        )
        columns = torch.arange(keys, device=device)
        seen = columns <= last_seen
        # A window's lower bound is relative to the query, like the upper one.
        if window is not None:
            seen &= columns >= window.first_key(last_seen)
        return seen.unsqueeze(1)


@dataclass
class VarlenPacking(Packing):
    """Packing for a kernel of sequences of any lengths (FlashAttention's "varlen", Transformer Engine's "thd").

    A segment is one sequence. Its queries are its own tokens, as they lie in the row.
    Its keys are those of the tokens that it shares with earlier sequences, and its own:

        sequence 0: prompt, response 0     row: [ prompt response 0 ][ response 1 ][ response 2 ]
        sequence 1: prompt, response 1     segment 0: queries and keys prompt + response 0
        sequence 2: prompt, response 2     segment 1: queries response 1, keys prompt + response 1

    So shared tokens are computed once, however many they are, and only their keys and
    values are repeated. A segment with more keys than queries needs the causal mask
    aligned at its last query and key ("bottom right").

    Everything is built on the host, and longest lengths are plain numbers. Kernels
    without them would read lengths from the device, which synchronizes.

    Attributes:
        cu_seqlens_q, cu_seqlens_kv: [segments + 1] int32, of the base class: offsets of the segments' queries and keys.
        max_seqlen_q, max_seqlen_kv: of the base class: largest number of queries and keys of a segment.
        keys: [k] int64: place in the row of each key. None: nothing is shared, and keys lie as queries do.
        chunked: the same row with segments cut into chunks, for layers that attend within chunks. None: no segment is
            longer than a chunk.
    """

    keys: torch.Tensor | None = None
    chunked: VarlenPacking | None = None

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        chunked = None if self.chunked is None else self.chunked.to(device)
        return replace(super().to(device), chunked=chunked)

    def gather_segments(self, rows: torch.Tensor) -> torch.Tensor:
        """Return keys or values of the segments, [k, kv_heads, d], from those of the row's tokens [t, kv_heads, d]."""
        return rows if self.keys is None else rows.index_select(0, self.keys)


# Packing function: (lengths, tree, width=..., multiple_of=...) -> layout of the row.
Pack = Callable[..., Packing]


class Segment(NamedTuple):
    """Part of a row for attention.

    Attributes:
        keys: [k] int64: places of the keys.
        num_queries: number of queries, which are the last keys. They lie next to each other in the row.
    """

    keys: torch.Tensor
    num_queries: int

    @property
    def num_shared(self) -> int:
        """Number of keys before the first query."""
        return len(self.keys) - self.num_queries


def pack(
    lengths: Sequence[int], tree: PrefixTree, *, width: int, multiple_of: int = 1
) -> DensePacking:
    """Pack sequences into one row.

    Args:
        lengths: tokens of each sequence.
        tree: tree of the tokens that sequences share.
        width: width of the padded sequences that tokens are taken from.
        multiple_of: the row is padded to a multiple of it.
    """
    row = _Row(lengths, tree)
    wholes: list[Segment] = []
    later: list[Segment] = []
    for segment in row.segments:
        looks_back = segment.num_shared > LONG_BEGINNING * segment.num_queries
        (later if looks_back else wholes).append(segment)
    padding = -row.total % multiple_of
    # [m, a] places of tokens, padded to the longest sequence, and whose outputs count.
    all_wholes, whole_mask = padded([segment.keys for segment in wholes])
    offsets = torch.tensor(
        [segment.num_shared for segment in wholes], dtype=torch.int64
    )
    # Outputs of shared tokens are taken from the sequence that they belong to.
    whole_mask &= torch.arange(whole_mask.shape[1]) >= offsets[:, None]
    keys, _ = padded([segment.keys for segment in later])
    queries, query_mask = padded([own_keys(segment) for segment in later])
    # Outputs of whole sequences come first, then those of later ones. Padding takes the
    # output at 0.
    place_of = torch.zeros(row.total + padding, dtype=torch.int64)
    place_of[all_wholes[whole_mask]] = whole_mask.flatten().nonzero()[:, 0]
    place_of[queries[query_mask]] = (
        all_wholes.numel() + query_mask.flatten().nonzero()[:, 0]
    )
    # Padding tokens are copies of token 0, whose outputs nothing reads.
    tensors = row.tokens(width, padding)
    longest = int(tensors["positions"].max()) + 1
    return DensePacking(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **tensors,
        whole=None,
        wholes=all_wholes,
        later_queries=queries,
        later_keys=keys,
        later_offsets=torch.tensor(
            [segment.num_shared for segment in later], dtype=torch.int64
        ),
        place=place_of,
    )


def pack_varlen(
    lengths: Sequence[int],
    tree: PrefixTree,
    *,
    width: int,
    multiple_of: int = 1,
    chunk: int | None = None,
) -> VarlenPacking:
    """Pack sequences like `pack`, for kernels of sequences of any lengths.

    Padding at the end of the row is a segment of its own, so that no output or gradient
    is left uninitialized.

    Args:
        chunk: tokens of a chunk, if some layers attend within chunks.
    """
    tensors, segments = laid_out(lengths, tree, width=width, multiple_of=multiple_of)
    return pack_segments(tensors, segments, chunk)


def _in_chunks(segments: Sequence[Segment], chunk: int) -> Iterator[Segment]:
    """Yield the parts of segments whose queries lie in one chunk, with the keys of that chunk."""
    for segment in segments:
        first = segment.num_shared
        while first < len(segment.keys):
            begin = first - first % chunk
            end = min(begin + chunk, len(segment.keys))
            yield Segment(segment.keys[begin:end], end - first)
            first = end


def pack_segments(
    tensors: dict[str, torch.Tensor],
    segments: Sequence[Segment],
    chunk: int | None = None,
    whole: WholeRow | None = None,
) -> VarlenPacking:
    """Return the packing of these segments, whose queries lie in this order."""
    chunked = None
    if chunk is not None and any(len(segment.keys) > chunk for segment in segments):
        chunked = pack_segments(tensors, [*_in_chunks(segments, chunk)])
    queries = torch.tensor([segment.num_queries for segment in segments])
    keys = torch.tensor([len(segment.keys) for segment in segments])
    zero = torch.zeros(1, dtype=torch.int32)
    has_shared = any(segment.num_shared for segment in segments)
    # None saves the copy of keys and values if segments share nothing.
    repeats = has_shared or "local_places" in tensors
    return VarlenPacking(
        qkv_format="sbhd",
        cu_seqlens_q=torch.cat([zero, queries.cumsum(0, dtype=torch.int32)]),
        cu_seqlens_kv=torch.cat([zero, keys.cumsum(0, dtype=torch.int32)]),
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
        **tensors,
        whole=whole,
        keys=torch.cat([segment.keys for segment in segments]) if repeats else None,
        chunked=chunked,
    )


def laid_out(
    lengths: Sequence[int], tree: PrefixTree, *, width: int, multiple_of: int
) -> tuple[dict[str, torch.Tensor], list[Segment]]:
    """Return `Packing`'s fields, and the segments of the row in order: sequences, and padding."""
    row = _Row(lengths, tree)
    padding = -row.total % multiple_of
    segments = list(row.segments)
    if padding:
        segments.append(Segment(torch.arange(row.total, row.total + padding), padding))
    return row.tokens(width, padding), segments


class _Row:
    """Sequences laid end to end in the order of their tree, each without the tokens that it shares with the one before.

    Attributes:
        total: number of tokens.
        segments: one for each sequence with tokens of its own, in the row's order. The queries are these tokens.
    """

    def __init__(self, lengths: Sequence[int], tree: PrefixTree) -> None:
        self.total = 0
        self.segments: list[Segment] = []
        # (sequence, first token, number of tokens), in the order of the row.
        self._taken: list[tuple[int, int, int]] = []
        # By sequence: places of its tokens.
        self._places = [torch.zeros(0, dtype=torch.int64)] * len(lengths)
        before = torch.zeros(0, dtype=torch.int64)
        for sequence, shared in zip(tree.order, tree.shared, strict=True):
            count = lengths[sequence] - shared
            own = torch.arange(self.total, self.total + count)
            # The first tokens are those of the sequence before, wherever it has them
            # from.
            places = torch.cat([before[:shared], own])
            self._places[sequence] = before = places
            if count:
                self.segments.append(Segment(places, count))
                self._taken.append((sequence, shared, count))
                self.total += count
        if not self.total:
            # A rank without samples computes one dummy token.
            self.segments.append(Segment(torch.zeros(1, dtype=torch.int64), 1))
            self._taken.append((0, 0, 1))
            self.total = 1

    def tokens(self, width: int, padding: int) -> dict[str, torch.Tensor]:
        """Return `Packing`'s fields for the row with `padding` more tokens."""
        # Positions restart in every sequence, and continue after the shared tokens.
        positions = torch.cat(
            [torch.arange(first, first + count) for _, first, count in self._taken]
        )
        sequence_of_run = torch.tensor([sequence for sequence, _, _ in self._taken])
        tokens_of_run = torch.tensor([count for _, _, count in self._taken])
        sequences = torch.repeat_interleave(sequence_of_run, tokens_of_run)
        empty = torch.zeros(padding, dtype=torch.int64)
        return {
            "source": torch.cat([sequences * width + positions, empty]),
            "positions": torch.cat([positions, empty]),
            "places": places_of_sequences(self._places, width),
        }


def places_of_sequences(places: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return `Packing.places`, [b, width], from the places of each sequence's tokens."""
    padded_places = torch.zeros(len(places), width, dtype=torch.int64)
    for row, of_sequence in zip(padded_places, places, strict=True):
        row[: len(of_sequence)] = of_sequence
    return padded_places


def own_keys(segment: Segment) -> torch.Tensor:
    """Return the places of a segment's queries."""
    return segment.keys[segment.num_shared :]


def padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of places as [n, longest], and a mask of what is no padding. Short rows repeat their last place."""
    longest = max(map(len, rows), default=0)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    steps = torch.arange(longest).expand(len(rows), longest)
    # [n, longest]: index into the rows laid end to end.
    begins = counts.cumsum(0) - counts
    index = begins + steps.minimum(counts - 1)
    flat = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])
    return flat[index], steps < counts


def _gather(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select tokens: [t, heads, d] -> [n, heads, length, d]."""
    rows: torch.Tensor = x.index_select(0, places.flatten())
    segments: torch.Tensor = rows.unflatten(0, places.shape)
    return segments.transpose(1, 2)


class Predicting(NamedTuple):
    """Place of the prediction of each response token, [n] each.

    Attributes:
        sample: sample that the token belongs to.
        row, position: place in the model's output [b, s] that predicts it.
    """

    sample: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor


@dataclass
class MicroBatch:
    """Samples that pass through the model together, prompt and response joined, each in a row or packed into one row.

    It is built on the host with everything that its shapes depend on, since reading
    them from a device would synchronize.

    Attributes:
        samples: [n] int64, places of the samples in the whole batch.
        tokens: [n, s] int64, right-padded, which needs no mask because causal attention never sees it; or [1, t] with
            `packing`.
        prompt_lengths, response_lengths: [n] int64.
        fields: inputs of a loss by name, each [n, r] for responses of at most r tokens.
        packing: layout of a packed row. None: each sample has a row.
        vision: further inputs of a model that takes images.
        routed_experts: [n, s, layers, k] or [1, t, layers, k] int16, like `tokens`: experts to take, -1 where the
            router chooses. None: it always chooses.
        taught: [response tokens, hidden], on the last stage: the teacher's hidden states that predict each of them.
        observed: [b, s, n]: another model's hidden states of each token (`workers/hidden_states.py`).
        places: [s / cp] int64: places of this context-parallel rank's tokens in the rows; see `cut`. None: it has all.
        num_response_columns: r, the longest response. Derived from the lengths.
        predicting: place of the prediction of each response token. Derived. A context-parallel rank has only those on
            its own tokens, likewise for the next two.
        targets: [n] int64, the response tokens.
        predicted: [n, r] bool, which response tokens these are.
        last: [n] int64: place of each sequence's last token in its row; -1 if another rank has it.
    """

    samples: torch.Tensor
    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    packing: Packing | None = None
    vision: VisionInputs | None = None
    routed_experts: torch.Tensor | None = None
    taught: torch.Tensor | None = None
    observed: torch.Tensor | None = None
    places: torch.Tensor | None = None
    num_response_columns: int = -1
    predicting: Predicting = None  # type: ignore[assignment]  # `__post_init__` has these
    targets: torch.Tensor = None  # type: ignore[assignment]
    predicted: torch.Tensor = None  # type: ignore[assignment]
    last: torch.Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # A copy made by `replace` has these fields already, perhaps of a part of the
        # row.
        if self.num_response_columns < 0:
            self.num_response_columns = (
                int(self.response_lengths.max()) if self.samples.numel() else 0
            )
            self.predicting = self._predicting()
            self.predicted = self.response_mask
            self.targets = self._targets()
            self.last = self._last()

    @property
    def response_mask(self) -> torch.Tensor:
        """Mask of response tokens, [n, r] bool."""
        return (
            torch.arange(self.num_response_columns, device=self.tokens.device)
            < self.response_lengths[:, None]
        )

    def _predicting(self) -> Predicting:
        """Return the position whose logits predict each response token: the position before it."""
        sample, column = self.response_mask.nonzero(as_tuple=True)
        predecessor = self.prompt_lengths[sample] - 1 + column
        if self.packing is not None:
            place = self.packing.places[sample, predecessor]
            return Predicting(sample, torch.zeros_like(sample), place)
        return Predicting(sample, sample, predecessor)

    def _targets(self) -> torch.Tensor:
        """Return the response tokens, [n]."""
        sample, column = self.response_mask.nonzero(as_tuple=True)
        position = self.prompt_lengths[sample] + column
        if self.packing is not None:
            return self.tokens[0, self.packing.places[sample, position]]
        return self.tokens[sample, position]

    def _last(self) -> torch.Tensor:
        """Return the place of each sequence's last token in its row."""
        last = (self.prompt_lengths + self.response_lengths - 1).clamp(min=0)
        if self.packing is not None:
            return self.packing.places.gather(1, last[:, None]).squeeze(1)
        return last

    def cut(self, places: torch.Tensor) -> MicroBatch:
        """Return the part of a context-parallel rank: the tokens at `places` of each row, and what they predict."""
        local_place = torch.full((self.tokens.shape[1],), -1)
        # -1: the token belongs to another rank.
        local_place[places] = torch.arange(len(places))
        sample, row, position = self.predicting
        is_here = local_place[position] >= 0
        return replace(
            self,
            tokens=self.tokens[:, places],
            routed_experts=None
            if self.routed_experts is None
            else self.routed_experts[:, places],
            places=places,
            predicting=Predicting(
                sample[is_here], row[is_here], local_place[position[is_here]]
            ),
            targets=self.targets[is_here],
            # A mask of the same shape, of which only this rank's tokens are left.
            predicted=self.predicted.masked_scatter(self.predicted, is_here),
            last=local_place[self.last],
        )

    def at_the_end(self, output: torch.Tensor) -> torch.Tensor:
        """Return the model's output at each sequence's last token: [b, s, k] -> [n, k].

        The value is undefined for an empty sequence, and 0 if another context-parallel
        rank has the token.
        """
        row = torch.arange(len(self.samples), device=output.device)
        # All samples lie in one row.
        if self.packing is not None:
            row = torch.zeros_like(row)
        values = output[row, self.last.clamp(min=0)]
        if self.places is None:
            return values
        return values.where(self.last[:, None] >= 0, 0.0)

    def drawing(self, sample: torch.Tensor, temperature: float) -> dict[str, Any]:
        """Return temperature and top-k of tokens of these samples [n], or `temperature` if the samples have none."""
        if (
            "temperatures" not in self.fields
            or not self.fields["temperatures"].shape[1]
        ):
            return {"temperature": temperature}
        return {
            "temperature": self.fields["temperatures"][sample, 0],
            "top_k": self.fields["top_ks"][sample, 0],
        }

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on another device."""
        if self.tokens.device == device:
            return self
        copies: dict[str, Any] = {
            "fields": {
                name: to_device(tensor, device) for name, tensor in self.fields.items()
            },
            "predicting": Predicting(
                *(to_device(tensor, device) for tensor in self.predicting)
            ),
        }
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if isinstance(value, torch.Tensor):
                copies[attribute.name] = to_device(value, device)
            # Nested inputs move with the batch.
            elif isinstance(value, Packing | VisionInputs):
                copies[attribute.name] = value.to(device)
        return replace(self, **copies)


def spread(flat: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Scatter [n response tokens] to [b, r], with zeros elsewhere."""
    mask = batch.predicted
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
