"""What every world of a split run measured, told to the one rank that keeps the records; and their timelines as one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megaverl.distributed.p2p import Sent, receive_json, send_json
from megaverl.distributed.worlds import Fabric
from megaverl.monitoring.memory import memory_metrics
from megaverl.monitoring.timeline import Timeline, merge_traces

# What a rank measures of itself: the reporter's own is shown.
OF_A_RANK = ("time/wait_ms", "time/step_ms", "time/other_ms", "memory/process_rss_mb", "memory/process_peak_rss_mb")


class Reports:
    """This rank's end of it; each world's first rank speaks for it.

    Args:
        reporter: the rank that keeps the records.
    """

    def __init__(self, fabric: Fabric, reporter: int) -> None:
        self.fabric, self.reporter = fabric, reporter
        self._sent, self._last, self._received = Sent(), time.perf_counter(), 0

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
        dist.barrier(self.fabric.control)
        if self.fabric.rank == self.reporter:
            traces = [_timeline_of(run_dir, world.name) for world in self.fabric.placement.worlds]
            merge_traces(traces, run_dir / "timeline.json")


def _timeline_of(run_dir: Path, world: str) -> Path:
    return run_dir / "timelines" / f"{world}.json"
