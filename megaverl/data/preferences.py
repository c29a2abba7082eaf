"""Judged responses as token ids: pairs of a better and a worse one, or single ones with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megaverl.config.run import PreferenceConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.images import image_column
from megaverl.data.prompts import PromptEncoder, value_at
from megaverl.errors import DataError

# Losses convert margins to float32, whose largest number is 3e38.
MOST_MARGIN = 1e30


class Judged(NamedTuple):
    """One response of a row.

    Attributes:
        which: name of the response in messages.
        value: its text, or the column's value before it was checked.
        desirable: whether such responses should become more likely.
    """

    which: str
    value: Any
    desirable: bool


@dataclass(frozen=True)
class PreferenceColumns:
    """Names of columns: the two responses of a pair, or a single response and its label.

    Attributes:
        margin: column that says how much better the better response is. None: not read.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str = "completion"
    label: str = "label"
    margin: str | None = None

    @classmethod
    def of(cls, config: PreferenceConfig) -> PreferenceColumns:
        """Return the names in the section `preference`."""
        return cls(
            config.chosen_key,
            config.rejected_key,
            config.completion_key,
            config.label_key,
            config.margin_key,
        )

    def fit(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has any of the columns."""
        return any(
            value_at(row, name) is not None
            for name in (self.chosen, self.rejected, self.completion)
        )

    def read(self, row: Mapping[str, Any], where: str) -> list[Judged]:
        """Return the row's pair, the better response first, or its single response.

        Raises:
            DataError: the row has neither or both, or a value that is no response or no label.
        """
        single = value_at(row, self.completion)
        pair = {name: value_at(row, name) for name in (self.chosen, self.rejected)}
        if single is not None and any(value is not None for value in pair.values()):
            raise DataError(
                f"{where}: it has {self.completion!r}, of a single response, and a pair as well. Leave one out."
            )
        if single is not None:
            return [
                self._text(Judged("single", single, self._label(row, where)), where)
            ]
        for name, setting in (
            (self.chosen, "chosen_key"),
            (self.rejected, "rejected_key"),
        ):
            if pair[name] is None:
                raise DataError(
                    f"{where}: no {name!r} in this row; its keys: {', '.join(map(repr, row)) or 'none'}. A row has a "
                    f"pair, {self.chosen!r} and {self.rejected!r}, or a single response, {self.completion!r} and "
                    f"{self.label!r}. Name the right column with preference.{setting}."
                )
        better, worse = pair.values()
        return [
            self._text(judged, where)
            for judged in (
                Judged("chosen", better, True),
                Judged("rejected", worse, False),
            )
        ]

    def read_margin(self, row: Mapping[str, Any], where: str) -> float:
        """Return how much better a pair's better response is.

        Raises:
            DataError: the margin is not a number of at least 0.
        """
        value = value_at(row, str(self.margin))
        if (
            # NaN fails the comparison below, too.
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= MOST_MARGIN
        ):
            raise DataError(
                f"{where}: {self.margin!r} is {value!r:.60}; a margin is a number of at least 0 and at most "
                f"{MOST_MARGIN:g}. Correct the row, or leave preference.margin_key out."
            )
        return float(value)

    def _label(self, row: Mapping[str, Any], where: str) -> bool:
        """Return the label of a single response."""
        value = value_at(row, self.label)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise DataError(
                f"{where}: {self.label!r} is {value!r:.60}; it says whether a single response is desirable: true or "
                "false (or 1 or 0). Correct the row, or name the right column with preference.label_key."
            )
        return bool(value)

    def _text(self, response: Judged, where: str) -> Judged:
        """Return the response with its text checked. For a conversation that is the last message."""
        value = response.value
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            # In a conversation, the last message is the response.
            value = value[-1].get("content")
        if not isinstance(value, str):
            raise DataError(
                f"{where}: the {response.which} response is {type(value).__name__}; it must be text, or chat messages "
                "that end with it. Name the right column with preference.chosen_key, rejected_key or completion_key."
            )
        return response._replace(value=value)


class PreferenceReader:
    """Reads judged responses from prompt records, which hold them among their other columns.

    Args:
        max_tokens: longest response, including its end of sequence.
        pairs_only: refuse single responses, for losses that compare two.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        columns: PreferenceColumns,
        *,
        max_tokens: int,
        pairs_only: bool = True,
    ) -> None:
        self.encoder = encoder
        self.columns = columns
        self.max_tokens = max_tokens
        self.pairs_only = pairs_only

    def check(self, dataset: PromptDataset) -> None:
        """Read every row, so that a bad one fails the run before it starts.

        Raises:
            DataError: see `batch`.
        """
        # The tokens are thrown away: `batch` encodes the rows that it needs again.
        for number in range(len(dataset)):
            self._read(dataset[number])

    def batch(self, records: Sequence[PromptRecord]) -> RolloutBatch:
        """Return the responses of these rows as a batch, with a pair's better one first.

        `desirable` [responses] is the label of each. With margins, `margins` [2 x
        pairs] repeats each pair's. `group_ids` are the rows.

        Raises:
            DataError: a row has no response, or one that is too long. Names the row.
        """
        read_rows = [self._read(record) for record in records]
        record_of_response = [
            record
            for record, responses in zip(records, read_rows, strict=True)
            for _ in responses
        ]
        batch = responses_of(
            [record.token_ids for record in record_of_response],
            [tokens for responses in read_rows for tokens, _ in responses],
            [row for row, responses in enumerate(read_rows) for _ in responses],
        ).with_(
            desirable=torch.tensor(
                [desirable for responses in read_rows for _, desirable in responses],
                dtype=torch.bool,
            )
        )
        batch = batch.with_columns(
            **image_column(record.images for record in record_of_response)
        )
        if self.columns.margin is None:
            return batch
        margins = [
            self.columns.read_margin(record.extra, record.where)
            for record in records
            # One for each response of the pair.
            for _ in range(2)
        ]
        return batch.with_(margins=torch.tensor(margins))

    def _read(self, record: PromptRecord) -> list[tuple[list[int], bool]]:
        """Return (tokens, whether it is desirable) of the row's responses."""
        judged = self.columns.read(record.extra, record.where)
        if self.pairs_only and len(judged) == 1:
            raise DataError(
                f"{record.where}: it has a single response ({self.columns.completion!r}), and this loss compares two. "
                "Use preference.loss=kto or bco, or rows with a chosen and a rejected response."
            )
        if self.columns.margin is not None:
            self.columns.read_margin(record.extra, record.where)
        encoded = []
        for which, value, desirable in judged:
            tokens = self.encoder.encode_answer(value)
            if len(tokens) > self.max_tokens:
                raise DataError(
                    f"{record.where}: the {which} response is {len(tokens)} tokens long, and at most "
                    f"{self.max_tokens} are allowed. Raise preference.max_response_tokens, or shorten the row."
                )
            encoded.append((tokens, desirable))
        return encoded


def pairs_of(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> RolloutBatch:
    """Return a batch of given responses, in which two consecutive ones with the same prompt are a pair."""
    return responses_of(
        prompts, responses, [number // 2 for number in range(len(responses))]
    )


def responses_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    group_ids: Sequence[int],
) -> RolloutBatch:
    """Return a batch of given responses, as if an engine had generated them."""
    lengths = torch.tensor([len(response) for response in responses])
    # [responses, longest response] and [responses, longest prompt], padded with zeros
    # on the right.
    ids = torch.zeros(
        len(responses), int(lengths.max()) if len(responses) else 0, dtype=torch.int64
    )
    inputs = torch.zeros(
        len(prompts),
        max((len(prompt) for prompt in prompts), default=0),
        dtype=torch.int64,
    )
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        inputs[row, : len(prompt)] = torch.tensor(list(prompt))
        ids[row, : len(response)] = torch.tensor(list(response))
    return RolloutBatch(
        {
            "input_ids": inputs,
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "generated_ids": ids,
            "response_lengths": lengths,
            "response_mask": torch.arange(ids.shape[1]) < lengths.unsqueeze(1),
            "group_ids": torch.tensor(list(group_ids), dtype=torch.int64),
        }
    )


def best_and_worst(scores: torch.Tensor, group_ids: torch.Tensor) -> list[int]:
    """Return rows [best, worst, best, worst, ...] of the groups whose scores `[batch]` differ.

    The first of equal rows counts.

    Rows with an unknown score (NaN) are skipped.
    """
    rows: list[int] = []
    for group in group_ids.unique():
        members = ((group_ids == group) & ~scores.isnan()).nonzero()[:, 0]
        # [members]. If all scores are equal, the group says nothing about what is
        # better.
        group_scores = scores[members]
        if len(group_scores) and bool(group_scores.max() > group_scores.min()):
            rows += [
                int(members[group_scores.argmax()]),
                int(members[group_scores.argmin()]),
            ]
    return rows


def best_of_each(scores: torch.Tensor, group_ids: torch.Tensor) -> list[int]:
    """Return the row of the best response of every group with a known score (not NaN).

    The first of equal rows counts.
    """
    is_known = ~scores.isnan()
    best = []
    for group in group_ids.unique():
        members = ((group_ids == group) & is_known).nonzero()[:, 0]
        if len(members):
            best.append(int(members[scores[members].argmax()]))
    return best
