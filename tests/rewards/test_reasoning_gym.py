"""reasoning-gym's tasks as rows, and its verifiers as the reward: with the real package, confined."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaverl.cli.main import main
from megaverl.config.yaml_source import all_recipes, read_source
from megaverl.data.sources import kind_of, open_source
from megaverl.errors import DataError
from megaverl.rewards import RewardSample, build_reward
from megaverl.rewards.reasoning_gym import COLUMN, VERIFIER, read_task, why_no_task

if find_spec("reasoning_gym") is None:
    pytest.skip("pip install 'megaverl[reasoning-gym]'", allow_module_level=True)
# a task of numbers, one whose verifier evaluates the answer, one with many right
# answers
TASKS = (
    "chain_sum?size=3&min_terms=2&max_terms=2",
    "intermediate_integration?size=3&seed=4",
    "rush_hour?size=2",
)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("reasoning_gym:chain_sum", "chain_sum", {}),
        ("reasoning_gym:a?size=5&seed=3", "a", {"size": 5, "seed": 3}),
        (
            "reasoning_gym:a?x=1.5&y=true&z=[1,2]&t=some%20text",
            "a",
            {"x": 1.5, "y": True, "z": [1, 2], "t": "some text"},
        ),
    ],
)
def test_how_a_task_is_written(text: str, name: str, options: dict[str, Any]) -> None:
    assert kind_of(text) == "reasoning_gym"
    assert read_task(text) == (name, options)
    assert why_no_task(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        "reasoning_gym:",
        "reasoning_gym:a b",
        "reasoning_gym:a?size",
        "reasoning_gym:a?=1",
    ],
)
def test_what_is_no_task(text: str) -> None:
    assert "expected reasoning_gym:NAME" in why_no_task(text)
    with pytest.raises(DataError, match="expected reasoning_gym:NAME"):
        open_source(text)


def test_rows_are_the_packages_own() -> None:
    import reasoning_gym

    rows = open_source("reasoning_gym:chain_sum?size=5&seed=7")
    own = reasoning_gym.create_dataset("chain_sum", size=5, seed=7)
    assert len(rows) == 5 and rows.where(4).endswith("seed=7, row 5")
    assert [(rows[i]["prompt"], rows[i]["answer"]) for i in range(5)] == [
        (e["question"], e["answer"]) for e in own
    ]
    assert json.loads(json.dumps(rows[3])) == rows[3], "it can travel"
    assert (
        rows.fingerprint
        == open_source("reasoning_gym:chain_sum?size=5&seed=7").fingerprint
    )
    assert (
        rows.fingerprint
        != open_source("reasoning_gym:chain_sum?size=5&seed=8").fingerprint
    )
    with pytest.raises(DataError, match="has no task 'chian_sum'; it has .*chain_sum"):
        open_source("reasoning_gym:chian_sum")
    with pytest.raises(DataError, match=r"refuses its options .*it has .*min_terms"):
        open_source("reasoning_gym:chain_sum?mni_terms=3")
    with pytest.raises(DataError, match="refuses its options"):
        open_source("reasoning_gym:chain_sum?min_terms=9&max_terms=2")


def test_the_verifiers_score(tmp_path: Path) -> None:
    """As the package has it; without tags nothing; and what it would evaluate does nothing here."""
    import reasoning_gym

    samples, expected = list[RewardSample](), list[float]()

    def add(row: dict[str, Any], response: str, score: float) -> None:
        samples.append(
            RewardSample(row["prompt"], response, row["answer"], {COLUMN: row[COLUMN]})
        )
        expected.append(score)

    sums, integrals, puzzles = (open_source(f"reasoning_gym:{task}") for task in TASKS)
    right = sums[1]["answer"]
    add(sums[1], f"so <answer>0</answer>, no: <answer> {right}\n</answer> done", 1.0)
    add(sums[1], right, 0.0)
    add(sums[1], "<answer>no number</answer>", 0.0)
    own = reasoning_gym.create_dataset("intermediate_integration", size=3, seed=4)
    for answer in (own[2]["answer"], "x**2 + 12345"):
        add(
            integrals[2], f"<answer>{answer}</answer>", own.score_answer(answer, own[2])
        )
    puzzle = reasoning_gym.create_dataset("rush_hour", size=2, seed=0)
    add(
        puzzles[0],
        "<answer>no move</answer>",
        puzzle.score_answer("no move", puzzle[0]),
    )
    file = tmp_path / "written"
    add(
        integrals[2],
        f"<answer>__import__('pathlib').Path('{file}').touch()</answer>",
        0.0,
    )
    found = build_reward({"name": "reasoning_gym"}).score(samples).total
    assert (
        found[:-1] == pytest.approx(expected[:-1])
        and found[-1] < 0.1
        and not file.exists()
    )
    assert sorted({found[0], found[3]}) == [1.0] and found[4] < 1
    assert build_reward({"name": "reasoning_gym", "tags": False}).score(
        samples[1:2]
    ).total == [1.0]
    # what ends its process takes nothing from those that were asked with it
    add(integrals[2], "<answer>__import__('os')._exit(3)</answer>", 0.0)
    again = (
        build_reward({"name": "reasoning_gym", "workers": 1})
        .score([samples[-1], *samples[:-1]])
        .total
    )
    assert again == [0.0, *found]


def test_a_verifier_makes_a_data_set_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import reasoning_gym

    made, create = list[str](), reasoning_gym.create_dataset
    monkeypatch.setattr(
        reasoning_gym,
        "create_dataset",
        lambda name, **options: made.append(name) or create(name, **options),
    )
    options = {"size": 3, "seed": 5, "min_word_len": 4}
    rows = create("spell_backward", **options)
    given = [
        {
            "name": name,
            "options": options,
            "index": index,
            "answer": rows[index]["answer"],
        }
        for name, options, index in (
            ("spell_backward", options, 0),
            ("spell_backward", options, 1),
            ("spell_backward", {"seed": 5}, 0),
        )
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given)))
    exec(VERIFIER, {})
    assert json.loads(capsys.readouterr().out)[:2] == [1.0, 1.0] and len(made) == 2


RECIPES = [path for path in all_recipes() if path.parent.name == "reasoning_gym"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_holds_rows_out(path: Path) -> None:
    """Row i of a task is drawn with seed + i."""
    data = read_source(path, []).values["data"]
    trained, held_out = (
        {
            (name, options.get("data_file"), options["seed"] + i)
            for name, options in map(read_task, data[key])
            for i in range(options["size"])
        }
        for key in ("train", "validation")
    )
    assert len(held_out) >= 64 and not trained & held_out


def test_the_command_line_looks_through_a_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "check", "reasoning_gym:chain_sum?size=20"]) == 0
    assert "20" in capsys.readouterr().out
    assert main(["data", "check", "reasoning_gym:no_such_task"]) != 0


def test_the_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_task("reasoning_gym:chain_sum").startswith(
        "which needs the package reasoning-gym: pip install"
    )
    with pytest.raises(DataError, match="needs the package reasoning-gym"):
        open_source("reasoning_gym:chain_sum?size=77")
