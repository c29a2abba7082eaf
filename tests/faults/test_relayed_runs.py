"""Engines on nodes that pass weights on to each other: the bits of a run without that, also after kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.points import RELAYED, RELAYED_POINTS, RELAYED_RANKS, hit, run_on
from tests.faults.runs import (
    BYTES,
    CHANGED,
    Remains,
    differences,
    remains,
    without_bytes,
)
from tests.launcher import Launcher


def busiest(found: Remains) -> float:
    return max(
        record[f"{BYTES}sent"]
        for record in found["metrics"]
        if f"{BYTES}sent" in record
    )


@pytest.fixture(scope="module")
def direct(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Remains:
    """What remains of a run in which the actor sends every engine all weights."""
    runs = tmp_path_factory.mktemp("direct")
    ended = run_on(
        launch,
        inputs,
        runs,
        *RELAYED,
        "reshard.fan_out=never",
        "reshard.delta=off",
        nodes=RELAYED_RANKS,
    )
    assert ended.codes == [0] * RELAYED_RANKS, ended.text
    return remains(runs / "run")


def test_killed_inside_relayed_reshards(
    launch: Launcher, inputs: Path, direct: Remains, tmp_path: Path
) -> None:
    for name, fault in RELAYED_POINTS.items():
        found = hit(launch, inputs, tmp_path, fault, *RELAYED, nodes=RELAYED_RANKS)
        assert found.happened and found.wrong == [], (name, found)
    ended = run_on(launch, inputs, tmp_path, *RELAYED, nodes=RELAYED_RANKS)
    assert ended.codes == [0] * RELAYED_RANKS, ended.text
    relayed = remains(tmp_path / "run")
    assert differences(without_bytes(relayed), without_bytes(direct)) == []
    assert busiest(relayed) < 0.8 * busiest(direct)
    fractions = [record[CHANGED] for record in relayed["metrics"] if CHANGED in record]
    assert fractions and 0 < min(fractions) <= max(fractions) < 0.6
