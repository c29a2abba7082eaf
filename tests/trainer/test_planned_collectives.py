"""Bytes of a step's collectives, of `megaverl train` and of commands on a data set: ranks count what the plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.grids import OfflineCommand
from megaverl.data.tokenizers import load_tokenizer
from megaverl.models.tiny import make_tiny_folder
from megaverl.planner.collectives import received_in_collectives
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import make_offline_job
from megaverl.planner.offline import operators, with_rows
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
    "context": ["actor={tp: 1, pp: 1, cp: 2}"],
    "context recomputed": ["actor={tp: 1, cp: 2, activation_checkpointing: full}"],
    "attention of a context recomputed": [
        "actor={tp: 1, cp: 2, megatron: {recompute_granularity: selective, recompute_modules: [core_attn]}}"
    ],
    "sequence parallel": ["actor={tp: 2, pp: 1, megatron: {sequence_parallel: true}}"],
}


# Command -> grid, and settings. A row of a pair has two responses.
OFFLINE: dict[OfflineCommand, tuple[str, list[str]]] = {
    "sft": (
        "pipeline",
        [f"sft={{steps: 2, batch_size: 16, max_answer_tokens: {RESPONSE}}}"],
    ),
    "dpo": ("tensor", ["preference.loss=dpo"]),
    "reward": ("data", []),
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
    compare(launch, inputs, prompts, tmp_path, inputs / "model", GRIDS[grid])


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM"]
)
def test_the_plan_counts_the_exchange_of_layers_with_a_state(
    architecture: str,
    checkpointing: str,
    launch: Launcher,
    inputs: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    """Half of Qwen3-Next's layers here have one, and all of Falcon-H1's, beside attention."""
    tokenizer = load_tokenizer(inputs / "model")
    folder = make_tiny_folder(
        tmp_path / "model",
        architecture,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save(folder)
    grid = [f"actor={{tp: 1, cp: 2, activation_checkpointing: {checkpointing}}}"]
    compare(launch, inputs, prompts, tmp_path, folder, grid)


def compare(
    launch: Launcher,
    inputs: Path,
    prompts: Path,
    tmp_path: Path,
    model: Path,
    grid: list[str],
) -> None:
    """Compare the plan of a run of two steps with what its ranks count."""
    arguments = [
        f"--config={inputs / 'run.yaml'}",
        f"model.path={model}",
        f"data.train={prompts}",
        f"reward={json.dumps({'function': str(inputs / 'reward.py') + ':letters'})}",
        f"run.dir={tmp_path}",
        "rollout.engine=hf",
        *STEP,
        *grid,
    ]
    assert launch.world(
        2, "tests.trainer.ranks:attempt", command="train", arguments=arguments
    ) == [{}, {}]
    spec = ModelSpec.from_config(json.loads((model / "config.json").read_text()))
    job = make(spec, 2, *STEP, *grid, "model.dtype=float32")
    load = StepLoad(
        job, Hardware.read("cpu"), LengthDistribution.fixed(PROMPT, RESPONSE), None
    )
    check(tmp_path / "run", received_in_collectives(load))


@pytest.mark.parametrize("command", OFFLINE)
def test_the_plan_counts_what_ranks_count_on_a_data_set(
    command: OfflineCommand, launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    grid, settings = OFFLINE[command]
    rows = [
        {
            "prompt": f"{number:05d}",
            "answer": f"{number:06d}",
            "chosen": f"{number:06d}",
            "rejected": f"{number + 1:06d}",
        }
        for number in range(32)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"--config={inputs / 'run.yaml'}",
        f"model={{path: {inputs / 'model'}, dtype: float32}}",
        f"data.train={file}",
        f"preference={{train: [{file}], steps: 2, batch_size: 8, max_response_tokens: {RESPONSE}}}",
        f"run.dir={tmp_path}",
        "actor.pack_samples=false",
        *GRIDS[grid],
        *settings,
    ]
    assert launch.world(
        2, "tests.trainer.ranks:attempt", command=command, arguments=arguments
    ) == [{}, {}]
    config = load_config(
        inputs / "run.yaml", arguments[1:], command=command, world_size=2
    )
    spec = ModelSpec.from_folder(inputs / "model")
    job = make_offline_job(with_rows(config, command), command, spec, 2)
    load = StepLoad(
        job, Hardware.read("cpu"), LengthDistribution.fixed(PROMPT, RESPONSE), None
    )
    planned = received_in_collectives(load, operators(job, command))
    # The reference's passes are in the span of the actor's update, over the same groups.
    for dimension, count in planned.pop("reference", {}).items():
        planned["actor"][dimension] = planned["actor"].get(dimension, 0.0) + count
    check(tmp_path / "run", planned)


def check(run: Path, received: dict[str, dict[str, float]]) -> None:
    """Compare what a run's second step counted with what is planned."""
    records = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    counted = {
        name: value for name, value in records[1].items() if name.startswith("comm/")
    }
    planned = {
        f"comm/{role}/{dimension}_bytes": count
        for role, counts in received.items()
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
