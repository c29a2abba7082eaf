"""Samples that are sent as they are finished: at work before the last is written, and the same batch in the end."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.dataflow.carrier import Reads
from megaverl.dataflow.plan import Edge
from megaverl.dataflow.streaming import Shares, StreamingCarrier, lengths_from
from megaverl.distributed.worlds import Fabric, receive_json, send_json
from megaverl.errors import DataError
from megaverl.monitoring.timeline import Timeline
from tests.distributed.ranks import full_batch, same, start
from tests.launcher import Launcher

NUM = 8
# the ranks that score read what lands on them; one of those that train reads a few more than land there, one nothing
LANDS = {2: range(NUM // 2), 4: range(NUM // 2, NUM)}
TRAINS = {3: [0, 1, 6], 5: []}


def samples_stream(seed: int, ahead: bool, shares: int = 0) -> dict[str, Any]:
    """Two engines, two ranks that score, two that train; then a step whose samples come at once.

    Args:
        ahead: the engines are steps ahead of training.
        shares: those that train score in so many shares of the samples; the first of these reads all of each.
    """
    fabric = start({"rollout": "0-1", "reward": "2,4", "actor": "3,5"})
    to_reward = Edge("rollouts", "rollout", ("reward",), (0, 1), (2, 4), ())
    to_actor = Edge("rollouts", "rollout", ("advantages",), (0, 1), (3, 5), ())
    in_shares = Shares.of_groups(shares, NUM, 1, {"advantages"}) if shares else None
    carrier = StreamingCarrier(fabric, (), ("reward", "advantages"), (0, 1), NUM, ahead, in_shares)
    carrier.share_reads = {"advantages": Reads(lambda outline: {3: range(len(outline)), 5: []})}
    carrier.reads = {
        "reward": Reads(lambda outline: LANDS),
        "advantages": Reads(lambda outline: TRAINS, frozenset({"group_ids"})),
    }
    carrier.follow([to_reward, to_actor])
    batch, seen = full_batch(random.Random(seed), NUM), Timeline()
    found: dict[str, Any] = {"same": [], "parts": [], "shares": []}
    for one_by_one in (True, False):
        if fabric.rank in (0, 1):
            if one_by_one:
                carrier.begin(range(fabric.rank, NUM, 2))
                for row in (n for n in (5, 2, 7, 0, 1, 6, 3, 4) if n % 2 == fabric.rank):
                    carrier.give([row], batch.select([row]).trim())
                    if row in (2, 1):  # goes on when its first sample of that half was worked on
                        assert receive_json(fabric, "worked on", 2) == row
            for edge in (to_reward, to_actor):
                carrier.send(edge, {"rollouts": batch})
            continue
        edge = to_reward if fabric.rank in LANDS else to_actor

        def each(rows: Any, part: RolloutBatch) -> None:
            found["parts"].append(list(rows))
            if fabric.rank == 2 and rows[0] in (2, 1):
                send_json(fabric, "worked on", rows[0] % 2, rows[0]).wait()

        def scored(operators: Any, rows: range, share: RolloutBatch) -> None:
            assert tuple(operators) == ("advantages",)
            expected = batch.select(rows)
            alike = sequence_lengths(share)[:2] == sequence_lengths(expected)[:2]
            assert share["prompt_numbers"].tolist() == expected.group_ids.tolist()
            own = RolloutBatch({name: share[name] for name in batch}, share.columns)
            alike = alike and (same(own, expected) if fabric.rank == 3 else not share.generated_ids.any())
            found["shares"].append([rows.start, rows.stop, alike])

        carrier.arrive(edge, seen.span, each if one_by_one else lambda rows, part: None, scored)
        read = list({**LANDS, **TRAINS}[fabric.rank])
        whole = carrier.receive(edge, {})
        alike = sequence_lengths(whole) == sequence_lengths(batch)
        alike = alike and (fabric.rank in LANDS or torch.equal(whole.group_ids, batch.group_ids))
        own = RolloutBatch({name: whole[name] for name in batch}, whole.columns)
        found["same"].append(alike and same(own.select(read), batch.select(read)))
        others = [row for row in range(NUM) if row not in read]
        found["same"].append(not whole.select(others).generated_ids.any())
    carrier.settle()
    return found


@pytest.mark.parametrize(("ahead", "trained"), [(False, [[0], [1], [2], [3]]), (True, [[0, 2], [1, 3]])])
def test_samples_are_worked_on_before_the_last_is_finished(
    launch: Launcher, ahead: bool, trained: list[list[int]]
) -> None:
    """An engine here waits for its first sample to have been scored: sent with the others, it would wait for good."""
    found = launch.ranks(6, "tests.dataflow.test_streaming:samples_stream", seed=3, ahead=ahead).check()
    assert [each["same"] for each in found] == [[], [], *([[True] * 4] * 4)]
    assert sorted(found[2]["parts"]) == [[row] for row in LANDS[2]]
    assert sorted(map(sorted, found[3]["parts"])) == trained


@pytest.mark.parametrize("shares", [3, NUM])
def test_shares_come_in_one_order(launch: Launcher, shares: int) -> None:
    """The same on all ranks that score. Of eight shares each has one sample: an engine, and a rank, have none of it."""
    found = launch.ranks(6, "tests.dataflow.test_streaming:samples_stream", seed=3, ahead=False, shares=shares).check()
    assert [each["same"] for each in found] == [[], [], *([[True] * 4] * 4)]
    bounds = [0, 2, 5, 8] if shares == 3 else list(range(NUM + 1))
    expected = [[start, stop, True] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    assert [sorted(each["shares"]) for each in found] == [[], [], [], sorted(2 * expected), [], sorted(2 * expected)]
    assert found[3]["shares"] == found[5]["shares"]


def test_what_an_operator_changes_goes_whole() -> None:
    """`trainer.operators` may take the samples and give others: these are sent, when they are there."""
    fabric = Fabric(*[cast(Any, None)] * 8)
    carrier = StreamingCarrier(fabric, (), (), (0,), NUM, shares=Shares.of_groups(2, NUM, 1, {"values"}))
    first, changed = (Edge("rollouts", maker, ("values",), (0,), (1,), ()) for maker in ("rollout", "mine"))
    assert (carrier.in_shares(first), carrier.in_shares(changed)) == (("values",), ())
    assert carrier.streams(first) and not carrier.streams(changed)


def test_a_sample_that_does_not_come_is_missed() -> None:
    with pytest.raises(DataError, match=r"of 4 samples \[2\] did not come"):
        lengths_from({0: (1, 1, 0), 1: (1, 1, 0), 3: (1, 1, 1)})
