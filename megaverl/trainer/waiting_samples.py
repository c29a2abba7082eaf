"""Samples that the engines generated ahead of training, and that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaverl.config import Config
from megaverl.distributed.job_context import JobContext
from megaverl.trainer.stored_rollouts import StoredRollouts
from megaverl.workers.reward import Scores

# Prefixes of the metrics that describe samples. They are saved with the samples and
# restored after an interruption.
KEPT = ("rollout/", "reward/", "queue/depth")


class WaitingSamples:
    """Samples that wait for training, as seen by the engines' ranks of a run with separate role groups.

    Attributes:
        paused: seconds for which the engines waited for new weights, since the last samples.
        is_here: whether this rank keeps the samples. Only the first rank of the engines does.
    """

    def __init__(self, config: Config, context: JobContext) -> None:
        self._context, self._samples_per_step = context, config.samples_per_step
        placement = context.placement
        self.is_here = context.rank == placement.ranks["rollout"][0]
        self._is_async = config.rollout.async_rollout
        self.paused = 0.0
        self._kept: dict[int, StoredRollouts] = {}
        self._samplers: dict[int, dict[str, Any]] = {}

    def begin(self, step: int, sampler: dict[str, Any]) -> None:
        """Record that the engines begin a step.

        Args:
            sampler: state of the prompt sampler before the step's prompts are taken.
        """
        self._samplers[step] = sampler

    def sampler(self, done: int) -> dict[str, Any] | None:
        """Return the sampler state at the start of the step after `done` steps, or None
        if the engines have not begun it.
        """
        return self._samplers.get(done)

    def keep(self, samples: StoredRollouts) -> None:
        """Keep the samples of a step, and their scores if they have any, until the step is trained on."""
        metrics = {
            name: value
            for name, value in samples.metrics.items()
            if name.startswith(KEPT)
        }
        self._kept[samples.step] = replace(samples, metrics=metrics)

    def add_scores(
        self, step: int, scores: Scores, metrics: Mapping[str, float]
    ) -> None:
        """Add scores, and the metrics measured since, to samples that wait."""
        if (kept := self._kept.get(step)) is not None:
            self.keep(replace(kept, scores=scores, metrics=dict(metrics)))

    def metrics(self, ahead: int, measured: Mapping[str, float]) -> dict[str, float]:
        """Return staleness, queue depth and waiting time of a step's samples.

        Args:
            ahead: number of steps that the samples are ahead of training.
            measured: metrics of the samples so far. Values from before an interruption take precedence.
        """
        paused, self.paused = self.paused, 0.0
        staleness = {"rollout/staleness": float(ahead)}
        if self._is_async:
            staleness["queue/depth"] = float((ahead + 1) * self._samples_per_step)
        # Metrics of restored samples describe their generation in the interrupted run.
        staleness |= {name: measured[name] for name in staleness if name in measured}
        return staleness | ({"queue/wait_ms": paused * 1e3} if self._is_async else {})

    def forget(self, done: int) -> None:
        """Drop samples and sampler states of the first `done` steps, which have been trained on."""
        self._kept = {
            step: rollouts for step, rollouts in self._kept.items() if step >= done
        }
        self._samplers = {
            step: sampler for step, sampler in self._samplers.items() if step >= done
        }

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Return everything except the batches, as JSON-compatible values."""
        return [rollouts.facts() for rollouts in self._kept.values()]

    @property
    def files(self) -> dict[str, bytes]:
        """Return the batches as file contents, by file name in a checkpoint."""
        return {
            file_of(step): rollouts.to_bytes() for step, rollouts in self._kept.items()
        }


def read_waiting(
    folder: Path, facts: Iterable[Mapping[str, Any]]
) -> dict[int, StoredRollouts]:
    """Read the samples that a checkpoint kept, by step.

    Args:
        folder: folder of the checkpoint.
        facts: `WaitingSamples.facts`, from the checkpoint's state.

    Raises:
        DataError: a file is missing or damaged.
    """
    waiting = (
        StoredRollouts.read(folder / file_of(int(stored["step"])), dict(stored))
        for stored in facts
    )
    return {rollouts.step: rollouts for rollouts in waiting}


def file_of(step: int) -> str:
    """Return the file name of a step's waiting samples in a checkpoint."""
    return f"ahead_{step + 1:08d}.safetensors"
