"""The controller over sockets, with four real ranks: results, failures, and who may connect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from megaverl.controller.messages import End, encode
from megaverl.controller.serving import run_blocking
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.zmq_transport import ZmqController, ZmqRank
from megaverl.distributed.curve_sockets import Address
from megaverl.errors import TrainingStopped
from tests.launcher import Launcher

RANKS = "tests.controller.ranks:run"


@pytest.mark.parametrize("relayed", [False, True], ids=["direct", "relayed"])
def test_rows_move_as_part_of_a_call(launch: Launcher, relayed: bool) -> None:
    first, *others = launch.world(4, RANKS, relayed=relayed)
    expected = [
        [3.0 * sum(step * 100 + row for row in range(7))] * 2 for step in range(3)
    ]
    assert first == {"reason": "", "sums": expected}
    assert others == [{"reason": ""}] * 3


def test_what_a_worker_raises_names_its_rank_and_call(launch: Launcher) -> None:
    """Also where it is SystemExit, which would end the process without a word."""
    first, *others = launch.world(4, RANKS, how="fail")
    assert (first["ranks"], first["call"]) == ([3], "actor.fail")
    assert first["error"].startswith("rank 3 failed in actor.fail: SystemExit: 0")
    assert [rank["reason"] for rank in others] == [first["reason"]] * 3
    assert first["reason"] == first["error"]


@pytest.mark.parametrize(
    ("how", "relayed", "said"),
    [
        ("die", False, "rank 3 was lost in actor.die"),
        ("die", True, "rank 3 was lost in actor.die"),
        ("stay", True, "stage decode"),
    ],
)
def test_a_lost_or_stuck_rank_is_named_and_every_rank_ends(
    launch: Launcher, how: str, relayed: bool, said: str
) -> None:
    ended = launch.ranks(
        4, "tests.controller.ranks:lost", how=how, relayed=relayed, deadline=60.0
    )
    result = ended.results[0]
    assert result is not None, ended.text
    assert (result["ranks"], result["call"]) == ([3], f"actor.{how}")
    assert said in result["error"]
    assert ended.results[1] == ended.results[2] == {"reason": result["error"]}
    assert ended.codes[3] == (-9 if how == "die" else 1)
    assert how == "die" or "rank 3 leaves a call that does not end" in ended.output[3]


def test_a_lost_relay_is_named_by_its_rank_and_every_rank_ends(
    launch: Launcher,
) -> None:
    """Rank 3 loses its connection with the relay on rank 2, but is not at fault."""
    ended = launch.ranks(
        4,
        "tests.controller.ranks:lost",
        how="die as the relay",
        relayed=True,
        deadline=60.0,
    )
    result = ended.results[0]
    assert result is not None, ended.text
    assert (result["ranks"], result["call"]) == ([2], "actor.die")
    assert ended.codes == [0, 0, -9, 0], ended.text
    assert ended.results[1] == {"reason": result["error"]}
    assert "the connection to the controller broke" in ended.results[3]["lost"]


def test_a_relay_stays_until_the_slowest_rank_of_its_node_has_left(
    launch: Launcher,
) -> None:
    """Rank 3 is in the last call for longer than a rank stays that has lost the controller."""
    first, *others = launch.world(4, RANKS, how="outlast the relay", relayed=True)
    assert (first["reason"], len(first["sums"])) == ("", 3)
    assert others == [{"reason": ""}] * 3


def test_ranks_leave_by_themselves_when_the_controller_is_lost(
    launch: Launcher,
) -> None:
    """Also those that are in a call, whose replies nobody receives any more."""
    ended = launch.ranks(
        4, "tests.controller.ranks:lost", how="lose the controller", deadline=60.0
    )
    assert ended.codes == [-9, 0, 0, 0], ended.text
    for rank in (1, 2, 3):
        result = ended.results[rank]
        assert result is not None and result["lost"].startswith(
            f"rank {rank}: the connection to the controller broke"
        )


def test_a_peer_without_the_key_does_not_join() -> None:
    async def join() -> None:
        transport = ZmqController("127.0.0.1", num_ranks=2)
        public_key, secret_key = zmq.curve_keypair()
        address = transport.address
        stranger = Address(address.endpoint, address.server_key, public_key, secret_key)
        with (
            ZmqRank(address, 0, StatusBoard()),
            ZmqRank(stranger, 1, StatusBoard()) as rank,
        ):
            with pytest.raises(
                TrainingStopped,
                match="ranks 1 did not connect to the controller within 0.5 s",
            ):
                await transport.join(timeout=0.5)
            with pytest.raises(
                TrainingStopped, match="rank 1: the connection to the controller"
            ):
                await asyncio.to_thread(run_blocking, rank.receive())
        await transport.close()

    asyncio.run(join())


class Inbox:
    """Inbox that notes what a rank knows when a message comes."""

    def __init__(self, rank: ZmqRank) -> None:
        self._rank, self.reasons = rank, list[str | None]()

    def put(self, message: object) -> None:
        self.reasons.append(self._rank.reason)


@pytest.mark.parametrize("how", ["told", "lost"])
def test_a_rank_knows_the_reason_before_its_main_thread_wakes_up(how: str) -> None:
    server_key, _ = zmq.curve_keypair()
    nowhere = Address("tcp://127.0.0.1:1", server_key, *zmq.curve_keypair())
    with ZmqRank(nowhere, 0, StatusBoard(), leave_after=60.0) as rank:
        inbox: Any = Inbox(rank)
        rank._inbox = inbox
        socket: Any = None  # an end is not answered
        if how == "told":
            rank._take(encode(End("no room")), socket)
        else:
            rank._lose("no room")
        assert inbox.reasons == ["no room"]
