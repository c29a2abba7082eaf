"""The run that faults are tried on, two ranks of PPO with everything that has a state; and what must be the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from megaverl.checkpoint import Manifest, newest_first
from tests.trainer.conftest import command_arguments
from tools.same_numbers import is_cost

STEPS = 4
# Adaptive KL, schedules, two optimizers, validation with a best score, checkpoints at
# every step and milestones.
PPO = [
    "rollout={engine: hf, use_dynamic_batching: true}",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01, target: 0.01}}",
    "actor={tp: 2, optimizer: {lr: 1.0e-3}, scheduler: {lr_decay_style: cosine, lr_warmup_steps: 1}}",
    "critic={tp: 1, pp: 2, optimizer: {lr: 1.0e-3}}",
    f"trainer={{steps: {STEPS}, validate_every: 2}}",
    "checkpoint={save_interval: 1, keep_last_k: 2, milestone_interval: 3}",
    "run={name: run, nproc: 2, log_with: jsonl, timeout_minutes: 2}",
]
# Metrics of what a reshard sends, which depends on how and when a run was started.
BYTES, CHANGED = "reshard/bytes_", "reshard/changed_fraction"
# Of the trainer's state, what the machine says.
MACHINE = ("metrics_bytes", "generation_budget")


def arguments(inputs: Path, runs: Path, *more: str) -> list[str]:
    """Of a run on `inputs` that writes to `runs`/run."""
    return [
        "train",
        *command_arguments(inputs, runs),
        f"data.validation={inputs / 'held_out.jsonl'}",
        *PPO,
        *more,
    ]


Remains = dict[str, Any]


def remains(run: Path) -> Remains:
    """What a finished run leaves that must not depend on what happened to it: compare with ==.

    The exported weights and the whole training state to the bit, every number that was
    measured, every sample.
    """
    newest, problems = newest_first(run / "checkpoints")
    assert not problems, problems
    files = Manifest.read(newest[0]).files
    state = json.loads((newest[0] / "state.json").read_text())
    return {
        "weights": {
            path.name: _digest(path)
            for path in sorted((run / "hf").glob("*.safetensors"))
        },
        "checkpoint": newest[0].name,
        "state": {
            name: found for name, found in files.items() if name.endswith(".distcp")
        },
        # the same values can be pickled in several ways
        "common": repr(torch.load(newest[0] / "common.pt", weights_only=True)),
        "random": {
            name: found for name, found in files.items() if name.startswith("random_")
        },
        "trainer": {
            name: value for name, value in state.items() if name not in MACHINE
        },
        "metrics": metrics(run),
        "samples": (run / "samples.jsonl").read_text().splitlines(),
        "kept": sorted(path.name for path in newest),
    }


def metrics(run: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl in order, without what the clock or the machine says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if not is_cost(k)} for record in records]


def differences(found: Remains, expected: Remains) -> list[str]:
    """The names of what differs."""
    return [name for name in expected if found.get(name) != expected[name]]


def without_bytes(found: Remains) -> Remains:
    """What remains of a run, without the bytes of its reshards, which fan-out, deltas and restarts change."""
    metrics = [
        {
            name: value
            for name, value in record.items()
            if not name.startswith((BYTES, CHANGED))
        }
        for record in found["metrics"]
    ]
    return found | {"metrics": metrics}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
