"""`megaverl train`, `python -m megaverl.cli.train`: reinforcement learning with PPO or GRPO."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run
from megaverl.config.grids import CLAIMS
from megaverl.distributed.placement import parse_claims
from megaverl.errors import SAVED_AND_LEFT

EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 a mistake in the configuration; 130 interrupted; "
    f"{SAVED_AND_LEFT} saved and left on SIGTERM or SIGUSR1: start it again to go on."
)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser("train", "Reinforcement learning: PPO or GRPO.")
    described.add_argument("--rollout-only", action="store_true", help="generate, score and store; train nothing")
    described.add_argument("--replay-rollouts", metavar="PATH", help="train on stored rollouts, without an engine")
    described.add_argument(
        "--track_metrics",
        "--track-metrics",
        nargs="?",
        const="*",
        metavar="PATTERNS",
        help="which metrics the trackers get, such as 'reward/*,actor/*'; alone: all (run.track_metrics)",
    )
    described.add_argument(
        "--role",
        action="append",
        metavar="ROLES",
        help="what this node is, under torchrun: train, rollout, reward, critic, reference, coordinator; several with "
        "commas, or with an option each; where no node says train, those of the rollout train as well",
    )
    described.epilog = f"{described.epilog} {EXIT_CODES}"
    arguments = described.parse_intermixed_args(given)
    if arguments.role is not None:
        roles = ",".join(arguments.role)
        try:
            parse_claims(roles)
        except ValueError as error:
            described.error(f"--role: {error}")
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
    return run("train", arguments, given, {})


if __name__ == "__main__":
    sys.exit(main())
