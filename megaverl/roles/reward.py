"""The reward role: every rank scores its share of the responses; all get all scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.data.tokenizers import Tokenizer
from megaverl.parallel.collectives import gather_rows, together
from megaverl.platform import platform
from megaverl.rewards import Reward, RewardSample


@dataclass(frozen=True)
class Scores:
    """total: [B] float32, the weighted sum. components: each reward's own [B], by name. correct: [B] bool."""

    total: torch.Tensor
    components: dict[str, torch.Tensor]
    correct: torch.Tensor


class RewardRole:
    """Scores responses by rules and functions, spread over the ranks of `world`."""

    def __init__(self, reward: Reward, tokenizer: Tokenizer, world: dist.ProcessGroup) -> None:
        self.reward, self.tokenizer, self.world = reward, tokenizer, world

    def score(self, batch: RolloutBatch) -> Scores:
        """Scores of all samples, on every rank. The batch has the columns `prompt`, `reference` and `extra`.

        Raises:
            RewardError: on every rank, when a reward raises or returns the wrong thing on any.
        """
        size, rank = dist.get_world_size(self.world), dist.get_rank(self.world)
        bounds = [len(batch) * r // size for r in range(size + 1)]
        rows = range(bounds[rank], bounds[rank + 1])
        scored = torch.empty(0)
        names = [component.name for component in self.reward.components]
        with together(self.world):
            output = self.reward.score(self.samples(batch, rows))
            columns = [output.total, output.correct, *(output.components[name] for name in names)]
            scored = torch.tensor(columns, dtype=torch.float32).T
        table = gather_rows(scored.to(platform.device), self.world).cpu()
        components = {name: table[:, 2 + i] for i, name in enumerate(names)}
        return Scores(table[:, 0], components, table[:, 1].bool())

    def samples(self, batch: RolloutBatch, rows: Sequence[int]) -> list[RewardSample]:
        """What a reward function sees of the samples `rows`."""
        return [
            RewardSample(
                prompt=batch.columns["prompt"][i],
                response=self.text(batch, i),
                reference=batch.columns["reference"][i],
                extra=batch.columns["extra"][i],
                num_tokens=int(batch.response_lengths[i]),
                finish_reason=batch.columns["finish_reason"][i],
            )
            for i in rows
        ]

    def text(self, batch: RolloutBatch, row: int) -> str:
        """A response as text, without special tokens."""
        return self.tokenizer.decode(batch.generated_ids[row, : int(batch.response_lengths[row])].tolist())
