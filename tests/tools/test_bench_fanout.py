"""The table of the benchmark, and the whole of it once, tiny, over real networks; times are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.processes import ending_with_parent
from tests.faults.networks import why_not
from tests.trainer.conftest import ROOT, environment
from tools import bench_fanout


def test_the_table_shows_multiples_of_the_receive_bound() -> None:
    figures = [
        {
            "replicas": 1,
            "model_bytes": 25_000_000,
            "seconds": {"fan-out": 2.2, "direct": 2.1},
        },
        {
            "replicas": 8,
            "model_bytes": 25_000_000,
            "seconds": {"fan-out": 2.4, "direct": 8.4},
        },
    ]
    lines = bench_fanout.table(figures, 100.0).splitlines()
    assert lines[0] == "25.0 MB a replica, links of 100 Mbit/s: receive bound 2.00 s"
    assert lines[-1] == "| 8 | 2.40 (1.20) | 8.40 (4.20) |"


def test_a_machine_without_tc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench_fanout.why_no_shaping() == "needs `tc`: install iproute2."


def test_all_ways_over_shaped_links(tmp_path: Path) -> None:
    if reason := why_not() or bench_fanout.why_no_shaping():
        pytest.skip(reason)
    options = [
        "--replicas",
        "1",
        "2",
        "--mbit",
        "500",
        "--layers",
        "1",
        "--hidden",
        "64",
        "--turns",
        "1",
    ]
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_fanout.py"),
        *options,
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(
        ending_with_parent(command),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [of_count["replicas"] for of_count in found] == [1, 2]
    assert all(
        of_count["seconds"].keys() == set(bench_fanout.WAYS) for of_count in found
    )
    model = found[0]["model_bytes"]
    assert (
        found[0]["busiest_sent"]["fan-out"]
        == found[0]["busiest_sent"]["direct"]
        <= 1.1 * model / 2
    )
    assert found[1]["busiest_sent"]["direct"] >= model
