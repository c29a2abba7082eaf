"""Worker group whose calls return the values of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from megaverl.controller.core import Wanted
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.messages import Reply, decode_value
from megaverl.controller.references import PendingCall

T = TypeVar("T")


class EveryRank(WorkerGroup):
    """Group with one more kind of call, by which tests see what each rank did."""

    def report_all(
        self,
        method: str,
        kind: type[T],
        *arguments: object,
        wanted: Mapping[int, Wanted] | None = None,
        asking: Sequence[int] = (),
    ) -> PendingCall[list[T]]:
        """Run a method that returns a small value; the result has one for each rank, in rank order."""

        def finish(replies: dict[int, Reply]) -> list[T]:
            return [decode_value(replies[rank].value, kind) for rank in sorted(replies)]

        return self._controller.call(
            self.ranks,
            self.role,
            method,
            arguments,
            finish=finish,
            wanted=wanted,
            asking=asking,
        )
