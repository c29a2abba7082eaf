"""Every way in which the unreliable tool fails is a fault of the environment, and none is one of the policy's."""

from __future__ import annotations

import pytest

from megaverl.rollout.environments.tools import ToolBox, ToolLimits
from tools.check_faults import UNRELIABLE, steps_that_differ

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
