"""Commands that look at what is there: `report` at runs, `doctor` at this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from megaverl.cli.options import Subcommand, add_json
from megaverl.errors import FAILED

REPORT = """\
Write one HTML page about a run: curves, where time and memory went, who was busy when, samples with their rewards,
configuration, versions, warnings. It needs nothing but itself: mail it, or open it from a disk.

  megaverl report runs/quickstart                     writes runs/quickstart/report.html
  megaverl report runs/a runs/b --output compare.html two runs side by side
"""
DOCTOR = """\
Look at this machine and try it: versions, devices, kernels, network, storage, an all-reduce of two ranks and one
generated token. Every line that warns or fails says how to fix it. Something to paste into a bug report.

  megaverl doctor                     all of it, in under 30 seconds
  megaverl doctor --gpu               also driver, ECC, clocks, NVLink, InfiniBand, and NCCL's rates between all GPUs
  megaverl doctor --json > doctor.json
  megaverl doctor --no-trials         only look, start no process
  megaverl doctor --timeout 120       a slow or busy machine

Exit code: 0 where nothing fails, else 1.
"""


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run (run.dir/run.name)")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="default: report.html in the (first) run's folder"
    )


def _report(arguments: argparse.Namespace) -> int:
    from megaverl.monitoring.report import write_report

    name = "report.html" if len(arguments.runs) == 1 else "comparison.html"
    try:
        written = write_report(arguments.runs, arguments.output or arguments.runs[0] / name)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
    return 0


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "the findings as JSON")
    parser.add_argument("--gpu", action="store_true", help="look at GPUs and links, and measure NCCL between them")
    parser.add_argument("--no-trials", action="store_true", help="start no other processes")
    parser.add_argument("--no-generation", action="store_true", help="leave the engine out of the trials")
    parser.add_argument("--timeout", type=float, default=28.0, metavar="SECONDS", help="for the trials (%(default)s)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs would write")


def _doctor(arguments: argparse.Namespace) -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    if importlib.util.find_spec("torch") is None:
        fix = "pip install 'megaverl[megatron,vllm]' (without a GPU 'megaverl[cpu]'), or ./launch/bootstrap.sh"
        absent = {"name": "torch", "status": "fail", "found": "absent", "fix": fix}
        report = {"healthy": False, "sections": {"versions": [absent]}}
        print(json.dumps(report, indent=2) if arguments.json else f"versions\n  FAIL  torch  absent\n    -> {fix}")
        return FAILED
    from megaverl.monitoring.doctor import as_dict, as_text, examine

    trials, generate = not arguments.no_trials, not arguments.no_generation
    options = {"trials": trials, "generate": generate, "gpu": arguments.gpu}
    findings = list(examine(arguments.run_dir, timeout=arguments.timeout, **options))
    print(json.dumps(as_dict(findings), indent=2) if arguments.json else as_text(findings))
    return FAILED if any(finding.status == "fail" for finding in findings) else 0


COMMANDS = {
    "report": Subcommand(REPORT, _report_options, _report),
    "doctor": Subcommand(DOCTOR, _doctor_options, _doctor),
}
