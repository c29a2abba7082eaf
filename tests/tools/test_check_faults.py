"""Every way in which the unreliable tool fails is a fault of the environment, and none is one of the policy's."""

from __future__ import annotations

import pytest

from megaverl.rollout.environments.tools import ToolBox, ToolLimits
from tools.check_faults import UNRELIABLE, Held, is_flat, steps_that_differ

FILE = UNRELIABLE.rpartition(":")[0]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("time_out", "took longer than 0.5 s"),
        ("raise_error", "RuntimeError: no state"),
        ("end_process", "ended its process (code -9)"),
    ],
)
def test_no_way_to_fail_is_blamed_on_the_policy(way: str, said: str) -> None:
    limits = ToolLimits(seconds=0.5, blame="environment")
    box = ToolBox({"calculator": f"{FILE}:{way}"}, limits, size=1)
    answer = box.call("calculator", {"expression": "1+1"})
    box.close()
    assert (answer.ok, answer.is_fault) == (False, True)
    assert said in answer.text


def test_steps_differ_in_loss_or_norm_or_if_one_run_lacks_them() -> None:
    def records(*losses: float) -> list[dict[str, float]]:
        return [
            {"step": step, "actor/loss": loss, "actor/grad_norm": 1.0}
            for step, loss in enumerate(losses, 1)
        ]

    some = records(0.1, 0.2, 0.3)
    of_validation = {"step": 2, "validation/accuracy": 0.5}
    assert steps_that_differ(some, [*records(0.1, 0.2, 0.3), of_validation]) == 0
    assert steps_that_differ(some, records(0.1, 0.2000001, 0.3)) == 1
    assert steps_that_differ(some, records(0.1)) == 2
    other_norm = [{**record, "actor/grad_norm": 2.0} for record in some]
    assert steps_that_differ(some, other_norm) == 3


@pytest.mark.parametrize(
    ("memory_grows", "peak_grows", "more_processes", "flat"),
    [
        (0, 0, 0, True),
        (1, 0, 0, True),
        # More than 2 % of 100 MiB.
        (3, 0, 0, False),
        (0, 2, 0, True),
        # More than 2 % of 150 MiB.
        (0, 4, 0, False),
        # One more tool may run, two would be a leak.
        (0, 0, 1, True),
        (0, 0, 2, False),
    ],
)
def test_what_grows_from_step_to_step_is_a_leak(
    memory_grows: int, peak_grows: int, more_processes: int, flat: bool
) -> None:
    def held(step: int, memory: int, processes: int = 7) -> Held:
        return Held(step, memory * 2**20, processes, 200)

    early = [held(step, memory) for step in range(20, 40) for memory in (100, 150)]
    late = [
        held(step, memory, 7 + more_processes)
        for step in range(180, 201)
        for memory in (100 + memory_grows, 150 + memory_grows + peak_grows)
    ]
    assert is_flat([*early, *late], [*early, *late]) == flat
