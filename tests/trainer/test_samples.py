"""Samples on disk follow the run: a resumed one drops what it will write again. And episodes as batches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from megaverl.data.batch_io import load, save
from megaverl.data.datasets import PromptRecord
from megaverl.rewards import Reward
from megaverl.rollout.engine import Generation
from megaverl.rollout.environments import Outcome, View
from megaverl.trainer.saving import append_samples, forget_samples
from megaverl.workers.responses import episodes_batch
from megaverl.workers.reward import RewardRole


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_later_and_torn_records_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in (1, 2, 3):
        append_samples(
            path,
            step,
            [{"prompt": "p", "response": "r"}, {"prompt": "q", "response": "s"}],
        )
    with path.open("a") as file:
        file.write('{"step": 2, "split": "tr')
    forget_samples(path, 2)
    assert steps(path) == [1, 1, 2, 2]
    forget_samples(path, 0)
    assert steps(path) == []


def test_nothing_to_forget(tmp_path: Path) -> None:
    forget_samples(tmp_path / "samples.jsonl", 3)
    assert not (tmp_path / "samples.jsonl").exists()


def test_an_episode_as_a_batch_also_after_it_was_stored(tmp_path: Path) -> None:
    """Only the model's own tokens train; a turn's reward stands at its end; a reward sees the last turn."""
    view = View([7, 8])
    view.write(Generation([1, 2], [-0.1, -0.2], "stop"))
    view.rewards[-1] = 0.5
    view.read(Outcome([9]))
    view.write(Generation([3], [-0.3], "stop"))
    view.finish_reason = "stop"
    record = PromptRecord(0, "p", "p", [7, 8], "r", {}, "row 1", [])
    path = tmp_path / "batch.safetensors"
    save(episodes_batch([record], [{"a": view, "b": view}], ("a", "b"), [4]), path)
    batch = load(path)
    assert batch.response_mask.tolist() == [[True, True, False, True]] * 2
    assert batch.turn_ids.tolist() == [[0, 0, 0, 1]] * 2
    assert batch.turn_rewards.tolist() == [[0.0, 0.5, 0.0, 0.0]] * 2
    assert batch.agent_ids.tolist() == [0, 1] and batch.group_ids.tolist() == [8, 9]
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    role = RewardRole(Reward([], may_be_empty=True), tokenizer, None)  # type: ignore[arg-type]
    [sample, _] = role.samples(batch, range(2))
    assert (sample.response, sample.transcript, sample.num_tokens) == (
        "3",
        "1 2 9 3",
        3,
    )
