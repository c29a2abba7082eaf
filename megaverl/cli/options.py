"""The description of a command, and the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from megaverl.config import Config, load_config
from megaverl.config.loader import Choose, Command
from megaverl.errors import ConfigError


class UsageError(Exception):
    """Arguments that contradict each other.

    The message is printed below the command's usage, and the exit code is 2.
    """


class Subcommand(NamedTuple):
    """A command of `megaverl`.

    Attributes:
        description, epilog: text above and below the options in the command's --help.
        add_options: adds the command's arguments to a parser.
        run: runs the command with the parsed arguments and returns its exit code. `argv` among them is the list of
            arguments before parsing.
    """

    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `key=value`, which together name a configuration."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file; configs/ holds recipes"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the file, such as actor.tp=2 (see `megaverl keys`)",
    )


def add_nproc(
    parser: argparse.ArgumentParser,
    help: str = "processes to start on this machine (run.nproc)",
) -> None:
    """Add `--nproc`."""
    parser.add_argument("--nproc", type=int, metavar="N", help=help)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run` and the two options that go with it."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make every check of a start, and start nothing",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        help="with --dry-run: print the resolved configuration",
    )
    parser.add_argument(
        "--no-file-checks",
        action="store_true",
        help="with --dry-run: do not require the model folder and the data files",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add `--resume`."""
    parser.add_argument(
        "--resume",
        metavar="WHAT",
        help="auto, latest, unfinished, never or a folder (checkpoint.resume)",
    )


def add_json(
    parser: argparse.ArgumentParser, help: str = "the same for machines"
) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=help)


def read_config(
    arguments: argparse.Namespace,
    command: Command = "train",
    *,
    check_paths: bool = False,
    choose: Choose | None = None,
) -> Config:
    """Load and check the configuration that the options of this module describe.

    Args:
        arguments: parsed arguments, with those of `add_config`. `--nproc` and `--resume` become overrides if the
            command has them.
        command: the command whose required keys are checked.
        check_paths: require the model folder and the data files to exist.
        choose: chooses the values of keys that are `auto`. None: `auto` is refused.

    Raises:
        ConfigError: lists every mistake.
    """
    if getattr(arguments, "no_file_checks", False) and not arguments.dry_run:
        raise ConfigError(
            "--no-file-checks: use it only with --dry-run; a run needs its files."
        )
    if getattr(arguments, "print", False) and not arguments.dry_run:
        raise ConfigError(
            "--print: use it only with --dry-run; a run writes its configuration into its folder."
        )
    overrides = list(arguments.overrides)
    # Added last, so that an option wins over the same key given as key=value.
    for option, key in (("nproc", "run.nproc"), ("resume", "checkpoint.resume")):
        if getattr(arguments, option, None) is not None:
            overrides.append(f"{key}={getattr(arguments, option)}")
    return load_config(
        arguments.config,
        overrides,
        command=command,
        check_paths=check_paths,
        choose=choose,
    )
