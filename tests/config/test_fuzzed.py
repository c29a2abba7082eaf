"""200 bad configurations, each made from a good one by one change: refused, with the key named, without a traceback."""

from __future__ import annotations

import copy
import io
import random
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl.cli.main import main
from megaverl.config import Config, load_config
from megaverl.config.section import described_keys
from megaverl.config.yaml_source import all_recipes, read_source

COUNT = 200
# recipes of other commands than train
NOT_TRAIN = ("quickstart", "sft", "games", "preferences_smollm2")
GOOD = [
    path
    for path in all_recipes()
    if path.stem not in NOT_TRAIN and path.parent.name not in NOT_TRAIN
]
WRONG_TYPES: dict[str, list[Any]] = {
    "int": ["many", 1.5, True, [1], {"a": 1}],
    "number": ["much", True, [0.5], {"a": 1}],
    "text": [3, True, ["a"], {"a": 1}],
    "true | false": ["yes!", 3, [True]],
    "mapping": [3, "text", [1]],
}
Change = tuple[str, str]  # the key that must be named, and what was done to it


def put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        inner = values.get(part)
        values[part] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    values[last] = value


def plain_keys() -> list[tuple[str, str]]:
    """Keys outside of lists, with their types in words."""
    return [
        (entry.key, entry.type)
        for entry in described_keys(Config)
        if ".N." not in entry.key
    ]


def misspelled(draw: random.Random, name: str) -> str:
    """Another word: a letter doubled, left out, or swapped."""
    place = draw.randrange(len(name))
    return draw.choice(
        [
            name[:place] + name[place] + name[place:],
            name[:place] + "q" + name[place:],
            f"{name}_x",
        ]
    )


def spoil(draw: random.Random, values: dict[str, Any]) -> Change:
    """One change that makes a good configuration bad; returns the key that a message must name."""
    keys = plain_keys()
    kind = draw.choice(
        ["type", "type", "bound", "choice", "unknown", "section", "list", "reward"]
    )
    if kind == "unknown":
        key, _ = draw.choice(keys)
        around, _, name = key.rpartition(".")
        wrong = misspelled(draw, name)
        key = f"{around}.{wrong}" if around else wrong
        known = {entry for entry, _ in keys}
        if key in known or any(known_key.startswith(key + ".") for known_key in known):
            key += "_x"
        put(values, key, 1)
        return key, kind
    if kind == "choice":
        key, words = draw.choice(
            [
                (k, t)
                for k, t in keys
                if " | " in t and t != "true | false" and "or" not in t
            ]
        )
        put(values, key, draw.choice(words.split(" | ")) + "_no")
        return key, kind
    if kind == "bound":
        key = draw.choice(
            [k for k, t in keys if t in ("int", "number") and k not in UNBOUNDED]
        )
        put(values, key, draw.choice([-1, -7]))
        return key, kind
    if kind == "section":
        # model: NAME is allowed, and one reward module without its list
        key = draw.choice(
            sorted(Config.model_fields.keys() - {"reward", "model", "reward_modules"})
        )
        values[key] = draw.choice([3, "text", [1]])
        return key, kind
    if kind == "list":
        key = draw.choice(["trainer.pass_at", "run.log_with"])
        put(values, key, [draw.choice([-1, "sheet", {"a": 1}, 0])])
        return key, kind
    if kind == "reward":
        values["reward"] = [
            draw.choice(
                [{"name": "no_such_reward"}, {"weight": 1.0}, {"nam": "gsm8k"}, 3]
            )
        ]
        return "reward.0", kind
    key, words = draw.choice([(k, t) for k, t in keys if t in WRONG_TYPES])
    put(values, key, draw.choice(WRONG_TYPES[words]))
    return key, kind


# Their numbers may be below 0, or are handed on as they are.
UNBOUNDED = {"reward.N.weight", "reshard.check_every"}


@pytest.fixture(scope="module")
def good() -> list[dict[str, Any]]:
    found = []
    for path in GOOD:
        load_config(path, check_paths=False)
        found.append(read_source(path, []).values)
    assert len(found) > 20
    return found


def refuse(file: Path) -> tuple[int, str]:
    """What the command says of a file, and its exit code; it looks at nothing but the file."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = main(["train", "--config", str(file), "--dry-run", "--no-file-checks"])
    return code, said.getvalue()


def test_every_spoilt_configuration_is_refused_with_its_key(
    good: list[dict[str, Any]], tmp_path: Path
) -> None:
    draw = random.Random(2026)
    file, wrong = tmp_path / "spoilt.yaml", []
    for number in range(COUNT):
        values = copy.deepcopy(draw.choice(good))
        key, kind = spoil(draw, values)
        file.write_text(yaml.safe_dump(values))
        code, said = refuse(file)
        if code != 2 or key not in said or "Traceback" in said:
            wrong.append(f"{number}: {kind} {key}: exit code {code}: {said[:300]}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("actor: {tp: 2", "not valid YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("actor:\n  tp: 2\n  tp: 4\n", "actor.tp"),
        ("model: {path: '${nowhere.x}'}\n", "model.path"),
        ("model:\n  path: ???\n", "model.path"),
        ("\x00\x01", "not valid YAML"),
        ("a: &x [*x]\n", "--config"),
        ("1: {2: 3}\n", "1"),
    ],
)
def test_files_that_are_no_configuration(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    code, answer = refuse(file)
    assert code == 2 and said in answer and "Traceback" not in answer
