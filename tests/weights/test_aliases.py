"""Destinations that share the source's storage, and versions that move in the background."""

from __future__ import annotations

from typing import Any

import pytest

from megaverl.weights.reshard import MAX_PARTS
from tests.launcher import Launcher

RANKS = "tests.weights.transport_ranks"


def test_tensors_that_agree_share_their_storage(launch: Launcher) -> None:
    """Same TP on both sides: all but qkv, whose rows Megatron interleaves by group, where a rank has several."""
    for found in launch.world(
        4, f"{RANKS}:alias", grid={"tp": 2, "dp": 2}, vllm_tp=2, may_rebind=True
    ):
        assert found["wrong"] == []
        assert found["copied"] == 0, (
            "one group of heads a rank: nothing is left to copy"
        )
        assert found["shared"] == found["aliased"] == found["shared_again"] > 0
        assert found["unmoved"] == []
        assert "no version has been moved yet" in found["unset"]
        assert found["whole"] == ""
        assert (
            "shares storage with the source, which has changed since version 1"
            in found["changed"]
        )
        assert (
            "model.embed_tokens.weight" in found["freed"]
            and "reshard.alias=never" in found["freed"]
        )


def test_only_what_is_held_whole_is_shared(launch: Launcher) -> None:
    for found in launch.world(
        4, f"{RANKS}:alias", grid={"tp": 2, "pp": 2}, vllm_tp=2, may_rebind=True
    ):
        assert found["wrong"] == []
        assert found["shared"] == found["aliased"] == found["shared_again"] > 0


def test_captured_addresses_are_copied_to(launch: Launcher) -> None:
    for found in launch.world(
        4, f"{RANKS}:alias", grid={"tp": 2, "dp": 2}, vllm_tp=2, may_rebind=False
    ):
        assert found["wrong"] == []
        assert (found["aliased"], found["shared"]) == (0, 0)
        assert found["copied"] > 0
        assert found["freed"] == "", "the engine has storage of its own"


@pytest.mark.parametrize(("ipc", "alias"), [(False, False), (True, True)])
def test_a_version_moves_as_its_parts_get_their_new_values(
    launch: Launcher, ipc: bool, alias: bool
) -> None:
    for found in launch.world(4, f"{RANKS}:overlap", ipc=ipc, alias=alias):
        assert "version 2 is being written over version 1" in found["unusable"]
        assert found["parts"] == MAX_PARTS
        assert (found["wrong"], found["wrong_again"], found["usable"]) == ([], [], "")
        assert found["hidden"] >= 0 and found["waited"] is None
        assert found["bytes"] == [found["needs"]] * 2, (
            "no element travels twice, whatever its part"
        )
        before, after = found["shared"]
        assert before == after and (before > 0) == alias
        assert found["unordered_early"] == [], "what is in no part comes last"
        assert found["unordered"] > 0 and found["early"] > 0


def test_a_destination_that_was_lost_gets_all_weights_once(launch: Launcher) -> None:
    """Also those that do not change, which travel no more otherwise."""
    for found in launch.world(2, f"{RANKS}:lost"):
        assert found["first"] == found["told"] == []
        assert found["untold"] == found["untold_again"] != []


def test_weights_go_through_files(launch: Launcher, tmp_path: Any) -> None:
    for found in launch.world(4, f"{RANKS}:through_files", folder=tmp_path):
        assert (found["wrong"], found["left"]) == ([], [])
        assert found["received"] == 4 * found["elements"]
