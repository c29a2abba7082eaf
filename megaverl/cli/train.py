"""Commands that train: `train` (also `python -m megaverl.cli.train`), `sft`, `dpo`, `reward`, `quickstart`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from megaverl.cli.options import UsageError
from megaverl.cli.ranks import rank_command
from megaverl.config import load_config
from megaverl.config.grids import CLAIMS
from megaverl.config.loader import Make
from megaverl.config.yaml_source import recipe
from megaverl.distributed.placement import parse_claims
from megaverl.errors import SAVED_AND_LEFT, STARTS_AGAIN

EXIT_CODES = (
    " Exit codes: 0 done; 1 failed; 2 a mistake in the configuration; 130 interrupted; "
    f"{SAVED_AND_LEFT} saved and left on SIGTERM or SIGUSR1: start it again to go on; {STARTS_AGAIN} saved, to go on "
    "on another layout: this command starts the ranks again."
)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollout-only", action="store_true", help="generate, score and store; train nothing")
    parser.add_argument("--replay-rollouts", metavar="PATH", help="train on stored rollouts, without an engine")
    parser.add_argument(
        "--track_metrics",
        "--track-metrics",
        nargs="?",
        const="*",
        metavar="PATTERNS",
        help="which metrics the trackers get, such as 'reward/*,actor/*'; alone: all (run.track_metrics)",
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLES",
        help="what this node is, under torchrun: train, rollout, reward, critic, reference, coordinator; several with "
        "commas, or with an option each; where no node says train, those of the rollout train as well",
    )


def _train(arguments: argparse.Namespace) -> None:
    """The options of `train` as overrides; the roles of this node go into its environment."""
    if arguments.role is not None:
        roles = ",".join(arguments.role)
        try:
            parse_claims(roles)
        except ValueError as error:
            raise UsageError(f"--role: {error}") from error
        os.environ[CLAIMS] = roles
    if arguments.rollout_only:
        arguments.overrides.append("trainer.rollout_only=true")
    if arguments.replay_rollouts is not None:
        arguments.overrides.append(f"trainer.replay_rollouts={arguments.replay_rollouts}")
    if arguments.track_metrics is not None:
        if "=" in arguments.track_metrics:  # the next override, as the option stood alone
            arguments.overrides.append(arguments.track_metrics)
            arguments.track_metrics = "*"
        arguments.overrides.append(f"run.track_metrics={json.dumps(arguments.track_metrics.split(','))}")


def not_yet(make: Make, keys: tuple[str, ...], world: int) -> tuple[dict[str, Any], str]:
    """Keys that are `auto` stay at their defaults: the model that they are chosen for is not made yet."""
    return {}, ""


def _quickstart(arguments: argparse.Namespace) -> None:
    arguments.config = arguments.config or str(recipe("quickstart"))
    if arguments.dry_run:
        arguments.no_file_checks = True  # the files are made by the run
    elif "RANK" not in os.environ:  # the process that starts the ranks makes what they read
        config = load_config(
            arguments.config, arguments.overrides, command="quickstart", check_paths=False, choose=not_yet
        )
        from megaverl.trainer.quickstart import prepare

        prepare(config)


COMMANDS = {
    "train": rank_command(
        "train",
        "Reinforcement learning: PPO or GRPO.",
        """\
  megaverl train --config configs/gsm8k_smollm2/ppo.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE actor.tp=2 rollout.tp=2 --nproc 4
  megaverl train --config FILE --dry-run""",
        _train_options,
        _train,
        EXIT_CODES,
    ),
    "sft": rank_command(
        "sft",
        "Supervised fine-tuning on prompt/answer pairs; the section `sft` has its settings.",
        """\
  megaverl sft --config configs/gsm8k_smollm2/sft.yaml model.path=DIR 'data.train=[train.jsonl]' sft.steps=200""",
    ),
    "dpo": rank_command(
        "dpo",
        "A policy from pairs of responses (DPO, IPO, KTO, SimPO, ORPO); settings in `preference`.",
        """\
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]'
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]' \\
      preference.loss=simpo""",
    ),
    "reward": rank_command(
        "reward",
        "A reward model from pairs of responses; settings in `preference` and `reward_model`.",
        """\
  megaverl reward --config configs/preferences_smollm2/reward_model.yaml model.path=DIR \\
      'preference.train=[pairs.jsonl]'""",
    ),
    "quickstart": rank_command(
        "quickstart",
        "Teach a tiny model from nothing: warm-up, then PPO. Downloads nothing.",
        """\
  megaverl quickstart
  megaverl quickstart run.seed=1 trainer.steps=50""",
        apply=_quickstart,
    ),
}

if __name__ == "__main__":
    from megaverl.cli.main import main

    sys.exit(main(["train", *sys.argv[1:]]))
