"""`megaverl report RUN [RUN2 ...]`: a run, or several side by side, as one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megaverl.errors import MegaverlError

DESCRIPTION = """\
Write one HTML page about a run: curves, where time and memory went, who was busy when, samples with their rewards,
configuration, versions, warnings. It needs nothing but itself: mail it, or open it from a disk.

  megaverl report runs/quickstart                     writes runs/quickstart/report.html
  megaverl report runs/a runs/b --output compare.html two runs side by side
"""


def main(argv: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(
        prog="megaverl report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run (run.dir/run.name)")
    described.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="default: report.html in the (first) run's folder"
    )
    arguments = described.parse_args(argv)
    from megaverl.monitoring.report import write_report

    name = "report.html" if len(arguments.runs) == 1 else "comparison.html"
    try:
        written = write_report(arguments.runs, arguments.output or arguments.runs[0] / name)
    except (MegaverlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
