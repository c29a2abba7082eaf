"""Detailed profiles of chosen steps: torch's operators and kernels, memory, stacks; joined over all ranks in one trace.

`run.profile` names the steps, ranks and tools. Each rank writes its own files and
stages to `profile/step_N`, and `megaverl trace` joins them. A tool that fails is left
out with a warning and never ends a run.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megaverl.config.watching import ProfileConfig, py_spy
from megaverl.distributed.flight_record import recorded_collectives
from megaverl.errors import ConfigError, DataError
from megaverl.monitoring.timeline import Timeline
from megaverl.outside import MAX_TRACE_BYTES, read_json_file
from megaverl.processes import ending_with_parent

NEED_A_GPU = ("memory", "nvtx", "cuda")
# Time limits of py-spy to start, and to write its file.
SECONDS_TO_START, SECONDS_TO_WRITE = 10.0, 60.0
_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)
_FILE = re.compile(r"rank_(\d+)\.(stages|torch)\.json(?:\.gz)?")
_COLLECTIVES = re.compile(r"rank_(\d+)\.collectives\.json")


class Profiler:
    """Profiler of one rank. A step that is not chosen costs one set lookup.

    Args:
        timeline: this rank's timeline, whose stages go into the trace and to NVTX.

    Attributes:
        dims: ranks of a group (empty: all ranks) -> its meaning in a grid, such as "actor tp".

    Raises:
        ConfigError: a tool needs CUDA, and there is no GPU.
    """

    def __init__(
        self,
        chosen: ProfileConfig,
        run_dir: Path,
        rank: int,
        timeline: Timeline,
        warn: Callable[[str], None],
    ) -> None:
        is_chosen = chosen.ranks is None or rank in chosen.ranks
        self._steps = frozenset(chosen.steps if is_chosen else ())
        self._chosen, self._run_dir, self._rank, self._timeline, self._warn = (
            chosen,
            run_dir,
            rank,
            timeline,
            warn,
        )
        self._running: int | None = None
        # Begin of the step by time.perf_counter_ns and by time.time_ns.
        self._begin = self._began_at = 0
        self.dims: dict[tuple[int, ...], str] = {}
        self._open: list[tuple[str, AbstractContextManager[None]]] = []
        if (
            self._steps
            and not _has_gpu()
            and (absent := [tool for tool in chosen.tools if tool in NEED_A_GPU])
        ):
            raise ConfigError(
                f"run.profile.tools: {', '.join(absent)}: of CUDA, and this machine has no GPU that torch can use. "
                "Leave it out; torch and py_spy work here."
            )

    def begin(self, step: int) -> None:
        """Start recording if `step`, counted from 1, is chosen. The step before is over."""
        if step == self._running:
            return
        self.close()
        if step not in self._steps:
            return
        folder = step_folder(self._run_dir, step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._steps -= {step}
            self._warn(f"run.profile: {error}; step {step} is not profiled")
            return
        self._running, self._begin, self._began_at = (
            step,
            time.perf_counter_ns(),
            time.time_ns(),
        )
        for tool in self._chosen.tools:
            around = TOOLS[tool](self, folder / f"rank_{self._rank}")
            try:
                around.__enter__()
            except Exception as error:
                # A tool may raise anything, and must not end the run.
                self._warn(
                    f"run.profile: {tool} does not start: {type(error).__name__}: {error}"
                )
            else:
                self._open.append((tool, around))

    def end(self, step: int) -> None:
        """Stop recording: `step` is over, and the engines have its weights."""
        if self._running == step:
            self.close()

    def close(self) -> None:
        """Stop the recording, if there is one, and write it."""
        if self._running is None:
            return
        step, self._running = self._running, None
        while self._open:
            tool, around = self._open.pop()
            try:
                around.__exit__(None, None, None)
            except Exception as error:
                self._warn(
                    f"run.profile: {tool} of step {step} is not written: {type(error).__name__}: {error}"
                )
        events = self._timeline.trace_events(self._begin)
        collectives, is_whole = recorded_collectives(self._began_at)
        rows = [
            [self.dims.get(collective.ranks, ""), *collective]
            for collective in collectives
        ]
        try:
            for name, content in (
                ("stages", {"traceEvents": events}),
                ("collectives", {"all": is_whole, "rows": rows}),
            ):
                path = (
                    step_folder(self._run_dir, step) / f"rank_{self._rank}.{name}.json"
                )
                path.write_text(json.dumps(content), encoding="utf-8")
        except OSError as error:
            self._warn(f"run.profile: {error}")

    @contextmanager
    def _torch(self, name: Path) -> Iterator[None]:
        """Record operators on the host, and kernels and copies on the device, in Chrome's trace-event format."""
        from torch.profiler import ProfilerActivity, profile

        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if _has_gpu() else []),
        ]
        options = {
            key: getattr(self._chosen, key)
            for key in ("record_shapes", "with_stack", "profile_memory")
        }
        profiler = profile(activities=activities, **options)
        profiler.start()
        yield
        profiler.stop()
        # torch compresses by the name's ending, so the unfinished file must end in
        # .json.gz too.
        part = name.with_name(name.name + ".part.json.gz")
        profiler.export_chrome_trace(str(part))
        os.replace(part, name.with_name(name.name + ".torch.json.gz"))

    @contextmanager
    def _memory(self, name: Path) -> Iterator[None]:
        """Record every allocation with its stack, for https://pytorch.org/memory_viz."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        yield
        try:
            torch.cuda.memory._dump_snapshot(
                str(name.with_name(name.name + ".memory.pickle"))
            )
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _nvtx(self, name: Path) -> Iterator[None]:
        """Mark the stages as ranges for Nsight Systems."""
        import torch

        def mark(stage: str) -> Callable[[], None]:
            number = torch.cuda.nvtx.range_start(stage)
            return lambda: torch.cuda.nvtx.range_end(number)

        self._timeline.mark = mark
        yield
        self._timeline.mark = None

    @contextmanager
    def _cuda(self, name: Path) -> Iterator[None]:
        """Start and stop the capture of `nsys profile --capture-range=cudaProfilerApi`."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        yield
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()

    @contextmanager
    def _py_spy(self, name: Path) -> Iterator[None]:
        """Sample Python's stacks a hundred times a second, for https://www.speedscope.app."""
        output = name.with_name(name.name + ".speedscope.json")
        command = [
            py_spy() or "py-spy",
            "record",
            "--pid",
            str(os.getpid()),
            "--format",
            "speedscope",
            "--threads",
        ]
        command = ending_with_parent([*command, "--output", str(output)])
        _may_be_traced(True)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            # py-spy prints a line once it has attached to this process.
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                selector.select(SECONDS_TO_START)
            yield
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=SECONDS_TO_WRITE)[1].strip()
        finally:
            process.kill()
            process.wait()
            _may_be_traced(False)
        if not output.is_file():
            raise RuntimeError(errors.partition("\n")[0] or "it wrote nothing")


TOOLS: dict[str, Callable[[Profiler, Path], AbstractContextManager[None]]] = {
    "torch": Profiler._torch,
    "memory": Profiler._memory,
    "nvtx": Profiler._nvtx,
    "cuda": Profiler._cuda,
    "py_spy": Profiler._py_spy,
}


def _may_be_traced(allowed: bool) -> None:
    """Allow child processes to trace this one. Yama (ptrace_scope 1) forbids this unless the process permits it."""
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANYBODY if allowed else 0, 0, 0, 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# --- one trace of all ranks -------------------------------------------------------------------------------------------


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's recordings."""
    return run_dir / "profile" / f"step_{step}"


def profiled_steps(run_dir: Path) -> list[int]:
    """List the steps with recordings."""
    numbers = (
        path.name.removeprefix("step_") for path in (run_dir / "profile").glob("step_*")
    )
    return sorted(int(name) for name in numbers if name.isdigit())


def write_step_trace(
    run_dir: Path, step: int | None = None, output: Path | None = None
) -> tuple[Path, list[Path]]:
    """Join the recordings and stages of all ranks for one step, on one time axis that begins at 0.

    Each rank has its stages, then its host threads, then its devices. Times are those
    of the hosts' clocks. For ranks without recordings, the stages come from the run's
    own timeline if it has them.

    Args:
        step: None: the last profiled step.
        output: None: trace_N.json.gz in the run's folder. A name that ends in .gz is compressed; Perfetto reads both.

    Returns:
        The trace, and the step's files in other formats.

    Raises:
        DataError: there is no such run, it has nothing of this step, or a file is damaged.
    """
    known = profiled_steps(run_dir)
    if step is None and known:
        step = known[-1]
    if not run_dir.is_dir() or step is None:
        reason = "nothing was profiled in it" if run_dir.is_dir() else "no such folder"
        raise DataError(
            f"{run_dir}: {reason}. Name a run that has run.profile.steps, or a step: --step 3."
        )
    stages: dict[int, list[dict[str, Any]]] = {}
    traces: dict[int, list[dict[str, Any]]] = {}
    other_files: list[Path] = []
    for path in sorted(step_folder(run_dir, step).glob("rank_*")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            # Collectives are shown as a table, see `collective_lines`.
            if not _COLLECTIVES.fullmatch(path.name):
                other_files.append(path)
            continue
        rank = int(match[1])
        if match[2] == "stages":
            stages[rank] = _events(path)
        else:
            traces[rank] = _events(path)
    timeline = run_dir / "timeline.json"
    of_step = []
    if timeline.is_file():
        of_step = [event for event in _events(timeline) if _is_of(event, step)]
    # Ranks that were not profiled have their stages in the run's timeline.
    ranks_of_step = {event["pid"] for event in of_step if event["ph"] == "X"}
    for rank in ranks_of_step - stages.keys():
        stages[rank] = [event for event in of_step if event["pid"] == rank]
    if not stages and not traces:
        available = (
            f"profiled were {', '.join(map(str, known))}"
            if known
            else "nothing was profiled"
        )
        raise DataError(f"{run_dir}: it has nothing of step {step}; {available}.")
    joined: list[dict[str, Any]] = []
    for rank, events in stages.items():
        joined += _placed(events, rank, 0, "stages")
    for rank, events in traces.items():
        joined += _placed(events, rank, 1, "")
    # Viewers show absolute times since 1970 badly, and lose microseconds in them.
    first = min(event["ts"] for event in joined if event["ph"] == "X")
    for event in joined:
        event["ts"] = (event.get("ts", first) - first) / 1e3
    text = json.dumps({"traceEvents": joined, "displayTimeUnit": "ms"}).encode()
    output = output or run_dir / f"trace_{step}.json.gz"
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    part.write_bytes(gzip.compress(text, 5) if output.suffix == ".gz" else text)
    os.replace(part, output)
    return output, other_files


def collective_lines(run_dir: Path, step: int | None = None) -> list[str]:
    """Return a table of the bytes that each rank sent in collectives of a step, as lines; empty without recordings.

    Args:
        step: None: the last profiled step.
    """
    known = profiled_steps(run_dir)
    if not step:
        step = known[-1] if known else 0
    lines = []
    for path in sorted(step_folder(run_dir, step).glob("rank_*.collectives.json")):
        content = read_json_file(path)
        rank = path.name.partition(".")[0].replace("_", " ")
        for dim, ranks, operation, calls, nbytes in content["rows"]:
            group = dim or (
                f"ranks {', '.join(map(str, ranks))}" if ranks else "all of its world"
            )
            lines.append(
                f"{rank:<9}{operation:<20}{calls:>6} calls {nbytes / 1e6:>12,.3f} MB  {group}"
            )
        if not content["all"]:
            lines.append(
                f"{rank:<9}... the first of them are lost: set TORCH_NCCL_TRACE_BUFFER_SIZE to more than 2000"
            )
    return lines


def _events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, with times in whole nanoseconds since 1970.

    Microseconds would not be exact, and a nested event could end after the one around
    it.
    """
    try:
        trace = read_json_file(path, MAX_TRACE_BYTES, not_finite=True)
        base = trace.get("baseTimeNanoseconds", 0)
        events = []
        for event in trace["traceEvents"]:
            # Names of processes have no time.
            if "ts" in event:
                event = event | {"ts": base + round(event["ts"] * 1e3)}
            events.append(event)
        return events
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a trace ({error!r}). Remove the file.") from error


def _is_of(event: dict[str, Any], step: int) -> bool:
    """Return whether an event of the run's timeline, whose steps count from 0, is of the step or names a process."""
    is_of_step: bool = event.get("args", {}).get("step") == step - 1
    return event["ph"] == "M" or is_of_step


PROCESSES_OF_A_RANK = 1000


def _placed(
    events: list[dict[str, Any]], rank: int, first: int, name: str
) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with process numbers that are unique and ordered by rank, and with the rank's name."""
    numbers: dict[Any, int] = {}
    for event in events:
        number = numbers.setdefault(
            event.get("pid"), rank * PROCESSES_OF_A_RANK + first + len(numbers)
        )
        placed = event | {"pid": number}
        if event["ph"] == "M" and event["name"] == "process_name":
            placed["args"] = {
                "name": f"rank {rank}: {name or event['args'].get('name', '')}"
            }
        elif event["ph"] == "M" and event["name"] == "process_sort_index":
            placed["args"] = {"sort_index": number}
        elif event["ph"] in "stf" and isinstance(event.get("id"), int):
            # Every rank numbers its arrows (flow events) from 1, so make the ids
            # unique.
            placed["id"] = (rank << 32) + event["id"]
        yield placed
    if name:
        for number in numbers.values():
            yield {
                "ph": "M",
                "pid": number,
                "name": "process_sort_index",
                "args": {"sort_index": number},
            }
