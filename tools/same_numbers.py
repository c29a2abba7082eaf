#!/usr/bin/env python3
"""Check that a refactoring changes no number: record four short runs before it, and compare them to the bit after it.

    python tools/same_numbers.py record before.json              # about two minutes on two quiet cores
    python tools/same_numbers.py compare before.json             # the same runs again, in the working tree as it is now
    python tools/same_numbers.py compare before.json after.json  # two recordings; nothing is run

The runs are real ones of the commands, from the working tree that this file stands in: the quickstart with two seeds,
PPO with the actor and the engine on ranks of their own, and GRPO with LoRA over two pipeline stages, the last two from
the first one's warm start. A recording holds every metric of every step as the text that stands in metrics.jsonl, from
which a float is read back to the bit, without those that measure time, memory or speed (COSTS); and a SHA-256 of each
folder of weights. It also holds the processor, libraries and variables that last bits depend on: where they differ,
nothing is compared.

Exit codes: 0 the same to the bit; 1 different; 2 a run failed, or nothing can be compared; 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

DEFAULT_STEPS = 6
# Metrics of what a step costs, which no two runs share; patterns of names.
COSTS = (
    "time",
    "time/*",
    "*_ms",
    "*/seconds",
    "*_per_sec",
    "*/mfu",
    "gpu/*",
    "memory/*",
    "busy/*",
    "comm/*",
    "reward/service_*",
    "*/hidden_fraction",
    "rollout/server_samples/*",  # the server that is free first takes a request
)
# Variables by which a user or an administrator chooses kernels and threads.
KERNEL_VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "VLLM_")
# One thread a rank, and no GPU, whatever the machine has.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}
ABSENT = "absent"


class Run(TypedDict):
    """Records of a run: metrics of each record by name, as text; SHA-256 of the weights by folder."""

    records: list[dict[str, str]]
    weights: dict[str, str]


class Recording(TypedDict):
    """Recorded runs. `steps` is None for the recipe's own number; `machine` holds all that last bits depend on."""

    commit: str
    steps: int | None
    machine: dict[str, str]
    runs: dict[str, Run]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.what == "record":
        steps = None if options.full else options.steps
        made = start_recording(steps) | {"runs": run_all(steps)}
        options.file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return 0
    expected: Recording = json.loads(options.file.read_text(encoding="utf-8"))
    compared: Recording = (
        json.loads(options.other.read_text())
        if options.other
        else start_recording(expected["steps"])
    )
    if unlike := list(obstacles(expected, compared)):
        print(
            f"{options.file} cannot be compared, the numbers depend on:",
            *unlike,
            sep="\n  ",
            file=sys.stderr,
        )
        print(
            f"Record commit {expected['commit']} again, in the place of the other side.",
            file=sys.stderr,
        )
        return 2
    runs = compared["runs"] or run_all(compared["steps"])
    same = [
        compare_run(name, expected["runs"].get(name), runs.get(name))
        for name in expected["runs"] | runs
    ]
    print(
        "the same to the bit"
        if all(same)
        else f"not the same: {same.count(False)} of {len(same)} runs differ"
    )
    return 0 if all(same) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    record = commands.add_parser("record", help="run, and write what came of it")
    record.add_argument("file", type=Path)
    length = record.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help=f"of each run (default: {DEFAULT_STEPS})",
    )
    length.add_argument(
        "--full", action="store_true", help="as many steps as the quickstart has"
    )
    compare = commands.add_parser(
        "compare", help="run again, with as many steps, and say what differs first"
    )
    compare.add_argument("file", type=Path)
    compare.add_argument(
        "other", type=Path, nargs="?", help="another recording, instead of running"
    )
    options = parser.parse_args(arguments)
    if options.what == "record" and options.steps < 1:
        parser.error(f"--steps is {options.steps}; at least 1 is needed")
    if options.what == "record" and not options.file.parent.is_dir():
        parser.error(
            f"there is no folder {options.file.parent} to write {options.file.name} to"
        )
    for file in (options.file, options.other) if options.what == "compare" else ():
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}: record it first")
    return options


def start_recording(steps: int | None) -> Recording:
    """Make a recording without runs that describes machine and sources, and set the environment for the runs."""
    os.environ |= ENVIRONMENT
    import torch  # which takes its number of threads from there

    from megaverl.monitoring.tracker import collect_versions

    machine = {
        f"cpu {name}": str(value)
        for name, value in torch.cpu.get_capabilities().items()
    }
    # Each rank has one thread.
    machine = {name: value for name, value in machine.items() if "cpu num_" not in name}
    machine["cpu kernels of torch"] = torch.backends.cpu.get_cpu_capability()
    machine["libc"] = " ".join(platform.libc_ver())
    machine |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KERNEL_VARIABLES)
    }
    versions = collect_versions()
    commit = versions.pop("commit", "unknown")
    for name in ("megaverl", "platform"):  # what is compared, and the kernel
        del versions[name]
    return {"commit": commit, "steps": steps, "machine": machine | versions, "runs": {}}


def run_all(steps: int | None) -> dict[str, Run]:
    """Run every command, one after the other; prints which metrics are left out."""
    from megaverl.cli.main import main as megaverl

    # The temporary folder is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs: dict[str, Run] = {}
    left_out: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="megaverl_same_numbers_") as folder:
        for name, command in commands(Path(folder), steps).items():
            print(f"== {name}", flush=True)
            if code := megaverl(command):
                print(f"{name} ended with exit code {code}", file=sys.stderr)
                sys.exit(130 if code == 130 else 2)
            records = read_records(Path(folder, name, "metrics.jsonl"))
            left_out |= {
                metric for record in records for metric in record if is_cost(metric)
            }
            kept = [
                {metric: text for metric, text in record.items() if not is_cost(metric)}
                for record in records
            ]
            runs[name] = {"records": kept, "weights": digests(Path(folder, name))}
    print(
        f"left out, as they measure time, memory or speed: {', '.join(sorted(left_out))}"
    )
    return runs


def commands(folder: Path, steps: int | None) -> dict[str, list[str]]:
    """Return the arguments of `megaverl` for each run, whose folder is in `folder`."""
    inputs = folder / "quickstart_seed_0" / "inputs"
    common = [
        f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
        f"run.dir={folder}",
        "run.log_with=jsonl",
    ]
    if steps is not None:
        common += [
            f"trainer={{steps: {steps}, validate_every: {(steps + 1) // 2}}}",
            "sft.steps=15",
        ]
    data = [
        f"data={{train: '{inputs / 'train.jsonl'}', validation: '{inputs / 'held_out.jsonl'}'}}"
    ]
    warm = [*common, *data, f"model.path={inputs / 'warm'}"]
    lora = [
        "algorithm={name: grpo, kl: {in: loss, kind: k3, coef: 0.01}}",
        "actor={tp: 1, pp: 2, lora: {rank: 8}}",
    ]
    by_name = {
        "quickstart_seed_0": ["quickstart", *common, "run.seed=0"],
        "quickstart_seed_1": ["quickstart", *common, "run.seed=1"],
        "split": [
            "train",
            *warm,
            "run.nproc=3",
            "critic.pp=2",
            "placement={rollout: 0, actor: 1-2}",
        ],
        "grpo_lora": ["train", *warm, *lora],
    }
    return {name: [*command, f"run.name={name}"] for name, command in by_name.items()}


def read_records(path: Path) -> list[dict[str, str]]:
    """Return the records of a metrics.jsonl, each number as its text in the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_float=str, parse_int=str) for line in lines]


def is_cost(metric: str) -> bool:
    """Return whether a metric depends on time, memory or speed, and so differs from run to run."""
    return any(fnmatchcase(metric, pattern) for pattern in COSTS)


def digests(run: Path) -> dict[str, str]:
    """Return a digest of every folder of weights in a run except checkpoints: made, starting and exported models."""
    folders = sorted(
        {file.parent.relative_to(run) for file in run.rglob("*.safetensors")}
    )
    return {
        str(folder): digest(run / folder)
        for folder in folders
        if folder.parts[0] != "checkpoints"
    }


def digest(folder: Path) -> str:
    """Return a SHA-256 over name, dtype, shape and bytes of all tensors, sorted by name, in any number of files."""
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def obstacles(expected: Recording, compared: Recording) -> Iterator[str]:
    """Yield the reasons for which two recordings would differ with the same code, one a line."""
    if expected["steps"] != compared["steps"]:
        yield f"steps: {expected['steps']} recorded, {compared['steps']} to compare with"
    for name in expected["machine"] | compared["machine"]:
        recorded, here = (
            side["machine"].get(name, ABSENT) for side in (expected, compared)
        )
        if recorded != here:
            yield f"{name}: {recorded} recorded, {here} to compare with"


def compare_run(name: str, expected: Run | None, compared: Run | None) -> bool:
    """Print the first difference between two runs and of their weights; return whether there is none."""
    if expected is None or compared is None:
        print(
            f"{name}: only in {'the second' if expected is None else 'the first'} recording"
        )
        return False
    difference = first_difference(expected["records"], compared["records"])
    print(f"{name}: {difference or 'metrics are equal'}")
    for folder in expected["weights"] | compared["weights"]:
        before, after = (
            side["weights"].get(folder, ABSENT) for side in (expected, compared)
        )
        print(
            f"  weights in {folder}: {before} "
            + ("in both" if before == after else f"expected, {after} found")
        )
    return difference is None and expected["weights"] == compared["weights"]


def first_difference(
    expected: Sequence[Mapping[str, str]], compared: Sequence[Mapping[str, str]]
) -> str | None:
    """Return step, name and both values of the first metric that differs; None if all are equal."""
    empty: Mapping[str, str] = {}
    for before, after in itertools.zip_longest(expected, compared, fillvalue=empty):
        for metric in {**before, **after}:
            values = before.get(metric, ABSENT), after.get(metric, ABSENT)
            if values[0] != values[1]:
                step = before.get("step", after.get("step"))
                return f"step {step}, {metric}: {values[0]} expected, {values[1]} found"
    return None


if __name__ == "__main__":
    sys.exit(main())
