"""The compiled part: where it is used, and what is said where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megaverl.kernels import extension
from megaverl.kernels.extension import in_threads, library, why_not


@pytest.fixture(autouse=True)
def looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_load", extension._load.__wrapped__)


def compiler_knows_amx() -> bool:
    if shutil.which("c++") is None:
        return False
    look = ["c++", "-mamx-tile", "-mamx-bf16", "-x", "c++", "-E", os.devnull]
    return subprocess.run(look, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(
    not compiler_knows_amx() or not list(metadata.distributions(name="megaverl")),
    reason="there is no C++ compiler that knows AMX, or megaverl is run from a checkout that was not installed",
)
def test_it_was_built_if_there_was_a_compiler() -> None:
    """Else every other test of the kernels would be left out unseen."""
    assert not why_not().startswith("not built"), "install again: pip install --no-build-isolation --no-deps -e ."


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_another_processor_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "cpuinfo"
    other.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512dq avx512vl\nbugs\t\t: avx512_bf16\n")
    monkeypatch.setattr(extension, "CPUINFO", other)
    assert library() is None and why_not() == "this processor lacks AVX512-BF16"
    monkeypatch.setattr(extension, "CPUINFO", tmp_path / "no Linux")
    assert library() is None


def test_tiles_are_left_alone_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "cpuinfo"
    other.write_text(f"processor\t: 0\nflags\t\t: {' '.join(extension.INSTRUCTIONS)} amx_tile amx_int8\n")
    monkeypatch.setattr(extension, "CPUINFO", other)
    assert not extension.has_tiles.__wrapped__()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "NAME", "megaverl.kernels._never_built")
    assert library() is None and "no C++ compiler" in why_not()


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_done_in_as_many_threads_as_pytorch_has(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    everyone = threading.Barrier(threads, timeout=60)
    seen = []

    def work() -> None:
        everyone.wait()  # passes only where so many run at once
        seen.append(threading.current_thread() is threading.main_thread())

    in_threads(work for _ in range(threads))
    assert seen == [threads == 1] * threads

    def fails() -> None:
        raise ValueError("a kernel's")

    with pytest.raises(ValueError, match="a kernel's"):
        in_threads([fails])
