"""What is measured of recipes, and that their section and the others of the page leave each other alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.yaml_source import recipe
from tools import learning_recipes
from tools.learning_curves import main, write
from tools.learning_curves_page import Result
from tools.learning_recipes import (
    HEADING,
    ONE_PROCESS,
    RECIPES,
    measured,
    own_settings,
    result_file,
    section,
)


def lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_run_as_it_is(name: str, tmp_path: Path) -> None:
    settings = [*ONE_PROCESS, *own_settings(tmp_path, name, 2)]
    config = load_config(
        recipe(name), settings, command="quickstart", check_paths=False, world_size=1
    )
    assert (config.run.seed, config.run.name) == (2, f"{name.replace('/', '_')}_2")
    assert config.data.train[0].path.startswith((str(tmp_path), "reasoning_gym:"))


def test_what_is_measured(tmp_path: Path) -> None:
    """Accuracy and the share of episodes of several turns, of held-out prompts alone."""
    accuracies: list[dict[str, object]] = [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "reward/accuracy": 0.3},
    ]
    lines(
        tmp_path / "metrics.jsonl",
        [*accuracies, {"step": 20, "validation/accuracy": 0.75}],
    )
    samples = [
        (0, "validation", 1),
        (0, "validation", 2),
        (20, "train", 1),
        (20, "validation", 2),
        (20, "validation", 3),
    ]
    lines(
        tmp_path / "samples.jsonl",
        [{"step": step, "split": split, "turns": n} for step, split, n in samples],
    )
    assert measured(tmp_path) == {
        "curve": [(0, 0.25), (20, 0.75)],
        "tool_use": [(0, 0.5), (20, 1.0)],
    }
    lines(tmp_path / "samples.jsonl", [{"step": 0, "split": "validation"}])
    assert measured(tmp_path)["tool_use"] == []


def test_a_run_that_fails_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        learning_recipes,
        "command",
        lambda name: [sys.executable, "-c", "raise SystemExit(3)"],
    )
    assert main(["run", "--task", "recipes", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "results").exists()


def test_the_sections_of_the_page_leave_each_other_alone(tmp_path: Path) -> None:
    arguments = ["report", "--out", str(tmp_path), "--docs", str(tmp_path)]
    assert main([*arguments, "--task", "recipes"]) == 2, "nothing is there"
    write(tmp_path, Result("grpo", 0, [(0, 0.1), (100, 0.9)], 60.0, None))
    assert main(arguments) == 0
    page = tmp_path / "learning_curves.md"
    digits = page.read_text()
    for number, name in enumerate(RECIPES):
        result = {
            "curve": [[0, 0.1], [80, 0.9]],
            "tool_use": [[0, 0.2], [80, 1.0]][: 2 * number],
            "seconds": 90.0,
        }
        result_file(tmp_path, name, 1).write_text(json.dumps(result))
    assert (
        main(["run", "--task", "recipes", "--out", str(tmp_path), "--seeds", "1"]) == 0
    ), "all is done"
    for again in range(2):
        assert main([*arguments, "--task", "recipes"]) == 0
        assert page.read_text() == digits + section(page), again
    assert main(arguments) == 0 and page.read_text() == digits + section(page)
    assert (
        "| reasoning_gym/quickstart | 1 | 10.0% | 90.0% | 80 |  |  | 1.5 |"
        in section(page)
    )
    assert (
        "| games/calculator_tool | 1 | 10.0% | 90.0% | 80 | 20.0% | 100.0% | 1.5 |"
        in section(page)
    )
    assert digits.endswith("(benchmarks.md#muon-beside-adam).\n") and section(
        page
    ).startswith(f"\n{HEADING}")
