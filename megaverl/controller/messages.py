"""Control messages between the controller and the ranks, encoded with msgpack.

    controller -> rank:  CallRequest, ProgramAnswer, Where, End
    rank -> controller:  Question, Reply, Status, Ended, Failed, Left

A message carries small values only: method names, numbers, reports, references. Tensors
never travel here; rows move from rank to rank as the moves of a call.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from megaverl.distributed.heartbeat import Heartbeat

T = TypeVar("T")
# Number of a question that nobody waits for, and of what a rank tells unasked.
NO_QUESTION = 0


class RowTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Transfer between two ranks that a call needs before it runs.

    Attributes:
        value: id of the call that made the value.
        source, dest: ranks of the job.
        rows: row numbers that the destination receives, ascending; None: the whole value.
    """

    value: int
    source: int
    dest: int
    rows: tuple[int, ...] | None = None


class ValueArgument(msgspec.Struct, frozen=True, tag="value"):
    """Argument that the rank already holds, or holds once the call's moves are done."""

    id: int


class ValuesArgument(msgspec.Struct, frozen=True, tag="values"):
    """Argument that is a list of values which the rank holds."""

    ids: tuple[int, ...]


class PlainArgument(msgspec.Struct, frozen=True, tag="plain"):
    """Argument that is sent in the message. The rank decodes it to the type in the method's signature."""

    data: bytes


Argument = ValueArgument | ValuesArgument | PlainArgument


class CallRequest(msgspec.Struct, frozen=True, tag="call"):
    """Call of the program, for one rank.

    Attributes:
        id: number of the call in the program; the value it makes has the same id.
        role, method: the method that the rank runs. `method` is empty on a rank that only sends rows for this call.
        moves: transfers in which this rank takes part, in the order of the whole job.
        keeps: the rank keeps the returned value under `id`; otherwise it replies with it.
        releases: values that the program does not refer to any more.
    """

    id: int
    role: str
    method: str
    arguments: tuple[Argument, ...]
    moves: tuple[RowTransfer, ...] = ()
    keeps: bool = False
    releases: tuple[int, ...] = ()


class Question(msgspec.Struct, frozen=True, tag="question"):
    """Question of a running call to the program.

    Attributes:
        call: id of the call.
        value: what the call asks, encoded.
    """

    call: int
    value: bytes


class ProgramAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer of the program to a running call, for every rank of the call.

    Attributes:
        call: id of the call.
        value: the answer, encoded.
    """

    call: int
    value: bytes


class Where(msgspec.Struct, frozen=True, tag="where"):
    """Question what the rank is doing. A side thread of the rank answers it, also during a long call.

    Attributes:
        beat: what the coordinator's rank is doing, for the others if its process ends; None: it is not observed.
    """

    question: int
    beat: Heartbeat | None = None


class End(msgspec.Struct, frozen=True, tag="end"):
    """End of a program, or of the whole run.

    Attributes:
        reason: why the run fails, whether a program runs or not; empty: the program has returned.
    """

    reason: str = ""


class ErrorReport(msgspec.Struct, frozen=True):
    """Exception that a rank raised.

    Attributes:
        is_secondary: the exception says that another rank is gone (a broken connection), so that rank is the cause.
        is_expected: a `MegaverlError`, whose message is shown without the traceback.
        stage: stage that the call was in; empty: it has named none.
    """

    kind: str
    text: str
    traceback: str
    is_secondary: bool = False
    is_expected: bool = False
    stage: str = ""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer of one rank to a call.

    Attributes:
        value: the returned value, encoded; empty where the rank keeps it.
        rows: row numbers of the kept value that are on this rank; None: the whole value.
        description: the value's description for the program (`references.Describes`), encoded; or empty.
        signal: number of the signal that asked this rank to leave the run, such as SIGTERM; 0: none has.
    """

    call: int
    error: ErrorReport | None = None
    value: bytes = b""
    rows: tuple[int, ...] | None = None
    description: bytes = b""
    signal: int = 0


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Answer to `Where`, or what a rank tells unasked when it begins a stage outside of programs.

    Attributes:
        question: number of the question, or `NO_QUESTION`.
        call: id of the running call, or of the last one. 0: none yet.
        name: name of that call; empty: the rank serves no program.
        is_idle: the rank waits for its next call.
        seconds: for how long it has been in this stage.
        is_asking: the running call waits for the program's answer.
        beat: what the rank's main thread does, as `heartbeat.blame` reads it; None: the rank does not observe it.
    """

    question: int
    call: int
    name: str
    stage: str
    seconds: float
    is_idle: bool
    is_asking: bool = False
    beat: Heartbeat | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Word of a rank that has received `End`, and runs no call of the program any more."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Failure of a rank outside of programs.

    Attributes:
        text: names the rank and says what failed.
        is_secondary: another rank is gone, so that rank is the cause.
    """

    text: str
    is_secondary: bool = False


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Goodbye of a rank that leaves the job. A connection that closes without it is a lost rank."""


ToRank = CallRequest | ProgramAnswer | Where | End
ToController = Question | Reply | Status | Ended | Failed | Left

_encoder = msgspec.msgpack.Encoder()
_from_controller: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(
    ToController
)


def encode(message: ToRank | ToController) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def encode_value(value: object) -> bytes:
    """Return a plain value as msgpack. Dataclasses, msgspec structs, numbers, text and containers of these work."""
    return _encoder.encode(value)


def decode_value(data: bytes, kind: type[T]) -> T:
    """Return the value that `encode_value` was given, checked against its type.

    Raises:
        msgspec.ValidationError: the data is not of this type.
    """
    return msgspec.msgpack.decode(data, type=kind, strict=False)


def decode_for_rank(data: bytes) -> ToRank:
    """Return a message from the controller."""
    return _from_controller.decode(data)


def decode_for_controller(data: bytes) -> ToController:
    """Return a message from a rank."""
    return _from_rank.decode(data)
