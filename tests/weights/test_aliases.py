"""Destinations that share the source's storage, and versions that move in the background."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher

RANKS = "tests.weights.transport_ranks"


def test_tensors_that_agree_share_their_storage(launch: Launcher) -> None:
    """Same TP on both sides: all but qkv, whose rows Megatron interleaves by group, where a rank has several."""
    for found in launch.world(4, f"{RANKS}:alias", grid={"tp": 2, "dp": 2}, vllm_tp=2, may_rebind=True):
        assert found["wrong"] == []
        assert found["copied"] == 0, "one group of heads a rank: nothing is left to copy"
        assert found["shared"] == found["aliased"] == found["shared_again"] > 0
        assert found["unmoved"] == []
        assert "no version has been moved yet" in found["unset"]
        assert found["whole"] == ""
        assert "shares storage with the source, which has changed since version 1" in found["changed"]
        assert "model.embed_tokens.weight" in found["freed"] and "reshard.alias=never" in found["freed"]


def test_only_what_is_held_whole_is_shared(launch: Launcher) -> None:
    for found in launch.world(4, f"{RANKS}:alias", grid={"tp": 2, "pp": 2}, vllm_tp=2, may_rebind=True):
        assert found["wrong"] == []
        assert found["shared"] == found["aliased"] == found["shared_again"] > 0


def test_captured_addresses_are_copied_to(launch: Launcher) -> None:
    for found in launch.world(4, f"{RANKS}:alias", grid={"tp": 2, "dp": 2}, vllm_tp=2, may_rebind=False):
        assert found["wrong"] == []
        assert (found["aliased"], found["shared"]) == (0, 0)
        assert found["copied"] > 0
        assert found["freed"] == "", "the engine has storage of its own"


@pytest.mark.parametrize("may_rebind", [True, False])
def test_a_version_in_the_background_shows_at_the_boundary(launch: Launcher, may_rebind: bool) -> None:
    for found in launch.world(4, f"{RANKS}:overlap", may_rebind=may_rebind):
        assert (found["before"], found["usable"], found["total"]) == ([], "", 4)
        assert (found["after"], found["version"]) == ([], 2)
        assert found["in_place"] != may_rebind


def test_weights_go_through_files(launch: Launcher, tmp_path: Any) -> None:
    for found in launch.world(4, f"{RANKS}:through_files", folder=tmp_path):
        assert (found["wrong"], found["left"]) == ([], [])
        assert found["received"] == 4 * found["elements"]
