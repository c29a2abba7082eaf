"""What is said of two recordings: the first metric that differs by one bit, other weights, another machine."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megaverl.monitoring.tracker import Tracker
from tools.same_numbers import (
    Recording,
    commands,
    digest,
    digests,
    first_difference,
    is_cost,
    main,
    read_records,
)

LOSS = 0.1 + 0.2
RECORDING: Recording = {
    "commit": "c0ffee",
    "steps": 2,
    "machine": {"cpu avx2": "True", "torch": "2.13.0"},
    "runs": {
        "first": {
            "records": [
                {"step": "0", "validation/reward": "0.5"},
                {"step": "1", "actor/loss": repr(LOSS), "actor/kl": "NaN"},
                {"step": "2", "actor/loss": "0.25", "actor/kl": "0.0"},
            ],
            "weights": {"hf": "aa"},
        },
        "second": {
            "records": [{"step": "1", "actor/loss": "0.0"}],
            "weights": {"hf": "bb", "inputs/warm": "cc"},
        },
    },
}


@pytest.fixture
def other() -> Recording:
    return copy.deepcopy(RECORDING)


def compare(other: Recording, folder: Path) -> int:
    files = [folder / "before.json", folder / "after.json"]
    for file, recording in zip(files, (RECORDING, other), strict=True):
        file.write_text(json.dumps(recording))
    return main(["compare", *map(str, files)])


def test_equal_recordings(
    other: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other["commit"] = "another"
    assert compare(other, tmp_path) == 0
    said = capsys.readouterr().out
    assert (
        "first: metrics are equal" in said
        and "weights in inputs/warm: cc in both" in said
    )
    assert said.endswith("the same to the bit\n")


def test_one_bit(
    other: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run, step, name and both values of the first that differs; the later ones follow from it."""
    after = math.nextafter(LOSS, 1.0)
    other["runs"]["first"]["records"][1]["actor/loss"] = repr(after)
    other["runs"]["first"]["records"][2]["actor/loss"] = "7.0"
    other["runs"]["first"]["weights"]["hf"] = "dd"
    assert compare(other, tmp_path) == 1
    said = capsys.readouterr().out
    assert (
        f"first: step 1, actor/loss: {LOSS!r} expected, {after!r} found\n  weights in hf: aa expected, dd"
        in said
    )
    assert "second: metrics are equal" in said and "7.0" not in said
    assert said.endswith("1 of 2 runs differ\n")


def test_other_weights_alone(
    other: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del other["runs"]["second"]["weights"]["inputs/warm"]
    assert compare(other, tmp_path) == 1
    assert (
        "weights in inputs/warm: cc expected, absent found" in capsys.readouterr().out
    )


def test_a_run_that_is_not_there(
    other: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del other["runs"]["second"]
    assert compare(other, tmp_path) == 1
    assert "second: only in the first recording" in capsys.readouterr().out


def test_another_machine_is_refused(
    other: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other["machine"] = {"torch": "2.14.0", "cpu avx2": "True", "MKL_CBWR": "AVX2"}
    other["steps"] = None
    assert compare(other, tmp_path) == 2
    said = capsys.readouterr()
    for line in (
        "steps: 2 recorded, None",
        "torch: 2.13.0 recorded, 2.14.0",
        "MKL_CBWR: absent recorded, AVX2",
    ):
        assert line in said.err
    assert (
        "avx2" not in said.err
        and "Record commit c0ffee again" in said.err
        and not said.out
    )


def test_a_metric_or_a_record_more() -> None:
    records = RECORDING["runs"]["first"]["records"]
    fewer = [records[0], {"step": "1", "actor/loss": repr(LOSS)}, records[2]]
    assert (
        first_difference(records, fewer)
        == "step 1, actor/kl: NaN expected, absent found"
    )
    assert (
        first_difference(fewer, records)
        == "step 1, actor/kl: absent expected, NaN found"
    )
    assert (
        first_difference(records, records[:2])
        == "step 2, step: 2 expected, absent found"
    )
    assert first_difference([], records) == "step 0, step: absent expected, 0 found"


@given(st.dictionaries(st.sampled_from(["actor/a", "critic/b"]), st.floats()))
def test_numbers_are_read_as_they_were_logged(
    tmp_path_factory: pytest.TempPathFactory, logged: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Tracker(folder, ["jsonl"]) as tracker:
        tracker.log(3, logged)
    (record,) = read_records(folder / "metrics.jsonl")
    assert record["step"] == "3" and first_difference([record], [record]) is None
    assert {name: value.hex() for name, value in logged.items()} == {
        name: float(record[name]).hex() for name in logged
    }


def test_what_measures_a_cost(tmp_path: Path) -> None:
    line = {
        "step": 3,
        "time": 17.5,
        "actor/loss": 1e-05,
        "actor/kl": "NaN",
        "agent/reshard/seconds": 1.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["actor/loss"] == "1e-05" and record["actor/kl"] == "NaN"
    assert [name for name in record if not is_cost(name)] == [
        "step",
        "actor/loss",
        "actor/kl",
    ]


def save(folder: Path, **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def test_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    """Not of the files: how many there are, and in which order, is no number."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.zeros(2, dtype=torch.bfloat16)
    expected = digest(save(tmp_path / "one", model={"a": a, "b": b}))
    assert digest(save(tmp_path / "two", z={"a": a}, y={"b": b})) == expected
    others = {
        "sign of zero": {"a": a, "b": -b},
        "shape": {"a": a.reshape(3, 2), "b": b},
        "dtype": {"a": a, "b": b.half()},
        "name": {"a": a, "c": b},
        "fewer": {"a": a},
    }
    assert expected not in {
        digest(save(tmp_path / name, model=tensors)) for name, tensors in others.items()
    }


def test_every_folder_of_weights_apart_from_checkpoints(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1)}
    for folder in ("hf", "inputs/warm", "checkpoints/step_00000001"):
        save(tmp_path / folder, model=tensors)
    assert list(digests(tmp_path)) == ["hf", "inputs/warm"]


@pytest.mark.parametrize("steps", [None, 1, 6])
def test_the_runs_are_configurations(steps: int | None, tmp_path: Path) -> None:
    from megaverl.config import load_config

    for name, (command, config, *settings) in commands(tmp_path, steps).items():
        loaded = load_config(
            config.removeprefix("--config="),
            settings,
            command=command,
            check_paths=False,
        )  # type: ignore[arg-type]
        assert (loaded.run.name, loaded.run.nproc) == (
            name,
            3 if name == "split" else 2,
        )
        assert loaded.trainer.steps == (steps or 150) and (loaded.sft.steps == 75) == (
            steps is None
        )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["record", "x.json", "--steps", "0"], "--steps is 0; at least 1"),
        (["record", "nowhere/x.json"], "no folder nowhere"),
        (["compare", "nowhere.json"], "no file nowhere.json"),
    ],
)
def test_mistakes_are_found_before_any_run(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert reason in capsys.readouterr().err
