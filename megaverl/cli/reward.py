"""`megaverl reward`: a reward model from pairs of responses (Bradley-Terry, with margins if given)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser("reward", "A reward model from pairs of responses; settings in `preference` and `reward_model`.")
    return run("reward", described.parse_intermixed_args(given), given, {})


if __name__ == "__main__":
    sys.exit(main())
