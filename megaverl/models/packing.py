"""Micro-batches: samples that go through a model together, in rows of their own or packed end to end into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch

from megaverl.models.vision import VisionInputs
from megaverl.platform import platform, to_device

platform.adapt_megatron()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

# Shared beginnings of more than so many times the longest own part are attended from once, and looked back at.
LONG_BEGINNING = 1.5

# (queries [n, heads, q, d], keys and values [n, kv_heads, k, d], [n, 1, q, k] bool: where to look; None: causal)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass
class Packing(PackedSeqParams):
    """Which of a row's `t` tokens belong together.

    All layers but attention treat a token by itself, so that a shared beginning costs them once. Attention
    (arXiv 1706.03762, eq. 1) is over the keys and values that each sequence alone would have; gradients of shared ones
    add up. How it is computed says the kind: a `DensePacking` for PyTorch's kernels, a `VarlenPacking` for those of
    FlashAttention and Transformer Engine.

    It travels through megatron-core in the place of `PackedSeqParams`, also where layers are computed again; as its
    format is "sbhd", megatron-core itself does nothing with it. In its "thd" format it would rotate queries and keys by
    their places in sequences that share nothing; `AtPositions` gives each token its own position, in the fused kernels
    too, which take an embedding for every token of a row.

    Attributes:
        source: [t] int64: of each token, the place in the flattened padded sequences [b, s].
        positions: [t] int64: its place in its sequence, for rotary embeddings; of the tokens in `own` alone.
        starts: [b] int64: where each sequence's own part begins in the row.
        own: [t / cp] int64: the places in the row of the tokens that this context-parallel rank has. None: all.
    """

    source: torch.Tensor = None  # type: ignore[assignment]  # the base class has defaults
    positions: torch.Tensor = None  # type: ignore[assignment]
    starts: torch.Tensor = None  # type: ignore[assignment]
    own: torch.Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: to_device(x, device) for name, x in held.items() if isinstance(x, torch.Tensor)})


@dataclass
class DensePacking(Packing):
    """For a kernel of equally long sequences, causal or under a mask (`scaled_dot_product_attention`).

    A beginning that is short beside what follows it is attended from anew by each of its sequences, as the
    causal kernel is fast and what it computes twice is dropped; a long one is computed once, as a sequence of its own,
    and its sequences' own parts look back at it under a mask.

    Attributes:
        wholes: [m, a] int64: places of the tokens of whole sequences, and of long beginnings; short ones repeat one.
        later_queries, later_keys: [n, q], [n, k] int64: of own parts after a long beginning, which their keys begin
            with.
        later_offsets: [n] int64: the length of that beginning.
        place: [t] int64: where each token is in [m * a + n * q], the outputs of all.
    """

    wholes: torch.Tensor = None  # type: ignore[assignment]
    later_queries: torch.Tensor = None  # type: ignore[assignment]
    later_keys: torch.Tensor = None  # type: ignore[assignment]
    later_offsets: torch.Tensor = None  # type: ignore[assignment]
    place: torch.Tensor = None  # type: ignore[assignment]

    def attend(
        self, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attention within the sequences.

        Args:
            query: [t, heads, d]. key, value: [t, kv_heads, d].
            window: how many keys a query sees, its own among them. None: all before it.

        Returns:
            [t, heads * d of the values].
        """
        outputs = []
        if len(self.wholes):
            width = self.wholes.shape[1]
            mask = None if window is None or window >= width else self._mask(width, width, None, window)
            keys, values = _gather(key, self.wholes), _gather(value, self.wholes)
            outputs.append(attend(_gather(query, self.wholes), keys, values, mask))
        if len(self.later_queries):
            mask = self._mask(self.later_queries.shape[1], self.later_keys.shape[1], self.later_offsets, window)
            keys, values = _gather(key, self.later_keys), _gather(value, self.later_keys)
            outputs.append(attend(_gather(query, self.later_queries), keys, values, mask))
        flat = torch.cat([out.transpose(1, 2).flatten(2).flatten(0, 1) for out in outputs])
        return flat.index_select(0, self.place)

    def _mask(self, queries: int, keys: int, offsets: torch.Tensor | None, window: int | None) -> torch.Tensor:
        """[n, 1, queries, keys] bool: where a query looks, which is `offsets` [n] keys after its segment's first."""
        device = self.place.device
        own = torch.arange(queries, device=device)[:, None]
        own = own[None] if offsets is None else own + offsets[:, None, None]
        columns = torch.arange(keys, device=device)
        seen = columns <= own
        if window is not None:
            seen &= columns > own - window
        return seen.unsqueeze(1)


@dataclass
class VarlenPacking(Packing):
    """For a kernel of sequences of any lengths, end to end (FlashAttention's "varlen", Transformer Engine's "thd").

    The row is cut into segments: a shared beginning, and the own parts after it. The queries of a segment are its
    tokens, as they lie in the row; its keys those of the beginning, if any, and its own. So a beginning is computed
    once, whatever its length, and only its keys and values are repeated. A segment that has more keys than queries
    wants the causal mask aligned at its last query and key ("bottom right").

    Everything is made on the host, lengths of the longest segments as plain numbers: kernels that were not told them
    would ask the device.

    Attributes:
        cu_seqlens_q, cu_seqlens_kv: [segments + 1] int32, of the base class: where segments' queries and keys begin.
        max_seqlen_q, max_seqlen_kv: of the base class: most queries and keys of a segment.
        keys: [k] int64: of each key its place in the row. None: nothing is shared, and keys lie as queries do.
    """

    keys: torch.Tensor | None = None

    def of_segments(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values of the row's tokens [t, kv_heads, d] -> of the segments [k, kv_heads, d]."""
        return rows if self.keys is None else rows.index_select(0, self.keys)


# (lengths, shared, groups, width=..., multiple_of=...) -> the row
Pack = Callable[..., Packing]
# (place of a beginning, its length, place of what follows it, its length)
Segment = tuple[int, int, int, int]


def pack(
    lengths: Sequence[int], shared: Sequence[int], groups: Sequence[int], *, width: int, multiple_of: int = 1
) -> DensePacking:
    """Lay sequences into one row.

    Args:
        lengths: tokens of each sequence.
        shared: how many of its first tokens all sequences of its group have; the others are its own part.
        groups: the same number for sequences that begin alike.
        width: of the padded sequences that tokens are taken from.
        multiple_of: the row is filled up to a multiple of it.
    """
    row = _Row(lengths, shared, groups)
    wholes: list[_Part] = []
    later: list[_Part] = []
    for beginning, common, own in row.groups:
        long = common > LONG_BEGINNING * max(count for _, count in own)
        if common and long:
            wholes.append((beginning, common, 0, 0, True))
        for number, (place, count) in enumerate(own):
            if common and long:
                later.append((beginning, common, place, count, False))
            elif count or common:
                wholes.append((beginning, common, place, count, not number))
    total, padding = row.total, -row.total % multiple_of
    all_wholes, of_wholes = spans(wholes, total)
    keys, _ = spans(later, total)
    queries, of_queries = spans([(0, 0, begin, count, False) for _, _, begin, count, _ in later], total)
    place_of = torch.zeros(total + padding, dtype=torch.int64)
    place_of[all_wholes[of_wholes]] = of_wholes.flatten().nonzero()[:, 0]
    place_of[queries[of_queries]] = all_wholes.numel() + of_queries.flatten().nonzero()[:, 0]
    held = row.tokens(width, padding)
    longest = int(held["positions"].max()) + 1
    return DensePacking(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **held,
        wholes=all_wholes,
        later_queries=queries,
        later_keys=keys,
        later_offsets=torch.tensor([count for _, count, _, _, _ in later], dtype=torch.int64),
        place=place_of,
    )


def pack_varlen(
    lengths: Sequence[int], shared: Sequence[int], groups: Sequence[int], *, width: int, multiple_of: int = 1
) -> VarlenPacking:
    """The same row as `pack`, for kernels of sequences of any lengths. What fills it up is a segment of its own, so
    that no output and no gradient is left as it was found in memory."""
    held, segments = laid_out(lengths, shared, groups, width=width, multiple_of=multiple_of)
    return of_segments(held, segments, [count for *_, count in segments])


def of_segments(held: dict[str, torch.Tensor], segments: Sequence[Segment], counts: Sequence[int]) -> VarlenPacking:
    """That of these segments, of whose tokens the last `counts` are queries."""
    queries, keys = torch.tensor(counts), torch.tensor([common + count for _, common, _, count in segments])
    places = [
        torch.arange(first, first + count)
        for beginning, common, place, own_count in segments
        for first, count in ((beginning, common), (place, own_count))
    ]
    zero, lie_elsewhere = torch.zeros(1, dtype=torch.int32), any(common for _, common, _, _ in segments)
    return VarlenPacking(
        qkv_format="sbhd",
        cu_seqlens_q=torch.cat([zero, queries.cumsum(0, dtype=torch.int32)]),
        cu_seqlens_kv=torch.cat([zero, keys.cumsum(0, dtype=torch.int32)]),
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
        **held,
        keys=torch.cat(places) if lie_elsewhere or "own" in held else None,
    )


def laid_out(
    lengths: Sequence[int], shared: Sequence[int], groups: Sequence[int], *, width: int, multiple_of: int
) -> tuple[dict[str, torch.Tensor], list[Segment]]:
    """(`Packing`'s own fields, the segments of the row in order: beginnings, own parts, and what fills it up)."""
    row = _Row(lengths, shared, groups)
    padding = -row.total % multiple_of
    segments: list[Segment] = []
    for beginning, common, own in row.groups:
        segments += [(0, 0, beginning, common), *((beginning, common, place, count) for place, count in own)]
    segments = [segment for segment in [*segments, (0, 0, row.total, padding)] if segment[3]]
    return row.tokens(width, padding), segments


# (place of a beginning, its length, place of what follows, its length, whether the beginning's outputs are taken here)
_Part = tuple[int, int, int, int, bool]


class _Row:
    """Sequences laid end to end, after the beginning that they share; arguments as `pack` has them.

    Attributes:
        total: tokens.
        starts: where each sequence's own part begins, which is after what `shared` says, in company or alone.
        groups: (place of a beginning, its length, (place, length) of each of what follows it), in the row's order.
    """

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], groups: Sequence[int]) -> None:
        self.total = 0
        self.starts = [0] * len(lengths)
        self.groups: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._taken: list[tuple[int, int, int]] = []  # (sequence, first token, tokens), in the row's order
        members: dict[int, list[int]] = {}
        for sequence, group in enumerate(groups):
            members.setdefault(group, []).append(sequence)
        for alike in members.values():
            common = shared[alike[0]] if len(alike) > 1 else 0
            beginning, own = self._lay(alike[0], 0, common), []
            for sequence in alike:
                place = self._lay(sequence, common, lengths[sequence] - common)
                self.starts[sequence] = place + shared[sequence] - common
                own.append((place, lengths[sequence] - common))
            self.groups.append((beginning, common, own))
        if not self.total:  # a rank without samples computes one token that nobody asks for
            self.groups.append((0, 0, [(self._lay(0, 0, 1), 1)]))

    def _lay(self, sequence: int, first: int, count: int) -> int:
        """Add tokens to the row; returns their place."""
        self._taken.append((sequence, first, count))
        self.total += count
        return self.total - count

    def tokens(self, width: int, padding: int) -> dict[str, torch.Tensor]:
        """`Packing`'s own fields, of a row that is `padding` tokens longer."""
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in self._taken])
        sequences = torch.repeat_interleave(
            torch.tensor([sequence for sequence, _, _ in self._taken]), torch.tensor([n for _, _, n in self._taken])
        )
        empty = torch.zeros(padding, dtype=torch.int64)
        return {
            "source": torch.cat([sequences * width + positions, empty]),
            "positions": torch.cat([positions, empty]),
            "starts": torch.tensor(self.starts, dtype=torch.int64),
        }


def spans(parts: list[_Part], total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([n, longest] places of each part's tokens, where short ones repeat one; which of their outputs are theirs)."""
    numbers = torch.tensor([part[:4] for part in parts], dtype=torch.int64).view(-1, 4)
    beginning, common, own, count = (column.unsqueeze(1) for column in numbers.unbind(1))
    owned = torch.tensor([part[4] for part in parts], dtype=torch.bool).unsqueeze(1)
    steps = torch.arange(int((common + count).max()) if parts else 0)
    places = torch.where(steps < common, beginning + steps, own + (steps - common).minimum(count - 1))
    return places.clamp(0, total - 1), (steps < common + count) & ((steps >= common) | owned)


def _gather(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[t, heads, d] -> [n, heads, length, d]."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


class Predicting(NamedTuple):
    """Of each response token [n]: whose it is, and where in the model's output [b, s] it is predicted."""

    sample: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor


@dataclass
class MicroBatch:
    """Samples that go through the model together, prompt and response joined: a row each, or packed into one row.

    It is made on the host, with all that its shapes follow from: asking a device for them would mean waiting for it.

    Attributes:
        samples: [n] int64, the samples' places in the whole batch.
        tokens: [n, s] int64, right-padded: padding on the right needs no mask, as causal attention never sees it; or
            [1, t], see `packing`.
        prompt_lengths, response_lengths: [n] int64.
        fields: what a loss needs, by name, each [n, r] for responses of at most r tokens.
        packing: where the samples are in a packed row; None: they have rows of their own.
        vision: of a model that takes images, what it reads besides.
        routed_experts: [n, s, layers, k] or [1, t, layers, k] int16, as `tokens`: the experts that each is to take, -1
            where its router chooses; None: it always does.
        taught: [response tokens, hidden], on the last stage: the teacher's hidden states before each of them.
        places: [s / cp] int64: where the tokens that this context-parallel rank has are in the rows, see `cut`; None:
            it has all.
        num_response_columns: r, the longest response here; follows from the lengths.
        predicting: where each response token's predecessor is, whose output predicts that token; likewise. Of tokens
            whose predecessor is on another context-parallel rank nothing is here, and so with the next two.
        targets, predicted: [n] int64, these response tokens; [n, r] bool, which they are.
        last: [n] int64: where each sequence's last token is in its row; -1: on another rank.
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
    places: torch.Tensor | None = None
    num_response_columns: int = -1
    predicting: Predicting = None  # type: ignore[assignment]  # `__post_init__` has these
    targets: torch.Tensor = None  # type: ignore[assignment]
    predicted: torch.Tensor = None  # type: ignore[assignment]
    last: torch.Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.num_response_columns < 0:
            self.num_response_columns = int(self.response_lengths.max()) if self.samples.numel() else 0
            self.predicting, self.predicted = self._predicting(), self.response_mask
            self.targets = self.tokens[self.predicting.row, self.predicting.position + 1]
            self.last = self._last()

    @property
    def response_mask(self) -> torch.Tensor:
        """[n, r] bool: where a response token is."""
        return torch.arange(self.num_response_columns, device=self.tokens.device) < self.response_lengths[:, None]

    def _predicting(self) -> Predicting:
        sample, column = self.response_mask.nonzero(as_tuple=True)
        if self.packing is not None:
            return Predicting(sample, torch.zeros_like(sample), self.packing.starts[sample] + column)
        return Predicting(sample, sample, self.prompt_lengths[sample] - 1 + column)

    def _last(self) -> torch.Tensor:
        if self.packing is not None:
            return self.packing.starts + self.response_lengths
        return (self.prompt_lengths + self.response_lengths - 1).clamp(min=0)

    def cut(self, places: torch.Tensor) -> MicroBatch:
        """What a context-parallel rank has of it: the tokens at these `places` of each row, and what they predict."""
        here = torch.full((self.tokens.shape[1],), -1)
        here[places] = torch.arange(len(places))
        sample, row, position = self.predicting
        held = here[position] >= 0
        return replace(
            self,
            tokens=self.tokens[:, places],
            routed_experts=None if self.routed_experts is None else self.routed_experts[:, places],
            places=places,
            predicting=Predicting(sample[held], row[held], here[position[held]]),
            targets=self.targets[held],
            predicted=self.predicted.masked_scatter(self.predicted, held),
            last=here[self.last],
        )

    def at_the_end(self, output: torch.Tensor) -> torch.Tensor:
        """[b, s, k] -> [n, k]: the model's output at each sequence's last token; anything where there is none, and 0
        where another context-parallel rank has it."""
        row = torch.arange(len(self.samples), device=output.device)
        found = output[row if self.packing is None else torch.zeros_like(row), self.last.clamp(min=0)]
        return found if self.places is None else found.where(self.last[:, None] >= 0, 0.0)

    def drawing(self, sample: torch.Tensor, temperature: float) -> dict[str, Any]:
        """How tokens of these samples [n] were drawn: as the samples say, or at `temperature` where they do not."""
        if "temperatures" not in self.fields or not self.fields["temperatures"].shape[1]:
            return {"temperature": temperature}
        return {"temperature": self.fields["temperatures"][sample, 0], "top_k": self.fields["top_ks"][sample, 0]}

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if self.tokens.device == device:
            return self
        moved = {name: to_device(tensor, device) for name, tensor in self.fields.items()}
        predicting = Predicting(*(to_device(tensor, device) for tensor in self.predicting))
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        there: dict[str, Any] = {name: to_device(x, device) for name, x in held.items() if isinstance(x, torch.Tensor)}
        there |= {name: x.to(device) for name, x in held.items() if isinstance(x, Packing | VisionInputs)}
        return replace(self, fields=moved, predicting=predicting, **there)


def spread(flat: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """[n response tokens] -> [b, r], zero elsewhere."""
    mask = batch.predicted
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
