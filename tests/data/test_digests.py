"""A resumed run notices that its data changed, whatever their source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.config.run import SourceConfig
from megaverl.data import digests
from megaverl.data.datasets import PromptDataset
from megaverl.data.digests import RowsDigest, digest_of_files
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat, RowColumns
from megaverl.data.streaming import PromptStream, StreamedPrompts
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError

ROWS = [
    {"prompt": f"a {number}", "answer": f"{number:03}"} for number in range(100, 140)
]
# The same size, and the same least and greatest value of every column.
SWAPPED = [
    *ROWS[:5],
    {**ROWS[5], "answer": "106"},
    {**ROWS[6], "answer": "105"},
    *ROWS[7:],
]


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    table = pyarrow.Table.from_pylist(rows)
    options: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": False,
        "row_group_size": 8,
    }
    pyarrow.parquet.write_table(table, folder / "rows.parquet", **options)
    return str(folder / "rows.parquet")


def write_folder(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "inside").mkdir(exist_ok=True)
    write_parquet(folder / "inside", rows)
    return str(folder / "inside")


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A saved data set whose recorded fingerprint does not change with its rows."""
    datasets = pytest.importorskip(
        "datasets", reason="pip install 'megaverl[datasets]'"
    )
    target = folder / f"saved{len(list(folder.iterdir()))}"
    datasets.Dataset.from_list(rows).save_to_disk(str(target))
    state = target / "state.json"
    state.write_text(
        json.dumps(json.loads(state.read_text()) | {"_fingerprint": "always the same"})
    )
    final = folder / "final"
    shutil.rmtree(final, ignore_errors=True)
    target.rename(final)
    return str(final)


def write_own(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "own.py").write_text(
        "import json, pathlib\n"
        "class Rows(list):\n"
        "    fingerprint = 'always the same'\n"
        "    def where(self, index): return f'row {index}'\n"
        "def rows(): return Rows(json.loads((pathlib.Path(__file__).parent / 'rows.json').read_text()))\n"
    )
    return f"{folder / 'own.py'}:rows"


KINDS: list[Callable[[Path, list[dict[str, Any]]], str]] = [
    write_jsonl,
    write_parquet,
    write_folder,
    write_saved,
    write_own,
]


def resumed(stream: Any, state: Any) -> Any:
    stream.load_state_dict(json.loads(json.dumps(state)), 0)
    return stream


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, PromptFormat(chat_template="none"))


def open_stream(
    path: str, encoder: PromptEncoder, weights: bool = False
) -> PromptStream:
    other = Path(path.partition(":")[0]).parent / "other.jsonl"
    other.write_text(json.dumps(ROWS[0]) + "\n")
    entries = [
        SourceConfig(path=str(each), weight=1.0 if weights else None)
        for each in (other, path)
    ]
    dataset = PromptDataset.load(entries, encoder)
    return PromptStream(dataset, dataset.sampler(4, seed=0))


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize("weights", [False, True])
def test_other_answers_are_noticed(
    write: Callable[[Path, list[dict[str, Any]]], str],
    weights: bool,
    tmp_path: Path,
    encoder: PromptEncoder,
) -> None:
    path = write(tmp_path, ROWS)
    state = open_stream(path, encoder, weights).state_dict()
    resumed(open_stream(write(tmp_path, ROWS), encoder, weights), state)
    changed = open_stream(write(tmp_path, SWAPPED), encoder, weights)
    with pytest.raises(DataError, match="its rows are others") as said:
        resumed(changed, state)
    assert path in str(said.value) and "other.jsonl: its rows" not in str(said.value)
    resumed(
        changed,
        {key: value for key, value in changed.state_dict().items() if key != "rows"},
    )


@pytest.mark.parametrize(
    "write", [write_jsonl, write_parquet, write_folder, write_saved]
)
@pytest.mark.parametrize("taken", [0, 9])
def test_a_stream_notices_other_files(
    write: Callable[[Path, list[dict[str, Any]]], str],
    taken: int,
    tmp_path: Path,
    encoder: PromptEncoder,
) -> None:
    def stream(rows: list[dict[str, Any]]) -> StreamedPrompts:
        source = SourceConfig(path=write(tmp_path, rows))
        return StreamedPrompts([source], encoder, Columns(), seed=0, shuffle_buffer=7)

    first = stream(ROWS)
    first.take(taken)
    state = first.state_dict()
    resumed(stream(ROWS), state)
    with pytest.raises(DataError, match="its data are others"):
        resumed(stream(SWAPPED), state)


def test_a_stream_notices_other_rows_in_its_block(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    """As of the hub, whose files cannot be looked at before they come."""

    def stream(rows: list[dict[str, Any]]) -> StreamedPrompts:
        source = SourceConfig(path=write_own(tmp_path, rows))
        return StreamedPrompts([source], encoder, Columns(), seed=0, shuffle_buffer=7)

    first = stream(ROWS)
    first.take(3)
    with pytest.raises(DataError, match="and the rows read with it, are not those"):
        resumed(stream(SWAPPED), first.state_dict())
    resumed(stream([*ROWS[:-1], {"prompt": "later", "answer": ""}]), first.state_dict())


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_large_files_are_sampled(
    write: Callable[[Path, list[dict[str, Any]]], str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(digests, "WHOLE_FILE", 100)
    monkeypatch.setattr(digests, "SAMPLE", 8)
    rows = ROWS * 50
    first = digest_of_files([Path(write(tmp_path, rows))])
    assert digest_of_files([Path(write(tmp_path, rows))]) == first
    others = [{**row, "answer": row["answer"][::-1]} for row in rows]
    assert digest_of_files([Path(write(tmp_path, others))]) != first
    assert digest_of_files([Path(write(tmp_path, rows[:-1]))]) != first


@pytest.mark.parametrize("limit", [None, 5])
def test_a_large_file_that_was_written_again_is_named(
    limit: int | None,
    tmp_path: Path,
    encoder: PromptEncoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its samples are the same, and what lies between them was not read."""

    def stream() -> StreamedPrompts:
        source = SourceConfig(path=str(path), limit=limit)
        return StreamedPrompts([source], encoder, Columns(), seed=0, shuffle_buffer=7)

    path = Path(write_jsonl(tmp_path, ROWS * 50))
    monkeypatch.setattr(digests, "WHOLE_FILE", 100)
    state = stream().state_dict()
    assert resumed(stream(), state).notes == []
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    [note] = resumed(stream(), state).notes
    assert note.startswith(f"written again since the checkpoint: {path}. Their sizes")
    # Of an earlier version.
    earlier = {key: value for key, value in state.items() if key != "written"}
    assert resumed(stream(), earlier).notes == []
    monkeypatch.setattr(digests, "WHOLE_FILE", 2**30)  # now every byte is compared
    small = stream().state_dict()
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert resumed(stream(), small).notes == []


def test_everything_that_is_read_of_a_row_counts() -> None:
    def digest(**changes: Any) -> str:
        row = RowColumns(
            "p", "a", [{"name": "f"}], {"level": 1}, [SharedItem("image", 1, dict)]
        )
        found = RowsDigest()
        found.add(row._replace(**changes))
        return found.value()

    changes: list[dict[str, Any]] = [
        {},
        {"prompt": "q"},
        {"reference": ["a"]},
        {"tools": None},
        {"extra": {"level": 2}},
        {"images": [SharedItem("other", 1, dict)]},
    ]
    found = [digest(**change) for change in changes]
    assert len(set(found)) == len(found) and found[0] == digest()
