"""Lengths that nobody gave: they fit the model's context, are said, written down, and the same when read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.cli.main import main
from megaverl.config import load_config
from megaverl.config.lengths import PROMPT, RESPONSE, fitted_lengths
from tests.config.conftest import LLAMA

LENGTH = st.none() | st.integers(1, 2000)


def shrink(tmp_path: Path, context: int) -> None:
    """Give the model of the fixture `files` so many positions."""
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**LLAMA, "max_position_embeddings": context})
    )


def test_a_small_model_needs_no_lengths(load, tmp_path):
    shrink(tmp_path, 64)
    config = load(
        "algorithm={name: dr_grpo, group_size: 4, loss_length: '${rollout.sampling.max_tokens}'}"
    )
    assert (config.data.max_prompt_tokens, config.rollout.sampling["max_tokens"]) == (
        42,
        22,
    )
    assert config.algorithm.loss_length == 22, (
        "what refers to a length finds the one that was chosen"
    )
    assert config.choices == (
        "data.max_prompt_tokens=42 and rollout.sampling.max_tokens=22, not given, chosen to fit the model's context of "
        "64 tokens",
    )
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "resolved.yaml")
    assert (again.to_dict(), again.choices) == (config.to_dict(), ())


@pytest.mark.parametrize(
    ("overrides", "command", "expected"),
    [
        ([], "generate", (42, 22)),
        (["data.max_prompt_tokens=50"], "train", (50, 14)),
        (["rollout.sampling={max_tokens: 60, temperature: 0.5}"], "train", (4, 60)),
        (["sft.max_answer_tokens=8"], "sft", (56, 256)),
        (["sft.max_answer_tokens=8"], "train", (42, 22)),
        (["preference={train: model, max_response_tokens: 10}"], "dpo", (54, 256)),
        (["preference={train: model, max_response_tokens: 10}"], "reward", (54, 256)),
    ],
)
def test_what_is_not_given_gets_what_is_left(
    load, tmp_path, monkeypatch, overrides, command, expected
):
    monkeypatch.chdir(tmp_path)
    shrink(tmp_path, 64)
    config = load(*overrides, command=command)
    assert (
        config.data.max_prompt_tokens,
        config.rollout.sampling["max_tokens"],
    ) == expected
    assert len(config.choices) == 1


@given(st.integers(2, 2000), LENGTH, LENGTH, LENGTH, st.sampled_from(["train", "sft"]))
def test_what_is_chosen_fits(tmp_path_factory, context, prompt, response, own, command):
    folder = tmp_path_factory.getbasetemp() / "context"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    shrink(folder, context)
    written = {PROMPT: prompt, RESPONSE: response, "sft.max_answer_tokens": own}
    values = {
        "model": {"path": str(folder / "model")},
        "data": {},
        "rollout": {"sampling": {}},
        "sft": {},
    }
    for key, length in written.items():
        if length is not None:
            around = (
                values["rollout"]["sampling"]
                if key == RESPONSE
                else values[key.partition(".")[0]]
            )
            around[key.rpartition(".")[2]] = length
    chosen, said = fitted_lengths(values, command)
    assert bool(chosen) == bool(said)
    assert all(
        written[key] is None and length > 0 and f"{key}={length}" in said
        for key, length in chosen.items()
    )
    result = {PROMPT: prompt or 512, RESPONSE: response or 256} | chosen
    assert result[PROMPT] <= max(512, prompt or 0) and result[RESPONSE] <= max(
        256, response or 0
    )
    # What is given of the response that counts.
    limit = own if own and command == "sft" else response
    if None in (prompt, limit) and context - (prompt or 0) - (limit or 0) > 1:
        assert result[PROMPT] + (limit or result[RESPONSE]) <= context
    if (prompt or 512) + max(limit or 256, response or 256) <= context:
        assert chosen == {}


@pytest.mark.parametrize(
    "given",
    ["data=3", "rollout.sampling=[]", "data.max_prompt_tokens=", "model.path=3"],
)
def test_nothing_is_chosen_over_a_mistake(mistakes, tmp_path, given):
    shrink(tmp_path, 64)
    assert given.partition("=")[0] in mistakes(given)


def test_a_dry_run_says_what_was_chosen(files, tmp_path, capsys):
    shrink(tmp_path, 64)
    assert main(["train", *files, "rollout.engine=hf", "--dry-run", "--print"]) == 0
    said = capsys.readouterr()
    assert (
        "max_prompt_tokens: 42" in said.out
        and "data.max_prompt_tokens=42 and rollout.sampling" in said.err
    )
