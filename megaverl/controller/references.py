"""References to values that stay on the ranks which made them, and handles of calls in flight."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from megaverl.controller.messages import decode_value

T = TypeVar("T")
Q = TypeVar("Q")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Describes(Protocol):
    """Value that tells the program something about itself: lengths, a weight version, a number of rows."""

    def describe(self) -> object:
        """Return a small value that msgpack can carry; the same on every rank that holds the value."""


@runtime_checkable
class HoldsRows(Protocol):
    """Value whose rows are distributed over ranks. Row numbers are global."""

    def held_rows(self) -> tuple[int, ...]:
        """Return the numbers of the rows on this rank, ascending."""


class Ref(Generic[T_co]):
    """Reference to a value of type `T_co` that is held by ranks.

    The program passes it to calls; a rank that needs rows which it does not hold
    receives them as part of the call. Ranks drop the value once the program has dropped
    its last reference.

    Attributes:
        id: number of the call that made the value.
        rows: by rank that holds it, the rows there; None: the whole value.
    """

    def __init__(
        self,
        id: int,
        rows: Mapping[int, tuple[int, ...] | None],
        description: bytes,
        release: Callable[[int, Iterable[int]], None],
    ) -> None:
        self.id = id
        self.rows = dict(rows)
        self._description = description
        # The mapping itself, not a copy: it also lists ranks that receive the value later,
        # and they must drop it as well.
        weakref.finalize(self, release, id, self.rows).atexit = False

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold the value, or rows of it."""
        return tuple(self.rows)

    def describe(self, kind: type[T]) -> T:
        """Return the value's description (`Describes`), as this type.

        Raises:
            TypeError: the value describes nothing.
        """
        if not self._description:
            raise TypeError(
                f"the value of call {self.id} describes nothing: give its type a describe() method"
            )
        return decode_value(self._description, kind)

    def __repr__(self) -> str:
        return f"Ref(id={self.id}, holders={self.holders})"


class PendingCall(Generic[T]):
    """Call that has been sent. Await it for the result; await it later to run something else beside it.

    Args:
        asking: ranks that ask the program while they run the call (`dialogue.Dialogue`).
        answer: sends an answer to all ranks of the call.

    Example:
        coming = run.rollout.generate(prompts)   # the engines begin
        update = run.actor.update(batch)         # the actor trains meanwhile
        while reports := await update.questions(Report):
            update.answer(decide(reports))
        next_batch = await coming
    """

    def __init__(
        self,
        name: str,
        future: asyncio.Future[T],
        asking: Sequence[int] = (),
        answer: Callable[[object], None] = lambda value: None,
    ) -> None:
        self.name = name
        self._future = future
        self._asking = tuple(asking)
        self._send_answer = answer
        # By rank: what it asks. None: the call has ended.
        self._asked: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        future.add_done_callback(lambda done: self._asked.put_nowait(None))

    def __await__(self) -> Generator[Any, None, T]:
        # Shielded: a program that gives up on waiting must not cancel the call, which
        # the ranks run all the same.
        return asyncio.shield(self._future).__await__()

    def take_question(self, rank: int, value: bytes) -> None:
        """Keep what a rank asks, encoded, until the program looks."""
        self._asked.put_nowait((rank, value))

    async def questions(self, kind: type[Q]) -> list[Q]:
        """Wait until every rank that asks has asked once more. Return their questions in rank order.

        Returns:
            Values of type `kind`; none once the call has ended, or if it never asks.

        Raises:
            CallFailed: the call failed; the error names the rank and the call.
        """
        values: dict[int, Q] = {}
        while len(values) < len(self._asking):
            question = await self._asked.get()
            if question is None:
                self._asked.put_nowait(None)  # for further calls of this method
                await self
                return []
            rank, value = question
            values[rank] = decode_value(value, kind)
        return [values[rank] for rank in sorted(values)]

    def answer(self, value: object) -> None:
        """Answer the questions, with one value for all ranks of the call. The ranks go on with the call."""
        self._send_answer(value)

    def is_done(self) -> bool:
        """Return whether all ranks have replied. Do not let it decide what is computed: a resumed run may differ."""
        return self._future.done()
