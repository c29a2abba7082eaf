"""What every run here starts from: a tiny model with its tokenizer, data of a small task, and how to run a command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Heads of 32 dimensions, the smallest that vLLM's CPU attention has; two of each, so
# that 2 is the largest tp.
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_embeddings": True,
}
SETTINGS = """
run: {name: run, nproc: 2}
actor: {tp: 2, optimizer: {lr: 1.0e-3}}
rollout: {sampling: {max_tokens: 6}}
data: {max_prompt_tokens: 16, prompts_per_step: 8}
trainer: {steps: 2}
"""
# Differs from response to response even before any training, so that there is always
# something to learn.
REWARD = """
def letters(prompt, response, reference, extra):
    return sum(ord(letter) % 7 for letter in response) / 40
"""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` (weights in several files, tokenizer), data files, `run.yaml` and `reward.py`.

    Read-only for the tests.
    """
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def make_inputs(folder: Path) -> Path:
    """Fill a folder with what the fixture `inputs` promises."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    task = make_task("reverse", num_digits=3, num_train=64, num_held_out=16)
    task.save(folder)
    tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
    special: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(
        folder / "model", "Qwen3ForCausalLM", shard_bytes=100_000, **MODEL, **special
    )
    tokenizer.save(folder / "model")
    short = [
        {"prompt": f"reverse {number} =", "answer": str(number)} for number in range(8)
    ]
    mixed = [
        *short,
        *map(json.loads, (folder / "train.jsonl").read_text().splitlines()[:24]),
    ]
    (folder / "lengths.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in mixed)
    )
    (folder / "run.yaml").write_text(SETTINGS)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture
def arguments(inputs: Path, tmp_path: Path) -> list[str]:
    """Of a command that reads `inputs` and writes to `tmp_path`/runs/run."""
    return command_arguments(inputs, tmp_path / "runs")


def command_arguments(inputs: Path, runs: Path) -> list[str]:
    reward = json.dumps({"function": f"{inputs / 'reward.py'}:letters"})
    return [
        f"--config={inputs / 'run.yaml'}",
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"reward={reward}",
        f"run.dir={runs}",
    ]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what a torchrun around the tests would have left."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **changes}
