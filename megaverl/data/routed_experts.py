"""The experts that an engine took for each token, as a column of a batch: a byte or two per token, layer and choice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaverl.distributed.shared_items import SharedItem
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout.engine import Generation

COLUMN = "routed_experts"  # of a batch: each sample's, a list of one `SharedItem`
OWN = -1  # in the place of an expert: nobody says which, and the trainer's router chooses


def experts_column(generations: Sequence[Generation]) -> dict[str, list[Any]]:
    """The column of these responses; empty where the engine does not say."""
    if not generations or generations[0].routed_experts is None:
        return {}
    return {COLUMN: [[_item(each.routed_experts)] for each in generations]}


def _item(experts: torch.Tensor | None) -> SharedItem:
    if experts is None:
        raise DataError("one response says which experts it took, and another does not.")
    key = hashlib.blake2b(experts.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    return SharedItem(key, len(experts), lambda: {COLUMN: experts})


def experts_of(entry: Sequence[SharedItem] | None) -> torch.Tensor | None:
    """[tokens, layers, k] of an entry of the column."""
    return entry[0].tensors[COLUMN] if entry else None


def padded_experts(batch: RolloutBatch, width: int) -> torch.Tensor | None:
    """[B, width, layers, k] int16, `OWN` beyond what the engine read: the last token, and padding; None without them.

    Raises:
        DataError: a sample with more or fewer tokens than its experts are of.
    """
    column = batch.columns.get(COLUMN)
    if column is None:
        return None
    found = [experts_of(entry) for entry in column]
    like = next((each for each in found if each is not None), None)
    if like is None:
        return None
    rows = torch.full((len(batch), width, *like.shape[1:]), OWN, dtype=torch.int16)
    for row, (each, length) in enumerate(zip(found, batch.sequence_lengths.tolist(), strict=True)):
        if each is not None:
            if len(each) != length - 1:
                raise DataError(f"sample {row} has {length} tokens, and the engine's experts are of {len(each)}.")
            rows[row, : len(each)] = each
    return rows
