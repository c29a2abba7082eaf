"""`megaverl dpo`: a policy from pairs of responses (DPO, IPO, KTO, SimPO, ORPO)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megaverl.cli.command import parser, run


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    described = parser(
        "dpo", "A policy from pairs of responses (DPO, IPO, KTO, SimPO, ORPO); settings in `preference`."
    )
    return run("dpo", described.parse_intermixed_args(given), given, {})


if __name__ == "__main__":
    sys.exit(main())
