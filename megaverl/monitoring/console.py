"""Output for the user: a line per step, warnings and progress bars. Libraries print to log files."""

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
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from megaverl.announcements import announcements
from megaverl.errors import MegaverlError
from megaverl.outside import clean
from megaverl.user_code import describe

logger = logging.getLogger("megaverl")


@dataclass(frozen=True)
class Column:
    """One entry of a step's line: the first of `keys` that the metrics contain, formatted."""

    label: str
    keys: tuple[str, ...]
    form: str  # format specification for value * scale
    scale: float = 1.0
    unit: str = ""

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """Return the entry, e.g. "reward 0.532"; None if no key is present."""
        for key in self.keys:
            if key in metrics:
                value = metrics[key] * self.scale
                number = (
                    format(value, self.form) if math.isfinite(value) else str(value)
                )
                return f"{self.label} {number}{self.unit}".strip()
        return None


STEP_COLUMNS: tuple[Column, ...] = (
    Column("reward", ("reward/mean",), "6.3f"),
    Column("accuracy", ("reward/accuracy",), "5.1f", 100.0, "%"),
    Column("held-out", ("validation/accuracy",), "5.1f", 100.0, "%"),
    Column("kl", ("train/kl",), "8.2e"),
    Column("loss", ("actor/loss", "sft/loss"), "8.4f"),
    Column(
        "",
        ("rollout/throughput_tokens_per_sec", "train/tokens_per_sec"),
        "7,.0f",
        1.0,
        " tok/s",
    ),
    Column("", ("train/step_time_ms",), "6.2f", 1e-3, " s"),
)


class Console:
    """Writes to the user's terminal. Only rank 0 prints (`speaks`), but every rank may report an error.

    `out` and `err` are the terminal's streams, not the ones that libraries write to.
    Without them, in a program that configures logging, the program's handlers show the
    lines instead. The logger "megaverl" receives every line in any case, warnings and
    errors under their levels.
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
        self._rich = RichConsole(
            file=out,  # type: ignore[arg-type]
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        self._progress: Progress | None = None

    def print(self, text: str = "") -> None:
        """Print one or more lines on the speaking rank, above a progress bar if there is one."""
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
        """Print the line of one step, with the `columns` that the metrics contain."""
        texts = [
            text for column in columns if (text := column.text(metrics)) is not None
        ]
        self.print("  ".join([f"{name} {step:>{len(str(total))}}/{total}", *texts]))

    def warn(self, text: str) -> None:
        """Print a warning on the speaking rank, to the terminal and to its log, where a report finds it."""
        if self.speaks:
            self._tell(logging.WARNING, text, f"warning: {text}")
        if self.speaks and self._err is not None and self._err is not sys.stderr:
            # If the log cannot be written, the terminal has shown the warning.
            with contextlib.suppress(OSError):
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Report an error from any rank, to the terminal's stderr and to this rank's log.

        If several ranks of one machine report the same text in one run, it is shown
        once.
        """
        # A full disk must not keep the error from the terminal.
        with contextlib.suppress(OSError):
            if not self._is_logged(logging.ERROR, text):
                print(f"error: {text}", file=sys.stderr, flush=True)
        if self._err is None or self._err is sys.stderr or not self._is_first(text):
            return
        where = f"[rank {self.rank}] " if self.rank else ""
        self._err_line(f"{where}error: {text}")

    def announce(self, text: str, *, is_warning: bool = False) -> None:
        """Show a line from any rank on the terminal and in this rank's log."""
        line = f"warning: {text}" if is_warning else text
        self._rich.print(line)
        if self._has_terminal:
            print(line, flush=True)

    @contextlib.contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar over long work; yield a function that takes the number of further items done.

        Without a terminal, print a line at each quarter. On ranks that do not speak,
        show nothing.
        """
        if not self.speaks:
            yield lambda done: None
        elif (
            self._rich.is_terminal
            and self._progress is None
            and not self._is_left_to_logging(logging.INFO)
        ):
            label = TextColumn("{task.description}")
            columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(
                *columns, console=self._rich, transient=True
            ) as self._progress:
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
        """Pass `text` to the logger; return whether that shows it, so that nothing else needs to."""
        # Without handlers, logging itself would write warnings to stderr.
        if logger.hasHandlers():
            logger.log(level, "%s", text)
        return self._is_left_to_logging(level)

    def _is_left_to_logging(self, level: int) -> bool:
        """Return whether the program's own handlers show lines of this level."""
        handlers = logging.getLogger().handlers if logger.propagate else []
        shown = logger.isEnabledFor(level) and any(
            handler.level <= level for handler in handlers
        )
        return shown and not self._has_terminal

    def _is_first(self, text: str) -> bool:
        """Return whether no rank of this run on this machine has shown `text` yet, and record it in errors.log."""
        if self.log_dir is None:
            return True
        mark = f"{_run_id()} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            with (self.log_dir / "errors.log").open("a+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                if any(line.startswith(mark) for line in file):
                    return False
                file.write(f"{mark} rank {self.rank}: {text}\n")
        except OSError as unwritable:
            self._err_line(
                f"warning: {self.log_dir / 'errors.log'} cannot be written: {unwritable}"
            )
        return True

    def _err_line(self, line: str) -> None:
        if self._err is not None:
            self._err.write(f"{line}\n")
            self._err.flush()


def _turned_to(log: Path) -> tuple[int, int]:
    """Redirect stdout and stderr to a log file, and return duplicates of their earlier descriptors."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = (os.dup(1), os.dup(2))
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    return saved


class _Announcer(logging.Handler):
    """Handler that shows announcements on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one announcement."""
        self._console.announce(
            record.getMessage(), is_warning=record.levelno >= logging.WARNING
        )


def show_announcements(console: Console) -> None:
    """Show announcements of this process on `console`, and on no other, from now on."""
    for handler in [
        handler for handler in announcements.handlers if isinstance(handler, _Announcer)
    ]:
        announcements.removeHandler(handler)
    announcements.addHandler(_Announcer(console))
    announcements.setLevel(logging.INFO)


def _line_buffered(descriptor: int) -> Any:
    """Return a text stream of a duplicate of `descriptor`. Text that it cannot encode is escaped."""
    return os.fdopen(
        os.dup(descriptor),
        "w",
        buffering=1,
        encoding="utf-8",
        errors="backslashreplace",
    )


def redirect_output(log_dir: str | os.PathLike[str], rank: int) -> Console:
    """Redirect all output of this process, also from C++, to `log_dir`/rank_N.log; return a console for the terminal.

    An uncaught exception also appears on the terminal: a MegaverlError as its message,
    others as their last line with the name of the log that has the traceback. A crash
    in native code appears too. Loggers and streams that were made earlier follow,
    since the file descriptors themselves are redirected.
    """
    # Absolute: user code may change the working folder later.
    log = Path(log_dir, f"rank_{rank}.log").absolute()
    saved = _turned_to(log)
    out, err = (_line_buffered(descriptor) for descriptor in saved)
    console = Console(rank, out, err, log.parent)
    show_announcements(console)
    faulthandler.enable(file=saved[1])

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # A failure to write the log must not hide the error from the terminal.
        with contextlib.suppress(Exception):
            traceback.print_exception(kind, error, trace)
        if issubclass(kind, MegaverlError):
            console.error(clean(str(error)))
        elif not issubclass(kind, KeyboardInterrupt):
            console.error(f"{describe(error)}\n(the traceback is in {log})")

    sys.excepthook = show
    return console


def _plain_progress(
    show: Callable[[str], None], description: str, total: int
) -> Callable[[int], None]:
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
    """Return an id that is equal on all ranks of one run on this machine: launcher's
    process, port, and torchrun's attempt.
    """
    port, attempt = (
        os.environ.get(name, "0")
        for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    return f"{os.getppid()}.{port}.{attempt}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
