"""Stages beside plain reinforcement, as whole commands on two ranks: pairs, reward models, PRIME, mixes of updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.injector import Fault
from tests.faults.runs import arguments, metrics
from tests.faults.server import Ended, Server
from tests.trainer.conftest import make_inputs

RANKS = 2
SHORT = [
    "trainer={steps: 2, validate_every: 0}",
    "data.validation=[]",
    "checkpoint={save_interval: 0, export_hf: false}",
    "actor.optimizer.lr=1.0e-3",
    "actor.tp=1",
    f"critic.pp={RANKS}",
    f"run.nproc={RANKS}",
]
NO_KL = "algorithm.kl={in: none, coef: 0.0, target: null}"
PAIRS = [
    f"run={{name: run, nproc: {RANKS}, log_with: jsonl, timeout_minutes: 2}}",
    f"actor={{tp: 1, pp: {RANKS}, optimizer: {{lr: 1.0e-3}}}}",
    "preference={steps: 6, batch_size: 8, lr: 2.0e-3, max_response_tokens: 8}",
    "data.max_prompt_tokens=16",
    "checkpoint={save_interval: 2, resume: auto, async_save: false}",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of `tests.trainer.conftest`, with pairs: the answer is better than the digits as they stood."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    for name in ("train", "held_out"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": row["prompt"], "chosen": "1 2", "rejected": "3", "margin": 0.5} for row in rows]
        (folder / f"{name}_pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def on_pairs(inputs: Path, runs: Path, command: str, *more: str) -> list[str]:
    return [
        command,
        f"model.path={inputs / 'model'}",
        f"preference.train={inputs / 'train_pairs.jsonl'}",
        f"preference.validation={inputs / 'held_out_pairs.jsonl'}",
        f"run.dir={runs}",
        *PAIRS,
        *more,
    ]


def rewarded(inputs: Path, runs: Path, *more: str) -> list[str]:
    """Arguments with other rewards than those of the inputs."""
    return [each for each in arguments(inputs, runs, *more) if each in more or not each.startswith("reward=")]


def run(server: Server, command: list[str], logs: Path, fault: Fault | None = None) -> Ended:
    environment = fault.environment() if fault else None
    return server.run(command, ranks=RANKS, logs=logs, environment=environment)


def exported(runs: Path) -> dict[str, torch.Tensor]:
    return load_file(runs / "run" / "hf" / "model.safetensors")


def test_preferences_are_learned_and_a_killed_run_ends_with_the_same_bits(
    server: Server, inputs: Path, tmp_path: Path
) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    ended = run(server, on_pairs(inputs, whole, "dpo"), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    found = metrics(whole / "run")
    assert found[-1]["dpo/loss"] < found[0]["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["validation/accuracy"] == 1.0
    fault = Fault("kill", RANKS - 1, "dpo", 4, mark=str(tmp_path / "mark"))
    run(server, on_pairs(inputs, hit, "dpo"), tmp_path / "logs", fault)
    ended = run(server, on_pairs(inputs, hit, "dpo"), tmp_path / "logs")
    assert (tmp_path / "mark").exists() and ended.codes == [0] * RANKS and "2 of 6 steps are done" in ended.text
    assert metrics(hit / "run") == found
    expected = exported(whole)
    assert all(torch.equal(expected[name], tensor) for name, tensor in exported(hit).items())


def test_a_reward_model_scores_as_hugging_face_does_and_as_the_reward_role(
    server: Server, inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    command = on_pairs(
        inputs, tmp_path, "reward", "preference.margin_key=margin", "reward_model.options={center_coef: 0.01}"
    )
    ended = run(server, command, tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    assert metrics(tmp_path / "run")[-1]["validation/accuracy"] == 1.0
    folder = tmp_path / "run" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    learned = [f"reward=[{{name: learned, path: '{folder}'}}, {{name: exact_match}}]", "trainer.save_samples=16"]
    ended = run(server, rewarded(inputs, tmp_path / "rl", *SHORT, *learned), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    lines = (tmp_path / "rl" / "run" / "samples.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["finish_reason"] == "stop"]
    text = [tokenizer.encode(r["prompt"]) + tokenizer.encode(r["response"]) for r in records]
    ends = [tokenizer.eos_token_id]
    checked = 0
    for record, ids in zip(records, text, strict=True):
        with torch.no_grad():
            score = float(model(torch.tensor([[*ids, *ends]])).logits)
        checked += record["reward"] == pytest.approx(score, abs=1e-4)
    assert checked >= len(records) // 2, "but for those whose text is tokenised in another way"
    found = metrics(tmp_path / "rl" / "run")[-1]
    assert found["reward/mean"] == pytest.approx(found["reward/learned"] + found["reward/exact_match"], abs=1e-5)


@pytest.mark.parametrize("name", ["prime", "raft"])
def test_estimators_with_a_loop_of_their_own(server: Server, inputs: Path, tmp_path: Path, name: str) -> None:
    letters = f"reward={{function: '{inputs / 'reward.py'}:letters', accuracy: true}}"
    algorithm = f"algorithm={{name: {name}, group_size: 4, num_mini_batches: 1}}"
    ended = run(server, arguments(inputs, tmp_path, *SHORT, algorithm, NO_KL, letters), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    first, last = metrics(tmp_path / "run")
    assert last["actor/grad_norm"] > 0
    if name == "prime":
        assert last["reward_model/grad_norm"] > 0 and last["reward_model/loss"] < first["reward_model/loss"]
        assert first["reward_model/loss"] == pytest.approx(0.6931, abs=1e-3), "phi begins as the reference"


def test_one_flow_with_ppo_a_reward_model_rejection_sampling_pairs_and_answers(
    server: Server, inputs: Path, tmp_path: Path
) -> None:
    """And killed inside, started again, it ends with the same bits."""
    run(server, on_pairs(inputs, tmp_path / "rm", "reward", "preference.steps=1"), tmp_path / "logs")
    mixed = [
        f"reward=[{{function: '{inputs / 'reward.py'}:letters'}}, {{name: learned, path: '{tmp_path / 'rm/run/hf'}'}}]",
        "mix=[{update: rejection, judge: letters}, {update: preference, judge: letters, weight: 0.5}, "
        "{update: reward_model, judge: letters}, {update: sft, every: 2}]",
        "algorithm.group_size=2",
        "data.prompts_per_step=4",
        "checkpoint={save_interval: 1, export_hf: true, resume: auto, async_save: false}",
        "preference.loss=dpo",
    ]
    command = rewarded(inputs, tmp_path / "whole", *SHORT, *mixed)
    ended = run(server, command, tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    first, last = metrics(tmp_path / "whole" / "run")
    for name in ("rejection", "preference", "reward_model"):
        assert last[f"mix_{name}/grad_norm"] > 0 and last[f"mix_{name}/samples"] > 0
    assert "mix_sft/loss" in last and "mix_sft/loss" not in first
    command = rewarded(inputs, tmp_path / "hit", *SHORT, *mixed)
    run(server, command, tmp_path / "logs", Fault("kill", 0, "mix_1_preference", 2, mark=str(tmp_path / "mark")))
    ended = run(server, command, tmp_path / "logs")
    assert (tmp_path / "mark").exists() and ended.codes == [0] * RANKS, ended.text
    assert metrics(tmp_path / "hit" / "run") == [first, last]
    expected = exported(tmp_path / "whole")
    assert all(torch.equal(expected[name], tensor) for name, tensor in exported(tmp_path / "hit").items())
