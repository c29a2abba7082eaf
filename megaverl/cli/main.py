"""The entry point `megaverl COMMAND`: finds the command, parses its arguments and runs it.

A command's module is imported only when the command is asked for, so that `megaverl
--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaverl.errors import FAILED, MISTAKE, ConfigError, MegaverlError
from megaverl.processes import note_finished
from megaverl.temporary import temporary_folder
from megaverl.version import __version__

if TYPE_CHECKING:
    from megaverl.cli.options import Subcommand


# Maps a command's name to the module of this folder whose `COMMANDS` holds it, and to
# its line in `megaverl --help`.
COMMANDS = {
    "train": (
        "train",
        "train by reinforcement learning: PPO, GRPO and similar algorithms",
    ),
    "sft": ("train", "fine-tune on prompt/answer pairs"),
    "dpo": (
        "train",
        "train on pairs of responses: DPO, IPO, KTO, SimPO, ORPO and 15 more",
    ),
    "reward": ("train", "train a reward model on pairs of responses"),
    "init": ("start", "write a configuration for your own model and data"),
    "recipes": (
        "start",
        "list the included recipes, what each shows and where it runs",
    ),
    "quickstart": ("train", "train a tiny generated model; downloads nothing"),
    "generate": ("train", "generate responses to prompts"),
    "eval": (
        "train",
        "evaluate on held-out prompts, or on AIME, GPQA, GSM8K, MATH and code",
    ),
    "plan": (
        "plan",
        "predict memory, traffic and time of a configuration, without a cluster",
    ),
    "convert": (
        "convert",
        "convert between Hugging Face, Megatron (any grid) and GGUF",
    ),
    "draft-head": ("start", "write an untrained draft head for a model"),
    "check-plugin": ("plan", "test a reward, loss, environment, ... of your own"),
    "data": ("plan", "check: list the rows of a data set that cannot be used"),
    "flow": ("plan", "show: print the operators of a training step"),
    "rollout-pool": (
        "serve",
        "add, remove, list: manage the inference servers of a running job",
    ),
    "serve": (
        "serve",
        "start a server for rollouts, for a reward or judge model, or with Tinker's API",
    ),
    "report": ("report", "write one HTML page about one or several runs"),
    "watch": (
        "report",
        "show a running job in the terminal: curves, stages, waiting ranks",
    ),
    "trace": (
        "report",
        "write one trace of all ranks of a profiled step, for Perfetto",
    ),
    "doctor": ("report", "check this machine, and print how to fix what fails"),
    "completion": ("keys", "print shell completion for bash, zsh or fish"),
    "models": (
        "keys",
        "list which models train, generate and convert; or test one folder",
    ),
    "keys": ("keys", "explain every key of the configuration"),
}

_USAGE = """usage: megaverl COMMAND [--config FILE] [key=value ...]

{commands}

examples:
  megaverl quickstart                                          train a tiny model from nothing
  megaverl train --config configs/gsm8k_smollm2/grpo_pp2.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE --dry-run                       check everything, start nothing
  megaverl report runs/quickstart                              write one HTML page about a run

megaverl COMMAND --help shows the options of a command; megaverl --version shows the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments after the program's name. None: those of this process.

    Returns:
        0: done, 1: failed, 2: a mistake in the command or in the configuration. `train` documents further codes.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else MISTAKE
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        # Imported here because it loads the whole configuration package, which no other
        # path of this function needs.
        from megaverl.config.successors import successor_sentence
        from megaverl.config.wording import did_you_mean

        hint = (
            f" {sentence}"
            if (sentence := successor_sentence(name))
            else did_you_mean(name, COMMANDS)
        )
        print(f"megaverl: no command `{name}`.{hint}\n", file=sys.stderr)
        print(usage(), end="", file=sys.stderr)
        return MISTAKE
    try:
        with temporary_folder():
            code = _run(name, rest)
        sys.stdout.flush()
        if code == 0:
            note_finished()
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed the pipe. It needs no
        # more, so this is success. Python flushes stdout once more at exit, and would
        # report the same error again. So stdout is pointed at /dev/null first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def usage() -> str:
    """Return the text of `megaverl --help`."""
    width = max(map(len, COMMANDS))
    return _USAGE.format(
        commands="\n".join(
            f"  {name:<{width}}  {description}"
            for name, (_, description) in COMMANDS.items()
        )
    )


def parser_of(name: str, command: Subcommand | None = None) -> argparse.ArgumentParser:
    """Build the parser of a command's arguments.

    Args:
        command: the command, if its module is already imported. None: import it.
    """
    command = command or _command(name)
    parser = argparse.ArgumentParser(
        prog=f"megaverl {name}",
        description=command.description,
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_options(parser)
    return parser


def _command(name: str) -> Subcommand:
    """Import the module of a command, and return the command."""
    command: Subcommand = importlib.import_module(
        f"megaverl.cli.{COMMANDS[name][0]}"
    ).COMMANDS[name]
    return command


def _run(name: str, argv: list[str]) -> int:
    """Parse a command's arguments and run it. Errors meant for the user are printed without a traceback."""
    from megaverl.cli.options import UsageError

    command = _command(name)
    parser = parser_of(name, command)
    arguments = parser.parse_intermixed_args(argv)
    arguments.argv = argv
    try:
        return command.run(arguments)
    except UsageError as error:
        parser.error(str(error))
    except MegaverlError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE if isinstance(error, ConfigError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
