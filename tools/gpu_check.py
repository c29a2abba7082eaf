"""What a first hour on GPUs must show, on one GPU or on eight: one command, one table, JSON for a report.

    python tools/gpu_check.py                                  # every check, one after the other
    python tools/gpu_check.py --json gpu_check.json            # and the same for machines
    python tools/gpu_check.py --only logits training           # some of them
    python tools/gpu_check.py --device cpu                     # what a CPU can show of it

Each check (tools/gpu_check_parts.py) runs in processes of its own, one on each GPU that it takes, so that one that
fails, crashes or hangs hides no other. What cannot be checked here is said with its reason. Exits 1 if a check fails
and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from megaverl.monitoring.doctor import Finding, as_dict, as_text  # noqa: E402
from megaverl.monitoring.doctor.trials import Trial  # noqa: E402
from megaverl.monitoring.tracker import collect_versions  # noqa: E402
from tools.gpu_check_parts import CHECKS, Check  # noqa: E402

MODULE = "tools.gpu_check_parts"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings and the versions there")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each check (%(default)s)")
    arguments = parser.parse_args(argv)
    gpus = count_devices(arguments.device)
    if arguments.device == "cuda" and not gpus:
        print("no CUDA device here: nothing to check (--device cpu checks what a CPU can)")
        return 2
    findings = []
    for name in arguments.only or CHECKS:
        findings.append(run(name, CHECKS[name], arguments.device, gpus, arguments.timeout))
        print(f"{findings[-1].status:5}{name}: {findings[-1].found.splitlines()[0]}", file=sys.stderr, flush=True)
    print(as_text(findings))
    if arguments.json:
        report = {"versions": collect_versions(), "device": arguments.device, "gpus": gpus, **as_dict(findings)}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def count_devices(device: str) -> int:
    """GPUs that torch sees."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def run(name: str, check: Check, device: str, gpus: int, timeout: float) -> Finding:
    """The finding of one check, run in as many ranks as it takes."""
    if reason := check.why_not(device, gpus):
        return Finding("checks", name, "note", f"not checked: {reason}")
    ranks = check.ranks(device, gpus)
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megaverl_check_") as folder:
        fix = "its last lines say why: run it alone with --only, and report it with --json"
        trial = Trial(name, MODULE, ranks, fix, environment, arguments=[name, folder], section="checks")
        finding = trial.finish(begin + timeout)
    took = f"{finding.found}\n({ranks} rank{'s' * (ranks > 1)}, {time.monotonic() - begin:.0f} s)"
    return Finding("checks", name, finding.status, took, finding.fix)


if __name__ == "__main__":
    sys.exit(main())
