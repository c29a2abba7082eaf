"""Rollouts in files: samples that a checkpoint keeps, and the rollouts of a whole run for a replay. Nothing is pickled.

rollouts/
    step_00000001.safetensors   a batch: tokens, log-probs, lengths, prompts, references and scores
    index.jsonl                 one line per file: step, weight version, rollout metrics, size and checksum
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megaverl.checkpoint import crc32_of
from megaverl.data import batch_io
from megaverl.data.batch import RolloutBatch
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
        batch_io.save(self._with_scores(), path)

    def to_bytes(self) -> bytes:
        """Return the contents of the file that `write` writes."""
        return batch_io.to_bytes(self._with_scores())

    def _with_scores(self) -> RolloutBatch:
        """Return the batch with a column of its scores."""
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
        return batch

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
