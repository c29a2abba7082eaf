"""The entry point `megaverl COMMAND`: finds the command, parses its arguments and runs it.

A command's module is imported only when the command is asked for, so that `megaverl --help` does not wait for torch.
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


# Maps a command's name to the module of this folder whose `COMMANDS` holds it, and to its line in `megaverl --help`.
COMMANDS = {
    "train": ("train", "reinforcement learning: PPO, GRPO and their kin"),
    "sft": ("train", "a warm-up by supervised fine-tuning on prompt/answer pairs"),
    "dpo": ("train", "a policy from pairs of responses: DPO, IPO, KTO, SimPO, ORPO and 15 more"),
    "reward": ("train", "a reward model from pairs of responses"),
    "init": ("start", "a recipe for your own model and data, and what to type next"),
    "recipes": ("start", "the recipes that come along: what each shows, and where it runs"),
    "quickstart": ("train", "the whole job on a tiny model made on the spot; downloads nothing"),
    "generate": ("train", "responses to prompts"),
    "eval": ("train", "validation only: mean reward, accuracy, pass@k"),
    "plan": ("plan", "memory, bytes and seconds of a configuration on a given cluster, before there is one"),
    "convert": ("convert", "Hugging Face <-> Megatron checkpoint on any grid, Megatron <-> Megatron, GGUF"),
    "check-plugin": ("plan", "whether a reward, loss, environment, ... of your own keeps to its contract"),
    "data": ("plan", "check: what is wrong with which rows of a data set"),
    "flow": ("plan", "show: the operators of a configuration's training step"),
    "rollout-pool": ("serve", "add, remove, list: the inference servers of a run, while it goes on"),
    "serve": ("serve", "vLLM's server: for a run's responses, or a reward or judge model that several jobs share"),
    "report": ("report", "one HTML page about a run, or about several side by side"),
    "watch": ("report", "a run that goes on, in the terminal: curves, stages, who waits"),
    "trace": ("report", "one trace of all ranks of a profiled step, for Perfetto"),
    "doctor": ("report", "what this machine has and lacks, and how to fix it"),
    "completion": ("keys", "what makes bash, zsh or fish complete commands and keys"),
    "models": ("keys", "which models train under which engine, generate and convert; or one folder's, tried"),
    "keys": ("keys", "every key of the configuration: type, default, meaning"),
}

_USAGE = """usage: megaverl COMMAND [--config FILE] [key=value ...]

{commands}

examples:
  megaverl quickstart                                          a tiny model learns a task, from nothing
  megaverl train --config configs/gsm8k_smollm2/grpo_pp2.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE --dry-run                       check everything that a start checks, and stop
  megaverl report runs/quickstart                              what came of it, as one HTML page

megaverl COMMAND --help shows a command's options; megaverl --version the version.
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
        # Imported here because it loads the whole configuration package, which no other path of this function needs.
        from megaverl.config.errors import did_you_mean

        print(f"megaverl: no command `{name}`.{did_you_mean(name, COMMANDS)}\n", file=sys.stderr)
        print(usage(), end="", file=sys.stderr)
        return MISTAKE
    try:
        with temporary_folder():
            code = _run(name, rest)
        sys.stdout.flush()
        if code == 0:
            note_finished()
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed the pipe. It needs no more, so this is success. Python
        # flushes stdout once more at exit, and would report the same error again. So stdout is pointed at /dev/null
        # first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def usage() -> str:
    """Return the text of `megaverl --help`."""
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()))


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
    command: Subcommand = importlib.import_module(f"megaverl.cli.{COMMANDS[name][0]}").COMMANDS[name]
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
