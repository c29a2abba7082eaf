"""Wheels of one lock that overwrite each other's files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import pytest

from tools.wheel_records import Overlap, find_overlaps, read_record, read_records


def write_wheel(folder: Path, name: str, record: str) -> str:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/RECORD", record)
    return str(path)


def no_remote(url: str) -> IO[bytes]:
    raise AssertionError(url)


def test_the_same_path_with_different_contents_is_an_overlap(tmp_path: Path) -> None:
    """As an old cuda-python, which ships files of cuda-bindings."""
    old = write_wheel(
        tmp_path,
        "old",
        "cuda/runtime.py,sha256=a,1\ncuda/driver.py,sha256=b,1\nold.py,sha256=c,1\n",
    )
    new = write_wheel(
        tmp_path,
        "new",
        "cuda/runtime.py,sha256=x,1\ncuda/driver.py,sha256=y,1\nnew.py,sha256=z,1\n",
    )
    other = write_wheel(tmp_path, "other", "other/runtime.py,sha256=a,1\n")
    records = read_records(
        {"old": old, "new": f"file://{new}", "other": other}, no_remote
    )
    (overlap,) = find_overlaps(records)
    assert overlap == Overlap("new", "old", ("cuda/driver.py", "cuda/runtime.py"))
    assert (
        str(overlap)
        == "new and old both install cuda/driver.py and 1 more, with different contents"
    )


def test_equal_contents_and_metadata_are_none(tmp_path: Path) -> None:
    """Packages of one namespace share its `__init__.py`; every wheel has a RECORD of its own."""
    shared = "nvidia/__init__.py,sha256=e,0\n"
    first = write_wheel(tmp_path, "first", f"{shared}first-1.0.dist-info/RECORD,,\n")
    second = write_wheel(tmp_path, "second", f"{shared}second-1.0.dist-info/RECORD,,\n")
    assert find_overlaps(read_records({"a": first, "b": second}, no_remote)) == []


def test_files_are_compared_where_they_are_installed(tmp_path: Path) -> None:
    """Both schemes of libraries are site-packages; scripts and data are apart."""
    record = 'one-1.0.data/purelib/a.py,sha256=1,1\none-1.0.data/scripts/a.py,sha256=2,1\n"b,c.py",sha256=3,1\n'
    found = read_record(Path(write_wheel(tmp_path, "one", record)))
    assert found == {
        "a.py": "sha256=1",
        "(scripts)/a.py": "sha256=2",
        "b,c.py": "sha256=3",
    }


def test_a_wheel_without_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad.py", "")
    with pytest.raises(ValueError, match=r"bad\.whl: no RECORD"):
        read_record(path)
