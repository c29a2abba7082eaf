"""What a person sees: a line per step and a progress bar; what the libraries say goes to a log file."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import io
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megaverl.errors import MegaverlError

logger = logging.getLogger("megaverl")


@dataclass(frozen=True)
class Column:
    """One entry of a step's line: the first of `keys` that the metrics hold, formatted."""

    label: str
    keys: tuple[str, ...]
    form: str  # applied to value * scale
    scale: float = 1.0
    unit: str = ""

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """E.g. "reward 0.532"; None when no key is there."""
        for key in self.keys:
            if key in metrics:
                value = metrics[key] * self.scale
                number = format(value, self.form) if math.isfinite(value) else str(value)
                return f"{self.label} {number}{self.unit}".strip()
        return None


STEP_COLUMNS: tuple[Column, ...] = (
    Column("reward", ("reward/mean",), "6.3f"),
    Column("accuracy", ("reward/accuracy",), "5.1f", 100.0, "%"),
    Column("held-out", ("validation/accuracy",), "5.1f", 100.0, "%"),
    Column("kl", ("actor/kl", "train/kl"), "8.2e"),
    Column("loss", ("actor/loss", "train/loss", "sft/loss"), "8.4f"),
    Column("", ("rollout/throughput_tokens_per_sec", "train/tokens_per_sec"), "7,.0f", 1.0, " tok/s"),
    Column("", ("train/step_time_ms",), "6.2f", 1e-3, " s"),
)


class Console:
    """Writes to the person's terminal. One rank prints (`speaks`; rank 0), every rank may report an error.

    `out` and `err` are the terminal's own streams, not the ones that libraries write to. Without them, in a program
    that configures logging, its handlers show what is printed here instead: the logger "megaverl" carries it in any
    case, warnings and errors under their levels.
    """

    def __init__(
        self,
        rank: int = 0,
        out: io.TextIOBase | None = None,
        err: io.TextIOBase | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.rank, self.speaks = rank, rank == 0
        self.log_dir = log_dir
        self._err = err
        self._has_terminal = out is not None
        self._rich = RichConsole(file=out, highlight=False, markup=False, soft_wrap=True)  # type: ignore[arg-type]
        self._progress: Progress | None = None

    def print(self, text: str = "") -> None:
        """One or more lines, from the rank that speaks; above the progress bar while there is one."""
        if self.speaks:
            self._tell(logging.INFO, text, text)

    def step(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, float],
        columns: Sequence[Column] = STEP_COLUMNS,
        name: str = "step",
    ) -> None:
        """The line of one step: what it has of `columns`, in their order."""
        texts = [text for column in columns if (text := column.text(metrics)) is not None]
        self.print("  ".join([f"{name} {step:>{len(str(total))}}/{total}", *texts]))

    def warn(self, text: str) -> None:
        """A warning, from the rank that speaks: to the terminal, and to its log, where a report finds it."""
        if self.speaks:
            self._tell(logging.WARNING, text, f"warning: {text}")
        if self.speaks and self._err is not None and self._err is not sys.stderr:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """An error, from any rank, to the terminal's stderr and to this rank's log.

        Ranks of one machine that report the same text in one run show it once.
        """
        if not self._is_logged(logging.ERROR, text):
            print(f"error: {text}", file=sys.stderr, flush=True)
        if self._err is None or self._err is sys.stderr or not self._is_first(text):
            return
        where = f"[rank {self.rank}] " if self.rank else ""
        self._err.write(f"{where}error: {text}\n")
        self._err.flush()

    @contextlib.contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over long work: yields a function that takes how many more are done.

        Without a terminal: a plain line at each quarter. On ranks that do not speak: nothing.
        """
        if not self.speaks:
            yield lambda done: None
        elif self._rich.is_terminal and self._progress is None and not self._is_left_to_logging(logging.INFO):
            label = TextColumn("{task.description}")
            columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=self._rich, transient=True) as self._progress:
                task = self._progress.add_task(description, total=total)
                try:
                    yield lambda done: self._progress.advance(task, done)  # type: ignore[union-attr]
                finally:
                    self._progress.stop()
                    self._progress = None
        else:
            yield _plain_progress(self.print, description, total)

    def _tell(self, level: int, text: str, line: str) -> None:
        if not self._is_logged(level, text):
            self._rich.print(line)

    def _is_logged(self, level: int, text: str) -> bool:
        """Hand `text` to the logger; whether that shows it, and nothing else needs to."""
        if logger.hasHandlers():  # without any, logging would write warnings to stderr by itself
            logger.log(level, "%s", text)
        return self._is_left_to_logging(level)

    def _is_left_to_logging(self, level: int) -> bool:
        """Whether the program's own handlers show what is said at this level."""
        handlers = logging.getLogger().handlers if logger.propagate else []
        shown = logger.isEnabledFor(level) and any(handler.level <= level for handler in handlers)
        return shown and not self._has_terminal

    def _is_first(self, text: str) -> bool:
        """Whether no rank of this run on this machine has shown `text`; notes it in errors.log."""
        if self.log_dir is None:
            return True
        mark = f"{_run_id()} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with (self.log_dir / "errors.log").open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if any(line.startswith(mark) for line in file):
                return False
            file.write(f"{mark} rank {self.rank}: {text}\n")
        return True


class Redirection:
    """The process's stdout and stderr turned to a log file, descriptors and all; `undo` turns them back."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        _flush()
        self.saved = (os.dup(1), os.dup(2))
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        self._open = True

    def undo(self) -> None:
        """Give the terminal back to stdout and stderr. A second call does nothing."""
        if self._open:
            self._open = False
            _flush()
            for number, saved in zip((1, 2), self.saved, strict=True):
                os.dup2(saved, number)


def redirect_output(log_dir: str | os.PathLike[str], rank: int) -> Console:
    """Send whatever this process prints, from C++ too, to `log_dir`/rank_N.log; return a way to the terminal.

    An exception that nobody catches is shown on the terminal as well: a MegaverlError as its message, all
    else as its last line with the name of the log that has the traceback; so is a crash in native code.
    Loggers and streams made before the call follow, as it is the descriptors that are turned.
    """
    redirection = Redirection(Path(log_dir, f"rank_{rank}.log"))
    out, err = (os.fdopen(os.dup(fd), "w", buffering=1, encoding="utf-8") for fd in redirection.saved)
    console = Console(rank, out, err, Path(log_dir))  # type: ignore[arg-type]
    faulthandler.enable(file=redirection.saved[1])

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        if issubclass(kind, MegaverlError):
            console.error(str(error))
        elif not issubclass(kind, KeyboardInterrupt):
            console.error(f"{kind.__name__}: {error}\n(the traceback is in {redirection.log})")

    sys.excepthook = show
    return console


def _plain_progress(show: Callable[[str], None], description: str, total: int) -> Callable[[int], None]:
    done = shown = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        quarter = 4 * done // max(1, total)
        if quarter > shown:
            shown = quarter
            show(f"{description}: {done}/{total}")

    return advance


def _run_id() -> str:
    """The same on all ranks of one run on this machine: their launcher's id, their port, and torchrun's try."""
    port, attempt = (os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    return f"{os.getppid()}.{port}.{attempt}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
