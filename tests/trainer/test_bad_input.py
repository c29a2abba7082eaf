"""Every bad input, as its owner meets it: one message that names it and the cure, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megaverl.cli.main import main
from megaverl.data.tokenizers import load_tokenizer
from megaverl.models.tiny import make_tiny_folder
from tests.checkpoint.convert.folders import as_reward_model
from tests.launcher import Launcher

WHOLE = {
    "train.yaml",
    "sft.yaml",
    "versions.json",
    "metrics.jsonl",
    "samples.jsonl",
    "timeline.json",
}


def assert_nothing_half_written(runs: Path) -> None:
    """What a failed run leaves: its configuration, its logs, and lines of metrics that can be read."""
    run = runs / "run"
    left = {path.name for path in run.iterdir()} if run.exists() else set()
    assert left <= WHOLE | {"logs", "tensorboard"}
    for path in run.rglob("*.json*"):
        for line in (
            path.read_text().splitlines()
            if path.suffix == ".jsonl"
            else [path.read_text()]
        ):
            json.loads(line)


# --- What the configuration alone can tell, before any rank is started.


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["actor.tpp=2"], "actor.tpp", "unknown key. Did you mean `tp`?"),
        (["trainer.steps=many"], "trainer.steps", "found 'many'; expected an integer."),
        (
            ["run.nproc=3", "actor.tp=3"],
            "actor.tp",
            "found 3, which does not divide the model's 2 attention heads and 2 key-value heads and 128 "
            "feed-forward units. Sizes that fit: 1, 2.",
        ),
        (
            ["run.nproc=3"],
            "actor",
            "tp=2 x cp=1 x pp=1 = 2 does not divide the 3 ranks. Products that fit: 1, 3; or start a multiple of 2 "
            "processes.",
        ),
        (
            ["data.max_prompt_tokens=60"],
            "data.max_prompt_tokens",
            "data.max_prompt_tokens=60 + rollout.sampling.max_tokens=6 = 66 exceeds the model's context of 64 tokens. "
            "Lower one of the two.",
        ),
        (["data.train={inputs}/nowhere.jsonl"], "data.train.0", "which does not exist"),
        (
            ["data.train={inputs}/empty.jsonl"],
            "data.train.0",
            "which is an empty file.",
        ),
        (["model.path={inputs}"], "model.path", "config.json: not found"),
    ],
)
def test_a_mistake_in_the_configuration_ends_before_any_rank_is_started(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    key: str,
    said: str,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty.jsonl").touch()
    written = [text.format(inputs=tmp_path) for text in overrides]
    assert main(["train", *arguments, *written]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    head, *mistakes = [line for line in captured.err.splitlines() if line.strip()]
    assert head.startswith("1 mistake in the configuration") and len(mistakes) == 1, (
        captured.err
    )
    assert mistakes[0].startswith(f"  - {key} ("), captured.err
    assert said in mistakes[0]
    assert not (tmp_path / "runs").exists()


# --- What the files hold, and what rewards do: the whole command on two ranks, with plain transformers for rollout.


def attempt(
    launch: Launcher,
    arguments: list[str],
    *overrides: str,
    command: str = "train",
    **options: Any,
) -> list[dict[str, str]]:
    """What each of two ranks hears."""
    given = [*arguments, "rollout.engine=hf", *overrides]
    return launch.world(
        2, "tests.trainer.ranks:attempt", command=command, arguments=given, **options
    )


def assert_all_hear(heard: list[dict[str, str]], kind: str, *said: str) -> None:
    assert heard[0] == heard[1], "all ranks tell the same"
    assert heard[0].get("class") == kind, heard[0]
    for text in said:
        assert text in heard[0]["text"], heard[0]["text"]


def test_the_same_without_a_mistake(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    """What follows fails for the reason it names, not for another."""
    assert attempt(launch, arguments) == [{}, {}]
    run = tmp_path / "runs" / "run"
    assert (run / "hf" / "model.safetensors").exists() or list(
        (run / "hf").glob("*.index.json")
    )
    assert list((run / "checkpoints").iterdir())


@pytest.fixture
def model(inputs: Path, tmp_path: Path) -> Path:
    """A copy of the model folder that a test may damage."""
    return Path(shutil.copytree(inputs / "model", tmp_path / "model"))


def truncate(path: Path, missing: int = 1) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - missing])


SHARD = "model-00002-of-*.safetensors"


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_missing_safetensors_file(
    launch: Launcher, arguments: list[str], model: Path, tmp_path: Path, command: str
) -> None:
    (shard,) = model.glob(SHARD)
    shard.unlink()
    heard = attempt(launch, arguments, f"model.path={model}", command=command)
    assert_all_hear(
        heard,
        "ModelError",
        f"{shard}: not found, but model.safetensors.index.json names it",
        "Copy the",
    )
    assert_nothing_half_written(tmp_path / "runs")


@pytest.mark.parametrize("missing", [1, 10**5])
def test_a_truncated_safetensors_file(
    launch: Launcher, arguments: list[str], model: Path, tmp_path: Path, missing: int
) -> None:
    (shard,) = model.glob(SHARD)
    truncate(shard, min(missing, shard.stat().st_size - 4))
    heard = attempt(launch, arguments, f"model.path={model}")
    assert_all_hear(
        heard, "ModelError", f"{shard}: truncated", "Copy or download the file again"
    )
    assert_nothing_half_written(tmp_path / "runs")


def test_a_file_that_is_truncated_on_one_machine_only(
    launch: Launcher, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    (shard,) = model.glob(SHARD)
    truncate(shard)
    heard = attempt(launch, arguments, on_rank={"1": [f"model.path={model}"]})
    assert_all_hear(heard, "ModelError", f"rank 1: {shard}: truncated")
    assert_nothing_half_written(tmp_path / "runs")


def test_weights_of_another_model(
    launch: Launcher, arguments: list[str], model: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    heard = attempt(launch, arguments, f"model.path={model}")
    assert_all_hear(
        heard,
        "ModelError",
        f"{model}: its weights do not fit its config.json",
        "down_proj",
        "[64, 256]",
    )


def test_a_tokenizer_that_does_not_fit_the_model(
    launch: Launcher, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    size = config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": size - 3}))
    heard = attempt(launch, arguments, f"model.path={model}")
    assert_all_hear(
        heard,
        "DataError",
        f"does not fit {model}",
        f"ids reach {size - 1}",
        f"is {size - 3}",
        "Use the tokenizer that",
    )
    # the same, with the tokenizer's folder named apart and wrong on one machine
    other = attempt(
        launch,
        arguments,
        on_rank={"0": [f"model.path={model}", f"model.tokenizer={model}"]},
    )
    assert_all_hear(other, "DataError", f"rank 0: {model}: this tokenizer does not fit")
    assert_nothing_half_written(tmp_path / "runs")


def test_a_damaged_tokenizer(
    launch: Launcher, arguments: list[str], model: Path
) -> None:
    truncate(model / "tokenizer.json", 20)
    heard = attempt(launch, arguments, f"model.path={model}")
    assert_all_hear(
        heard,
        "DataError",
        f"{model}: no tokenizer could be loaded",
        "copy them from the model's source",
    )


GOOD = '{"prompt": "reverse 123 =", "answer": "321"}\n'


@pytest.mark.parametrize(
    ("lines", "overrides", "said"),
    [
        (
            "\n \n",
            [],
            ["bad.jsonl: the data set is empty.", "Put at least one row into it"],
        ),
        (
            GOOD + '{"answer": "1"}\n',
            [],
            ["bad.jsonl, line 2: no 'prompt' in this row; its keys: 'answer'"],
        ),
        (
            GOOD + "\n" + '{"prompt": "  ", "answer": "1"}\n',
            [],
            ["bad.jsonl, line 3: 'prompt' is empty"],
        ),
        (
            GOOD + '{"prompt": null, "answer": "1"}\n',
            [],
            ["bad.jsonl, line 2: 'prompt' is null", "data.prompt_key"],
        ),
        (
            GOOD + '{"prompt": "reverse 1 ="}\n',
            [],
            ["bad.jsonl, line 2: no 'answer'", "data.answer_key"],
        ),
        (GOOD + '{"prompt": "rev', [], ["bad.jsonl, line 2: not valid JSON"]),
        (
            GOOD + '{"prompt": 5, "answer": "1"}\n',
            [],
            ["bad.jsonl, line 2: 'prompt' is int; it must be text"],
        ),
        (
            GOOD + json.dumps({"prompt": "reverse " + "1" * 40, "answer": "1"}),
            [],
            [
                "bad.jsonl, line 2: the prompt is",
                "and at most 16 fit. Raise data.max_prompt_tokens",
            ],
        ),
        (
            json.dumps({"prompt": "reverse " + "1" * 40, "answer": "1"}),
            ["data.too_long=drop"],
            [
                "bad.jsonl, line 1, and all 1 rows: every prompt is longer than 16 tokens"
            ],
        ),
    ],
)
def test_rows_that_cannot_be_used(
    launch: Launcher,
    arguments: list[str],
    tmp_path: Path,
    lines: str,
    overrides: list[str],
    said: list[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    heard = attempt(
        launch, arguments, f"data.train={tmp_path / 'bad.jsonl'}", *overrides
    )
    assert_all_hear(heard, "DataError", *said)
    assert_nothing_half_written(tmp_path / "runs")


def test_a_row_that_only_one_machine_lacks(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(GOOD + '{"answer": "1"}\n')
    heard = attempt(launch, arguments, on_rank={"1": [f"data.train={bad}"]})
    assert_all_hear(heard, "DataError", f"rank 1: {bad}, line 2: no 'prompt'")


def test_a_prompt_for_generate_that_is_longer_than_the_context(
    launch: Launcher, arguments: list[str]
) -> None:
    options = {"prompt": ["reverse 1 =", "reverse " + "7" * 80]}
    heard = attempt(
        launch,
        arguments,
        "data.max_prompt_tokens=58",
        command="generate",
        options=options,
    )
    assert_all_hear(heard, "DataError", "--prompt: the prompt is", "at most 58 fit")


def test_an_answer_for_sft_that_is_too_long(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    """Found before the first step, though no step would have come to it."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text(GOOD + json.dumps({"prompt": "reverse 1 =", "answer": "1234567890"}))
    one_step = ["sft={steps: 1, batch_size: 1}", "data.shuffle=false"]
    heard = attempt(launch, arguments, f"data.train={bad}", *one_step, command="sft")
    assert_all_hear(
        heard,
        "DataError",
        f"{bad}, line 2: the answer is",
        "at most 6 are allowed",
        "sft.max_answer_tokens",
    )
    assert_nothing_half_written(tmp_path / "runs")


REWARDS = """
import os

ON_RANK_1 = os.environ["RANK"] == "1"

def raises(prompt, response, reference, extra):
    if ON_RANK_1:
        raise KeyError("level")
    return 1.0

def nan(prompt, response, reference, extra):
    return float("nan") if ON_RANK_1 else 1.0

def too_few(prompts, responses, references, extras):
    return [1.0] * (len(prompts) - ON_RANK_1)

def exits(prompt, response, reference, extra):
    if ON_RANK_1:
        exit()
    return 1.0

def late(prompt, response, reference, extra, calls=[]):
    calls.append(prompt)
    if ON_RANK_1 and len(calls) > 4:
        raise ValueError("in the second step")
    return 1.0
"""
MEND = {
    "raises": "Correct the function or the row",
    "exits": "Correct the function or the row",
    "nan": "Return a number, such as 0",
    "too_few": "one for each",
}
FOUND = {
    "raises": "raised KeyError: 'level'",
    "exits": "raised SystemExit",
    "nan": "returned nan",
    "too_few": "returned 3 numbers for a batch of 4",
}


@pytest.mark.parametrize("kind", list(MEND))
def test_a_reward_that_fails_on_one_rank(
    launch: Launcher, arguments: list[str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    reward = {
        "function": f"{tmp_path / 'mine.py'}:{kind}",
        "batched": kind == "too_few",
    }
    heard = attempt(launch, arguments, f"reward={json.dumps(reward)}")
    assert_all_hear(
        heard, "RewardError", f"rank 1: reward '{kind}' {FOUND[kind]}", MEND[kind]
    )
    if kind != "too_few":
        assert "sample 0 of 4 (prompt: 'reverse" in heard[0]["text"]
    assert_nothing_half_written(tmp_path / "runs")


def test_a_reward_that_only_one_machine_has(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    here, nowhere = (
        f'reward={{"function": "{tmp_path / name}:nan"}}'
        for name in ("mine.py", "other.py")
    )
    heard = attempt(launch, [*arguments, here], on_rank={"1": [nowhere]})
    assert_all_hear(
        heard,
        "RewardError",
        f"rank 1: reward.function: {tmp_path / 'other.py'}",
        "is not there (looked in",
    )


def test_a_reward_model_that_cannot_read_an_environments_answers(
    launch: Launcher, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    """They are written in the policy's chat template, and it has another."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    base = make_tiny_folder(tmp_path / "base", "Qwen3ForCausalLM", vocab_size=size)
    judge = as_reward_model(base, tmp_path / "judge")
    load_tokenizer(model).save(judge)
    for folder, end in ((model, "."), (judge, "!")):
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
        )
    given = [
        f"model.path={model}",
        "environment={name: guess}",
        "rollout.sampling.max_tokens=24",
    ]
    given += [f"reward={{name: judge, path: '{judge}', engine: transformers}}"]
    heard = attempt(
        launch, [each for each in arguments if not each.startswith("reward=")], *given
    )
    assert_all_hear(
        heard,
        "ConfigError",
        f"reward 'judge': {judge} has a tokenizer or chat template of its own",
    )


# --- The real command and its exit status.


def assert_one_message(outputs: list[str], *said: str) -> None:
    lines = [line for output in outputs for line in output.splitlines() if line.strip()]
    assert sum("error:" in line for line in lines) == 1, lines
    assert not any("Traceback" in line or "Warning" in line for line in lines), lines
    for text in said:
        assert any(text in line for line in lines), lines


def test_the_command_ends_with_one_message(
    arguments: list[str], model: Path, tmp_path: Path, launch: Launcher
) -> None:
    """A default run, vLLM and all: it ends before the engine starts."""
    (shard,) = model.glob(SHARD)
    truncate(shard)
    ended = launch.command(
        ["train", *arguments, f"model.path={model}"], logs=tmp_path / "logs"
    )
    assert ended.codes == [1, 1]
    assert_one_message(ended.output, f"error: {shard}: truncated: ")
    assert_nothing_half_written(tmp_path / "runs")


def test_every_rank_ends_with_a_status_of_its_own(
    arguments: list[str], tmp_path: Path, launch: Launcher
) -> None:
    """Two ranks as torchrun starts them, and a reward that fails on one of them in the middle of training."""
    (tmp_path / "mine.py").write_text(REWARDS)
    reward = json.dumps({"function": f"{tmp_path / 'mine.py'}:late"})
    given = [
        *arguments,
        "rollout.engine=hf",
        "checkpoint.save_interval=1",
        f"reward={reward}",
    ]
    ended = launch.command(["train", *given], logs=tmp_path / "logs")
    assert ended.codes == [1, 1], ended.text
    assert_one_message(
        ended.output,
        "error: rank 1: reward 'late' raised ValueError: in the second step",
    )
    # the first step is whole: its metrics and its checkpoint; of the second there is
    # nothing
    run = tmp_path / "runs" / "run"
    assert [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1]
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == [
        "step_00000001"
    ]
    assert not (run / "hf").exists()
