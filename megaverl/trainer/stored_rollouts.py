"""Rollouts on the disk: what was generated and not trained on yet, and whole runs' for a replay. No pickle.

rollouts/
    step_00000001.safetensors   a batch: tokens, log-probs, lengths; prompts, references and scores beside them
    index.jsonl                 a line per file: step, weight version, the rollout's metrics, size and checksum
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaverl.checkpoint import crc32_of
from megaverl.data import batch_io
from megaverl.data.batch import RolloutBatch
from megaverl.errors import DataError
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
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] < from_step]
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
            return {int(entry["step"]): entry for entry in map(json.loads, _whole_lines(path))}
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
            elif (count := len(batch_io.load(path))) != num_samples:
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


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _scores(rows: list[dict[str, Any]]) -> Scores:
    names = list(rows[0]["components"]) if rows else []
    return Scores(
        torch.tensor([row["total"] for row in rows], dtype=torch.float32),
        {name: torch.tensor([row["components"][name] for row in rows], dtype=torch.float32) for name in names},
        torch.tensor([row["correct"] for row in rows], dtype=torch.bool),
    )
