"""`megaverl doctor`: what this machine has, what it lacks, and how to mend it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Look at this machine and try it: versions, devices, kernels, network, storage, an all-reduce of two ranks and one
generated token. Every line that warns or fails says how to mend it. Something to paste into a bug report.

  megaverl doctor                     all of it, in under 30 seconds
  megaverl doctor --json > doctor.json
  megaverl doctor --no-trials         only look, start no process
  megaverl doctor --timeout 120       a slow or busy machine

Exit code: 0 where nothing fails, else 1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(
        prog="megaverl doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("--json", action="store_true", help="the findings as JSON")
    described.add_argument("--no-trials", action="store_true", help="start no other processes")
    described.add_argument("--no-generation", action="store_true", help="leave the engine out of the trials")
    described.add_argument(
        "--timeout", type=float, default=28.0, metavar="SECONDS", help="for the trials (%(default)s)"
    )
    described.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs would write")
    arguments = described.parse_args(argv)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    if importlib.util.find_spec("torch") is None:
        mend = "pip install 'megaverl[megatron,vllm]' (without a GPU 'megaverl[cpu]'), or ./launch/bootstrap.sh"
        absent = {"name": "torch", "status": "fail", "found": "absent", "mend": mend}
        report = {"healthy": False, "sections": {"versions": [absent]}}
        print(json.dumps(report, indent=2) if arguments.json else f"versions\n  FAIL  torch  absent\n    -> {mend}")
        return 1
    from megaverl.monitoring.doctor import as_dict, as_text, examine

    findings = list(
        examine(
            arguments.run_dir,
            trials=not arguments.no_trials,
            generate=not arguments.no_generation,
            timeout=arguments.timeout,
        )
    )
    print(json.dumps(as_dict(findings), indent=2) if arguments.json else as_text(findings))
    return 1 if any(finding.status == "fail" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
