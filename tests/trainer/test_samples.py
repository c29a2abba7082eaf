"""Samples on disk follow the run: a resumed one drops what it will write again."""

from __future__ import annotations

import json
from pathlib import Path

from megaverl.trainer.samples import append_samples, forget_samples


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_later_and_torn_records_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in (1, 2, 3):
        append_samples(path, step, [{"prompt": "p", "response": "r"}, {"prompt": "q", "response": "s"}])
    with path.open("a") as file:
        file.write('{"step": 2, "split": "tr')
    forget_samples(path, 2)
    assert steps(path) == [1, 1, 2, 2]
    forget_samples(path, 0)
    assert steps(path) == []


def test_nothing_to_forget(tmp_path: Path) -> None:
    forget_samples(tmp_path / "samples.jsonl", 3)
    assert not (tmp_path / "samples.jsonl").exists()
