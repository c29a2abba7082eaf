"""What a start finds before its ranks do: code that cannot be loaded, and bad rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from megaverl.child_checks import run_in_children
from megaverl.cli.main import main
from megaverl.config import Config, load_config
from megaverl.processes import ending_with_parent
from megaverl.trainer.code_checks import CodeCheck, preflight
from megaverl.trainer.preflight import _merge_reports
from tests.config.conftest import write_files
from tests.trainer.conftest import ROOT, environment

if TYPE_CHECKING:
    import torch.distributed as dist

CODE = {
    "syntax": "def f(:",
    "raises": "raise ValueError('on import')",
    "exits": "import sys\nsys.exit(0)",
    "ends": "import os\nos._exit(0)",
    "prints": "print('not an answer')\ndef f(prompt, response, reference):\n    return 1.0",
    "column": "def f(response, levle, **kwargs):\n    return 1.0",
    "starts": "from megaverl.trainer import init_distributed\ninit_distributed({})\ndef f(response):\n    return 1.0",
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
        {"function": own("starts.py:f")},
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
        "reward.8.function": "starts a run when it is imported",
        "environment.options.tools": "is not there",
        "trainer.operators.0": "is called with flow",
        "run.log_with.1": "expected a function",
        "rollout.function": "is called with generate, prompts, sampling, seeds",
        "rollout.engine": "is not there",
        "algorithm.rollout_filter": "has no 'lacks'",
    }
    assert {
        key: text for key, text in said.items() if text not in found.get(key, "")
    } == {}
    assert found.keys() == said.keys()


def test_code_that_blocks_is_ended(plugins):
    (plugins / "blocks.py").write_text("while True:\n    pass")
    check = CodeCheck(
        "object", "rollout.function", str(plugins / "blocks.py:f")
    ).for_child
    runner = "megaverl.trainer.code_checks:make_runner"
    [found] = run_in_children(runner, Config().to_dict(), [check], deadline=1.0)
    assert "did not finish within 1 s as it is loaded" in found.problem


def test_what_waits_for_a_hub_is_left_out_after_the_deadline(plugins):
    (plugins / "slow.py").write_text("while True:\n    pass")
    check = CodeCheck(
        "object", "rollout.function", str(plugins / "slow.py:f")
    ).for_child
    runner = "megaverl.trainer.code_checks:make_runner"
    [found] = run_in_children(
        runner, Config().to_dict(), [{**check, "may_wait": True}], deadline=1.0
    )
    assert found.problem == "" and "did not finish within 1 s" in found.left_out


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ 9 ** (9 ** 9) }}",
            "did not finish within 2 s as its chat template is rendered",
        ),
        ("{% for i in range(3) %}{{ messages[0].content * 2 }}{% endfor %}", None),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", None),
        ("{{ messages[0].content * 10 ** 11 }}", "needs more than 8 GiB"),
    ],
)
def test_a_chat_template_that_does_not_end(load, tmp_path, template, said):
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    issues = preflight(
        load(), "train", deadline=2.0 if said and "finish" in said else 60.0
    ).issues
    assert [issue.key for issue in issues] == (["model.path"] if said else [])
    assert not said or said in issues[0].message


def test_a_start_and_a_dry_run_refuse_code_and_rows_alike(files, plugins, capsys):
    (plugins / "train.jsonl").write_text(
        '{"prompt": "a", "answer": "b"}\n{"promt": "a"}\n'
    )
    for options in (["--dry-run"], []):
        code = main(
            ["train", *files, f"reward_modules={plugins / 'exits.py'}", *options]
        )
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert "reward_modules.0" in said.err and "SystemExit" in said.err
    code = main(
        ["train", *files, f"reward={plugins / 'raises.py'}:f", "rollout.engine=hf"]
    )
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "data.train.0" in said.err and "train.jsonl, line 2" in said.err
    assert "reward.0.function" in said.err and "on import" in said.err


def test_a_parameter_of_a_reward_that_no_column_has_is_named_before_the_start(
    files, plugins, capsys
):
    (plugins / "train.jsonl").write_text('{"prompt": "a", "answer": "b", "level": 3}\n')
    assert (
        main(
            [
                "train",
                *files,
                f"reward={plugins / 'column.py'}:f",
                "rollout.engine=hf",
                "--dry-run",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "reward.0.function" in said and "levle" in said and "level" in said


def test_a_reward_that_needs_trls_environments_is_refused_before_the_start(
    files, plugins, capsys
):
    (plugins / "theirs.py").write_text(
        "def named(completions, environments, **kwargs):\n    return [each.reward for each in environments]\n"
        "def rest(completions, **kwargs):\n    return [each.reward for each in kwargs['environments']]\n"
    )
    for name in ("named", "rest"):
        reward = f"reward={{function: '{plugins / 'theirs.py'}:{name}', batched: true}}"
        assert main(["train", *files, reward, "rollout.engine=hf"]) == 2
        said = capsys.readouterr().err
        assert (
            "reward.0" in said
            and "environments are closed before rewards are computed" in said
        )


def test_a_good_dry_run_ends_with_one_line(files, capsys):
    files = [*files, "rollout.engine=hf"]
    assert main(["train", *files, "--dry-run", "trainer.steps=1234"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "train: the configuration is good: 1 rank, 1 training rows, 1,234 steps, "
    )
    assert (
        "GB on the fullest rank" in line and "Not looked at: prompts in tokens" in line
    )
    assert main(["train", *files, "--dry-run", "--no-file-checks"]) == 0
    assert "files, code and data (--no-file-checks)" in capsys.readouterr().out


def test_a_mistake_names_the_line_of_the_file(files, plugins):
    data = plugins / "broken.jsonl"
    data.write_text('{"prompt": "a"}\n')
    recipe = plugins / "run.yaml"
    recipe.write_text(
        f"rollout: {{engine: hf}}\ndata:\n  train: [{data}]\nreward:\n  - function: {plugins / 'raises.py'}:f\n"
    )
    left = [each for each in files if not each.startswith(("data.train", "reward"))]
    issues = preflight(load_config(recipe, left), "train").issues
    assert {issue.key: issue.where for issue in issues} == {
        "data.train.0": f"{recipe}, line 3",
        "reward.0.function": f"{recipe}, line 5",
    }


PROGRAM = """
import sys
from megaverl.trainer import RLTrainer
if __name__ == "__main__":
    RLTrainer(overrides=sys.argv[1:]).train()
"""


def run_torchrun(start: str, folder: Path, *overrides: str) -> tuple[int, str]:
    """Run `megaverl train`, or a program of a user's own, in two ranks of a plain torchrun."""
    (folder / "program.py").write_text(PROGRAM)
    what = (
        ["-m", "megaverl.cli.main", "train"]
        if start == "command"
        else [str(folder / "program.py")]
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *what,
    ]
    settings = [
        "data.max_prompt_tokens=16",
        "rollout.sampling.max_tokens=6",
        f"run.dir={folder / 'runs'}",
    ]
    done = subprocess.run(
        ending_with_parent([*torchrun, *settings, *overrides]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("start", ["command", "program"])
def test_ranks_of_a_torchrun_check_code_and_rows(start, inputs, tmp_path):
    """Two ranks that torchrun starts: the mistakes are shown once, and no model is built."""
    (tmp_path / "raises.py").write_text(CODE["raises"])
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "a", "answer": "b"}\n{"promt": "a"}\n'
    )
    code, said = run_torchrun(
        start,
        tmp_path,
        f"model.path={inputs / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"reward={tmp_path / 'raises.py'}:f",
    )
    assert code != 0, said
    assert "2 mistakes in the configuration (code and data that it names)" in said
    assert (
        "reward.0.function" in said
        and "on import" in said
        and "train.jsonl, line 2" in said
    )
    assert said.count("train.jsonl, line 2") == (
        1 if start == "command" else 2
    )  # its ranks each end with their traceback
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


LEAVES = """
import os
def f(prompt, response):
    os._exit(0)
"""


@pytest.mark.parametrize("start", ["command", "program"])
def test_a_reward_that_leaves_every_rank_of_a_torchrun(start, inputs, tmp_path):
    """torchrun alone would see exit code 0 of all ranks, and call it success."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    code, said = run_torchrun(
        start,
        tmp_path,
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"reward={tmp_path / 'leaves.py'}:f",
        "actor={engine: fsdp}",
        "rollout.engine=hf",
        "algorithm={name: grpo, group_size: 2}",
        "data.prompts_per_step=4",
        "trainer.steps=1",
    )
    assert code != 0, said
    assert "reward 'f' raised SystemExit: 0" in said


C_LEAVES = """
import ctypes, os
def f(prompt, response):
    if os.environ["LOCAL_RANK"] == "1":
        ctypes.CDLL(None)._exit(0)
    return float(len(response))
"""


def test_a_rank_of_a_torchrun_that_c_code_ends_is_named_by_the_others(inputs, tmp_path):
    """Nothing in Python sees C's `_exit`, and torchrun takes exit code 0 for success."""
    (tmp_path / "leaves.py").write_text(C_LEAVES)
    code, said = run_torchrun(
        "command",
        tmp_path,
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"reward={tmp_path / 'leaves.py'}:f",
        "actor={engine: fsdp}",
        "rollout.engine=hf",
        "algorithm={name: grpo, group_size: 2}",
        "data.prompts_per_step=4",
        "trainer.steps=1",
    )
    assert code != 0, said
    # The controller, or the rank that waits for it, is the first to notice.
    assert (
        "rank 1 was lost in reward.score: its process ended" in said
        or "rank 1 is gone: it was in step 1: reward" in said
    )


def test_a_good_run_of_a_torchrun_is_not_held_up(monkeypatch):
    """`start_ranks` marks its ranks, which then do not check again; a run that they start is no part of it."""
    from megaverl.trainer.preflight import CHECKED, check_in_ranks

    monkeypatch.setenv(CHECKED, "1")
    group = cast("dist.ProcessGroup", None)
    check_in_ranks(Config(), "train", group)
    assert CHECKED not in os.environ


def test_issues_of_several_nodes_are_merged():
    def report(host: str, *keys: str) -> dict[str, Any]:
        return {
            "host": host,
            "issues": [{"key": key, "message": "is wrong."} for key in keys],
        }

    merged = _merge_reports([report("a", "x", "y"), None, report("b", "x"), None])
    assert {issue["key"]: issue["message"] for issue in merged} == {
        "x": "is wrong.",
        "y": "is wrong. (on a)",
    }
