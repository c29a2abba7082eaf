"""`megaverl sft`: a warm-up by supervised fine-tuning, on the actor's grid."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser("sft", "Supervised fine-tuning on prompt/answer pairs; the section `sft` has its settings.")
    return run("sft", described.parse_intermixed_args(given), given, {})


if __name__ == "__main__":
    sys.exit(main())
