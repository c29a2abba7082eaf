"""Options of `megaverl eval` become settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megaverl.cli.main import main
from tests.data import published

DRY = ["--dry-run", "--print", "--no-file-checks"]


def settings(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, dict[str, object]]:
    """The resolved configuration that a dry run prints."""
    assert main(["eval", *arguments, *DRY]) == 0
    loaded: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return loaded


def test_suites_need_neither_rewards_nor_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = settings(capsys, "--suite", "aime,gpqa", "model.path=org/model")
    assert found["evaluation"]["suites"] == ["aime", "gpqa"]


def test_a_run_gives_its_configuration_and_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    (run / "hf").mkdir(parents=True)
    (run / "hf" / "config.json").write_text("{}")
    (run / "train.yaml").write_text(
        "model: {path: org/before}\ndata: {chat_template: none}\nreward: exact_match\n"
    )
    found = settings(capsys, "--suite", "math", "--run", str(run), "evaluation.limit=3")
    assert found["model"]["path"] == str(run / "hf")
    assert (found["run"]["dir"], found["run"]["name"]) == (str(run), "eval")
    assert (
        found["data"]["chat_template"] == "none" and found["evaluation"]["limit"] == 3
    )
    with pytest.raises(SystemExit):
        main(["eval", "--suite", "math", "--run", str(tmp_path / "absent")])
    assert "has no model in" in capsys.readouterr().err


def test_a_served_model(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:8000"
    found = settings(capsys, "--suite", "math", "--url", url, "model.path=org/model")
    assert found["rollout"]["engine"] == "server"
    servers = found["rollout"]["servers"]
    assert isinstance(servers, dict) and servers["urls"] == [url]


def test_mistakes_come_before_any_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = published.write_jsonl(tmp_path / "rows.jsonl", published.GSM8K)
    given = [
        "model.path=org/model",
        f"evaluation.data={{gsm8k: {path}, math: {tmp_path / 'absent.jsonl'}}}",
    ]
    assert (
        main(
            [
                "eval",
                "--suite",
                "gsm8k,math",
                "evaluation.pass_at=[4]",
                *given,
                "--dry-run",
            ]
        )
        == 2
    )
    written = capsys.readouterr().err
    assert "evaluation.pass_at" in written and "gsm8k draws 1" in written
    assert "evaluation.data.math" in written and "absent.jsonl" in written
    assert "evaluation.data.gsm8k" not in written
    with pytest.raises(SystemExit):
        main(["eval", "--against", "runs/a", "model.path=org/model", *DRY])
    assert "--against compares suites" in capsys.readouterr().err


def test_tasks_of_a_harness(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--harness", "lm-eval", "--task", "gsm8k,arc_easy", "--task", "piqa"]
    options = "evaluation.harness_options.lm-eval.num_fewshot=5"
    found = settings(capsys, *given, "model.path=org/model", options)
    assert found["evaluation"]["tasks"] == [
        f"lm-eval:{name}" for name in ("gsm8k", "arc_easy", "piqa")
    ]
    assert found["evaluation"]["harness_options"] == {"lm-eval": {"num_fewshot": 5}}
    with pytest.raises(SystemExit):
        main(["eval", "--task", "gsm8k", "model.path=org/model", *DRY])
    assert "give both --harness NAME and --task TASK" in capsys.readouterr().err


def test_mistakes_in_tasks_come_before_any_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = f"[gsm8k, 'lm-eval:piqa', 'lm-eval:piqa', 'inspect:{tmp_path}/absent.py@a']"
    given = [
        f"evaluation.tasks={tasks}",
        "evaluation.harness_options={inspect: {limit: 3}}",
        f"evaluation.harness_python={tmp_path / 'python'}",
        "model.path=org/model",
    ]
    assert main(["eval", *given, "--dry-run"]) == 2
    written = capsys.readouterr().err
    for part in (
        "found 'gsm8k'; write a harness and its task: inspect:TASK",
        "found 'lm-eval:piqa' twice",
        "absent.py does not exist",
        "evaluation.harness_options.inspect.limit (command line): is set by",
        "which is no program",
    ):
        assert part in written, written


def test_tasks_that_a_run_cannot_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "evaluation.tasks=['lm-eval:piqa']",
        "reward=exact_match",
        "data.train=rows.jsonl",
        "model.path=org/model",
    ]
    assert main(["train", *given, *DRY]) == 0
    capsys.readouterr()
    for setting, key in (
        ("trainer.rollout_only=true", "trainer.rollout_only"),
        ("trainer.replay_rollouts=runs/a", "trainer.replay_rollouts"),
    ):
        assert main(["train", *given, setting, *DRY]) == 2
        written = capsys.readouterr().err
        assert (
            f"evaluation.tasks (command line): cannot be combined with {key}" in written
        )
