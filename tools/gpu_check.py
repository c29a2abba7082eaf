"""Check in a first hour on GPUs that everything a run uses works: one command, one table, JSON for a report.

    python tools/gpu_check.py                                  # every check, one after the other
    python tools/gpu_check.py --json gpu_check.json            # and the same for machines
    python tools/gpu_check.py --only logits training           # some of them
    python tools/gpu_check.py --device cpu                     # what a CPU can show of it

First come the driver, the start of CUDA, and the imports: if one fails, nothing else runs, as it would run on the CPU.
Then come the engine with the actor's weights, the other checks of one GPU, and those of two or more. Each check
(tools/gpu_check_parts.py) runs in processes of its own, one on each GPU that it takes, so that one that fails, crashes
or hangs hides no other. Each process refuses to check anything on another device than it was asked for. A check that
cannot be made here is listed with its reason.

Exit codes: 0 all checks passed; 1 one failed; 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from megaverl.gpus import count_gpus, cpu_torch_beside_gpus, driver_older_than_torch
from megaverl.monitoring.doctor import Finding, as_dict, as_text
from megaverl.monitoring.doctor.trials import Trial
from megaverl.monitoring.tracker import collect_versions
from tools.gpu_check_models import REHEARSAL
from tools.gpu_check_parts import CHECKS, Check

MODULE = "tools.gpu_check_parts"
IMPORTS = ("transformers", "megatron.core", "vllm")
START = "import torch; torch.ones(1, device='cuda').sum().item(); print('devices', torch.cuda.device_count())"
START_SECONDS = 300.0  # for all imports; a cold one of vLLM alone was measured at 33


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CHECKS),
        metavar="CHECK",
        help=", ".join(CHECKS),
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the findings and the versions there",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="for each check (%(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=30.0,
        metavar="MINUTES",
        help="start none after (%(default)s)",
    )
    parser.add_argument(
        "--rehearsal",
        action="store_true",
        help="small sizes, no CUDA graphs and no speed limits: try this tool where software stands for GPUs",
    )
    arguments = parser.parse_args(argv)
    begin = time.monotonic()
    findings: list[Finding] = []
    gpus = 0
    if arguments.device == "cuda":
        findings, gpus = examine_machine()
        if not gpus and not findings:
            print(
                "no CUDA device here: nothing to check (--device cpu checks what a CPU can)"
            )
            return 2
    if arguments.rehearsal:
        os.environ[REHEARSAL] = "1"
        findings.append(
            Finding(
                "machine",
                "rehearsal",
                "note",
                "small sizes, no CUDA graphs, no limits of speed",
            )
        )
    if not any(finding.status == "fail" for finding in findings):
        for name in arguments.only or CHECKS:
            spent = time.monotonic() - begin
            if spent > 60 * arguments.budget:
                reason = (
                    f"not checked: the budget of {arguments.budget:g} minutes is spent (--budget, or --only "
                    f"{name})"
                )
                findings.append(Finding(CHECKS[name].section, name, "note", reason))
                continue
            findings.append(
                run(name, CHECKS[name], arguments.device, gpus, arguments.timeout)
            )
            of_budget = (
                f"{(time.monotonic() - begin) / 60:.1f} of {arguments.budget:g} min"
            )
            line = f"{findings[-1].status:5}{name}: {findings[-1].found.splitlines()[0]} [{of_budget}]"
            print(line, file=sys.stderr, flush=True)
    print(as_text(findings))
    if arguments.json:
        report = {
            "versions": collect_versions(),
            "device": arguments.device,
            "gpus": gpus,
            **as_dict(findings),
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def examine_machine() -> tuple[list[Finding], int]:
    """Return findings on driver, CUDA and imports, and the number of GPUs on which CUDA starts.

    A driver that is too old, or a torch without CUDA, lets `device_count` name GPUs on
    which nothing can run.
    """
    listed = count_gpus()
    if problem := driver_older_than_torch() or cpu_torch_beside_gpus():
        return [
            Finding(
                "machine", "driver", "fail", problem, "docs/first_gpu_hour.md, minute 0"
            )
        ], 0
    code, output = _python(START)
    if code:
        if not listed:
            return [], 0
        listed_only = f"{listed} GPUs are listed, but CUDA does not start: {output.splitlines()[-1]}"
        return [
            Finding(
                "machine",
                "CUDA",
                "fail",
                listed_only,
                "megaverl doctor --gpu says more",
            )
        ], 0
    gpus = int(output.split()[-1])
    findings = [
        Finding("machine", "CUDA", "ok", f"starts; {gpus} GPU{'s' * (gpus != 1)}")
    ]
    # one interpreter for all is quicker; if something fails, one for each finds out
    # what
    failing = IMPORTS if _python(f"import torch, {', '.join(IMPORTS)}")[0] else ()
    for module in failing:
        code, output = _python(f"import torch, {module}")
        if code:
            fix = "./launch/bootstrap.sh --gpu installs the versions of the lock"
            findings.append(
                Finding(
                    "machine", f"import {module}", "fail", output.splitlines()[-1], fix
                )
            )
    return findings, gpus


def _python(program: str) -> tuple[int, str]:
    """Run a program in an interpreter of its own; return its exit code and its output."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"not done after {START_SECONDS:g} s"
    return done.returncode, (
        done.stderr if done.returncode else done.stdout
    ).strip() or "(it wrote nothing)"


def run(name: str, check: Check, device: str, gpus: int, timeout: float) -> Finding:
    """Run one check in as many ranks as it takes, and return its finding."""
    if reason := check.why_not(device, gpus):
        return Finding(check.section, name, "note", f"not checked: {reason}")
    ranks = check.ranks(device, gpus)
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megaverl_check_") as folder:
        fix = "its last lines say why: run it alone with --only, and report it with --json"
        trial = Trial(
            name,
            MODULE,
            ranks,
            fix,
            environment,
            arguments=[name, folder, device],
            section=check.section,
        )
        finding = trial.finish(begin + timeout)
    report = f"{finding.found}\n({ranks} rank{'s' * (ranks > 1)}, {time.monotonic() - begin:.0f} s)"
    return Finding(check.section, name, finding.status, report, finding.fix)


if __name__ == "__main__":
    sys.exit(main())
