"""Whole runs with an environment: two ranks of the real command on recipes of configs/games, plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaverl.config import load_config
from megaverl.trainer.quickstart import prepare
from tests.faults.injector import Fault
from tests.faults.runs import differences, metrics, remains
from tests.launcher import Launcher

CONFIGS = Path(__file__).parents[3] / "configs" / "games"
RANKS = 2
SHORT = [
    "rollout.engine=hf",
    "trainer={steps: 2, validate_every: 2, validation_prompts: 8, save_samples: 99}",
    "data.prompts_per_step=4",
    "run={log_with: jsonl, timeout_minutes: 2, name: run}",
]


def train(
    launch: Launcher,
    recipe: str,
    folder: Path,
    *more: str,
    ranks: int = RANKS,
    placement: str = "",
) -> Path:
    """Make the inputs of a recipe and train for two steps; the run folder."""
    config = f"--config={CONFIGS / recipe}.yaml"
    overrides = [*SHORT, f"run.dir={folder}", f"run.nproc={ranks}", *more]
    prepare(
        load_config(
            CONFIGS / f"{recipe}.yaml",
            overrides,
            command="quickstart",
            check_paths=False,
        )
    )
    placed = [f"placement={placement}"] if placement else []
    ended = launch.command(
        ["train", config, *overrides, *placed], ranks=ranks, logs=folder / "output"
    )
    assert ended.codes == [0] * ranks, ended.text
    return folder / "run"


def samples(run: Path, split: str = "train") -> list[dict[str, Any]]:
    records = [
        json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()
    ]
    return [record for record in records if record["split"] == split]


def test_a_game_of_several_turns(launch: Launcher, tmp_path: Path) -> None:
    """The same episodes on one rank and on two, though they are spread over the ranks; engine and actor agree."""
    two = train(launch, "guessing_game", tmp_path / "two", "checkpoint.export_hf=false")
    one = train(
        launch,
        "guessing_game",
        tmp_path / "one",
        "actor.tp=1",
        "checkpoint.export_hf=false",
        ranks=1,
    )
    first = [record for record in samples(two) if record["step"] == 1]
    assert len(first) == 32 and first == [
        record for record in samples(one) if record["step"] == 1
    ]
    assert samples(two, "validation")
    for found in (record for record in metrics(two) if "rollout/turns_mean" in record):
        assert 1 < found["rollout/turns_mean"] <= found["rollout/turns_max"] <= 4
        assert found["rollout/environment_tokens_mean"] > 0
        assert found["reward/mean"] == pytest.approx(found["reward/environment"])
        assert 0 < found["rollout/logprob_diff_max"] < 1e-3, (
            "over the model's own tokens"
        )
        assert found["critic/grad_norm"] > 0 and found["actor/grad_norm"] > 0


def test_tools_and_rewards_of_the_last_turn(launch: Launcher, tmp_path: Path) -> None:
    run = train(
        launch,
        "calculator_tool",
        tmp_path,
        "environment.options.call='(.)'",
        "algorithm.name=turn_grpo",
    )
    found = metrics(run)[-1]
    assert {"validation/accuracy", "validation/reward"} <= metrics(run)[
        0
    ].keys() | found.keys()
    told = [record["response"] for record in samples(run)]
    assert any("is " in text for text in told), (
        "every character is a call, and is answered"
    )
    for record in samples(run):
        assert ("is " in record["response"]) <= (record["turns"] > 1) and record[
            "turns"
        ] <= 3


def paid(folder: Path) -> str:
    """A further reward, as an untrained listener is never right."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(
        "def letters(prompt, response, reference, extra):\n    return len(response) / 9\n"
    )
    return f"reward={{function: '{folder / 'reward.py'}:letters'}}"


def test_two_players(launch: Launcher, tmp_path: Path) -> None:
    """Each with an actor and a critic of its own, on prompts that tell at least one of
    them something; and the same after it was killed and started again.
    """
    more = [
        "algorithm={group_size: 2, dynamic_sampling: {metric: letters, max_rounds: 2}}",
        "checkpoint={save_interval: 1, export_hf: true, resume: auto, async_save: false}",
        "actor.tp=1",
        paid(tmp_path),
    ]
    whole = train(launch, "signalling_game", tmp_path / "whole", *more)
    for record in (record for record in metrics(whole) if "rollout/rounds" in record):
        assert (
            4 <= record["rollout/generated_groups"] <= 4 * record["rollout/rounds"]
        ), "of prompts, not of agents"
    for agent in ("speaker", "listener"):
        assert (whole / "hf" / agent / "config.json").exists()
        last = metrics(whole)[-2]
        assert (
            last[f"{agent}/actor/grad_norm"] > 0
            and last[f"{agent}/critic/grad_norm"] > 0
        )
        assert 0 < last[f"{agent}/rollout/logprob_diff_max"] < 1e-3, (
            "its own weights wrote its turns"
        )
    assert {record["agent"] for record in samples(whole)} == {"speaker", "listener"}
    weights = {
        agent: load_file(whole / "hf" / agent / "model.safetensors")
        for agent in ("speaker", "listener")
    }
    assert any(
        (weights["speaker"][name] != tensor).any()
        for name, tensor in weights["listener"].items()
    )
    shutil.copytree(
        tmp_path / "whole" / "run" / "inputs", tmp_path / "hit" / "run" / "inputs"
    )
    arguments = [*SHORT, f"run.dir={tmp_path / 'hit'}", f"run.nproc={RANKS}", *more]
    command = ["train", f"--config={CONFIGS / 'signalling_game'}.yaml", *arguments]
    environment = Fault(
        "kill", 1, "actor_update", 2, mark=str(tmp_path / "mark")
    ).environment()
    launch.command(
        command, ranks=RANKS, logs=tmp_path / "output", environment=environment
    )
    ended = launch.command(command, ranks=RANKS, logs=tmp_path / "output")
    assert (
        (tmp_path / "mark").exists()
        and ended.codes == [0] * RANKS
        and "1 of 2 steps are done" in ended.text
    )
    for agent, expected in weights.items():
        found = load_file(tmp_path / "hit" / "run" / "hf" / agent / "model.safetensors")
        assert all(
            torch.equal(found[name], tensor) for name, tensor in expected.items()
        ), agent


def test_two_players_on_one_backbone_with_a_value_head_each(
    launch: Launcher, tmp_path: Path
) -> None:
    more = [
        "environment.agents=shared",
        "critic={tp: 1, pp: 2}",
        "actor.tp=1",
        paid(tmp_path),
    ]
    run = train(launch, "signalling_game", tmp_path, *more)
    found = metrics(run)[-2]
    assert found["critic/grad_norm"] > 0 and found["actor/grad_norm"] > 0
    assert {record["agent"] for record in samples(run)} == {"speaker", "listener"}


def test_a_program_with_several_conversations(launch: Launcher, tmp_path: Path) -> None:
    """In a run whose engines work ahead: the same after it was killed and started again."""
    more = ["environment={options: {}, max_turns: 5}", "checkpoint.export_hf=false"]
    options = "environment.options={function: 'tests.rollout.environments.own:aside'}"
    more_still = [
        *(
            *more,
            "environment.name=gateway",
            options,
            "actor.tp=1",
            "trainer={steps: 3, validate_every: 0}",
        ),
        "rollout={async_rollout: true, max_staleness: 1}",
        "checkpoint={save_interval: 2, resume: auto, async_save: false}",
    ]
    apart = "{rollout: 0, reward: 1-2, actor: 3, critic: actor}"  # no rank scores all
    run = train(
        launch,
        "guessing_game",
        tmp_path / "program",
        *more_still,
        ranks=4,
        placement=apart,
    )
    shutil.copytree(run / "inputs", tmp_path / "hit" / "run" / "inputs")
    overrides = [
        *SHORT,
        *more_still,
        f"run.dir={tmp_path / 'hit'}",
        "run.nproc=4",
        f"placement={apart}",
    ]
    command = ["train", f"--config={CONFIGS / 'guessing_game'}.yaml", *overrides]
    environment = Fault(
        "kill", 3, "actor_update", 3, mark=str(tmp_path / "mark")
    ).environment()
    launch.command(command, ranks=4, logs=tmp_path / "output", environment=environment)
    ended = launch.command(command, ranks=4, logs=tmp_path / "output")
    assert (
        (tmp_path / "mark").exists()
        and ended.codes == [0] * 4
        and "2 of 3 steps are done" in ended.text
    )
    assert differences(remains(tmp_path / "hit" / "run"), remains(run)) == []
    records = [record for record in metrics(run) if "rollout/turns_mean" in record]
    for found in records:
        assert (
            2 < found["rollout/turns_mean"] < 3
            and found["rollout/environment_tokens_mean"] > 0
        )
        assert found["rollout/conversations_mean"] == found["rollout/turns_mean"] - 1, (
            "not the same in every episode"
        )
        assert 0.1 < found["rollout/shared_tokens_fraction"] < 1.0
        assert found["reward/environment"] > 0 and found["rollout/logprob_diff_max"] > 0
        assert (
            found["rollout/logprob_diff_max"] < 1e-3 or found["rollout/staleness"] > 0
        )
    told = [record for record in samples(run) if record["step"] == 1]
    rewards = {record["episode"]: record["reward"] for record in told}
    assert sum(rewards.values()) / len(rewards) == pytest.approx(
        records[0]["reward/mean"], abs=1e-5
    )
    assert len(rewards) < len(told) and all(
        record["reward"] == rewards[record["episode"]] for record in told
    )
    assert {record["turns"] for record in told} == {1, 2}


@pytest.fixture(scope="module")
def countdown(
    launch: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run of an environment of one's own, and its arguments."""
    more = [
        "environment={options: {}, max_turns: 5}",
        "environment.name=tests.rollout.environments.own:Countdown",
        "checkpoint={export_hf: false, save_interval: 2, async_save: false}",
    ]
    folder = tmp_path_factory.mktemp("countdown")
    return train(launch, "guessing_game", folder, *more), more


FAILING = [
    "environment.name=tests.rollout.environments.own:Failing",
    "environment.faults={backoff_seconds: 0.0, pause_above: 1.0}",
]


def test_an_environment_of_ones_own(countdown: tuple[Path, list[str]]) -> None:
    assert metrics(countdown[0])[-2]["rollout/turns_mean"] == 3.0


def test_faults_that_pass_leave_no_trace(
    launch: Launcher, countdown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """A third of the episodes fail once, with what is no Exception: the run is that without faults, to the bit."""
    expected, more = countdown
    options = "environment.options={attempts: 1}"
    run = train(launch, "guessing_game", tmp_path, *more, *FAILING, options)
    steps = [record for record in metrics(run) if "environment/faults" in record]
    assert len(steps) == 2
    for record in steps:
        assert 5 < record["environment/faults"] < 32
        assert record["environment/retries"] == record["environment/faults"]
        assert record["environment/failed_fraction"] == 0
    was, found = remains(expected), remains(run)
    for records in (was["metrics"], found["metrics"]):
        for record in records:
            for name in [name for name in record if "environment/" in name]:
                del record[name]
            # Episodes that are tried again take their turns in other batches, which
            # shows in the last bits of the engine's log-probs.
            for name in [name for name in record if "logprob_diff" in name]:
                assert record.pop(name) < 1e-6
    assert differences(found, was) == []


def test_episodes_that_keep_failing_are_left_out(
    launch: Launcher, countdown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Neither rewards, baselines nor metrics know them; the others have the rewards of the run without faults."""
    expected, more = countdown
    lost = ["environment.faults={retries: 1, replacements: 0}"]
    options = "environment.options={attempts: 99}"
    run = train(launch, "guessing_game", tmp_path, *more, *FAILING, *lost, options)
    first = [record for record in samples(run) if record["step"] == 1]
    without = [record for record in samples(expected) if record["step"] == 1]
    failed = [record for record in first if record["finish_reason"] == "failed"]
    assert 0 < len(failed) < len(first) == len(without)
    kept = [
        (record["reward"], right["reward"])
        for record, right in zip(first, without, strict=True)
        if record not in failed
    ]
    assert all(found == right for found, right in kept)
    [record, _] = [record for record in metrics(run) if "environment/faults" in record]
    mean = sum(found for found, _ in kept) / len(kept)
    assert record["reward/mean"] == pytest.approx(mean, abs=1e-6)
    assert record["environment/failed_fraction"] == len(failed) / len(first)
    assert record["rollout/turns_mean"] == 3.0 and record["actor/grad_norm"] > 0


def test_an_environment_that_never_works_ends_the_run_in_words(
    launch: Launcher, countdown: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run, more = countdown
    command = [
        *("train", f"--config={CONFIGS / 'guessing_game'}.yaml", *SHORT, *more),
        f"run.dir={run.parent}",
        "checkpoint.resume=never",
        "environment.faults={backoff_seconds: 0.0, pause_seconds: 0.0}",
        "environment.name=tests.rollout.environments.own:NeverThere",
    ]
    ended = launch.command(command, logs=tmp_path)
    assert ended.codes == [1, 1]
    assert "reset() has failed for every episode since the run began" in ended.text
    assert "reset() raised ConnectionRefusedError: port 7" in ended.text
    assert "own.py, line" in ended.text
