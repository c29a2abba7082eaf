"""Data set of prompts, and the order in which steps take its rows.

Every row is checked and tokenized before the first step, then read by number. The order
of one source, or of several with weights, is arithmetic on (seed, step), so nothing
about it needs saving.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megaverl.config.run import SourceConfig
from megaverl.data.digests import RowsDigest
from megaverl.data.messages import Message
from megaverl.data.prompts import Columns, PromptEncoder, RowColumns
from megaverl.data.row_source import RowSource
from megaverl.data.sources import Entry, RowChain, as_source, open_source
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError


class PromptSampler:
    """Steps of `prompts_per_step` rows, taken from one endless stream of epochs.

    Every epoch is a permutation of all rows, drawn from (seed, epoch), or the rows in
    order without shuffling. A step may cross the end of an epoch, so no row is ever
    left out.

    Args:
        num_rows: rows of the data set, at least 1.
        prompts_per_step: rows of one step, at least 1. May exceed `num_rows`.
        seed: any integer >= 0.
        shuffle: False takes the rows in order.
        fingerprint: fingerprint of the data set. Resuming is refused if it has changed.
        digests: (name, digest of its rows) of each source, for the same purpose.
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_step: int,
        seed: int,
        *,
        shuffle: bool = True,
        fingerprint: str = "",
        digests: Sequence[tuple[str, str]] = (),
    ) -> None:
        if num_rows < 1:
            raise DataError(
                "the data set is empty: there are no rows to take prompts from."
            )
        if prompts_per_step < 1:
            raise DataError(
                f"data.prompts_per_step is {prompts_per_step}; it must be at least 1."
            )
        self.num_rows = num_rows
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.digests = tuple(digests)

    def indices(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (the first is 0), independent of earlier calls."""
        return self.rows(step * self.prompts_per_step, self.prompts_per_step)

    def rows(self, position: int, count: int) -> list[int]:
        """Return `count` row numbers of the endless stream, starting at `position`."""
        chosen: list[int] = []
        end = position + count
        while position < end:
            # The stream is computed from the position alone, so a resumed run and every
            # rank agree without a saved state.
            epoch, offset = divmod(position, self.num_rows)
            taken = min(self.num_rows - offset, end - position)
            chosen.extend(self.epoch_order(epoch)[offset : offset + taken].tolist())
            position += taken
        return chosen

    def epoch(self, step: int) -> float:
        """Return the number of epochs before step `step`; 1.5 is half-way through the second."""
        return step * self.prompts_per_step / self.num_rows

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the row numbers of one epoch, int64 [num_rows]."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return _permutation(self.num_rows, self.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the order depends on, as a few bytes of JSON values."""
        return {
            "num_rows": self.num_rows,
            "prompts_per_step": self.prompts_per_step,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "rows": [digest for _, digest in self.digests],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the order is the one that a checkpoint was made with.

        Raises:
            DataError: names each value that differs.
        """
        current = self.state_dict()
        current_rows = current.pop("rows")
        changed = [
            f"{key}: was {state.get(key)!r}, is {current[key]!r}"
            for key in current
            if state.get(key) != current[key]
        ]
        # Checkpoints of earlier versions do not store this entry.
        saved = state.get("rows", current_rows)
        if len(saved) == len(self.digests):
            pairs = zip(self.digests, saved, strict=True)
            changed += [
                f"{name}: its rows are others"
                for (name, digest), was in pairs
                if digest != was
            ]
        if changed:
            raise DataError(
                "the checkpoint was made with other prompts, so the run cannot go on exactly: "
                + "; ".join(changed)
                + ". Restore the data files and `data`/`run.seed` settings, or start a new run from the "
                "saved weights."
            )


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of one epoch, read-only because it is cached."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
    # A caller that changed it would change the order of all later calls.
    order.setflags(write=False)
    return order


# Number of positions in which every source has exactly its share.
BLOCK = 4096


class Mixture:
    """Choice of a source at each position of an endless stream.

    In every `BLOCK` positions a source has the number of turns that its weight gives
    it, rounded, and at least one. Their order is drawn from (seed, block).

    Args:
        weights: above 0, at most `BLOCK` of them. Only their ratios matter.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.turns = _apportion(tuple(weights))
        self.seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at a position, and its number of earlier turns."""
        block, place = divmod(position, BLOCK)
        order, before = _order(self.turns, self.seed, block)
        source = int(order[place])
        return source, block * self.turns[source] + int(before[place])


class MixedSampler(PromptSampler):
    """Steps of rows from several sources with shares. A source that is exhausted starts again.

    Args:
        sizes: rows of each source. Row numbers run through the sources one after the other.
        weights: one per source.
        For the others, see `PromptSampler`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        prompts_per_step: int,
        seed: int,
        *,
        shuffle: bool = True,
        fingerprint: str = "",
        digests: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(
            sum(sizes),
            prompts_per_step,
            seed,
            shuffle=shuffle,
            fingerprint=fingerprint,
            digests=digests,
        )
        if empty := [number for number, size in enumerate(sizes) if not size]:
            raise DataError(
                f"source {empty[0] + 1} has a weight but no rows left. Remove it."
            )
        self.sizes = tuple(sizes)
        self.weights = tuple(weights)
        self.mixture = Mixture(weights, seed)
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def rows(self, position: int, count: int) -> list[int]:
        """Return `count` row numbers of the endless stream, starting at `position`."""
        chosen = []
        for place in range(position, position + count):
            source, turn = self.mixture.at(place)
            epoch, offset = divmod(turn, self.sizes[source])
            order = (
                _source_order(self.sizes[source], self.seed, source, epoch)
                if self.shuffle
                else None
            )
            chosen.append(
                self._starts[source]
                + (int(order[offset]) if order is not None else offset)
            )
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the order depends on, including the sources' sizes and weights."""
        return {
            **super().state_dict(),
            "sizes": list(self.sizes),
            "weights": list(self.weights),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the order is the one that a checkpoint was made with.

        Raises:
            DataError: names each value that differs.
        """
        super().check_state(state)


def _apportion(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return each source's turns in a block, by the largest-remainder method, at least one each."""
    if not weights or min(weights) <= 0 or len(weights) > BLOCK:
        raise DataError(f"weights {weights}: expected 1 to {BLOCK} numbers above 0.")
    exact = np.asarray(weights) / sum(weights) * BLOCK
    # A source with a tiny weight still gets one turn in every block, and so is not
    # forgotten.
    turns = np.maximum(1, np.floor(exact).astype(int))
    while turns.sum() < BLOCK:
        turns[int(np.argmax(exact - turns))] += 1
    while turns.sum() > BLOCK:
        turns[int(np.argmax(turns - exact + (turns <= 1) * -BLOCK))] -= 1
    return tuple(int(turn) for turn in turns)


@lru_cache(maxsize=4)
def _order(
    turns: tuple[int, ...], seed: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position in a block, and how often it occurred before in the block, [BLOCK] each."""
    order = np.repeat(np.arange(len(turns)), turns)
    # The 1 keeps these numbers apart from those of the sources' own orders, which use
    # 2.
    np.random.Generator(np.random.PCG64([seed, 1, block])).shuffle(order)
    before = np.zeros(BLOCK, dtype=np.int64)
    for source in range(len(turns)):
        is_source = order == source
        before[is_source] = np.arange(turns[source])
    return order, before


@lru_cache(maxsize=64)
def _source_order(size: int, seed: int, source: int, epoch: int) -> np.ndarray:
    """Return the permutation of one source's rows in one epoch."""
    return np.random.Generator(np.random.PCG64([seed, 2, source, epoch])).permutation(
        size
    )


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, ready for rollout and reward.

    Attributes:
        index: its number in the data set, shared by all samples of the prompt.
        prompt: the prompt as in the row.
        text: the prompt as the model sees it.
        token_ids: `text`, tokenized.
        reference: reference answer, of any JSON type. None if no answer column is configured.
        extra: the row's other columns, for the reward.
        where: file and line, for messages.
        messages: the prompt as a conversation, whatever the chat template makes of it.
        images: images of the prompt. `token_ids` has one token for each part of each image. None for a model without
            images.
    """

    index: int
    prompt: str | list[Message]
    text: str
    token_ids: list[int]
    reference: Any
    extra: dict[str, Any]
    where: str
    messages: list[Message]
    images: Sequence[SharedItem] | None = None


@dataclass(frozen=True)
class PromptReport:
    """Numbers from checking all rows.

    Attributes:
        num_rows: rows in use.
        num_dropped: rows that are too long.
        num_truncated: rows that were cut at the left.
        num_short: rows that are too short.
    """

    num_rows: int
    num_dropped: int
    num_truncated: int
    num_short: int = 0

    def __str__(self) -> str:
        text = f"{self.num_rows} prompts"
        if self.num_dropped:
            text += f"; {self.num_dropped} too long and dropped"
        if self.num_short:
            text += f"; {self.num_short} too short and dropped"
        if self.num_truncated:
            text += f"; {self.num_truncated} too long and cut at the left"
        return text


class PromptDataset:
    """Prompts by number.

    All rows are read once at construction, so a bad one fails the run before it starts,
    not hours later. Afterwards a row is read again from its file when it is needed.
    Memory: 8 bytes per row.

    Args:
        rows: source of the rows.
        columns: which columns to read; see `Columns`.
        sources: (name, number of rows) of each source that `rows` consists of.
        weights: one per source, or none.

    Raises:
        DataError: a row has no prompt or answer, has one of a wrong type, or is too long (names file and line); or
            there are no rows.
    """

    def __init__(
        self,
        rows: RowSource,
        encoder: PromptEncoder,
        columns: Columns | None = None,
        *,
        sources: Sequence[tuple[str, int]] = (),
        weights: Sequence[float] = (),
    ) -> None:
        self._rows = rows
        self._encoder = encoder
        self._columns = columns or Columns()
        # 8 bytes per row: the data set may have hundreds of millions of rows.
        self._kept = array("Q")
        sources = sources or [("data", len(rows))]
        ends = list(accumulate(size for _, size in sources))
        digests = [RowsDigest() for _ in sources]
        num_truncated = num_short = 0
        for number in range(len(rows)):
            where = rows.where(number)
            read = self._columns.read(rows[number], where)
            digests[bisect_right(ends, number)].add(read)
            if encoder.is_short(read.prompt, where, read.tools):
                num_short += 1
                continue
            num_cut = encoder.num_cut(read.prompt, where, read.tools, read.images or ())
            # None means that the row is dropped because of its length.
            if num_cut is not None:
                self._kept.append(number)
                num_truncated += num_cut > 0
        if not self._kept:
            raise DataError(_nothing_left(rows, encoder.format.max_tokens))
        self.report = PromptReport(
            num_rows=len(self._kept),
            num_dropped=len(rows) - len(self._kept) - num_short,
            num_truncated=num_truncated,
            num_short=num_short,
        )
        self._digests = [
            (name, digest.value())
            for (name, _), digest in zip(sources, digests, strict=True)
        ]
        self._weights = tuple(weights)
        kept_before = [bisect_left(self._kept, end) for end in ends]
        self._sizes = [
            end - start
            for start, end in zip([0, *kept_before], kept_before, strict=False)
        ]

    @classmethod
    def load(
        cls,
        entries: Entry | Sequence[Entry],
        encoder: PromptEncoder,
        columns: Columns | None = None,
    ) -> PromptDataset:
        """Load prompts from files, folders, data sets on the hub, or the user's code (see `sources.open_source`)."""
        entry_list: Sequence[Entry] = (
            [entries] if isinstance(entries, SourceConfig | str | Path) else entries
        )
        entry_sources = [as_source(entry) for entry in entry_list]
        if not entry_sources:
            raise DataError(
                "no data file is named. Give at least one .jsonl or .parquet file."
            )
        opened = [open_source(source) for source in entry_sources]
        rows = opened[0] if len(opened) == 1 else RowChain(opened)
        sources = [
            (source.path, len(source_rows))
            for source, source_rows in zip(entry_sources, opened, strict=True)
        ]
        return cls(
            rows, encoder, columns, sources=sources, weights=weights_of(entry_sources)
        )

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptRecord:
        if not 0 <= index < len(self._kept):
            raise IndexError(f"prompt {index} of a data set of {len(self._kept)}")
        number = self._kept[index]
        where = self._rows.where(number)
        record = make_record(
            self._columns.read(self._rows[number], where), self._encoder, index, where
        )
        if record is None:
            raise DataError(
                f"{where}: too long, although it was not at the start. Was the file changed?"
            )
        return record

    @property
    def fingerprint(self) -> str:
        """Digest that changes if the files change, or if other rows are dropped because of their length."""
        return f"{self._rows.fingerprint}-{len(self._kept)}"

    def sampler(
        self, prompts_per_step: int, seed: int, *, shuffle: bool = True
    ) -> PromptSampler:
        """Return the order in which steps take these prompts."""
        facts: dict[str, Any] = {
            "shuffle": shuffle,
            "fingerprint": self.fingerprint,
            "digests": self._digests,
        }
        if self._weights:
            return MixedSampler(
                self._sizes, self._weights, prompts_per_step, seed, **facts
            )
        return PromptSampler(len(self), prompts_per_step, seed, **facts)


def make_record(
    read: RowColumns, encoder: PromptEncoder, index: int, where: str
) -> PromptRecord | None:
    """Return a row's prompt, ready to use, or None if it is dropped because of its length."""
    if encoder.is_short(read.prompt, where, read.tools):
        return None
    encoded = encoder.encode(read.prompt, where, read.tools, read.images or ())
    if encoded is None:
        return None
    text = encoded.text
    ids = encoded.token_ids
    messages = encoder.messages(read.prompt)
    return PromptRecord(
        index,
        read.prompt,
        text,
        ids,
        read.reference,
        read.extra,
        where,
        messages,
        read.images,
    )


def weights_of(sources: Sequence[SourceConfig]) -> list[float]:
    """Return the weight of each source, or an empty list if no source has one.

    Raises:
        DataError: only some sources have a weight.
    """
    without = [source.path for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise DataError(
            f"{without[0]}: it has no weight, and other sources have. Give every source one, or none."
        )
    return [source.weight for source in sources if source.weight is not None]


def _nothing_left(rows: RowSource, max_tokens: int | None) -> str:
    """Return the message for a data set without usable rows."""
    if len(rows) == 0:
        return "the data set is empty. Put at least one row into it."
    return (
        f"{rows.where(0)}, and all {len(rows)} rows: every prompt is longer than {max_tokens} tokens and "
        "was dropped. Raise data.max_prompt_tokens."
    )
