"""A data set of prompts: every row checked and tokenised before the first step, then read by number."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.data.prompts import Message, PromptEncoder, check_prompt
from megaverl.data.rows import RowSource, open_rows
from megaverl.data.sampler import PromptSampler, split_held_out
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
    """

    index: int
    prompt: str | list[Message]
    text: str
    token_ids: list[int]
    reference: Any
    extra: dict[str, Any]
    where: str


@dataclass(frozen=True)
class PromptReport:
    """What was found when all rows were checked: rows in use, rows left out, rows that lost their beginning."""

    num_rows: int
    num_dropped: int
    num_truncated: int

    def __str__(self) -> str:
        text = f"{self.num_rows} prompts"
        if self.num_dropped:
            text += f"; {self.num_dropped} too long and dropped"
        if self.num_truncated:
            text += f"; {self.num_truncated} too long and cut at the left"
        return text


class PromptDataset:
    """Prompts by number, from `rows`.

    All rows are read once when it is made, so that a bad one ends the run before it starts rather than hours
    into it; afterwards a row is read again from its file when it is asked for. Memory: 8 bytes a row.

    Args:
        prompt_key: column of the prompt. `a.b` reaches into a nested column.
        answer_key: column of the reference answer, likewise; None: there is none.

    Raises:
        DataError: a row without a prompt or an answer, of a wrong type, or too long, named by file and line;
            no rows.
    """

    def __init__(
        self,
        rows: RowSource,
        encoder: PromptEncoder,
        *,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
    ) -> None:
        self._rows = rows
        self._encoder = encoder
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._kept = array("Q")
        num_truncated = 0
        for number in range(len(rows)):
            num_cut = encoder.num_cut(self._columns(number)[0], rows.where(number))
            if num_cut is not None:
                self._kept.append(number)
                num_truncated += num_cut > 0
        if not self._kept:
            raise DataError(_nothing_left(rows, encoder.format.max_tokens))
        self.report = PromptReport(
            num_rows=len(self._kept),
            num_dropped=len(rows) - len(self._kept),
            num_truncated=num_truncated,
        )

    @classmethod
    def load(
        cls,
        paths: str | Path | Sequence[str | Path],
        encoder: PromptEncoder,
        *,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
    ) -> PromptDataset:
        """From JSONL and Parquet files, or patterns of such (see `rows.open_rows`)."""
        return cls(open_rows(paths), encoder, prompt_key=prompt_key, answer_key=answer_key)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptRecord:
        if not 0 <= index < len(self._kept):
            raise IndexError(f"prompt {index} of a data set of {len(self._kept)}")
        number = self._kept[index]
        where = self._rows.where(number)
        prompt, reference, extra = self._columns(number)
        encoded = self._encoder.encode(prompt, where)
        if encoded is None:
            raise DataError(f"{where}: too long, although it was not at the start. Was the file changed?")
        return PromptRecord(index, prompt, encoded.text, encoded.token_ids, reference, extra, where)

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do, or when other rows are dropped for their length."""
        return f"{self._rows.fingerprint}-{len(self._kept)}"

    def sampler(self, prompts_per_step: int, seed: int, *, shuffle: bool = True) -> PromptSampler:
        """The order in which steps take these prompts."""
        return PromptSampler(len(self), prompts_per_step, seed, shuffle=shuffle, fingerprint=self.fingerprint)

    def _columns(self, number: int) -> tuple[str | list[Message], Any, dict[str, Any]]:
        """Prompt, reference and further columns of row `number`, checked."""
        row, where = self._rows[number], self._rows.where(number)
        prompt = check_prompt(_column(row, self._prompt_key, where, "data.prompt_key"), where, self._prompt_key)
        reference = None
        if self._answer_key is not None:
            reference = _column(row, self._answer_key, where, "data.answer_key")
        extra = {key: value for key, value in row.items() if key not in (self._prompt_key, self._answer_key)}
        return prompt, reference, extra


def _column(row: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    """The value of `key` (or of the path `a.b`), which must be there and not null."""
    value: Any = row
    if key in row:
        value = row[key]
    else:
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(
            f"{where}: no {key!r} in this row; its keys: {', '.join(map(repr, row)) or 'none'}. "
            f"Add it, or name the right column with {setting}."
        )
    return value


def _nothing_left(rows: RowSource, max_tokens: int | None) -> str:
    if len(rows) == 0:
        return "the data set is empty. Put at least one row into it."
    return (
        f"{rows.where(0)}, and all {len(rows)} rows: every prompt is longer than {max_tokens} tokens and "
        "was dropped. Raise data.max_prompt_tokens."
    )
