"""What a run writes down for people: metrics to the trackers, samples, and files that nothing depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaverl.config import Config
from megaverl.monitoring.console import Console
from megaverl.monitoring.tracker import Tracker
from megaverl.trainer.samples import append_samples, forget_samples


class Records:
    """The records of a run. One rank keeps them; on the others nothing is written.

    Args:
        keeps: whether this rank does.

    Attributes:
        history: (steps done, what was measured), as far as this start of the run and this rank know.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console, *, keeps: bool) -> None:
        self.config, self.run_dir, self.console, self.keeps = config, run_dir, console, keeps
        self.history: list[tuple[int, Mapping[str, float]]] = []
        self._tracker: Tracker | None = None

    @contextmanager
    def opened(self, done: int) -> Iterator[None]:
        """Around the steps: the trackers go on after the `done` steps that are behind the run."""
        if not self.keeps:
            yield
            return
        run = self.config.run
        forget_samples(self._samples, done)
        self._tracker = Tracker(
            self.run_dir,
            run.log_with,
            only=run.track_metrics,
            resume_step=done or None,
            name=run.name,
            config=self.config.to_dict(),
            warn=self.console.warn,
        )
        try:
            yield
        finally:
            self._tracker.close()
            self._tracker = None

    def log(self, done: int, metrics: Mapping[str, float]) -> None:
        """What was measured up to here."""
        if self._tracker is not None:
            self._tracker.log(done, metrics)
        self.history.append((done, metrics))

    def log_samples(self, done: int, records: Sequence[Mapping[str, Any]], split: str = "train") -> None:
        """Samples for a person to read."""
        if self._tracker is not None:
            self.aside(lambda: append_samples(self._samples, done, records, split=split))

    def aside(self, write: Callable[[], object]) -> None:
        """Write a file that nothing depends on: where it cannot be written, that is told, and the run goes on."""
        try:
            write()
        except OSError as error:
            self.console.warn(f"{error}; the run goes on without this file")

    @property
    def _samples(self) -> Path:
        return self.run_dir / "samples.jsonl"
