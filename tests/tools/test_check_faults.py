"""Every way in which the unreliable tool fails is a fault of the environment, and none is one of the policy's."""

from __future__ import annotations

import pytest

from megaverl.rollout.environments.tools import ToolBox, ToolLimits
from tools.check_faults import UNRELIABLE

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
