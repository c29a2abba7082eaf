"""What a run writes down for people: metrics to the trackers, samples, and files that nothing depends on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import barrier
from megaverl.distributed.worlds import Fabric, PendingSends, receive_json, send_json
from megaverl.monitoring.alerts import Alerts
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline, memory_metrics, merge_traces
from megaverl.monitoring.tracker import Tracker
from megaverl.workers.reward import RewardRole, Scores

# What a rank measures of itself: the reporter's own is shown.
OF_A_RANK = ("time/wait_ms", "time/step_ms", "time/other_ms", "memory/process_rss_mb", "memory/process_peak_rss_mb")


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
        self._alerts: Alerts | None = None

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
        if alerts := self.config.alerts:
            self._alerts = Alerts(alerts, self.run_dir, run.name, self.console.warn)
        try:
            yield
        finally:
            if self._alerts is not None:
                self._alerts.close()
            self._tracker.close()
            self._tracker = self._alerts = None

    def log(self, done: int, metrics: Mapping[str, float]) -> None:
        """What was measured up to here."""
        if self._tracker is not None:
            self._tracker.log(done, metrics)
        if self._alerts is not None:
            self._alerts.note(done, metrics)
        self.history.append((done, metrics))

    def log_samples(self, done: int, records: Sequence[Mapping[str, Any]], split: str = "train") -> None:
        """Samples for a person to read."""
        if self._tracker is not None:
            self.aside(lambda: append_samples(self._samples, done, records, split=split))
            self._tracker.log_samples(done, split, records)

    def aside(self, write: Callable[[], object]) -> None:
        """Write a file that nothing depends on: where it cannot be written, a warning says so, and the run goes on."""
        try:
            write()
        except OSError as error:
            self.console.warn(f"{error}; the run goes on without this file")

    @property
    def _samples(self) -> Path:
        return self.run_dir / "samples.jsonl"


class WorldMetrics:
    """What every world of a job measured, brought to the one rank that keeps the records; and their timelines as one.

    Each world's first rank sends what is its own.

    Args:
        reporter: the rank that keeps the records.
    """

    def __init__(self, fabric: Fabric, reporter: int) -> None:
        self.fabric, self.reporter = fabric, reporter
        self._sent, self._last, self._received = PendingSends(), time.perf_counter(), 0

    def of_this_rank(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A step's, with what the first rank of a world says of its roles: memory, how long they were busy, and how
        many bytes of samples and results came to it."""
        found = {name: value for name, value in metrics.items() if not name.startswith("busy/")}
        for role in self.fabric.world.roles:
            if (share := metrics.get(f"busy/{role}")) is not None:  # in seconds, until the whole step's are known
                found[f"busy/{role}"] = share * metrics["time/step_ms"] / 1e3
        if self.fabric.rank == self.fabric.world.ranks[0]:
            found |= memory_metrics(*self.fabric.world.roles)
            came, self._received = self.fabric.traffic.received - self._received, self.fabric.traffic.received
            found |= {f"dataflow/{role}_bytes_received": float(came) for role in self.fabric.world.roles}
        return found

    def of_all(self, mine: Mapping[str, float]) -> dict[str, float]:
        """All that was measured of a step, on the reporter; elsewhere nothing. Every rank of the job takes part."""
        firsts = [world.ranks[0] for world in self.fabric.placement.worlds]
        if self.fabric.rank != self.reporter:
            if self.fabric.rank in firsts:
                self._sent.forget_done()
                self._sent.add(send_json(self.fabric, "metrics", self.reporter, dict(mine)))
            return {}
        metrics: dict[str, float] = {}
        for rank in firsts:
            if rank != self.reporter:
                theirs = receive_json(self.fabric, "metrics", rank)
                metrics |= {name: value for name, value in theirs.items() if name not in OF_A_RANK}
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        metrics |= mine
        metrics["train/step_time_ms"] = seconds * 1e3
        for name in [name for name in metrics if name.startswith("busy/")]:
            metrics[name] = min(1.0, metrics[name] / seconds)
        return metrics

    def write_timeline(self, timeline: Timeline, run_dir: Path) -> None:
        """That of this world."""
        if self.fabric.rank == self.fabric.world.ranks[0]:
            timeline.export(_timeline_of(run_dir, self.fabric.world.name))

    def join_timelines(self, run_dir: Path) -> None:
        """Those of all worlds, side by side in one trace; every rank of the job takes part."""
        barrier(self.fabric.control)
        if self.fabric.rank == self.reporter:
            traces = [_timeline_of(run_dir, world.name) for world in self.fabric.placement.worlds]
            merge_traces(traces, run_dir / "timeline.json")


def _timeline_of(run_dir: Path, world: str) -> Path:
    return run_dir / "timelines" / f"{world}.json"


def sample_records(batch: RolloutBatch, scores: Scores, reward: RewardRole, count: int) -> list[dict[str, Any]]:
    """The first `count` samples as JSON-able records."""
    agents = batch.columns.get("agent")
    return [
        {
            **({"agent": agents[i]} if agents else {}),
            "prompt": batch.columns["prompt"][i],
            "response": reward.transcript(batch, i),
            "reference": batch.columns["reference"][i],
            "reward": round(float(scores.total[i]), 6) if bool(scores.scored[i]) else None,
            "finish_reason": batch.columns["finish_reason"][i],
        }
        for i in range(min(count, len(batch)))
    ]


def forget_samples(path: Path, after_step: int) -> None:
    """Drop the records of later steps, which a run that goes on from `after_step` writes again; 0 drops all.

    A last line that a killed run left unfinished goes too.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines() if after_step else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= after_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def append_samples(path: Path, step: int, records: Sequence[Mapping[str, Any]], split: str = "train") -> None:
    """Add one JSON line per record to `path`."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"step": step, "split": split, **record}, ensure_ascii=False, default=str) + "\n")
