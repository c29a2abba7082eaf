"""What a start finds before its ranks do: code that cannot be loaded, bad rows, numbers out of range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from megaverl.cli.main import main
from megaverl.config import Config, load_config
from megaverl.config.preflight import Task, _in_children, preflight
from megaverl.config.section import Section, described_keys

CODE = {
    "syntax": "def f(:",
    "raises": "raise ValueError('on import')",
    "exits": "import sys\nsys.exit(0)",
    "ends": "import os\nos._exit(0)",
    "prints": "print('not an answer')\ndef f(prompt, response, reference):\n    return 1.0",
    "good": "def f(prompt, response, reference):\n    return 1.0\ndef nothing():\n    pass\nnumber = 3\n",
}


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
    task = Task("object", "rollout.function", str(plugins / "blocks.py:f"))
    [(_, problem, _)] = _in_children([task], Config(), deadline=1.0)
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
    code = main(["train", *files, f"reward={plugins / 'raises.py'}:f"])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "data.train.0" in said.err and "train.jsonl, line 2" in said.err
    assert "reward.0.function" in said.err and "on import" in said.err


def test_a_good_dry_run_ends_with_one_line(files, capsys):
    assert main(["train", *files, "--dry-run", "trainer.steps=1234"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("train: the configuration is good: 1 rank, 1 training rows, 1,234 steps, ")
    assert "GB on the fullest rank" in line and "Not looked at: prompts in tokens" in line
    assert main(["train", *files, "--dry-run", "--no-file-checks"]) == 0
    assert "files, code and data (--no-file-checks)" in capsys.readouterr().out


def test_a_folder_where_nothing_can_be_made(mistakes):
    assert "nothing can be made in /proc" in mistakes("run.dir=/proc/x")["run.dir"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.sampling.top_p=2", "at most 1"),
        ("rollout.sampling.top_p=0", "above 0"),
        ("rollout.sampling.temperature=-1", "at least 0"),
        ("rollout.sampling.top_p=.nan", "finite"),
        ("trainer.validation_sampling.top_p=2", "at most 1"),
        ("rollout.vllm.gpu_memory_utilization=7", "at most 1"),
        ("actor.optimizer.weight_decay=.inf", "finite"),
        ("actor.optimizer.clip_grad=-1", "at least 0"),
        ("actor.optimizer.lr=1e300", "at most 10"),
        ("critic.optimizer.adam_beta2=1.0", "below 1"),
        ("actor.scheduler.start_wd=-0.1", "at least 0"),
        ("actor.megatron.hidden_dropout=1.0", "below 1"),
        ("actor.ddp.bucket_size=0", "at least 1"),
        ("sft.lr=1e300", "at most 10"),
        ("run.timeout_minutes=0.0001", "at least 0.01"),
        ("algorithm.group_size=99999999999", "at most 65536"),
        ("run.nproc=100000", "at most 1024"),
        ("actor.tp=100000", "at most 65536"),
        ("algorithm.policy_loss_options.x=1e999", "finite"),
        ("rollout.sampling.extra_args={a: {b: [1, .inf]}}", "finite"),
    ],
)
def test_numbers_that_no_run_can_use(mistakes, override, said):
    found = mistakes(override)
    key = next(key for key in found if key.startswith(override.partition("=")[0]))
    assert said in found[key]


def number_keys() -> list[str]:
    return [entry.key for entry in described_keys(Config) if entry.type.startswith(("int", "number"))]


@pytest.mark.parametrize("value", ["1e300", "-1e300", ".nan", ".inf", "99999999999999999999"])
def test_no_number_of_a_section_is_without_bounds(value):
    """Every field that is a number refuses what no run can use."""
    keys = [key for key in number_keys() if ".N." not in key and not key.startswith("placement.")]
    assert len(keys) > 100
    accepted = []
    for key in keys:
        try:
            load_config(None, [f"{key}={value}", "model.path=m", "reward=exact_match"], check_paths=False)
        except ValueError as error:
            raise AssertionError(key) from error
        except Exception as error:
            if key not in str(error):
                accepted.append(key)
            continue
        accepted.append(key)
    assert accepted == []


def test_sections_have_no_bare_numbers():
    """A field of a section is never a plain int or float: each has its range."""

    def sections(section: type[Section]) -> set[type[Section]]:
        found = {section}
        for field in section.model_fields.values():
            for part in flat(field.annotation):
                if isinstance(part, type) and issubclass(part, Section):
                    found |= sections(part)
        return found

    def flat(annotation: Any) -> list[Any]:
        parts = get_args(annotation) if get_origin(annotation) is not None else ()
        return [annotation, *(each for part in parts for each in flat(part))]

    bare = []
    for section in sections(Config):
        for name, field in section.model_fields.items():
            if not field.metadata and any(part in (int, float) for part in [field.annotation]):
                bare.append(f"{section.__name__}.{name}")
    assert bare == []
