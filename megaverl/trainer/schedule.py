"""Schedule of asynchronous rollouts, and stored samples that are not trained on yet.

The schedule fixes how far each role group may run ahead of training. Samples that wait
for training are saved with a checkpoint. A `RolloutFolder` stores the rollouts of a
whole run for a replay. No file contains pickled objects.

    rollouts/
        step_00000001.safetensors   a batch: tokens, log-probs, lengths, prompts, references and scores
        index.jsonl                 one line per file: step, weight version, rollout metrics, size and checksum
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megaverl.checkpoint import crc32_of
from megaverl.config import Config
from megaverl.data import batch_io
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.worlds import JobContext
from megaverl.errors import DataError
from megaverl.outside import read_json
from megaverl.rollout.engine import drawing, sampling_options
from megaverl.workers.reward import Scores

INDEX_FILE = "index.jsonl"
SCORE_COLUMN = "score"


@dataclass(frozen=True)
class StoredRollouts:
    """Responses of one step (counted from 0) that have not been trained on yet.

    Attributes:
        weight_version: version of the weights that generated them.
        scores: None if they have not been scored yet.
        metrics: metrics of these samples so far.
    """

    step: int
    weight_version: int
    batch: RolloutBatch
    scores: Scores | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of a step's flow that these samples provide."""
        return (
            {"rollouts": self.batch}
            if self.scores is None
            else {"rollouts": self.batch, "scores": self.scores}
        )

    def drawn_with(self, sampling: Mapping[str, Any]) -> StoredRollouts:
        """Return a copy that records the temperature at which its samples were drawn.

        A resumed run needs this if its own temperature differs.

        Args:
            sampling: `rollout.sampling` of the run that generated the samples.
        """
        if "temperatures" in self.batch:
            return self
        # Every response of this run was drawn with the same options.
        options = [sampling_options(sampling)] * len(self.batch)
        return replace(
            self, batch=self.batch.with_(**drawing(options, len(self.batch)))
        )

    def facts(self) -> dict[str, Any]:
        """Return everything except the batch and its scores, as JSON-compatible values."""
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "metrics": self.metrics,
        }

    def write(self, path: Path) -> None:
        """Write the batch and its scores as a safetensors file."""
        batch = self.batch
        if self.scores is not None:
            scores = self.scores
            rows = [
                {
                    "total": float(scores.total[i]),
                    "correct": bool(scores.correct[i]),
                    "components": {
                        name: float(values[i])
                        for name, values in scores.components.items()
                    },
                    "logged": dict(scores.logged.get(i, {})),
                }
                for i in range(len(batch))
            ]
            batch = batch.with_columns(**{SCORE_COLUMN: rows})
        batch_io.save(batch, path)

    @classmethod
    def read(cls, path: Path, facts: dict[str, Any]) -> StoredRollouts:
        """Read a file that `write` wrote, with the values that `facts` returned.

        Raises:
            DataError: the file is missing, damaged, or not a batch.
        """
        batch, scores = batch_io.load(path), None
        try:
            if SCORE_COLUMN in batch.columns:
                scores = _scores(batch.columns[SCORE_COLUMN])
                columns = {
                    name: column
                    for name, column in batch.columns.items()
                    if name != SCORE_COLUMN
                }
                batch = RolloutBatch(batch.tensors, columns)
            return cls(
                int(facts["step"]),
                int(facts["weight_version"]),
                batch,
                scores,
                dict(facts["metrics"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: these are not stored rollouts: {type(error).__name__}: {error}"
            ) from error


class RolloutFolder:
    """Folder of stored rollouts. One rank writes it; any rank may read it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def append(self, rollouts: StoredRollouts) -> None:
        """Store the rollouts of one step. The index lists a file only after it is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{rollouts.step + 1:08d}.safetensors"
        rollouts.write(path)
        entry = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "crc32": crc32_of(path),
            **rollouts.facts(),
        }
        with (self.folder / INDEX_FILE).open("a", encoding="utf-8") as index:
            index.write(json.dumps(entry) + "\n")
            index.flush()
            # The line must reach the disk before the next step, so that a killed run
            # can continue after this one.
            os.fsync(index.fileno())

    def forget(self, from_step: int) -> None:
        """Drop the entries that a run which resumes at `from_step` (counted from 0) will store again.

        An incomplete last line of a killed run is dropped as well.
        """
        path = self.folder / INDEX_FILE
        if not path.exists():
            return
        # `not_finite`: metrics in the index may be NaN.
        kept = [
            line
            for line in _whole_lines(path)
            if read_json(line, not_finite=True)["step"] < from_step
        ]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)

    def entries(self) -> dict[int, dict[str, Any]]:
        """Read the index, by step.

        Raises:
            DataError: the index is missing or damaged.
        """
        path = self.folder / INDEX_FILE
        if not path.is_file():
            raise DataError(
                f"{self.folder}: no stored rollouts: it has no {INDEX_FILE}. Make them with `megaverl train "
                "--rollout-only`, or with trainer.store_rollouts=true."
            )
        try:
            return {
                int(entry["step"]): entry
                for entry in map(read_json, _whole_lines(path))
            }
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: damaged ({type(error).__name__}: {error}). Store the rollouts again."
            ) from error

    def check(self, first: int, last: int, num_samples: int) -> None:
        """Check that the steps from `first` up to, but not including, `last` are stored and intact.

        Args:
            num_samples: samples that a step must have.

        Raises:
            DataError: lists every step that is missing, damaged, or has another number of samples.
        """
        entries, wrong = self.entries(), []
        for step in range(first, last):
            if step not in entries:
                wrong.append(f"step {step + 1} is not in it")
                continue
            path, expected = self.folder / entries[step]["file"], entries[step]["crc32"]
            if not path.is_file():
                wrong.append(f"{path.name} is missing")
            elif (checksum := crc32_of(path)) != expected:
                wrong.append(
                    f"{path.name} has the checksum {checksum} instead of {expected}"
                )
            elif (count := _count(batch_io.load(path))) != num_samples:
                wrong.append(
                    f"{path.name} holds {count} samples, and a step of this run takes {num_samples}"
                )
        if wrong:
            raise DataError(
                f"{self.folder}: cannot be replayed: {'; '.join(wrong)}. Lower trainer.steps, or store these again "
                "with the same data.prompts_per_step and algorithm.group_size."
            )

    def read(self, step: int) -> StoredRollouts:
        """Read the rollouts of one step, counted from 0."""
        entry = self.entries()[step]
        return StoredRollouts.read(self.folder / entry["file"], entry)


def _count(batch: RolloutBatch) -> int:
    """Return the number of samples of a batch, or of episodes if it has them."""
    return len(batch.episode_ids.unique()) if "episode_ids" in batch else len(batch)


def _whole_lines(path: Path) -> list[str]:
    # A killed run may leave an incomplete last line.
    return [
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _scores(rows: list[dict[str, Any]]) -> Scores:
    names = list(rows[0]["components"]) if rows else []
    return Scores(
        torch.tensor([row["total"] for row in rows], dtype=torch.float32),
        {
            name: torch.tensor(
                [row["components"][name] for row in rows], dtype=torch.float32
            )
            for name in names
        },
        torch.tensor([row["correct"] for row in rows], dtype=torch.bool),
        {number: row["logged"] for number, row in enumerate(rows) if row.get("logged")},
    )


# Prefixes of the metrics that describe samples. They are saved with the samples and
# restored after an interruption.
KEPT = ("rollout/", "reward/", "queue/depth")


@dataclass(frozen=True)
class Schedule:
    """Staleness schedule: after how many completed steps a role group begins its part of each step.

    Steps count from 0. The schedule is fixed before the run, so that two runs use the
    same weights for each step.

    Attributes:
        placement: ranks of each role.
        max_staleness: number of steps that rollouts may be ahead, or 0 if they alternate with training.
        save_interval, validate_every: number of steps between checkpoints and between validations, or 0 for never. No
            role group runs ahead of such a step.
        in_rounds: whether samples are made in rounds of generating and scoring (dynamic sampling). Engines and rewards
            then begin a step together, and receive no new weights until its rounds are complete.
        in_flight: whether engines that run ahead receive new weights in the middle of a step's responses.
    """

    placement: ResolvedPlacement
    max_staleness: int
    save_interval: int
    validate_every: int
    in_rounds: bool = False
    in_flight: bool = False

    @classmethod
    def of(cls, config: Config, placement: ResolvedPlacement) -> Schedule:
        """Create the schedule that the configuration implies."""
        rollout = config.rollout
        limit = rollout.max_staleness if rollout.async_rollout else 0
        # A replay does not generate in rounds, so its rewards need not wait for them.
        in_rounds = (
            config.algorithm.dynamic_sampling.metric is not None
            and config.trainer.replay_rollouts is None
        )
        saves, validates = (
            config.checkpoint.save_interval or 0,
            config.trainer.validate_every,
        )
        return cls(
            placement, limit, saves, validates, in_rounds, rollout.in_flight_updates
        )

    def lag(self, rank: int) -> int:
        """Return the lag of a rank's role group: the number of steps that it may be ahead of training."""
        return self.placement.lag(rank, self.max_staleness, in_rounds=self.in_rounds)

    def begins_after(self, step: int, lag: int) -> int:
        """Return how many steps must be completed on all ranks before a role group with this lag begins `step`."""
        return max(step - lag, self._last_barrier(step, lag))

    def in_flight_after(self, step: int, lag: int) -> int:
        """Return how many steps must be completed before engines with this lag take new
        weights in the middle of `step`.
        """
        return max(self.begins_after(step, lag), min(step, step - lag + 1))

    def _last_barrier(self, step: int, lag: int) -> int:
        """Return the last number of completed steps, up to `step`, that no role group may run ahead of."""
        # Only barriers within the lag can hold this step back.
        return max(
            (
                done
                for done in range(max(0, step - lag), step + 1)
                if self._is_barrier(done)
            ),
            default=0,
        )

    def _is_barrier(self, done: int) -> bool:
        return any(
            every and done % every == 0
            for every in (self.save_interval, self.validate_every)
        )


class WaitingSamples:
    """Samples that wait for training, as seen by the engines' ranks of a run with separate role groups.

    Attributes:
        is_here: whether this rank keeps the samples. Only the first rank of the engines does.
    """

    def __init__(self, config: Config, context: JobContext) -> None:
        self._context, self._samples_per_step = context, config.samples_per_step
        placement = context.placement
        self.is_here = context.rank == placement.ranks["rollout"][0]
        self._is_async = config.rollout.async_rollout
        self._paused = 0.0
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

    def keep(
        self,
        step: int,
        version: int,
        values: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Keep the samples of a step, and their scores if they have any, until the step is trained on.

        Args:
            version: version of the weights that generated the samples.
        """
        kept_metrics = {
            name: value for name, value in metrics.items() if name.startswith(KEPT)
        }
        self._kept[step] = StoredRollouts(
            step, version, values["rollouts"], values.get("scores"), kept_metrics
        )

    def add_scores(
        self, step: int, scores: Scores, metrics: Mapping[str, float]
    ) -> None:
        """Add scores, and the metrics measured since, to samples that wait."""
        if (kept := self._kept.get(step)) is not None:
            self.keep(
                step,
                kept.weight_version,
                {"rollouts": kept.batch, "scores": scores},
                metrics,
            )

    def add_pause(self, seconds: float) -> None:
        """Add time in which the engines waited for new weights."""
        self._paused += seconds

    def metrics(self, ahead: int, measured: Mapping[str, float]) -> dict[str, float]:
        """Return staleness, queue depth and waiting time of a step's samples.

        Args:
            ahead: number of steps that the samples are ahead of training.
            measured: metrics of the samples so far. Values from before an interruption take precedence.
        """
        paused, self._paused = self._paused, 0.0
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
        files = {}
        with TemporaryDirectory() as folder:
            for step, rollouts in self._kept.items():
                path = Path(folder) / file_of(step)
                rollouts.write(path)
                files[path.name] = path.read_bytes()
        return files


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
