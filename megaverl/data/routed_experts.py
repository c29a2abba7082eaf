"""Expert choices: the experts that an engine used for each token, a byte or two per token, layer and choice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.rollout.engine import Generation

# Column of a batch with a list of one `SharedItem` per sample.
EXPERTS_COLUMN = "routed_experts"
# Stands for an unknown expert, so the trainer's router chooses.
ROUTERS_CHOICE = -1


def experts_column(generations: Sequence[Generation]) -> dict[str, list[Any]]:
    """Return the column of these responses, or an empty dictionary if the engine reports no experts."""
    if not generations or generations[0].routed_experts is None:
        return {}
    return {
        EXPERTS_COLUMN: [
            [_item(generation.routed_experts)] for generation in generations
        ]
    }


def _item(experts: torch.Tensor | None) -> SharedItem:
    """Return the experts of one response as a shared item."""
    if experts is None:
        raise DataError(
            "some responses report the experts of their tokens and others do not."
        )
    key = hashlib.blake2b(
        experts.contiguous().numpy().tobytes(), digest_size=16
    ).hexdigest()
    return SharedItem(key, len(experts), lambda: {EXPERTS_COLUMN: experts})


def experts_of(entry: Sequence[SharedItem] | None) -> torch.Tensor | None:
    """Return an entry's experts, [tokens, layers, k], or None."""
    return entry[0].tensors[EXPERTS_COLUMN] if entry else None


def padded_experts(
    column: Sequence[Sequence[SharedItem] | None] | None,
    sequence_lengths: torch.Tensor,
    width: int,
) -> torch.Tensor | None:
    """Return the experts of a batch, [B, width, layers, k] int16, or None if it has none.

    `ROUTERS_CHOICE` stands where the engine processed nothing: at the last token and at
    padding.

    Raises:
        DataError: a sample has another number of tokens than its experts cover.
    """
    if column is None:
        return None
    experts = [experts_of(entry) for entry in column]
    example = next(
        (sample_experts for sample_experts in experts if sample_experts is not None),
        None,
    )
    if example is None:
        return None
    rows = torch.full(
        (len(column), width, *example.shape[1:]), ROUTERS_CHOICE, dtype=torch.int16
    )
    for row, (sample_experts, length) in enumerate(
        zip(experts, sequence_lengths.tolist(), strict=True)
    ):
        if sample_experts is not None:
            if len(sample_experts) != length - 1:
                raise DataError(
                    f"sample {row} has {length} tokens, and the engine's experts are of {len(sample_experts)}."
                )
            rows[row, : len(sample_experts)] = sample_experts
    return rows
