"""Paths and values of other trainers: each has a replacement that works, and the command line names it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megaverl.cli.main import COMMANDS, main
from megaverl.config import load_config
from megaverl.config.errors import InvalidConfig
from megaverl.config.schema import Config
from megaverl.config.section import all_keys
from megaverl.config.successors import SUCCESSORS, VALUES, Successor, find_successor
from megaverl.config.yaml_source import recipe
from tests.docs.pages import ROOT, table_names

PATHS = {
    "examples/grpo_trainer/run_qwen2_5_vl-7b.sh": "qwen2_5_vl/grpo_geometry",
    "clones/verl/examples/ppo_trainer/run_deepseek7b_llm.sh": "gsm8k_smollm2/ppo",
    "examples/grpo_trainer/run_qwen2-7b_math_megatron.sh": "gsm8k_smollm2/grpo_pp2",
    "./examples/sft/gsm8k/run_qwen_05_sp2_liger.sh": "gsm8k_smollm2/sft",
    "recipe/dapo/": "gsm8k_smollm2/dapo",
    "recipe/dapo": "gsm8k_smollm2/dapo",
    "verl/trainer/config/ppo_trainer.yaml": "gsm8k_smollm2/ppo",
    "verl.trainer.main_ppo": "gsm8k_smollm2/ppo",
}


@pytest.mark.parametrize(("path", "name"), PATHS.items())
def test_paths_of_articles(path: str, name: str) -> None:
    successor = find_successor(path)
    assert successor is not None and successor.recipe == name


@pytest.mark.parametrize(
    "path", ["train.yaml", "configs/gsm8k_smollm2/ppo.yaml", "my_examples/run.sh", ""]
)
def test_own_paths_have_no_replacement(path: str) -> None:
    assert find_successor(path) is None


def overrides(successor: Successor) -> Iterator[list[str]]:
    """Settings that each sentence of a note names as key=value."""
    for sentence in successor.note.split(". "):
        yield re.findall(r"\b[a-z_]+(?:\.[a-z_]+)*=(?:\{.*?\}|\w+)", sentence)


@pytest.mark.parametrize(
    "successor", SUCCESSORS, ids=lambda successor: successor.pattern
)
def test_each_replacement_works(successor: Successor) -> None:
    assert successor.command.partition(" ")[0] in COMMANDS
    if not successor.recipe:
        return
    path = recipe(successor.recipe)
    for settings in [[], *overrides(successor)]:
        load_config(path, settings, command=successor.command, check_paths=False)  # type: ignore[arg-type]


def test_the_command_line_names_the_replacement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = "examples/grpo_trainer/run_qwen2_5_vl-7b.sh"
    line = "`megaverl train --config configs/qwen2_5_vl/grpo_geometry.yaml` replaces it"
    assert main(["recipes", path]) == 0
    assert line in capsys.readouterr().out
    assert main(["train", "--config", path]) == 2
    assert line in capsys.readouterr().err
    assert main([path]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_values_of_others(key: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(VALUES[key, value])):
        load_config(
            {"model": {"path": "m"}, "data": {"train": "t.jsonl"}},
            [f"{key}={value}"],
            check_paths=False,
        )


def test_sequence_parallel_size_is_context_parallelism() -> None:
    with pytest.raises(InvalidConfig, match="Did you mean `actor.cp`"):
        load_config({"actor": {"ulysses_sequence_parallel_size": 2}}, check_paths=False)


def test_keys_of_the_page_exist() -> None:
    text = (ROOT / "docs" / "from_the_articles.md").read_text(encoding="utf-8")
    here = [
        line.split("|")[2]
        for line in text.split("\n## Settings\n")[1].splitlines()
        if line.startswith("| ")
    ]
    named = {name for cell in here for name in re.findall(r"`([a-z]+\.[a-z_.]+)", cell)}
    sections = set(all_keys(Config))
    assert (
        len(named) > 10
        and {name for name in named if name not in sections and "(" not in name}
        - FUNCTIONS
        == set()
    )
    assert {successor.pattern for successor in SUCCESSORS} <= table_names(
        ROOT / "docs" / "from_the_articles.md", "Files"
    )


# Names of the page that are methods or options, not keys.
FUNCTIONS = {"run.rollout.generate", "run.nproc"}
