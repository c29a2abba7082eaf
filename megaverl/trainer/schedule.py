"""Asynchronous rollouts: how far each world may be ahead of training, and the samples that wait for it meanwhile, kept
on the disk: what was generated and not trained on yet, and whole runs' for a replay. No pickle.

rollouts/
    step_00000001.safetensors   a batch: tokens, log-probs, lengths; prompts, references and scores beside them
    index.jsonl                 a line per file: step, weight version, the rollout's metrics, size and checksum
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
from megaverl.distributed.worlds import Fabric
from megaverl.errors import DataError
from megaverl.outside import read_json
from megaverl.rollout.engine import drawing, sampling_options
from megaverl.workers.reward import Scores

INDEX_FILE = "index.jsonl"
SCORE_COLUMN = "score"


@dataclass(frozen=True)
class StoredRollouts:
    """The responses of one step (counted from 0), on their way to training.

    Attributes:
        weight_version: of the weights that generated them.
        scores: None where they were not scored yet.
        metrics: what was measured of them so far.
    """

    step: int
    weight_version: int
    batch: RolloutBatch
    scores: Scores | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """What of a step's flow is done with these."""
        return {"rollouts": self.batch} if self.scores is None else {"rollouts": self.batch, "scores": self.scores}

    def drawn_with(self, sampling: Mapping[str, Any]) -> StoredRollouts:
        """Return the same with the temperature that its samples were drawn at, for a run that has another one now.

        Args:
            sampling: `rollout.sampling` of the run that generated them.
        """
        if "temperatures" in self.batch:
            return self
        ways = [sampling_options(sampling)] * len(self.batch)
        return replace(self, batch=self.batch.with_(**drawing(ways, len(self.batch))))

    def facts(self) -> dict[str, Any]:
        """All but the batch, as JSON."""
        return {"step": self.step, "weight_version": self.weight_version, "metrics": self.metrics}

    def write(self, path: Path) -> None:
        """The batch, with its scores, as a safetensors file."""
        batch = self.batch
        if self.scores is not None:
            scores = self.scores
            rows = [
                {
                    "total": float(scores.total[i]),
                    "correct": bool(scores.correct[i]),
                    "components": {name: float(values[i]) for name, values in scores.components.items()},
                    "logged": dict(scores.logged.get(i, {})),
                }
                for i in range(len(batch))
            ]
            batch = batch.with_columns(**{SCORE_COLUMN: rows})
        batch_io.save(batch, path)

    @classmethod
    def read(cls, path: Path, facts: dict[str, Any]) -> StoredRollouts:
        """Undo `write` and `facts`.

        Raises:
            DataError: the file is missing, damaged, or not a batch.
        """
        batch, scores = batch_io.load(path), None
        try:
            if SCORE_COLUMN in batch.columns:
                scores = _scores(batch.columns[SCORE_COLUMN])
                columns = {name: column for name, column in batch.columns.items() if name != SCORE_COLUMN}
                batch = RolloutBatch(batch.tensors, columns)
            return cls(int(facts["step"]), int(facts["weight_version"]), batch, scores, dict(facts["metrics"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: these are not stored rollouts: {type(error).__name__}: {error}") from error


class RolloutFolder:
    """A folder of stored rollouts. One rank writes it; every rank may read it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def append(self, rollouts: StoredRollouts) -> None:
        """Store one step's; the index names it only when it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{rollouts.step + 1:08d}.safetensors"
        rollouts.write(path)
        entry = {"file": path.name, "bytes": path.stat().st_size, "crc32": crc32_of(path), **rollouts.facts()}
        with (self.folder / INDEX_FILE).open("a", encoding="utf-8") as index:
            index.write(json.dumps(entry) + "\n")
            index.flush()
            os.fsync(index.fileno())

    def forget(self, from_step: int) -> None:
        """Drop what a run that goes on at `from_step` (counted from 0) will store again, and a torn last line."""
        path = self.folder / INDEX_FILE
        if not path.exists():
            return
        kept = [line for line in _whole_lines(path) if read_json(line, not_finite=True)["step"] < from_step]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)

    def entries(self) -> dict[int, dict[str, Any]]:
        """The index, by step.

        Raises:
            DataError: there is none, or it is damaged.
        """
        path = self.folder / INDEX_FILE
        if not path.is_file():
            raise DataError(
                f"{self.folder}: no stored rollouts: it has no {INDEX_FILE}. Make them with `megaverl train "
                "--rollout-only`, or with trainer.store_rollouts=true."
            )
        try:
            return {int(entry["step"]): entry for entry in map(read_json, _whole_lines(path))}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({type(error).__name__}: {error}). Store the rollouts again.") from error

    def check(self, first: int, last: int, num_samples: int) -> None:
        """See that the steps from `first` up to, not including, `last` are there, and whole.

        Raises:
            DataError: lists every step that is missing or damaged.
        """
        entries, wrong = self.entries(), []
        for step in range(first, last):
            if step not in entries:
                wrong.append(f"step {step + 1} is not in it")
                continue
            path, expected = self.folder / entries[step]["file"], entries[step]["crc32"]
            if not path.is_file():
                wrong.append(f"{path.name} is missing")
            elif (found := crc32_of(path)) != expected:
                wrong.append(f"{path.name} has the checksum {found} instead of {expected}")
            elif (count := _count(batch_io.load(path))) != num_samples:
                wrong.append(f"{path.name} holds {count} samples, and a step of this run takes {num_samples}")
        if wrong:
            raise DataError(
                f"{self.folder}: cannot be replayed: {'; '.join(wrong)}. Lower trainer.steps, or store these again "
                "with the same data.prompts_per_step and algorithm.group_size."
            )

    def read(self, step: int) -> StoredRollouts:
        """One step's, counted from 0."""
        entry = self.entries()[step]
        return StoredRollouts.read(self.folder / entry["file"], entry)


def _count(batch: RolloutBatch) -> int:
    """Samples of a batch, episodes where it has them."""
    return len(batch.episode_ids.unique()) if "episode_ids" in batch else len(batch)


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _scores(rows: list[dict[str, Any]]) -> Scores:
    names = list(rows[0]["components"]) if rows else []
    return Scores(
        torch.tensor([row["total"] for row in rows], dtype=torch.float32),
        {name: torch.tensor([row["components"][name] for row in rows], dtype=torch.float32) for name in names},
        torch.tensor([row["correct"] for row in rows], dtype=torch.bool),
        {number: row["logged"] for number, row in enumerate(rows) if row.get("logged")},
    )


# What is measured of samples when they are made: it goes with them over an interruption.
KEPT = ("rollout/", "reward/", "queue/depth")


@dataclass(frozen=True)
class Schedule:
    """After how many steps of training a world begins its part of a step; steps count from 0.

    Settled before the run, so that two runs are the same.

    Attributes:
        placement: who has which roles.
        max_staleness: steps that rollouts may be ahead; 0 where they take turns with training.
        save_interval, validate_every: after so many steps the run saves, or validates, and nobody is ahead; 0: never.
        in_rounds: samples are made in rounds of generating and scoring (dynamic sampling): engines and rewards begin a
            step together, and see no other weights until its rounds are over.
        in_flight: engines that are ahead take the next weights while they generate a step.
    """

    placement: ResolvedPlacement
    max_staleness: int
    save_interval: int
    validate_every: int
    in_rounds: bool = False
    in_flight: bool = False

    @classmethod
    def of(cls, config: Config, placement: ResolvedPlacement) -> Schedule:
        rollout = config.rollout
        limit = rollout.max_staleness if rollout.async_rollout else 0
        in_rounds = config.algorithm.dynamic_sampling.metric is not None and config.trainer.replay_rollouts is None
        saves, validates = config.checkpoint.save_interval or 0, config.trainer.validate_every
        return cls(placement, limit, saves, validates, in_rounds, rollout.in_flight_updates)

    def lag(self, rank: int) -> int:
        """Return how many steps a rank's world may be ahead of training."""
        return self.placement.lag(rank, self.max_staleness, in_rounds=self.in_rounds)

    def begins_after(self, step: int, lag: int) -> int:
        """How many steps are behind all when a world of this lag begins its part of `step`."""
        return max(step - lag, self._last_barrier(step, lag))

    def in_flight_after(self, step: int, lag: int) -> int:
        """How many steps are behind all when engines of this lag take new weights in the middle of `step`."""
        return max(self.begins_after(step, lag), min(step, step - lag + 1))

    def _last_barrier(self, step: int, lag: int) -> int:
        """The last number of steps before `step` that nobody may run ahead of."""
        return max((done for done in range(max(0, step - lag), step + 1) if self._is_barrier(done)), default=0)

    def _is_barrier(self, done: int) -> bool:
        return any(every and done % every == 0 for every in (self.save_interval, self.validate_every))


class WaitingSamples:
    """The samples of a split run that wait for training, as its engines' ranks see them.

    Attributes:
        is_here: whether this rank keeps them: the engines' first does.
    """

    def __init__(self, config: Config, fabric: Fabric) -> None:
        self._fabric, self._samples_per_step = fabric, config.samples_per_step
        placement = fabric.placement
        self.is_here = fabric.rank == placement.ranks["rollout"][0]
        self._is_async = config.rollout.async_rollout
        self._paused = 0.0
        self._kept: dict[int, StoredRollouts] = {}
        self._samplers: dict[int, dict[str, Any]] = {}

    def begin(self, step: int, sampler: dict[str, Any]) -> None:
        """The engines begin a step, whose prompts are taken from here."""
        self._samplers[step] = sampler

    def sampler(self, done: int) -> dict[str, Any] | None:
        """Where the prompts of the step after `done` begin; None: the engines have not begun it."""
        return self._samplers.get(done)

    def keep(self, step: int, version: int, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """What was generated for a step, and scored if it was, waits for training."""
        own = {name: value for name, value in metrics.items() if name.startswith(KEPT)}
        self._kept[step] = StoredRollouts(step, version, values["rollouts"], values.get("scores"), own)

    def add_scores(self, step: int, scores: Scores, metrics: Mapping[str, float]) -> None:
        """Add the scores of samples that wait, with what was measured since."""
        if (kept := self._kept.get(step)) is not None:
            self.keep(step, kept.weight_version, {"rollouts": kept.batch, "scores": scores}, metrics)

    def add_pause(self, seconds: float) -> None:
        """Count time in which the engines waited for new weights."""
        self._paused += seconds

    def metrics(self, ahead: int, measured: Mapping[str, float]) -> dict[str, float]:
        """Of a step that was generated so many steps ahead of training, and of the pause before it.

        Args:
            measured: so far; what it says of samples from before an interruption stays.
        """
        paused, self._paused = self._paused, 0.0
        found = {"rollout/staleness": float(ahead)}
        if self._is_async:
            found["queue/depth"] = float((ahead + 1) * self._samples_per_step)
        found |= {name: measured[name] for name in found if name in measured}
        return found | ({"queue/wait_ms": paused * 1e3} if self._is_async else {})

    def forget(self, done: int) -> None:
        """So many steps are trained: what they were trained on is needed no more."""
        self._kept = {step: rollouts for step, rollouts in self._kept.items() if step >= done}
        self._samplers = {step: sampler for step, sampler in self._samplers.items() if step >= done}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """All but the batches, as JSON."""
        return [rollouts.facts() for rollouts in self._kept.values()]

    @property
    def files(self) -> dict[str, bytes]:
        """The batches, by the name of their file in a checkpoint."""
        found = {}
        with TemporaryDirectory() as folder:
            for step, rollouts in self._kept.items():
                path = Path(folder) / file_of(step)
                rollouts.write(path)
                found[path.name] = path.read_bytes()
        return found


def read_waiting(folder: Path, facts: Iterable[Mapping[str, Any]]) -> dict[int, StoredRollouts]:
    """By step, what a checkpoint has kept.

    Raises:
        DataError: a file is missing or damaged.
    """
    found = (StoredRollouts.read(folder / file_of(int(one["step"])), dict(one)) for one in facts)
    return {rollouts.step: rollouts for rollouts in found}


def file_of(step: int) -> str:
    return f"ahead_{step + 1:08d}.safetensors"
