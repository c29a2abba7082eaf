"""Commands that run in ranks: check everything, then do this rank's part, or start the ranks."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megaverl.cli.options import Subcommand, add_config, add_dry_run, add_nproc, add_resume, read_config
from megaverl.config import Config
from megaverl.config.grids import REINFORCING
from megaverl.config.loader import Command, Make
from megaverl.errors import FAILED, INTERRUPTED, MISTAKE, ConfigError, MegaverlError
from megaverl.gpus import cpu_torch_beside_gpus

UNDER_TORCHRUN = "Under torchrun the command is one of its ranks; otherwise it starts them itself."
RESUMED = ("train", "sft", "dpo", "reward")  # commands that write checkpoints, and go on from them
STARTING_THRESHOLD = 100_000  # objects made between two looks for garbage, until a training loop begins


# what a command's own options change of the others; it may return options for `megaverl.trainer.run.main`
Apply = Callable[[argparse.Namespace], dict[str, Any] | None]


def rank_command(
    command: Command,
    description: str,
    examples: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    apply: Apply | None = None,
    note: str = "",
) -> Subcommand:
    """A command with the options that all such commands take.

    Args:
        add_options: adds its own.
        note: the last sentence of its --help.
    """

    def all_options(parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        add_nproc(parser)
        add_dry_run(parser)
        if command in RESUMED:
            add_resume(parser)
        if add_options is not None:
            add_options(parser)

    def run(arguments: argparse.Namespace) -> int:
        return run_command(command, arguments, apply)

    return Subcommand(description, all_options, run, f"examples:\n{examples}\n\n{UNDER_TORCHRUN}{note}")


def run_command(command: Command, arguments: argparse.Namespace, apply: Apply | None) -> int:
    """Check everything, then do the command: as the rank that this process is, or by starting the ranks."""
    rank = int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    try:
        options = (apply(arguments) if apply else None) or {}
        choose = _choose if command in REINFORCING else None
        config = read_config(arguments, command, check_paths=not arguments.no_file_checks, choose=choose)
        unused_gpus = cpu_torch_beside_gpus()
        if unused_gpus and not arguments.dry_run and command != "quickstart":  # whose model is tiny
            raise ConfigError(unused_gpus)
    except ConfigError as error:
        if not rank:  # every rank of a job finds the same mistakes: the first reports them
            print(error, file=sys.stderr)
        return MISTAKE
    if unused_gpus and rank is None:
        print(f"warning: {unused_gpus}", file=sys.stderr)
    if arguments.dry_run:
        if not rank:
            print(config.to_yaml(), end="")
            for line in [*(f"warning: {warning}" for warning in config.warnings), *config.choices]:
                print(line, file=sys.stderr)
        return 0
    if rank is not None:
        return run_rank(config, command, options, rank)
    from megaverl.trainer.launcher import launch

    try:
        return launch(config, command, [command, *arguments.argv], arguments.nproc)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return exit_code(error)


def _choose(make: Make, keys: tuple[str, ...], world: int) -> tuple[dict[str, Any], str]:
    from megaverl.planner.search import choose  # the planner is only for those who ask

    return choose(make, keys, world)


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
