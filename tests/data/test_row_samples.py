"""Rows that are read before a run: a bounded number of them, wherever they lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.config.run import SourceConfig
from megaverl.data import row_samples
from megaverl.data.row_samples import FIRST_ROWS, SPREAD_ROWS, RowSample
from megaverl.errors import DataError
from tests.checkpoint.convert.hub_server import FakeHub, serving
from tests.config.conftest import write_files

ROWS = [
    {"prompt": f"p{number}", "answer": "a" * (number % 7)} for number in range(4000)
]


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_samples, "LARGE_BYTES", 0)


def sample(path: Path | str, limit: int | None = None) -> list[tuple[str, str]]:
    return [
        (row.columns["prompt"], row.where)
        for row in RowSample(SourceConfig(path=str(path), limit=limit))
    ]


def write_jsonl(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_small_files_are_sampled_by_number(tmp_path: Path) -> None:
    rows = RowSample(SourceConfig(path=str(write_jsonl(tmp_path / "train.jsonl"))))
    found = [row.columns["prompt"] for row in rows]
    assert rows.num_rows == 4000 and found[:16] == [
        f"p{number}" for number in range(16)
    ]
    assert found[-1] == "p3999" and len(found) == FIRST_ROWS + SPREAD_ROWS


@pytest.mark.usefixtures("all_are_large")
def test_large_files_are_sampled_by_place(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl")
    found = sample(file)
    assert [prompt for prompt, _ in found[:FIRST_ROWS]] == [
        f"p{number}" for number in range(FIRST_ROWS)
    ]
    assert found[0][1] == f"{file}, line 1" and len(found) == FIRST_ROWS + SPREAD_ROWS
    prompt, where = found[-1]
    begin = int(where.rpartition(" ")[2])
    assert (
        file.read_bytes()[begin:].splitlines()[0]
        == json.dumps(ROWS[int(prompt[1:])]).encode()
    )
    assert RowSample(SourceConfig(path=str(file))).num_rows is None
    assert len(sample(file, limit=3)) == 3


@pytest.mark.usefixtures("all_are_large")
def test_a_bad_row_in_the_middle_of_a_large_file(tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in ROWS]
    rows[1000:3000] = ['{"prompt": '] * 2000
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(DataError, match="the line at byte"):
        sample(file)


@pytest.mark.usefixtures("all_are_large")
def test_row_groups_of_large_parquet_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of two files: the front of the first, then beginnings of row groups of both. No group is decoded."""
    for name, rows in (("a", ROWS[:2000]), ("b", ROWS[2000:])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(
            table, tmp_path / f"{name}.parquet", row_group_size=500
        )
    monkeypatch.setattr(
        row_samples.ParquetFile,
        "__getitem__",
        lambda self, index: pytest.fail("a whole row group is decoded"),
    )
    found = sample(tmp_path)
    assert [prompt for prompt, _ in found[:FIRST_ROWS]] == [
        f"p{number}" for number in range(FIRST_ROWS)
    ]
    assert {prompt for prompt, _ in found[FIRST_ROWS:]} == {
        f"p{number}" for number in range(0, 4000, 500)
    }
    assert found[-1] == ("p3500", f"{tmp_path / 'b.parquet'}, row 1501")


HUB_PROGRAM = """
import json, sys
from megaverl.config import load_config
from megaverl.trainer.code_checks import preflight
found = {}
for name in ("org/sums", "org/none", "org/bad"):
    config = load_config(None, [*sys.argv[1:], f"data.train={name}", "rollout.engine=hf"])
    result = preflight(config, "train")
    found[name] = [[issue.message for issue in result.issues], result.not_checked]
print(json.dumps(found))
"""


def ask_hub(
    files: list[str], home: Path, url: str
) -> dict[str, tuple[list[str], list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", HUB_PROGRAM, *files],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[str], list[str]]] = json.loads(
        done.stdout.splitlines()[-1]
    )
    return found


def test_first_rows_of_the_hub(tmp_path: Path) -> None:
    """A good data set, one that is not there, and one whose rows lack a column; then a hub that is not reached."""
    pytest.importorskip("datasets", reason="pip install 'megaverl[datasets]'")
    for name, rows in (("sums", ROWS[:20]), ("bad", [{"promt": "a", "answer": "b"}])):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", rows)
    files = [
        each for each in write_files(tmp_path) if not each.startswith("data.train")
    ]
    with serving(
        FakeHub({f"datasets/org/{name}": tmp_path / name for name in ("sums", "bad")})
    ) as hub:
        found = ask_hub(files, tmp_path / "home", hub.url)
        url = hub.url
    assert found["org/sums"] == [[], []]
    assert "org/none" in found["org/none"][0][0] and "row 1" in found["org/bad"][0][0]
    assert "prompt" in found["org/bad"][0][0]
    left_out = ask_hub(files, tmp_path / "empty", url)["org/sums"]
    assert left_out == [[], ["org/sums: its rows, as the hub is not reached from here"]]
