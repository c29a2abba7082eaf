"""CUDA IPC with a stand-in for torch's calls, between real processes: what is open when, and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Launcher

STORAGES = 2  # of each rank's weights


def read(launch: Launcher, folder: Path, **options: Any) -> list[dict[str, Any]]:
    return launch.world(
        4, "tests.weights.cuda_ipc_ranks:read_over_ipc", folder=folder, **options
    )


@pytest.mark.parametrize("offload", [False, True])
def test_memory_is_open_while_it_is_read_and_no_longer(
    launch: Launcher, tmp_path: Path, offload: bool
) -> None:
    for found in read(launch, tmp_path, offload=offload):
        assert found["wrong"] == [] and found["lines"] == []
        assert (
            found["received"] == [found["by plan"]] * 3 and found["messages"] == [0] * 3
        )
        assert found["open"] == [0] * 3 and found["open after the trial"] == 0
        # once to try it, and once for each version
        assert found["opened"] == [
            found["peers"] * STORAGES * (1 + version) for version in (1, 2, 3)
        ]
        assert found["devices"] == [5], "opened on the receiver's own device"
        # torch's count is zero whoever reads, and nothing that was shared is left:
        # freed memory is free
        assert found["readers"] == [0] and found["left"] == 0


@pytest.mark.parametrize("first", [0, 2])
def test_all_ranks_use_the_network_where_one_cannot_open_memory(
    launch: Launcher, tmp_path: Path, first: int
) -> None:
    everyone = read(launch, tmp_path, fails={"2": first})
    before = max(0, first - 1)
    for found in everyone:
        assert (
            found["wrong"] == []
            and found["open"] == [0] * 3
            and found["open after the trial"] == 0
        )
        assert found["received"] == [found["by plan"]] * 3
        assert [count > 0 for count in found["messages"]] == [
            version > before for version in (1, 2, 3)
        ]
    (line,) = everyone[0]["lines"]
    assert line.startswith(
        "weights go over the network within nodes: rank 2: the memory of rank"
    )
    assert (
        "peer access is not supported" if first == 0 else "invalid device context"
    ) in line
    assert "reshard.ipc=never" in line and "\n" not in line
    assert [found["lines"] for found in everyone[1:]] == [[], [], []]
