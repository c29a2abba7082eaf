"""A data set of prompts: every row checked and tokenised before the first step, then read by number."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config.run import SourceConfig
from megaverl.data.prompts import Columns, Message, PromptEncoder, RowColumns
from megaverl.data.sampler import MixedSampler, PromptSampler, split_held_out
from megaverl.data.sources import Entry, RowChain, RowSource, as_source, open_source
from megaverl.distributed.shared_items import SharedItem
from megaverl.errors import DataError

__all__ = ["PromptDataset", "PromptRecord", "PromptReport", "PromptSampler", "split_held_out"]


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, ready for rollout and reward.

    Attributes:
        index: its number in the data set; samples of one prompt share it.
        prompt: as the row has it. `text`: as the model sees it. `token_ids`: that, tokenised.
        reference: the reference answer, of any JSON type; None where no answer key is asked for.
        extra: the row's other columns, for the reward.
        where: file and line, for messages.
        messages: the conversation that the prompt is, whatever the model's chat template makes of it.
        images: those of the prompt; a token of `token_ids` stands for each part of each of them. None: of a model that
            takes none.
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
    """What was found when all rows were checked: rows in use, rows left out, rows that lost their beginning.

    num_dropped: too long. num_short: too short.
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
    """Prompts by number, from `rows`.

    All rows are read once when it is made, so that a bad one ends the run before it starts rather than hours
    into it; afterwards a row is read again from its file when it is asked for. Memory: 8 bytes a row.

    Args:
        columns: which columns are read, see `Columns`.
        sources: (rows, weight) of each source that `rows` is a chain of, where they have weights.

    Raises:
        DataError: a row without a prompt or an answer, of a wrong type, or too long, named by file and line;
            no rows.
    """

    def __init__(
        self,
        rows: RowSource,
        encoder: PromptEncoder,
        columns: Columns | None = None,
        *,
        sources: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._rows = rows
        self._encoder = encoder
        self._columns = columns or Columns()
        self._kept = array("Q")
        num_truncated = num_short = 0
        for number in range(len(rows)):
            where = rows.where(number)
            read = self._columns.read(rows[number], where)
            if encoder.is_short(read.prompt, where, read.tools):
                num_short += 1
                continue
            num_cut = encoder.num_cut(read.prompt, where, read.tools, read.images or ())
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
        self._weights = tuple(weight for _, weight in sources)
        ends = [sum(size for size, _ in sources[: number + 1]) for number in range(len(sources))]
        kept_before = [bisect_left(self._kept, end) for end in ends]
        self._sizes = [end - start for start, end in zip([0, *kept_before], kept_before, strict=False)]

    @classmethod
    def load(
        cls,
        entries: Entry | Sequence[Entry],
        encoder: PromptEncoder,
        columns: Columns | None = None,
    ) -> PromptDataset:
        """From files, folders, data sets on the hub, or the user's own code (see `sources.open_source`)."""
        several: Sequence[Entry] = [entries] if isinstance(entries, SourceConfig | str | Path) else entries
        given = [as_source(entry) for entry in several]
        if not given:
            raise DataError("no data file is named. Give at least one .jsonl or .parquet file.")
        opened = [open_source(source) for source in given]
        rows = opened[0] if len(opened) == 1 else RowChain(opened)
        sizes = [len(some) for some in opened]
        return cls(rows, encoder, columns, sources=list(zip(sizes, weights_of(given), strict=False)))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptRecord:
        if not 0 <= index < len(self._kept):
            raise IndexError(f"prompt {index} of a data set of {len(self._kept)}")
        number = self._kept[index]
        where = self._rows.where(number)
        record = make_record(self._columns.read(self._rows[number], where), self._encoder, index, where)
        if record is None:
            raise DataError(f"{where}: too long, although it was not at the start. Was the file changed?")
        return record

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do, or when other rows are dropped for their length."""
        return f"{self._rows.fingerprint}-{len(self._kept)}"

    def sampler(self, prompts_per_step: int, seed: int, *, shuffle: bool = True) -> PromptSampler:
        """The order in which steps take these prompts."""
        fingerprint = self.fingerprint
        if self._weights:
            return MixedSampler(
                self._sizes, self._weights, prompts_per_step, seed, shuffle=shuffle, fingerprint=fingerprint
            )
        return PromptSampler(len(self), prompts_per_step, seed, shuffle=shuffle, fingerprint=fingerprint)


def make_record(read: RowColumns, encoder: PromptEncoder, index: int, where: str) -> PromptRecord | None:
    """A row's prompt, ready; None if its length drops it."""
    if encoder.is_short(read.prompt, where, read.tools):
        return None
    encoded = encoder.encode(read.prompt, where, read.tools, read.images or ())
    if encoded is None:
        return None
    text, ids, messages = encoded.text, encoded.token_ids, encoder.messages(read.prompt)
    return PromptRecord(index, read.prompt, text, ids, read.reference, read.extra, where, messages, read.images)


def weights_of(sources: Sequence[SourceConfig]) -> list[float]:
    """The weight of each source, or nothing where no source has one.

    Raises:
        DataError: some have one and some have not.
    """
    without = [source.path for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise DataError(f"{without[0]}: it has no weight, and other sources have. Give every source one, or none.")
    return [source.weight for source in sources if source.weight is not None]


def _nothing_left(rows: RowSource, max_tokens: int | None) -> str:
    if len(rows) == 0:
        return "the data set is empty. Put at least one row into it."
    return (
        f"{rows.where(0)}, and all {len(rows)} rows: every prompt is longer than {max_tokens} tokens and "
        "was dropped. Raise data.max_prompt_tokens."
    )
