"""Validation on held-out prompts: mean reward, accuracy and pass@k, and the best result of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import torch

from megaverl.algorithms import mean_pass_at_k
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch, answer_rows
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.distributed_batch import RowSelection, gather_samples
from megaverl.monitoring.console import Console
from megaverl.rollout.engine import sampling_options
from megaverl.trainer.saving import Records, sample_records
from megaverl.workers.player import Player
from megaverl.workers.responses import Draws, once, responses
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.rollout import AgentRollouts, Rollout


@dataclass
class Best:
    """Best validation so far.

    Attributes:
        tie: decides between equal values: the reward as long as no response was correct, afterwards 0.
    """

    step: int = -1
    value: float = float("-inf")
    tie: float = float("-inf")


@dataclass
class Validation:
    """Validations of a run: prompts, schedule, records and the best result.

    Attributes:
        data: held-out prompts, or None if there are none.
        best: best validation by `trainer.best_metric`.
    """

    config: Config
    data: PromptDataset | None
    records: Records
    console: Console
    best: Best = field(default_factory=Best)

    @property
    def prompts(self) -> list[PromptRecord]:
        """Return the held-out prompts, at most `trainer.validation_prompts`."""
        assert self.data is not None
        return held_out_prompts(self.config, self.data)

    def note(self, done: int, result: HeldOutResult) -> None:
        """Update the best validation, then write and print this one.

        If all accuracies are 0, the reward decides which is best. Otherwise the first
        validation would always be the best.
        """
        metrics = result.metrics
        reward = metrics["validation/reward"]
        value = metrics.get(f"validation/{self.config.trainer.best_metric}", reward)
        tie = reward if value == 0.0 else 0.0
        # Tuples compare by value first. On a tie, the earlier validation stays the
        # best.
        if (value, tie) > (self.best.value, self.best.tie):
            self.best = Best(done, value, tie)
        self.records.log(done, metrics)
        samples = json.loads(result.samples)
        self.records.log_samples(done, samples, split="validation")
        self.console.print(
            f"validation after step {done}: "
            + "  ".join(
                f"{name.removeprefix('validation/')} {value:.3f}"
                for name, value in metrics.items()
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best validation, and a digest of the held-out prompts that it was measured on."""
        return asdict(self.best) | {"data": self.data_digest}

    @property
    def data_digest(self) -> str | None:
        """Return the digest of the held-out prompts, or None if there are none."""
        return None if self.data is None else self.data.fingerprint

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best validation from `state_dict`."""
        self.best = Best(
            int(state["step"]), float(state["value"]), float(state.get("tie", 0.0))
        )


def held_out_prompts(config: Config, data: PromptDataset) -> list[PromptRecord]:
    """Return the first `trainer.validation_prompts` rows of a data set."""
    count = min(len(data), config.trainer.validation_prompts or len(data))
    return [data[index] for index in range(count)]


# Step number that seeds the draws of validations. No training step has it, so no seed
# is used twice.
VALIDATION_STEP = 1 << 40


class HeldOutResult(msgspec.Struct, frozen=True):
    """Result of a validation.

    Attributes:
        metrics: metrics by name.
        samples: the first samples as JSON text, because their records may hold integers of any size.
    """

    metrics: dict[str, float]
    samples: str


def held_out_responses(
    config: Config,
    rollout: Rollout | AgentRollouts,
    prompts: Sequence[PromptRecord],
    player: Player | None = None,
    selection: RowSelection | None = None,
) -> RolloutBatch:
    """Generate `trainer.validation_samples` responses to every prompt. Collective over the engines' ranks.

    Every call uses the same seeds, so that two validations differ only by the weights.

    Args:
        selection: row selection for scoring and recording, or None if every rank gets all responses.
    """
    sampling = sampling_options(
        config.rollout.sampling, **config.trainer.validation_sampling
    )
    draws = Draws(config.run.seed, VALIDATION_STEP, config.trainer.validation_samples)
    return responses(
        rollout,
        prompts,
        sampling,
        draws,
        player,
        config.rollout.function,
        selection=selection,
    )


def measure_held_out(
    config: Config, reward: RewardRole, batch: RolloutBatch, row_scores: Scores
) -> HeldOutResult:
    """Return metrics and sample records from scored responses to held-out prompts."""
    group_ids = gather_samples(batch, batch.group_ids)
    # Discard values that reward functions have logged for this validation. They are not
    # part of a step.
    reward.forget_logged()
    scores = once(batch, row_scores)
    # Conversations of the same episode count once, like in training metrics.
    if scores is not row_scores:
        group_ids = group_ids[answer_rows(batch).unique()]
    known = scores.known
    # pass@k needs all samples of a prompt, so groups with an unscored sample are left
    # out.
    whole = ~torch.isin(group_ids, group_ids[~scores.scored])
    correct: dict[str, float] = {}
    if reward.reward.has_accuracy:
        correct["accuracy"] = float(known.correct.float().mean())
        for k in config.trainer.pass_at:
            correct[f"pass@{k}"] = mean_pass_at_k(
                scores.correct[whole], group_ids[whole], k
            )
    metrics = {
        "reward": float(known.total.mean()),
        **correct,
        "response_length": float(
            gather_samples(batch, batch.response_mask.sum(dim=1)).float().mean()
        ),
    }
    samples = sample_records(batch, row_scores, reward, config.trainer.save_samples)
    return HeldOutResult(
        {f"validation/{name}": value for name, value in metrics.items()},
        json.dumps(samples),
    )
