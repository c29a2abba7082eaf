"""Bytes of a step's collectives: what the plan says is what ranks count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaverl.planner.collectives import received_in_collectives
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.operators import StepLoad
from megaverl.sharding.model_spec import ModelSpec
from tests.launcher import Launcher
from tests.planner.jobs import make

PROMPTS, GROUP, PROMPT, RESPONSE = 4, 4, 5, 7
STEP = [
    f"algorithm={{name: grpo, group_size: {GROUP}, num_mini_batches: 2, kl: {{in: loss, kind: k3, coef: 0.01}}}}",
    f"data.prompts_per_step={PROMPTS}",
    f"rollout.sampling={{max_tokens: {RESPONSE}, ignore_eos: true}}",
    "trainer={steps: 2, validate_every: 0}",
    "actor.pack_samples=false",
]
GRIDS = {
    "tensor": ["actor={tp: 2, pp: 1}"],
    "pipeline": ["actor={tp: 1, pp: 2}"],
    "data": ["actor={tp: 1, pp: 1}"],
    "full recomputation": ["actor={tp: 2, pp: 1, activation_checkpointing: full}"],
    "sequence parallel": ["actor={tp: 2, pp: 1, megatron: {sequence_parallel: true}}"],
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of one length, of five tokens each."""
    file = tmp_path_factory.mktemp("prompts") / "same.jsonl"
    rows = [{"prompt": f"{number:05d}", "answer": "1"} for number in range(32)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("grid", GRIDS)
def test_the_plan_counts_what_ranks_count(
    grid: str, launch: Launcher, inputs: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = [
        f"--config={inputs / 'run.yaml'}",
        f"model.path={inputs / 'model'}",
        f"data.train={prompts}",
        f"reward={json.dumps({'function': str(inputs / 'reward.py') + ':letters'})}",
        f"run.dir={tmp_path}",
        "rollout.engine=hf",
        *STEP,
        *GRIDS[grid],
    ]
    assert launch.world(
        2, "tests.trainer.ranks:attempt", command="train", arguments=arguments
    ) == [{}, {}]
    records = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    counted = {
        name: value for name, value in records[1].items() if name.startswith("comm/")
    }
    spec = ModelSpec.from_config(
        json.loads((inputs / "model" / "config.json").read_text())
    )
    job = make(spec, 2, *STEP, *GRIDS[grid], "model.dtype=float32")
    load = StepLoad(
        job, Hardware.read("cpu"), LengthDistribution.fixed(PROMPT, RESPONSE), None
    )
    planned: dict[str, Any] = {
        f"comm/{role}/{dimension}_bytes": count
        for role, counts in received_in_collectives(load).items()
        for dimension, count in counts.items()
    }
    total = counted.pop("comm/total_bytes")
    assert planned and total >= sum(counted.values())
    for name, count in counted.items():
        # Sums over all ranks are not planned: log-probs of a batch, norms of gradients,
        # and counts of tokens. They are counted under the dimension that has all ranks.
        slack = 0.03 * sum(planned.values())
        assert count == pytest.approx(planned.get(name, 0.0), abs=slack), (
            f"{name}: {counted}, planned {planned}"
        )
    assert planned.keys() <= counted.keys()
