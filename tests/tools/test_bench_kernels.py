"""The benchmark of the kernels runs, tiny; what it measures is not asserted."""

from __future__ import annotations

import sys

import pytest
import torch

from megaverl.kernels import extension
from megaverl.kernels.extension import has_tiles, why_not
from tools.bench_kernels import main

TINY = ["--groups=2", "--group=2", "--common=3", "--own=5", "--heads=2", "--kv-heads=1", "--ffn=16", "--repeats=1"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *TINY])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_both_sides_of_each_ratio_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("4 sequences of 8 tokens, 26 packed")
    assert len(lines) == 14 + has_tiles() and all(
        " ours " in line and " PyTorch " in line and line.endswith(" x") for line in lines
    )


def test_a_machine_without_them_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_load", lambda: (None, "this processor lacks something"))
    with pytest.raises(SystemExit, match="this processor lacks something"):
        main()
