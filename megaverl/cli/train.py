"""`megaverl train`, `python -m megaverl.cli.train`: reinforcement learning with PPO or GRPO."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser("train", "Reinforcement learning: PPO or GRPO.").parse_intermixed_args(given)
    return run("train", arguments, given, {})


if __name__ == "__main__":
    sys.exit(main())
