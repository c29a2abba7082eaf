"""Samples that are sent as they are finished: at work before the last is written, and the same batch in the end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.plan import Edge
from megaverl.dataflow.streaming import StreamingCarrier, put_together
from megaverl.errors import DataError
from megaverl.fabric.post import receive_json, send_json
from megaverl.metrics.timeline import Timeline
from tests.fabric.forks import Server
from tests.fabric.ranks import full_batch, same, start

NUM = 8
# who scores reads the first half; another of its ranks reads nothing
HALF = {2: range(NUM // 2), 4: range(0)}


def samples_stream(seed: int) -> dict[str, Any]:
    """Two engines, two ranks that score, one that trains; then a step whose samples come at once."""
    fabric = start({"rollout": "0-1", "reward": "2,4", "actor": 3})
    to_reward = Edge("rollouts", "rollout", ("reward",), (0, 1), (2, 4), ())
    to_actor = Edge("rollouts", "rollout", ("old_log_probs", "advantages"), (0, 1), (3,), ())
    carrier = StreamingCarrier(fabric, (), {"reward": lambda prompts, responses: HALF}, (0, 1), NUM)
    carrier.follow([to_reward, to_actor])
    batch, seen = full_batch(random.Random(seed), NUM), Timeline()
    found: dict[str, Any] = {"same": [], "parts": []}
    for one_by_one in (True, False):
        if fabric.rank in (0, 1):
            if one_by_one:
                carrier.begin()
                for row in (n for n in (5, 2, 7, 0, 1, 6, 3, 4) if n % 2 == fabric.rank):
                    carrier.give([row], batch.select([row]).trim())
                    if row in (2, 1):  # goes on when its first sample of that half was worked on
                        assert receive_json(fabric, "worked on", 2) == row
            for edge in (to_reward, to_actor):
                carrier.send(edge, {"rollouts": batch})
            continue
        edge = to_actor if fabric.rank == 3 else to_reward

        def each(rows: Any, part: RolloutBatch) -> None:
            found["parts"].append(list(rows))
            if fabric.rank == 2 and rows[0] in (2, 1):
                send_json(fabric, "worked on", rows[0] % 2, rows[0]).wait()

        carrier.arrive(edge, seen.span, each if one_by_one else lambda rows, part: None)
        read = list(HALF[fabric.rank]) if fabric.rank != 3 else list(range(NUM))
        whole = carrier.receive(edge, {})
        lengths = whole.prompt_lengths.tolist() == batch.prompt_lengths.tolist()
        found["same"].append(lengths and same(whole.select(read), batch.select(read)))
    carrier.settle()
    return found


def test_samples_are_worked_on_before_the_last_is_finished(forks: Server) -> None:
    """An engine here waits for its first sample to have been scored: sent with the others, it would wait for good."""
    found = forks.run("tests.fabric.test_streaming:samples_stream", ranks=5, seed=3).check()
    assert [each["same"] for each in found] == [[], [], [True, True], [True, True], [True, True]]
    assert sorted(found[2]["parts"]) == [[row] for row in HALF[2]]
    assert sorted(found[3]["parts"]) == [[row] for row in range(NUM)]


def test_a_sample_that_does_not_come_is_missed() -> None:
    with pytest.raises(DataError, match=r"of 4 samples \[2\] did not come"):
        put_together([], {0: (1, 1), 1: (1, 1), 3: (1, 1)})
