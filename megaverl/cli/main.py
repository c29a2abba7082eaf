"""`megaverl COMMAND`: the one door. A command is a module of this folder, imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megaverl.version import __version__

# name -> what --help says of it; the module megaverl.cli.<name> has `main(argv) -> exit code`
COMMANDS = {
    "train": "reinforcement learning: PPO or GRPO",
    "sft": "a warm-up by supervised fine-tuning on prompt/answer pairs",
    "quickstart": "the whole job on a tiny model made on the spot; downloads nothing",
    "generate": "responses to prompts",
    "eval": "validation only: mean reward, accuracy, pass@k",
    "plan": "memory, bytes and seconds of a configuration on a given cluster, before there is one",
    "convert": "Hugging Face <-> Megatron checkpoint on any grid, Megatron <-> Megatron, GGUF",
    "keys": "every key of the configuration: type, default, meaning",
}

_USAGE = """usage: megaverl COMMAND [--config FILE] [key=value ...]

{commands}

megaverl COMMAND --help shows a command's options; megaverl --version the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0: done, 1: failed, 2: a mistake in the command or configuration)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from megaverl.config.errors import did_you_mean

        print(f"megaverl: no command `{name}`.{did_you_mean(name, COMMANDS)}\n", file=sys.stderr)
        print(usage(), end="", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"megaverl.cli.{name}").main(rest)
    return code


def usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()))


if __name__ == "__main__":
    sys.exit(main())
