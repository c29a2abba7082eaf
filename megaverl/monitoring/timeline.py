"""Times of a step (named spans in milliseconds, a Chrome trace), and memory of the process."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from megaverl.outside import MAX_TRACE_BYTES, read_json_file

# Role of spans that belong to none.
NO_ROLE = "trainer"


class Timeline:
    """Spans of host time on one rank.

    Spans nest, and threads may open their own. On a GPU a span ends when the host has
    enqueued its work, so a caller that wants device time must synchronise before the
    span closes. The trace keeps the last `max_events` spans; the sums per step are
    exact regardless.

    Attributes:
        roles: span name -> role that does the work, for the trace.
        mark: called with a span's name when it opens; the returned function is called when it closes. None: no calls.
        received: returns the bytes that this rank has received so far, by the group of ranks. None: not counted.
        by_dimension: returns a role's bytes by the dimension of its grid, from bytes by group.

    Example:
        with timeline.step(3):
            with timeline.span("rollout"):
                ...
        timeline.step_metrics()   # {"time/rollout_ms": ..., "time/step_ms": ..., "time/other_ms": ...}
    """

    def __init__(self, rank: int = 0, max_events: int = 200_000) -> None:
        self.rank = rank
        self.roles: dict[str, str] = {}
        self.mark: Callable[[str], Callable[[], None]] | None = None
        self.received: Callable[[], Mapping[str, float]] | None = None
        self.by_dimension: Callable[[str, Mapping[str, float]], Mapping[str, float]] = (
            lambda role, counts: {}
        )
        # Role -> group -> bytes received in the outermost spans of the thread that runs
        # the step.
        self._bytes: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self._to_wall_ns = _monotonic_to_wall_ns()
        self._events: deque[tuple[str, int, int, int, int | None, int | None]] = deque(
            maxlen=max_events
        )
        self._totals: defaultdict[str, int] = defaultdict(int)
        self._work: defaultdict[str, int] = defaultdict(int)
        self._covered_ns = 0  # time in outermost spans of the thread that runs the step
        self._step: int | None = None
        # Step that the running spans belong to, where it is ahead of this one.
        self._ahead: int | None = None
        self._is_open = False
        self._step_begin = 0
        self._step_ns = 0
        self._step_thread = threading.get_ident()
        self._depth = threading.local()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        # Per thread, because threads open spans of their own.
        self._depth.value = getattr(self._depth, "value", 0) + 1
        unmark = self.mark(name) if self.mark is not None else None
        is_outermost = (
            self._depth.value == 1 and threading.get_ident() == self._step_thread
        )
        before = self.received() if is_outermost and self.received is not None else None
        # Processor time is of the whole process, all threads included.
        worked, begin = time.process_time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            duration, work = (
                time.perf_counter_ns() - begin,
                time.process_time_ns() - worked,
            )
            depth = self._depth.value = self._depth.value - 1
            thread = threading.get_ident()
            # A stage that runs ahead belongs to the step that it works for.
            step = self._step if self._ahead is None else self._ahead
            self._events.append((name, begin, duration, thread, step, work))
            self._totals[name] += duration
            self._work[name] += work
            if depth == 0 and thread == self._step_thread:
                self._covered_ns += duration
            if before is not None and self.received is not None:
                counts = self._bytes[self.roles.get(name, NO_ROLE)]
                for group, count in self.received().items():
                    counts[group] += count - before.get(group, 0.0)
            if unmark is not None:
                unmark()

    @contextmanager
    def ahead(self, number: int) -> Iterator[None]:
        """Inside, spans belong to a step that may be ahead of the one that has begun; the sums are this one's."""
        before, self._ahead = self._ahead, number
        try:
            yield
        finally:
            self._ahead = before

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time one training step, or the rest of a step that has begun."""
        self.begin(number)
        try:
            yield
        finally:
            self.end(number)

    def begin(self, number: int) -> None:
        """Begin a step and reset its sums, unless it has begun already. Leaving `step` ends it."""
        if self._is_open and self._step == number:
            return
        self._totals.clear()
        self._bytes.clear()
        self._covered_ns = self._step_ns = 0
        self._step, self._is_open = number, True
        self._step_thread = threading.get_ident()
        self._step_begin = time.perf_counter_ns()

    def end(self, number: int) -> None:
        """End the step that `begin` began."""
        self._is_open = False
        begin, self._step_ns = (
            self._step_begin,
            time.perf_counter_ns() - self._step_begin,
        )
        self._events.append(
            ("step", begin, self._step_ns, self._step_thread, number, None)
        )

    def step_metrics(self, prefix: str = "time/") -> dict[str, float]:
        """Return milliseconds per span name in the current or last step.

        `step_ms` is the whole step, and `other_ms` the time outside all outermost spans
        of its thread. `busy/<role>` is the fraction of the step in which this rank
        worked for a role. A nested span counts both under its own name and in the span
        around it. `comm/<role>/<dimension>_bytes` are bytes that this rank received in
        collectives.
        """
        metrics = {
            f"{prefix}{name}_ms": total / 1e6
            for name, total in sorted(self._totals.items())
        }
        if self._step is not None:
            metrics[f"{prefix}step_ms"] = self._step_ns / 1e6
            metrics[f"{prefix}other_ms"] = (
                max(0, self._step_ns - self._covered_ns) / 1e6
            )
        if self._step_ns:
            for role in dict.fromkeys(self.roles.values()):
                worked = sum(
                    self._totals.get(name, 0)
                    for name, role_of_stage in self.roles.items()
                    if role_of_stage == role
                )
                metrics[f"busy/{role}"] = min(1.0, worked / self._step_ns)
        for role, counts in sorted(self._bytes.items()):
            for dimension, count in sorted(self.by_dimension(role, counts).items()):
                metrics[f"comm/{role}/{dimension}_bytes"] = count
        return metrics

    def take_work(self) -> dict[str, float]:
        """Return the processor seconds of this process by span name since the last call, without waits."""
        work, self._work = self._work, defaultdict(int)
        return {name: nanoseconds / 1e9 for name, nanoseconds in work.items()}

    def trace_events(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the spans in Chrome's trace-event format. The process id is the rank.

        `processor_us` is the processor time that the process used in all its threads
        during a span.

        Args:
            since: a value of `time.perf_counter_ns`; earlier spans are left out.
        """
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "pid": self.rank,
                "name": "process_name",
                "args": {"name": f"rank {self.rank}"},
            }
        ]
        for name, begin, duration, thread, step, work in list(self._events):
            if begin < since:
                continue
            event = {"ph": "X", "pid": self.rank, "tid": thread, "name": name}
            event |= {"ts": (begin + self._to_wall_ns) / 1e3, "dur": duration / 1e3}
            worked = None if work is None else work / 1e3
            facts = {"step": step, "role": self.roles.get(name), "processor_us": worked}
            if known := {
                key: value for key, value in facts.items() if value is not None
            }:
                event["args"] = known
            events.append(event)
        return events

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace as JSON, for chrome://tracing or Perfetto."""
        return _write_trace(Path(path), self.trace_events())


def merge_traces(
    paths: Iterable[str | os.PathLike[str]], path: str | os.PathLike[str]
) -> Path:
    """Join the traces of several ranks in one file on one time axis."""
    events: list[dict[str, Any]] = []
    for source in paths:
        events += read_json_file(Path(source), MAX_TRACE_BYTES)["traceEvents"]
    return _write_trace(Path(path), events)


def _write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    # A report may be made while the run goes on, so a reader sees the old trace or the
    # new one, never half of one.
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return path


MB = 2**20


def total_received(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `comm/total_bytes`, the sum of a step's received bytes; empty for a record without any.

    It adds collectives and islands (`comm/*/*_bytes`), reshards and rows of batches.
    """
    parts = [
        value
        for name, value in metrics.items()
        if (name.startswith("comm/") and name.count("/") == 2)
        or name == "reshard/bytes_received"
        or (name.startswith("dataflow/") and name.endswith("_bytes_received"))
    ]
    return {"comm/total_bytes": math.fsum(parts)} if parts else {}


def _monotonic_to_wall_ns() -> int:
    """Return the offset from `time.perf_counter_ns` to nanoseconds since 1970, which other ranks and recorders use.

    The fastest of several readings is used, because the process
    may lose its processor within one.
    """
    readings = []
    for _ in range(16):
        before, wall, after = (
            time.perf_counter_ns(),
            time.time_ns(),
            time.perf_counter_ns(),
        )
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def process_memory_mb() -> float:
    """Return the resident memory of this process in MiB."""
    resident: int = psutil.Process(os.getpid()).memory_info().rss
    return resident / MB


def peak_process_memory_mb() -> float:
    """Return the largest resident memory that this process ever had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MB if sys.platform == "darwin" else peak * 1024 / MB


def memory_metrics(*roles: str) -> dict[str, float]:
    """Return `memory/<role>_gpu_mem_mb` of the roles on this rank, which share its
    memory, and the process's resident memory.

    On CUDA this is the peak of torch's allocator on the current device since the last
    call, which resets the peak. Without CUDA it is the resident memory, so that the
    curve exists on every platform. torch is not imported for this.
    """
    resident = process_memory_mb()
    metrics = {
        **{f"memory/{role}_gpu_mem_mb": resident for role in roles},
        "memory/process_rss_mb": resident,
        # The kernel updates the peak later than the current value.
        "memory/process_peak_rss_mb": max(resident, peak_process_memory_mb()),
    }
    torch = sys.modules.get("torch")
    # Check is_initialized first: reading a device's statistics would create a CUDA
    # context.
    if (
        torch is not None
        and torch.version.cuda is not None
        and torch.cuda.is_initialized()
    ):
        for role in roles:
            metrics[f"memory/{role}_gpu_mem_mb"] = (
                torch.cuda.max_memory_allocated() / MB
            )
            metrics[f"memory/{role}_gpu_reserved_mb"] = (
                torch.cuda.memory_reserved() / MB
            )
        torch.cuda.reset_peak_memory_stats()
        metrics |= gpu_metrics(
            torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        )
    return metrics


# uuid -> (handle, last energy, last time, last sample's time stamp).
_GPUS: dict[str, Any] = {}


def gpu_metrics(uuid: Any) -> dict[str, float]:
    """Return `gpu/power_w` and `gpu/utilization` of a GPU, averaged since the last call, from NVML's counters.

    Empty in the first call, and if NVML (nvidia-ml-py) is missing or lacks the
    counters. Utilization is the fraction of time in which any kernel ran; `train/mfu`
    shows how well they used the GPU.
    """
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        if str(uuid) not in _GPUS:
            pynvml.nvmlInit()
        # Counters only make sense as differences between two calls.
        before = _GPUS.get(str(uuid))
        handle = (
            before[0] if before else pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        )
        energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # mJ
        now = time.monotonic()
        kind, samples = pynvml.nvmlDeviceGetSamples(
            handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, before[3] if before else 0
        )
    except pynvml.NVMLError:
        return {}
    values = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp]
    newest = max(
        (sample.timeStamp for sample in samples), default=before[3] if before else 0
    )
    _GPUS[str(uuid)] = (handle, energy, now, newest)
    if before is None:
        return {}
    metrics = {"gpu/power_w": (energy - before[1]) / 1e3 / max(now - before[2], 1e-9)}
    return metrics | (
        {"gpu/utilization": sum(values) / len(values) / 100} if values else {}
    )
