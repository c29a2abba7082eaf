"""Metrics and timelines of a step: of a rank that has all roles, or collected from role groups on separate ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaverl.distributed.channels import PendingSends, receive_json, send_json
from megaverl.distributed.collectives import barrier
from megaverl.distributed.job_context import JobContext
from megaverl.monitoring.timeline import Timeline, memory_metrics, merge_traces

# Metrics of a single rank. Only the reporter's own values are recorded.
OF_A_RANK = (
    "time/wait_ms",
    "time/step_ms",
    "time/other_ms",
    "memory/process_rss_mb",
    "memory/process_peak_rss_mb",
)


@dataclass
class SharedMetrics:
    """Metrics of a rank that has all roles. They represent all ranks, so nothing is collected.

    Attributes:
        writes_timeline: whether this rank writes its timeline.
    """

    writes_timeline: bool

    def measure(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the metrics with those of the process's memory."""
        return {
            # Default for responses that were drawn with the current weights. The step's
            # own metrics override it.
            "rollout/staleness": 0.0,
            **metrics,
            **memory_metrics("actor"),
            "train/step_time_ms": metrics["time/step_ms"],
        }

    def collect(self, own_metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics unchanged: every rank reports its own."""
        return dict(own_metrics)

    def book(self, step: int) -> None:
        """Do nothing. Ranks that have all roles receive no samples for scoring."""

    def write_timeline(self, timeline: Timeline, run_dir: Path) -> None:
        """Write the timeline of this rank, if it represents all ranks."""
        if self.writes_timeline:
            timeline.export(run_dir / "timeline.json")

    def join_timelines(self, run_dir: Path) -> None:
        """Do nothing. One timeline represents all ranks."""


class CollectedMetrics:
    """Metrics and timelines of all role groups, collected on the rank that keeps the records.

    The first rank of each role group sends the values of its group.

    Args:
        reporting_rank: rank that keeps the records.
    """

    def __init__(self, context: JobContext, reporting_rank: int) -> None:
        self.context, self.reporter = context, reporting_rank
        self._sent, self._last, self._received = PendingSends(), time.perf_counter(), 0
        # Bytes received by step, until the step is reported.
        self._booked: dict[int, int] = {}

    def book(self, step: int) -> None:
        """Attribute the bytes received since the last call to a step, which may be ahead of training."""
        self._booked[step] = (
            self._booked.get(step, 0) + self.context.traffic.received - self._received
        )
        self._received = self.context.traffic.received

    def measure(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return a step's metrics, extended on the first rank of a role group by those of its roles.

        These are memory, busy time in seconds, and the bytes of samples and results
        that the rank received.
        """
        own_metrics = {
            name: value
            for name, value in metrics.items()
            if not name.startswith("busy/")
        }
        for role in self.context.role_group.roles:
            # In seconds here. `collect` divides by the duration of the whole step, which
            # only the reporter knows.
            if (share := metrics.get(f"busy/{role}")) is not None:
                own_metrics[f"busy/{role}"] = share * metrics["time/step_ms"] / 1e3
        if self.context.rank == self.context.role_group.ranks[0]:
            own_metrics |= memory_metrics(*self.context.role_group.roles)
            self.book(step)
            num_bytes = self._booked.pop(step)
            # The bytes cannot be divided by role, so each role of the group reports all
            # of them.
            own_metrics |= {
                f"dataflow/{role}_bytes_received": float(num_bytes)
                for role in self.context.role_group.roles
            }
        return own_metrics

    def collect(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Return the step's metrics of all role groups on the reporter, and an empty dictionary elsewhere.

        Collective over all ranks of the job.
        """
        firsts = [
            role_group.ranks[0] for role_group in self.context.placement.role_groups
        ]
        if self.context.rank != self.reporter:
            if self.context.rank in firsts:
                self._sent.forget_done()
                self._sent.add(
                    send_json(self.context, "metrics", self.reporter, dict(mine))
                )
            return {}
        metrics: dict[str, float] = {}
        for rank in firsts:
            if rank != self.reporter:
                received = receive_json(self.context, "metrics", rank)
                # Metrics such as time/wait_ms have the same name on every rank, and
                # only the reporter's are recorded.
                metrics |= {
                    name: value
                    for name, value in received.items()
                    if name not in OF_A_RANK
                }
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        metrics |= mine
        metrics["train/step_time_ms"] = seconds * 1e3
        for name in [name for name in metrics if name.startswith("busy/")]:
            # Clocks of two ranks may differ slightly, which must not give more than 100
            # %.
            metrics[name] = min(1.0, metrics[name] / seconds)
        return metrics

    def write_timeline(self, timeline: Timeline, run_dir: Path) -> None:
        """Write the timeline of this role group, on its first rank."""
        if self.context.rank == self.context.role_group.ranks[0]:
            timeline.export(_timeline_of(run_dir, self.context.role_group.name))

    def join_timelines(self, run_dir: Path) -> None:
        """Merge the timelines of all role groups into one trace. Collective over all ranks of the job."""
        barrier(self.context.control)
        if self.context.rank == self.reporter:
            traces = [
                _timeline_of(run_dir, role_group.name)
                for role_group in self.context.placement.role_groups
            ]
            merge_traces(traces, run_dir / "timeline.json")


# All ranks call the same methods in the same order.
StepMetrics = SharedMetrics | CollectedMetrics


def _timeline_of(run_dir: Path, role_group: str) -> Path:
    return run_dir / "timelines" / f"{role_group}.json"
