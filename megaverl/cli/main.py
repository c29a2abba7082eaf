"""`megaverl COMMAND`: the one entry point. A command is a module of this folder, imported when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from megaverl.version import __version__

# name -> what --help says of it; the module megaverl.cli.<name> has `main(argv) -> exit code`
COMMANDS = {
    "train": "reinforcement learning: PPO, GRPO and 22 more",
    "sft": "a warm-up by supervised fine-tuning on prompt/answer pairs",
    "dpo": "a policy from pairs of responses: DPO, IPO, KTO, SimPO, ORPO",
    "reward": "a reward model from pairs of responses",
    "quickstart": "the whole job on a tiny model made on the spot; downloads nothing",
    "generate": "responses to prompts",
    "eval": "validation only: mean reward, accuracy, pass@k",
    "plan": "memory, bytes and seconds of a configuration on a given cluster, before there is one",
    "convert": "Hugging Face <-> Megatron checkpoint on any grid, Megatron <-> Megatron, GGUF",
    "check-plugin": "whether a reward, loss, environment, ... of your own keeps to its contract",
    "data": "check: what is wrong with which rows of a data set",
    "flow": "show: the operators of a configuration's training step",
    "report": "one HTML page about a run, or about several side by side",
    "doctor": "what this machine has and lacks, and how to mend it",
    "completion": "what makes bash, zsh or fish complete commands and keys",
    "keys": "every key of the configuration: type, default, meaning",
}

_USAGE = """usage: megaverl COMMAND [--config FILE] [key=value ...]

{commands}

examples:
  megaverl quickstart                                          a tiny model learns a task, from nothing
  megaverl train --config configs/gsm8k_smollm2/grpo_pp2.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE --dry-run                       check everything, print the resolved configuration
  megaverl report runs/quickstart                              what came of it, as one HTML page

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
    try:
        code: int = importlib.import_module(f"megaverl.cli.{name.replace('-', '_')}").main(rest)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has read enough; nor must the interpreter's own flush at exit find this
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()))


if __name__ == "__main__":
    sys.exit(main())
