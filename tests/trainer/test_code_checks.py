"""What a start finds before its ranks do: code that cannot be loaded, and bad rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megaverl.child_checks import run_in_children
from megaverl.cli.main import main
from megaverl.config import Config, load_config
from megaverl.trainer.code_checks import CodeCheck, preflight
from tests.config.conftest import write_files

CODE = {
    "syntax": "def f(:",
    "raises": "raise ValueError('on import')",
    "exits": "import sys\nsys.exit(0)",
    "ends": "import os\nos._exit(0)",
    "prints": "print('not an answer')\ndef f(prompt, response, reference):\n    return 1.0",
    "column": "def f(response, levle, **kwargs):\n    return 1.0",
    "good": "def f(prompt, response, reference):\n    return 1.0\ndef nothing():\n    pass\nnumber = 3\n",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("RANK", raising=False)
    return write_files(tmp_path)


@pytest.fixture
def load(files: list[str]) -> Callable[..., Config]:
    return lambda *overrides: load_config(None, [*files, *overrides])


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    for name, text in CODE.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_every_key_that_names_code_is_loaded(load, plugins):
    def own(name: str) -> str:
        return str(plugins / name)

    rewards: list[dict[str, Any]] = [
        {"function": own("syntax.py:f")},
        {"function": own("raises.py:f")},
        {"function": own("exits.py:f")},
        {"function": own("ends.py:f")},
        {"function": own("good.py:lacks")},
        {"function": own("nowhere.py:f")},
        {"function": own("prints.py:f")},
        {"name": "exact_match", "shape": own("good.py:nothing")},
    ]
    config = load(
        f"reward={json.dumps(rewards)}",
        f"environment={{name: tools, options: {{tools: {{a: '{own('nowhere.py:a')}'}}}}}}",
        f"trainer.operators=['{own('good.py:nothing')}']",
        f"run.log_with=[jsonl, '{own('good.py:number')}']",
        f"rollout.function={own('good.py:f')}",
        f"rollout.engine={own('nowhere.py:f')}",
        f"algorithm.rollout_filter={own('good.py:lacks')}",
        "algorithm.group_size=2",
    )
    found = {issue.key: issue.message for issue in preflight(config, "train").issues}
    said = {
        "reward.0.function": "SyntaxError",
        "reward.1.function": "on import",
        "reward.2.function": "SystemExit",
        "reward.3.function": "ends the process with exit code 0",
        "reward.4.function": "has no 'lacks'",
        "reward.5.function": "is not there",
        "reward.7.shape": "is called with score",
        "environment.options.tools": "is not there",
        "trainer.operators.0": "is called with flow",
        "run.log_with.1": "expected a function",
        "rollout.function": "is called with generate, prompts, sampling, seeds",
        "rollout.engine": "is not there",
        "algorithm.rollout_filter": "has no 'lacks'",
    }
    assert {key: text for key, text in said.items() if text not in found.get(key, "")} == {}
    assert found.keys() == said.keys()


def test_code_that_blocks_is_ended(plugins):
    (plugins / "blocks.py").write_text("while True:\n    pass")
    check = asdict(CodeCheck("object", "rollout.function", str(plugins / "blocks.py:f")))
    runner = "megaverl.trainer.code_checks:make_runner"
    [(problem, _)] = run_in_children(runner, Config().to_dict(), [check], deadline=1.0)
    assert "did not finish within 1 s as it is loaded" in problem


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 9 ** (9 ** 9) }}", "did not finish within 2 s as its chat template is rendered"),
        ("{% for i in range(3) %}{{ messages[0].content * 2 }}{% endfor %}", None),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", None),
        ("{{ messages[0].content * 10 ** 11 }}", "needs more than 8 GiB"),
    ],
)
def test_a_chat_template_that_does_not_end(load, tmp_path, template, said):
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    issues = preflight(load(), "train", deadline=2.0 if said and "finish" in said else 60.0).issues
    assert [issue.key for issue in issues] == (["model.path"] if said else [])
    assert not said or said in issues[0].message


def test_a_start_and_a_dry_run_refuse_code_and_rows_alike(files, plugins, capsys):
    (plugins / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"promt": "a"}\n')
    for options in (["--dry-run"], []):
        code = main(["train", *files, f"reward_modules={plugins / 'exits.py'}", *options])
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert "reward_modules.0" in said.err and "SystemExit" in said.err
    code = main(["train", *files, f"reward={plugins / 'raises.py'}:f", "rollout.engine=hf"])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "data.train.0" in said.err and "train.jsonl, line 2" in said.err
    assert "reward.0.function" in said.err and "on import" in said.err


def test_a_parameter_of_a_reward_that_no_column_has_is_named_before_the_start(files, plugins, capsys):
    (plugins / "train.jsonl").write_text('{"prompt": "a", "answer": "b", "level": 3}\n')
    assert main(["train", *files, f"reward={plugins / 'column.py'}:f", "rollout.engine=hf", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "reward.0.function" in said and "levle" in said and "level" in said


def test_a_good_dry_run_ends_with_one_line(files, capsys):
    files = [*files, "rollout.engine=hf"]
    assert main(["train", *files, "--dry-run", "trainer.steps=1234"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("train: the configuration is good: 1 rank, 1 training rows, 1,234 steps, ")
    assert "GB on the fullest rank" in line and "Not looked at: prompts in tokens" in line
    assert main(["train", *files, "--dry-run", "--no-file-checks"]) == 0
    assert "files, code and data (--no-file-checks)" in capsys.readouterr().out
