"""Loop of a rank that runs the controller's calls in order until the program has ended."""

from __future__ import annotations

import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from megaverl.controller.dialogue import Dialogue, ProgramEnded
from megaverl.controller.failures import ControllerLost
from megaverl.controller.messages import (
    Argument,
    CallRequest,
    End,
    Ended,
    ErrorReport,
    Reply,
    RowTransfer,
    ValueArgument,
    ValuesArgument,
    encode,
    encode_value,
)
from megaverl.controller.references import Describes, HoldsRows
from megaverl.controller.status_board import RUN, StatusBoard
from megaverl.controller.transport import RankTransport
from megaverl.distributed.failures import says_peer_is_gone
from megaverl.errors import MegaverlError
from megaverl.user_code import describe

T = TypeVar("T")
_NONE = encode_value(None)


class Mover(Protocol):
    """Transfers rows between ranks. Both ends of a move call it, each when it comes to the move in its call."""

    async def send(self, move: RowTransfer, value: object) -> None:
        """Send the move's rows of a value that this rank holds."""

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        """Return the value with the received rows; `present` has the rows that this rank holds already."""


@functools.cache
def _read_kinds(worker: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types of the parameters of a class's public methods."""
    parameter_types: dict[str, tuple[Any, ...]] = {}
    for name, function in inspect.getmembers(worker, inspect.isfunction):
        if not name.startswith("_"):
            kinds = typing.get_type_hints(function)
            _, *parameters = inspect.signature(function).parameters
            parameter_types[name] = tuple(
                kinds.get(parameter, Any) for parameter in parameters
            )
    return parameter_types


@dataclass(frozen=True)
class Served:
    """End of a rank's loop.

    Attributes:
        reason: why the run fails; empty: the program has returned.
        error: the first exception that a call of this rank raised by itself; None: there was none, or it only said
            that another rank is gone.
    """

    reason: str
    error: BaseException | None = None


async def serve(
    rank: int,
    transport: RankTransport,
    workers: Mapping[str, object],
    mover: Mover,
    board: StatusBoard | None = None,
    signal: Callable[[], int] = lambda: 0,
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dialogue: Dialogue | None = None,
) -> Served:
    """Run the calls of a program until `End`.

    After a call has raised, the rank runs no further method, so that nothing is saved
    or trained on top of a failure. It still moves rows, for which other ranks may wait.

    On a rank it is driven by `run_blocking` on the main thread, where nothing in it
    suspends. In the simulation it is a task, and workers' methods are coroutines.

    Args:
        rank: this rank's number in the job.
        workers: by role, the object whose public methods the program calls.
        board: shows the running call to the thread that answers `Where`.
        signal: returns the number of the signal that asked this rank to leave the run, or 0.
        waiting: opened around the wait for each message.
        dialogue: lets workers' methods ask the program.

    Raises:
        ControllerLost: the connection to the controller broke.
    """
    board = board or StatusBoard()
    dialogue = dialogue or Dialogue()
    dialogue.connect(transport, board)
    first_error: BaseException | None = None
    has_failed = False
    values: dict[int, object] = {}
    board.enter_program()
    while True:
        # A method that asked the program may have received later calls while it waited
        # for the answer. They come first, to keep the order.
        message = dialogue.take_postponed()
        if message is None:
            with waiting():
                message = await transport.receive()
        if isinstance(message, End):
            board.leave_program()
            transport.send(encode(Ended()))
            return Served(message.reason, first_error)
        if not isinstance(message, CallRequest):
            continue
        # Free memory before the call allocates.
        for value in message.releases:
            values.pop(value, None)
        board.begin(
            message.id,
            f"{message.role}.{message.method}"
            if message.method
            else f"rows for {message.role}",
        )
        if has_failed:
            # The first error is reported already. A transfer that fails now is a
            # consequence.
            with suppress(Exception):
                await _move_rows(rank, message, values, mover, board)
            continue
        try:
            reply = await _run_call(
                rank, message, workers, values, mover, board, signal
            )
        # Neither can be reported to the controller: the first ends the process, the
        # second means that nobody listens.
        except (KeyboardInterrupt, ControllerLost):
            raise
        except ProgramEnded:
            continue  # the next message says why
        # A worker's SystemExit is an error of this call, too.
        except BaseException as error:
            has_failed = True
            report = _report_error(error, board.stage)
            if not report.is_secondary:
                first_error = first_error or error
            reply = Reply(message.id, report)
        board.end()
        transport.send(encode(reply))


async def _run_call(
    rank: int,
    call: CallRequest,
    workers: Mapping[str, object],
    values: dict[int, object],
    mover: Mover,
    board: StatusBoard,
    signal: Callable[[], int],
) -> Reply:
    await _move_rows(rank, call, values, mover, board)
    if not call.method:
        return Reply(call.id, signal=signal())
    board.enter(RUN)
    method, kinds = _find_method(workers, call.role, call.method)
    arguments = [
        _decode(argument, kind, values)
        for argument, kind in zip(call.arguments, kinds, strict=True)
    ]
    result = method(*arguments)
    if inspect.isawaitable(result):
        result = await result
    if not call.keeps:
        return Reply(call.id, value=encode_value(result), signal=signal())
    # The controller knows a value by the id of the call that made it, so every rank
    # stores it under this id.
    values[call.id] = result
    # Only the row numbers travel. The controller plans later moves with them.
    rows = result.held_rows() if isinstance(result, HoldsRows) else None
    description = (
        encode_value(result.describe()) if isinstance(result, Describes) else b""
    )
    return Reply(call.id, rows=rows, description=description, signal=signal())


async def _move_rows(
    rank: int,
    call: CallRequest,
    values: dict[int, object],
    mover: Mover,
    board: StatusBoard,
) -> None:
    """Send and receive the rows that a call needs, in the order of the call."""
    for move in call.moves:
        if move.source == rank:
            board.enter(f"send rows to rank {move.dest}")
            await mover.send(move, values[move.value])
        else:
            board.enter(f"receive rows from rank {move.source}")
            values[move.value] = await mover.receive(move, values.get(move.value))


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because everything in it blocks instead; return its result.

    No event loop runs meanwhile, so that workers may call `asyncio.run` themselves.

    Raises:
        RuntimeError: the coroutine suspended.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return typing.cast(T, done.value)
    coroutine.close()
    raise RuntimeError("a worker's method suspended; on a rank it must block instead")


def _find_method(
    workers: Mapping[str, object], role: str, name: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a public method of a worker, with the types that its plain arguments are decoded to."""
    if role not in workers:
        raise LookupError(
            f"this rank has no worker for the role {role!r}; it has {', '.join(sorted(workers))}"
        )
    kinds = _read_kinds(typing.cast(Any, type(workers[role])))
    if name not in kinds:
        raise LookupError(
            f"the worker of {role!r} has no method {name!r}; it has {', '.join(sorted(kinds))}"
        )
    return getattr(workers[role], name), kinds[name]


def _decode(argument: Argument, kind: Any, values: Mapping[int, object]) -> object:
    if isinstance(argument, ValueArgument):
        return values[argument.id]
    if isinstance(argument, ValuesArgument):
        return [values[id] for id in argument.ids]
    if argument.data == _NONE:
        # Whatever the parameter's type is, which may be one that msgspec does not know.
        return None
    return msgspec.msgpack.decode(argument.data, type=kind, strict=False)


def _report_error(error: BaseException, stage: str) -> ErrorReport:
    """Return what the controller needs to know of an exception, whatever the exception does when it is printed."""
    kind = type(error).__name__
    # The same text as in the job's failure reason, which the rank compares it with.
    text = describe(error).removeprefix(kind).removeprefix(": ")
    trace = "".join(traceback.format_exception(error))
    is_secondary = isinstance(error, ConnectionError) or says_peer_is_gone(error)
    return ErrorReport(
        kind, text, trace, is_secondary, isinstance(error, MegaverlError), stage
    )
