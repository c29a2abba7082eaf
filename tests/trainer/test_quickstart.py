"""What the quickstart makes for a recipe with rows of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.yaml_source import recipe
from megaverl.data.sources import open_source
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import SAVED_AND_LEFT
from megaverl.processes import ending_with_parent
from megaverl.rewards import build_reward
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.quickstart import prepare
from tests.trainer.conftest import ROOT, environment

RECIPE = "reasoning_gym/quickstart"


def test_rows_of_a_recipes_own_make_the_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'megaverl[reasoning-gym]'")
    overrides = [f"run.dir={tmp_path}", "run.name=run"]
    config = load_config(
        recipe(RECIPE), overrides, command="quickstart", check_paths=False
    )
    prepare(config)
    inputs = tmp_path / "run" / "inputs"
    assert sorted(path.name for path in inputs.iterdir()) == [
        "model",
        "tokenizer.model",
    ], "no rows of another task"
    tokenizer = load_tokenizer(config.model.path)
    train, held_out, warm_up = (
        open_source(sources[0])
        for sources in (config.data.train, config.data.validation, config.sft.train)
    )
    for rows in (train, held_out, warm_up):
        for row in (rows[index] for index in range(100)):
            prompt, answer = (
                tokenizer.encode(row["prompt"]),
                tokenizer.encode(row["answer"]),
            )
            assert (
                answer == prompt[:0:-1] and tokenizer.decode(answer) == row["answer"]
            ), "a symbol, and letters"
    assert ModelSpec.from_folder(config.model.path).vocab_size == tokenizer.vocab_size
    words = {
        rows[index]["answer"] for rows in (train, warm_up) for index in range(len(rows))
    }
    assert not words & {held_out[index]["answer"] for index in range(len(held_out))}
    assert build_reward(config.reward).accuracy_component == "reasoning_gym"


def test_the_warm_up_has_the_tokens_of_an_episode(tmp_path: Path) -> None:
    """Of a call and its answer, each tokenised by itself in an episode; else a model may never find what to copy."""
    overrides = [f"run.dir={tmp_path}", "run.name=run"]
    config = load_config(
        recipe("games/calculator_tool"),
        overrides,
        command="quickstart",
        check_paths=False,
    )
    prepare(config)
    tokenizer, rows = (
        load_tokenizer(config.model.path),
        open_source(config.sft.train[0]),
    )
    for call, told in ((rows[index], rows[index + 1]) for index in range(0, 40, 2)):
        called, said = (
            told["prompt"]
            .removeprefix(call["prompt"])
            .removesuffix(" =")
            .split("</s> is ")
        )
        result = config.environment.options["result"].format(text=said)
        turns = (
            tokenizer.encode(call["prompt"]),
            [*tokenizer.encode(called), tokenizer.eos_token_id],
        )
        assert [*turns[0], *turns[1], *tokenizer.encode(result)] == tokenizer.encode(
            told["prompt"]
        )
        assert called[:2] == call["answer"][:2] == " ["


def start_quickstart(folder: Path) -> subprocess.Popen[str]:
    """Start the command itself, with a run that lasts long enough to be asked to leave."""
    command = [
        sys.executable,
        "-m",
        "megaverl.cli.main",
        "quickstart",
        f"run.dir={folder}",
        "rollout.engine=hf",
    ]
    command += [
        "sft={steps: 2, lr_warmup_steps: 1}",
        "trainer={steps: 30, validate_every: 0}",
        "data.prompts_per_step=8",
    ]
    command += [
        "algorithm={num_mini_batches: 1, group_size: 2}",
        "actor.tp=1",
        "critic.tp=1",
        "run.log_with=[jsonl]",
    ]
    return subprocess.Popen(
        ending_with_parent(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
    )


def steps_of(run: Path) -> list[int]:
    """Return the training steps in the run's metrics."""
    if not (run / "metrics.jsonl").exists():
        return []
    records = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]
    return [record["step"] for record in records if "train/step_time_ms" in record]


def test_it_goes_on_after_sigterm_and_starts_anew_once_it_has_finished(
    tmp_path: Path,
) -> None:
    """As its message says: SIGTERM saves, and the same command goes on from there. A finished run starts anew."""
    run = tmp_path / "quickstart"
    process = start_quickstart(tmp_path)
    while len(steps_of(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == SAVED_AND_LEFT, said
    assert "start the run again to go on" in said
    done = len(steps_of(run))
    assert 2 <= done < 30, said
    process = start_quickstart(tmp_path)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert f"{done} of 30 steps are done" in said and "supervised warm-up" not in said
    assert (
        steps_of(run) == list(range(1, 31)) and (run / "hf" / "config.json").is_file()
    )
    process = start_quickstart(tmp_path)
    while (
        not (run / "metrics.jsonl").exists()
        or steps_of(run)[:1] != [1]
        or len(steps_of(run)) >= 30
    ):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert (
        process.returncode == SAVED_AND_LEFT and "of 30 steps are done" not in said
    ), said
