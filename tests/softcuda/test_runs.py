"""Whole runs through the CUDA branch, with values: metrics, samples and weights are those of the CPU branch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher import Launcher
from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice
from tests.softcuda.runs import PLAIN, differences
from tests.trainer.conftest import command_arguments

COMMON = [
    "model.dtype=float32",
    "rollout.engine=hf",
    f"actor.megatron={PLAIN}",
    f"critic.megatron={PLAIN}",
    "trainer.steps=2",
    "trainer.validate_every=0",
    "run.log_with=jsonl",
    "run.timeout_minutes=2",
]
RUNS = {
    "grpo": ["algorithm={name: grpo, group_size: 4, kl: {in: loss, coef: 0.01}}"],
    "ppo": [
        "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
        "critic={tp: 1, optimizer: {lr: 1.0e-3}}",
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_the_cpu_to_the_bit(
    launch: Launcher, device: SoftwareDevice, inputs: Path, tmp_path: Path, name: str
) -> None:
    on_cpu = ["train", *command_arguments(inputs, tmp_path / "cpu"), *COMMON, *RUNS[name]]
    on_device = ["train", *command_arguments(inputs, tmp_path / "device"), *COMMON, *RUNS[name]]
    launch.ranks(2, "tests.softcuda.runs:plain_command", arguments=on_cpu).check()
    options = Options(devices=2, shares_generator=True)
    ended = device.command(on_device, logs=tmp_path / "logs", options=options)
    ended.check()
    for rank in range(2):
        assert ended.matrix_products(rank) > 300
    lines = (tmp_path / "device" / "run" / "metrics.jsonl").read_text().splitlines()
    # in `actor_gpu_mem_mb` a CPU's run has the memory of the process
    assert all(json.loads(line)["memory/actor_gpu_reserved_mb"] > 0 for line in lines)
    assert differences(tmp_path / "device" / "run", tmp_path / "cpu" / "run") == []
