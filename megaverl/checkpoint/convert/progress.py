"""A bar with bytes and rate while files are written and compared, and one line at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that counts bytes, from any thread; shows a bar on a terminal, and one line when done."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(what, total=total)
    lock = threading.Lock()
    done, start = 0, time.perf_counter()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
        progress.advance(task, nbytes)

    if not (shown and console.is_terminal):
        yield lambda nbytes: None
    else:
        with progress:
            yield count
    if shown:
        seconds = max(time.perf_counter() - start, 1e-9)
        console.print(
            f"{what}: {total / 1e9:.3f} GB in {seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s)", highlight=False
        )
