"""Pairs of a better and a worse response to the same prompt, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.prompts import PromptEncoder
from megaverl.errors import DataError


class PairReader:
    """Reads pairs out of prompt records whose reference is the better response.

    Args:
        rejected_key: column of the worse response. margin_key: of how much better the other is; None: not read.
        max_tokens: of a response, its end of sequence included.
    """

    def __init__(self, encoder: PromptEncoder, *, rejected_key: str, margin_key: str | None, max_tokens: int) -> None:
        self.encoder, self.max_tokens = encoder, max_tokens
        self.rejected_key, self.margin_key = rejected_key, margin_key

    def batch(self, records: Sequence[PromptRecord]) -> RolloutBatch:
        """[2 x pairs]: better and worse responses in turn; `margins` [2 x pairs] of each pair, if they are read.

        Raises:
            DataError: a row without a response, or with one that is too long; names the row.
        """
        responses = []
        for record in records:
            if self.rejected_key not in record.extra:
                raise DataError(
                    f"{record.where}: no {self.rejected_key!r} in this row; name the column of the worse response with "
                    "preference.rejected_key."
                )
            pair = (("chosen", record.reference), ("rejected", record.extra[self.rejected_key]))
            responses += [self._encoded(value, which, record.where) for which, value in pair]
        prompts = [record.token_ids for record in records for _ in range(2)]
        batch = pairs_of(prompts, responses)
        if self.margin_key is None:
            return batch
        margins = torch.tensor([self._margin(record) for record in records for _ in range(2)])
        return batch.with_(margins=margins)

    def _encoded(self, value: Any, which: str, where: str) -> list[int]:
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")  # a conversation: its last message is the response
        if not isinstance(value, str):
            raise DataError(
                f"{where}: the {which} response is {type(value).__name__}; it must be text, or chat messages that end "
                "with it. Name the right column with preference.chosen_key and preference.rejected_key."
            )
        tokens = self.encoder.encode_answer(value)
        if len(tokens) > self.max_tokens:
            raise DataError(
                f"{where}: the {which} response is {len(tokens)} tokens long, and at most {self.max_tokens} are "
                "allowed. Raise preference.max_response_tokens, or shorten the row."
            )
        return tokens

    def _margin(self, record: PromptRecord) -> float:
        value = record.extra.get(str(self.margin_key))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise DataError(
                f"{record.where}: {self.margin_key!r} is {value!r}; a margin is a number of at least 0. Mend the row, "
                "or leave preference.margin_key out."
            )
        return float(value)


def pairs_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> RolloutBatch:
    """A batch of responses that nobody generated here; neighbours with the same prompt are a pair."""
    lengths = torch.tensor([len(response) for response in responses])
    ids = torch.zeros(len(responses), int(lengths.max()) if len(responses) else 0, dtype=torch.int64)
    inputs = torch.zeros(len(prompts), max((len(prompt) for prompt in prompts), default=0), dtype=torch.int64)
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
            "group_ids": torch.arange(len(responses)) // 2,
        }
    )


def best_and_worst(scores: torch.Tensor, group_ids: torch.Tensor) -> list[int]:
    """Rows [best, worst, best, worst, ...] of the groups whose scores `[batch]` differ; of equal ones the first."""
    rows: list[int] = []
    for group in group_ids.unique():
        members = (group_ids == group).nonzero()[:, 0]
        found = scores[members]
        if bool(found.max() > found.min()):
            rows += [int(members[found.argmax()]), int(members[found.argmin()])]
    return rows


def best_of_each(scores: torch.Tensor, group_ids: torch.Tensor) -> list[int]:
    """The row of the best response of every group; of equal ones the first."""
    groups = [(group_ids == group).nonzero()[:, 0] for group in group_ids.unique()]
    return [int(members[scores[members].argmax()]) for members in groups]
