"""Dialogue of a running call with the program: the call asks, the program answers, and the call goes on.

    rank, inside call 7                       program
    ask(report)  ------ Question 7 ------>    reports = await call.questions(Report)
    returns      <--- ProgramAnswer 7 ----    call.answer(decide(reports))

A question is no call: the calls that the program makes meanwhile wait until this one is
over, as always.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from megaverl.controller.messages import (
    CallRequest,
    End,
    ProgramAnswer,
    Question,
    ToRank,
    decode_value,
    encode,
    encode_value,
)
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.transport import RankTransport

T = TypeVar("T")


class ProgramEnded(BaseException):
    """Signal that the program has ended while a call waited for its answer.

    It is no `Exception`, so that a worker's method does not handle it: the call is
    given up.
    """


class Dialogue:
    """One rank's end of the dialogues between its calls and the program. `serve` connects it.

    Example:
        def update(self, batch: RolloutBatch) -> bool:      # a worker's method, on every rank of the group
            report = self._compute_gradient(batch)
            decision = run_blocking(self._dialogue.ask(report if self._is_first else None, Decision))
    """

    def __init__(self) -> None:
        self._transport: RankTransport | None = None
        self._board: StatusBoard | None = None
        self._postponed: deque[ToRank] = deque()

    def connect(self, transport: RankTransport, board: StatusBoard) -> None:
        """Use the connection of a program that begins.

        Args:
            board: knows the running call, whose method may ask, and shows the controller which ranks wait for an
                answer. They do not hold up the others.
        """
        self._transport, self._board = transport, board
        self._postponed.clear()

    def take_postponed(self) -> ToRank | None:
        """Return the next message that arrived while a call waited for an answer, or None."""
        return self._postponed.popleft() if self._postponed else None

    async def ask(self, question: object | None, kind: type[T]) -> T:
        """Ask the program, and wait for its answer. Every rank of the call waits for the same answer.

        Args:
            question: a small value; None on ranks that only wait. The handle names those that ask (`WorkerGroup.keep`).
            kind: type of the answer.

        Raises:
            ProgramEnded: the program has ended.
            ControllerLost: the connection to the controller broke.
        """
        transport, board = self._transport, self._board
        assert transport is not None and board is not None, (
            "only a call of a program can ask"
        )
        if question is not None:
            transport.send(encode(Question(board.call, encode_value(question))))
        board.ask(True)
        try:
            return decode_value(await self._receive_answer(transport, board.call), kind)
        finally:
            board.ask(False)

    async def _receive_answer(self, transport: RankTransport, call: int) -> bytes:
        while True:
            message = await transport.receive()
            if isinstance(message, ProgramAnswer) and message.call == call:
                return message.value
            if isinstance(message, End):
                # The calls in between do not run any more.
                self._postponed = deque([message])
                raise ProgramEnded
            if isinstance(message, CallRequest):
                self._postponed.append(message)
