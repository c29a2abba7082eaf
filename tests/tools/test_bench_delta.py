"""The benchmark of deltas: its table, and all of it once, tiny, over real networks; times are not asserted."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.processes import ending_with_parent
from tests.faults.networks import why_not
from tests.trainer.conftest import ROOT, environment, make_inputs
from tools import bench_delta, bench_delta_servers, bench_fanout


def test_the_table_has_both_ways() -> None:
    whole = {"seconds": 2.0, "bytes": 250_000_000, "changed": None}
    delta = {"seconds": 0.05, "bytes": 3_900_000, "changed": 0.0101}
    figures = [
        {"step": 0, "on": whole, "off": whole},
        {"step": 1, "on": delta, "off": whole},
    ]
    options = argparse.Namespace(optimizer="muon", lr=1e-6, replicas=2, mbit=1000.0)
    lines = bench_delta.table(figures, options).splitlines()
    assert lines[0] == "muon, lr 1e-06, 2 replicas, links of 1000 Mbit/s"
    assert lines[-2] == "| 0 | first | 250.00 | 250.00 | 2.00 | 2.00 |"
    assert lines[-1] == "| 1 | 1.010% | 3.90 | 250.00 | 0.05 | 2.00 |"


def test_both_ways_over_shaped_links(tmp_path: Path) -> None:
    if reason := why_not() or bench_fanout.why_no_shaping():
        pytest.skip(reason)
    inputs = make_inputs(tmp_path)
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_delta.py"),
        "--model",
        str(inputs / "model"),
        "--rows",
        str(inputs / "train.jsonl"),
        "--steps",
        "2",
        "--samples",
        "2",
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
    first, *later = json.loads((tmp_path / "found.json").read_text())
    assert first["on"]["bytes"] == first["off"]["bytes"]
    for of_step in later:
        assert 0 < of_step["on"]["changed"] < 0.5
        assert of_step["on"]["bytes"] < 0.8 * of_step["off"]["bytes"]


def test_the_table_of_servers_has_a_row_for_each_way() -> None:
    row = {"seconds": 0.5, "bytes_sent": 21_500.0, "bytes_received": 43_000.0}
    figures = [
        {"transfer": "folder", "delta": "on", "changed_fraction": 0.05, **row},
        {"transfer": "direct", "delta": "off", "changed_fraction": 0.0, **row},
    ]
    options = argparse.Namespace(lr=3e-6, servers=2, steps=4)
    *_, first, second = bench_delta_servers.table(figures, options).splitlines()
    assert first == "| folder | on | 5.0% | 21.5 | 43.0 | 0.50 |"
    assert second == "| direct | off |  | 21.5 | 43.0 | 0.50 |"
