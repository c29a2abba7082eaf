"""Worker groups: typed handles on the ranks of a role."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from megaverl.controller.core import Controller, Wanted, first_value
from megaverl.controller.messages import Reply
from megaverl.controller.references import PendingCall, Ref

T = TypeVar("T")
P = ParamSpec("P")
G = TypeVar("G", bound="WorkerGroup")


def remote(
    stub: Callable[Concatenate[G, P], T],
) -> Callable[Concatenate[G, P], PendingCall[T]]:
    """Make a method of a worker group that runs the worker's method of the same name on the ranks.

    The decorated function has a signature and a docstring, and no body. If it returns a
    `Ref`, the value stays on the ranks. Any other value comes back to the program.
    """
    signature = inspect.signature(stub)

    @functools.wraps(stub)
    def method(group: G, /, *arguments: P.args, **keywords: P.kwargs) -> PendingCall[T]:
        bound = signature.bind(group, *arguments, **keywords)
        # The worker's method takes all arguments in this order.
        bound.apply_defaults()
        _, *values = bound.arguments.values()
        kind = _returned(stub)
        if typing.get_origin(kind) is Ref:
            return cast(PendingCall[T], group.keep(stub.__name__, *values))
        return group.report(stub.__name__, kind, *values)

    return method


@functools.cache
def _returned(stub: Callable[..., Any]) -> Any:
    """Return the type that a function returns. Annotations are evaluated when it is called first."""
    return typing.get_type_hints(stub)["return"]


class WorkerGroup:
    """Handle on the ranks of a role. A subclass has one method for each method of its workers.

    A call goes to all ranks of the group, which run the worker's method of the same
    name SPMD on their main threads. The method returns at once; await what it returns.

    Example:
        class ActorGroup(WorkerGroup):
            @remote
            def log_probs(self, batch: Ref[RolloutBatch]) -> Ref[Tensor]:
                ...  # the tensor stays on the ranks

            @remote
            def update(self, batch: Ref[RolloutBatch]) -> UpdateReport:
                ...  # a small value comes back

        pending = actor.update(batch)  # PendingCall[UpdateReport]
    """

    def __init__(self, role: str, ranks: Sequence[int], controller: Controller) -> None:
        self.role = role
        self.ranks = tuple(ranks)
        self._controller = controller

    def _wanted(self, arguments: Sequence[object]) -> Mapping[int, Wanted] | None:
        """Return what each rank needs of the references among the arguments of a call (`Controller.call`)."""
        return None

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
            wanted=self._wanted(arguments) if wanted is None else wanted,
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
            wanted=self._wanted(arguments) if wanted is None else wanted,
            asking=asking,
        )
