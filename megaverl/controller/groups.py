"""Worker groups: typed handles on the ranks of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from megaverl.controller.core import Controller, Wanted, first_value
from megaverl.controller.messages import Reply
from megaverl.controller.references import PendingCall, Ref

T = TypeVar("T")


class WorkerGroup:
    """Handle on the ranks of a role. A subclass has one method for each method of its workers.

    A call goes to all ranks of the group, which run the worker's method of the same
    name SPMD on their main threads. The method returns at once; await what it returns.

    Example:
        class ActorGroup(WorkerGroup):
            def log_probs(self, batch: Ref[RolloutBatch]) -> PendingCall[Ref[Tensor]]:
                return self.keep("log_probs", batch)              # the tensor stays on the ranks

            def update(self, batch: Ref[RolloutBatch]) -> PendingCall[UpdateReport]:
                return self.report("update", UpdateReport, batch)  # a small value comes back
    """

    def __init__(self, role: str, ranks: Sequence[int], controller: Controller) -> None:
        self.role = role
        self.ranks = tuple(ranks)
        self._controller = controller

    def keep(
        self,
        method: str,
        *arguments: object,
        wanted: Mapping[int, Wanted] | None = None,
        asking: Sequence[int] = (),
    ) -> PendingCall[Ref[Any]]:
        """Run a method whose value stays on the ranks; the result is a reference to it.

        Args:
            asking: ranks that ask the program while they run the method (`PendingCall.questions`).
        """
        controller = self._controller

        def finish(replies: dict[int, Reply]) -> Ref[Any]:
            return controller.make_reference(next(iter(replies.values())).call, replies)

        return controller.call(
            self.ranks,
            self.role,
            method,
            arguments,
            finish=finish,
            keeps=True,
            wanted=wanted,
            asking=asking,
        )

    def report(
        self,
        method: str,
        kind: type[T],
        *arguments: object,
        wanted: Mapping[int, Wanted] | None = None,
        asking: Sequence[int] = (),
    ) -> PendingCall[T]:
        """Run a method that returns a small value, the same on every rank; the result is the first rank's.

        Args:
            asking: ranks that ask the program while they run the method (`PendingCall.questions`).
        """
        return self._controller.call(
            self.ranks,
            self.role,
            method,
            arguments,
            finish=first_value(kind),
            wanted=wanted,
            asking=asking,
        )
