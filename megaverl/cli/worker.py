"""One rank: do the command, and turn whatever goes wrong into one clear message and a non-zero exit."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, NoReturn

from megaverl.config import Config
from megaverl.errors import FAILED, INTERRUPTED, MISTAKE, ConfigError, MegaverlError

STARTING_THRESHOLD = 100_000  # objects made between two looks for garbage, until a training loop begins


def run_rank(config: Config, command: str, options: dict[str, Any], rank: int) -> int:
    """`megaverl.trainer.run.main` on this rank; returns only if it went well.

    A MegaverlError shows its message; anything else shows on the terminal rank, exception and the log that has
    the traceback. The process then ends at once: ranks that wait for this one must not hold it.
    """
    # Thousands of modules are imported now, and stay: looking for garbage among them takes a fifth of the start.
    gc.set_threshold(STARTING_THRESHOLD)
    try:
        from megaverl.planner.advice import check_memory
        from megaverl.trainer.run import main

        code = main(config, command, options, check_memory if command == "train" else None)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        _report(config, rank, error)
        _leave(exit_code(error))
    if code:
        _leave(code)
    return 0


def exit_code(error: BaseException) -> int:
    """2 for a mistake in the configuration, 1 for everything else."""
    return MISTAKE if isinstance(error, ConfigError) else FAILED


def _report(config: Config, rank: int, error: BaseException) -> None:
    """Through the hook of `redirect_output`: in full to the log, once per machine to the terminal."""
    if sys.excepthook is sys.__excepthook__:  # failed before the run turned its output to the log
        from megaverl.monitoring.console import redirect_output

        try:
            redirect_output(config.run_dir / "logs", rank)
        except OSError as unwritable:
            print(f"error: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"(no log of it: {unwritable})", file=sys.stderr)
            return
    if not isinstance(error, MegaverlError) and hasattr(error, "add_note"):
        error.add_note(f"on rank {rank} of {os.environ.get('WORLD_SIZE', '1')}")
    sys.excepthook(type(error), error, error.__traceback__)


def _leave(code: int) -> NoReturn:
    """End without waiting for engines, process groups and their threads, which may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
