"""What commands share: how one is described, and every option that several of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from megaverl.config import Config, load_config
from megaverl.config.loader import Choose, Command
from megaverl.errors import ConfigError


class UsageError(Exception):
    """Arguments that do not go together: shown below the command's usage, exit code 2."""


class Subcommand(NamedTuple):
    """A command of `megaverl`.

    Attributes:
        description, epilog: above and below the options of its --help.
        add_options: adds its arguments to a parser.
        run: does it with the parsed arguments, `argv` among them as given; returns the exit code.
    """

    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def add_config(parser: argparse.ArgumentParser) -> None:
    """`--config` and `key=value`: which configuration."""
    parser.add_argument("--config", metavar="FILE", help="YAML file; configs/ holds recipes")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="laid over the file, such as actor.tp=2 (`megaverl keys`)",
    )


def add_nproc(parser: argparse.ArgumentParser, help: str = "processes to start on this machine (run.nproc)") -> None:
    parser.add_argument("--nproc", type=int, metavar="N", help=help)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check everything that a start checks, and stop")
    parser.add_argument("--print", action="store_true", help="with --dry-run: print the resolved configuration")
    parser.add_argument(
        "--no-file-checks",
        action="store_true",
        help="with --dry-run: the model folder and the data files need not be here",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", metavar="WHAT", help="auto, latest, unfinished, never or a folder (checkpoint.resume)"
    )


def add_json(parser: argparse.ArgumentParser, help: str = "the same for machines") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def read_config(
    arguments: argparse.Namespace,
    command: Command = "train",
    *,
    check_paths: bool = False,
    choose: Choose | None = None,
) -> Config:
    """The checked configuration that the options above describe.

    Args:
        choose: decides on keys that are `auto`.

    Raises:
        ConfigError: lists every mistake.
    """
    if getattr(arguments, "no_file_checks", False) and not arguments.dry_run:
        raise ConfigError("--no-file-checks: only together with --dry-run; a run needs its files.")
    if getattr(arguments, "print", False) and not arguments.dry_run:
        raise ConfigError("--print: only together with --dry-run; a run writes its configuration into its folder.")
    overrides = list(arguments.overrides)
    for option, key in (("nproc", "run.nproc"), ("resume", "checkpoint.resume")):
        if getattr(arguments, option, None) is not None:
            overrides.append(f"{key}={getattr(arguments, option)}")
    return load_config(arguments.config, overrides, command=command, check_paths=check_paths, choose=choose)
