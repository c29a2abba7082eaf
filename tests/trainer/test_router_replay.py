"""Runs of a mixture of experts whose trainer takes the experts that the engine took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaverl.data.tokenizers import load_tokenizer
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

# vLLM's CPU attention has no kernel for heads below 32 dimensions
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
GRPO = "algorithm={name: grpo, group_size: 4, num_mini_batches: 2}"
PLACES: dict[str, list[str]] = {
    "together": ["actor={tp: 1, ep: 2}", "rollout.tp=2"],
    "apart": ["actor={tp: 1}", "placement={actor: [0], rollout: [1]}", "rollout.tp=1"],
}


@pytest.fixture(scope="module")
def model(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer(inputs / "model")
    special: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    folder = make_tiny_folder(
        tmp_path_factory.mktemp("moe"), "Qwen3MoeForCausalLM", **SIZES, **special
    )
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_a_run_takes_the_engines_experts(
    launch: Launcher, inputs: Path, model: Path, tmp_path: Path, place: str
) -> None:
    arguments = [
        *command_arguments(inputs, tmp_path / "runs"),
        f"model.path={model}",
        GRPO,
    ]
    arguments += [
        *PLACES[place],
        "actor.optimizer.lr=1e-3",
        "actor.router_replay=update",
        "model.dtype=bfloat16",
    ]
    arguments += ["trainer={steps: 2, validate_every: 0}", "checkpoint.export_hf=false"]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for step in map(json.loads, lines):
        # in 16 bits some choices are so close that engine and trainer would make them
        # differently
        assert 0 < step["actor/moe/routes_differ"] < 0.2
        assert (
            step["actor/moe/load_max"] > 1
            and 0 < step["actor/moe/router_entropy"] < 1.4
        )
        assert step["rollout/logprob_diff_max"] < 0.2
