"""Inference servers that die, and one that joins: the run goes on, and ends with the bits of an untouched one.

`tools/fault_campaign.py --servers` tries each point by itself.
"""

from __future__ import annotations

from pathlib import Path

from tests.faults.runs import differences, remains
from tests.faults.server_points import SERVER_POINTS, ServerPoint, run_on_servers
from tests.launcher import Launcher


def test_servers_come_and_go(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    ended, (one, two, other) = run_on_servers(
        launch, inputs, tmp_path / "untouched", ServerPoint()
    )
    assert ended.codes == [0, 0], ended.text
    assert min(one.calls["/generate"], two.calls["/generate"]) > 20 and not other.calls
    expected = remains(tmp_path / "untouched" / "run")
    point = SERVER_POINTS["server lost, another joins"]
    ended, (lost, two, joined) = run_on_servers(launch, inputs, tmp_path / "hit", point)
    assert ended.codes == [0, 0], ended.text
    assert (
        lost.dead and joined.calls["/generate"] > 20 and joined.version == two.version
    )
    logs = "".join(
        path.read_text() for path in (tmp_path / "hit" / "run" / "logs").iterdir()
    )
    assert f"rollout server {lost.url} is lost" in logs
    assert differences(remains(tmp_path / "hit" / "run"), expected) == []
