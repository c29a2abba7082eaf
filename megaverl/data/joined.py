"""Prompt and response as one sequence, as the trained models read them, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch


@dataclass(frozen=True)
class Joined:
    """Sequences of prompt + response without a gap between the two, right-padded.

    A causal model at position p reads tokens 0..p and predicts token p + 1. So response token t, which
    stands at position `prompt_length + t`, has its log-prob, and the value before it, at position
    `prompt_length + t - 1`.
    """

    token_ids: Tensor  # [B, s] int64; padding is 0, a token that every vocabulary has
    lengths: Tensor  # [B] int64
    positions: Tensor  # [B, R] int64: where response token t is predicted; 0 where there is no token
    present: Tensor  # [B, R] bool: response tokens that exist

    @property
    def targets(self) -> Tensor:
        """`[B, s]` int64: the token that each position predicts; 0 at the last one and in the padding."""
        return torch.cat([self.token_ids[:, 1:], torch.zeros_like(self.token_ids[:, :1])], dim=1)

    def to_response(self, per_position: Tensor) -> Tensor:
        """From `[B, s]` per position (log-prob of the next token, or value) to `[B, R]` per response token.

        0 where there is no token. The gradient flows through.
        """
        return torch.where(self.present, per_position.gather(1, self.positions), 0.0)

    def to_positions(self, per_token: Tensor) -> Tensor:
        """From `[B, R]` per response token to `[B, s]`, at the position that predicts it; 0 elsewhere."""
        result = per_token.new_zeros(self.token_ids.shape)
        # Added, since tokens that do not exist all point at position 0; they add nothing.
        return result.scatter_add(1, self.positions, torch.where(self.present, per_token, torch.zeros_like(per_token)))


def join(batch: RolloutBatch, *, multiple_of: int = 1, length: int | None = None) -> Joined:
    """Join prompts and responses of a batch; arguments as in `RolloutBatch.joined`.

    A batch of padding rows alone still gets a width of at least `multiple_of`, so that a model can read it.

    Raises:
        DataError: a response without a prompt (its first token is predicted by nothing), or a sequence longer
            than `length`.
    """
    lengths = batch.sequence_lengths
    orphans = ((batch.prompt_lengths == 0) & (batch.response_lengths > 0)).nonzero()
    if len(orphans):
        raise DataError(f"sample {int(orphans[0, 0])} has a response but an empty prompt: nothing predicts it")
    longest = int(lengths.max()) if len(batch) else 0
    width = -(-max(longest, 1) // multiple_of) * multiple_of if length is None else length
    if width < longest or width % multiple_of:
        raise DataError(f"sequences of up to {longest} tokens do not fit a width of {width} (x {multiple_of})")

    starts = batch.prompt_lengths.unsqueeze(1)
    tokens = torch.arange(batch.generated_ids.shape[1], device=starts.device)
    present = tokens < batch.response_lengths.unsqueeze(1)
    places = torch.where(present, starts + tokens, 0)
    columns = torch.arange(batch.input_ids.shape[1], device=starts.device)
    prompt = torch.where(columns < starts, batch.input_ids, 0)

    token_ids = batch.input_ids.new_zeros(len(batch), width)
    kept = min(width, prompt.shape[1])
    token_ids[:, :kept] = prompt[:, :kept]
    token_ids = token_ids.scatter_add(1, places, torch.where(present, batch.generated_ids, 0))
    return Joined(token_ids, lengths, torch.where(present, places - 1, 0), present)
