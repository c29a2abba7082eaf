"""What the commands that run ranks share: arguments, the checked configuration, then ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from megaverl.config import Config, load_config
from megaverl.config.loader import Command
from megaverl.errors import ConfigError, MegaverlError

UNDER_TORCHRUN = "Under torchrun the command is one of its ranks; otherwise it starts them itself."
EXAMPLES = {
    "train": """\
  megaverl train --config configs/gsm8k_smollm2/ppo.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE actor.tp=2 rollout.tp=2 --nproc 4
  megaverl train --config FILE --dry-run""",
    "sft": """\
  megaverl sft --config configs/gsm8k_smollm2/sft.yaml model.path=DIR 'data.train=[train.jsonl]' sft.steps=200""",
    "dpo": """\
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]'
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]' \\
      preference.loss=simpo""",
    "reward": """\
  megaverl reward --config configs/preferences_smollm2/reward_model.yaml model.path=DIR \\
      'preference.train=[pairs.jsonl]'""",
    "eval": """\
  megaverl eval --config FILE model.path=runs/mine/hf trainer.validation_samples=4 'trainer.pass_at=[1, 4]'""",
    "generate": """\
  megaverl generate model.path=DIR --prompt "What is 2+3?" rollout.sampling.temperature=0
  megaverl generate --config FILE --prompts questions.jsonl --output answers.jsonl""",
    "quickstart": """\
  megaverl quickstart
  megaverl quickstart run.seed=1 trainer.steps=50""",
}


RESUMED = ("train", "sft", "dpo", "reward")  # commands that write checkpoints, and go on from them


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all commands take."""
    result = argparse.ArgumentParser(
        prog=f"megaverl {command}",
        description=description,
        epilog=(f"examples:\n{EXAMPLES[command]}\n\n" if command in EXAMPLES else "") + UNDER_TORCHRUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--config", metavar="FILE", help="YAML file; configs/ holds recipes")
    result.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="laid over the file, such as actor.tp=2 (`megaverl keys`)",
    )
    result.add_argument("--nproc", type=int, metavar="N", help="processes to start on this machine (run.nproc)")
    result.add_argument("--dry-run", action="store_true", help="check and print the resolved configuration, and stop")
    result.add_argument(
        "--no-file-checks",
        action="store_true",
        help="with --dry-run: the model folder and the data files need not be here",
    )
    if command in RESUMED:
        result.add_argument("--resume", metavar="WHAT", help="auto, latest, never or a folder (checkpoint.resume)")
    return result


def run(command: Command, arguments: argparse.Namespace, argv: Sequence[str], options: dict[str, Any]) -> int:
    """Check everything, then do the command: as the rank that this process is, or by starting the ranks.

    Args:
        argv: the command's arguments as given; started ranks get the same.
        options: of the command, handed to `megaverl.trainer.run.main`.

    Returns: the exit code.
    """
    rank = int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    try:
        config = _load(command, arguments)
    except ConfigError as error:
        if not rank:  # every rank of a job finds the same mistakes: one of them tells
            print(error, file=sys.stderr)
        return 2
    if arguments.dry_run:
        if not rank:
            _print(config)
        return 0
    if rank is not None:
        from megaverl.cli.worker import run_rank

        return run_rank(config, command, options, rank)
    from megaverl.trainer.launcher import launch

    try:
        return launch(config, command, [command, *argv], arguments.nproc)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _load(command: Command, arguments: argparse.Namespace) -> Config:
    if arguments.no_file_checks and not arguments.dry_run:
        raise ConfigError("--no-file-checks: only together with --dry-run; a run needs its files.")
    overrides = list(arguments.overrides)
    if arguments.nproc is not None:
        overrides.append(f"run.nproc={arguments.nproc}")
    if getattr(arguments, "resume", None) is not None:
        overrides.append(f"checkpoint.resume={arguments.resume}")
    return load_config(arguments.config, overrides, command=command, check_paths=not arguments.no_file_checks)


def _print(config: Config) -> None:
    print(config.to_yaml(), end="")
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for choice in config.choices:
        print(choice, file=sys.stderr)
