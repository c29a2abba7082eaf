"""Methods of worker groups that are made from their signatures."""

from __future__ import annotations

from types import NoneType
from typing import Any

import pytest

from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref


class NotedGroup(WorkerGroup):
    """Group that returns its calls instead of sending them."""

    def __init__(self) -> None:
        pass

    def keep(self, *call: object, **options: object) -> Any:
        return ("keep", *call)

    def report(self, *call: object, **options: object) -> Any:
        return ("report", *call)

    @remote
    def values(self, rollouts: Ref[int], step: int) -> Ref[str]:
        """A value that stays on the ranks."""

    @remote
    def begin(self, step: int) -> dict[str, list[int]]:
        """A value that comes back."""

    @remote
    def load(self, folder: str, version: int = 7, *, with_optimizer: bool) -> bool:
        """A value that may be left out, and one that is given by name."""

    @remote
    def end(self) -> None:
        """Nothing comes back."""


def test_the_annotation_decides_whether_a_value_stays_on_the_ranks() -> None:
    group = NotedGroup()
    assert group.values("rollouts", 3) == ("keep", "values", "rollouts", 3)
    assert group.begin(3) == ("report", "begin", dict[str, list[int]], 3)
    assert group.end() == ("report", "end", NoneType)


def test_arguments_are_sent_in_the_order_of_the_signature() -> None:
    assert NotedGroup().values(step=3, rollouts="r") == ("keep", "values", "r", 3)
    loaded = NotedGroup().load("folder", with_optimizer=True)
    assert loaded == ("report", "load", bool, "folder", 7, True)
    with pytest.raises(TypeError, match="missing a required argument: 'step'"):
        NotedGroup().values("rollouts")
