"""Failures of calls: which rank is the cause, and in which call. Pure functions over the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megaverl.controller.messages import ErrorReport, Status
from megaverl.distributed.heartbeat import Heartbeat
from megaverl.errors import TrainingStopped


class CallFailed(TrainingStopped):
    """Failure of a call of the program. Every later call of the program fails with the same error.

    Attributes:
        ranks: ranks at the root of the failure.
        call: name of the call, such as "actor.update".
    """

    def __init__(self, message: str, ranks: Sequence[int], call: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.call = call


class ControllerLost(TrainingStopped):
    """Loss of the connection to the controller: its process ended, or its node is not reachable."""


@dataclass(frozen=True)
class LostRank:
    """Evidence that a rank's connection broke.

    Attributes:
        beat: what the rank did when it was asked last; None: it has not answered yet.
    """

    rank: int
    reason: str
    beat: Heartbeat | None = None


@dataclass(frozen=True)
class StalledRanks:
    """Evidence that ranks hold the others up, or do not answer any more.

    Attributes:
        ranks: these ranks; empty: all wait for each other.
        text: what was seen, as sentences.
    """

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class RaisedError:
    """Evidence that a rank replied with an exception."""

    rank: int
    call: str
    error: ErrorReport


@dataclass(frozen=True)
class FailedOutside:
    """Evidence that a rank failed outside of programs.

    Attributes:
        text: names the rank and says what failed.
        is_secondary: the error says that another rank is gone.
    """

    rank: int
    text: str
    is_secondary: bool


@dataclass(frozen=True)
class PassedDeadline:
    """Evidence that a call did not finish in time.

    The cause may be another call: a rank may be late for this one because it still
    waits inside an earlier one.

    Attributes:
        call: the call whose deadline passed. seconds: its deadline.
        unfinished: by rank, the earliest call that it has not replied to.
        statuses: what those ranks say they are doing; a rank without an entry did not answer.
    """

    call: str
    seconds: float
    unfinished: Mapping[int, str]
    statuses: Mapping[int, Status]


Evidence = LostRank | RaisedError | FailedOutside | StalledRanks | PassedDeadline


def default_name(rank: int) -> str:
    """Return the name of a rank in messages, for jobs in which all ranks have the same roles."""
    return f"rank {rank}"


def is_secondary(evidence: Evidence) -> bool:
    """Return whether the evidence is an error that reports the loss of another rank."""
    if isinstance(evidence, FailedOutside):
        return evidence.is_secondary
    return isinstance(evidence, RaisedError) and evidence.error.is_secondary


def find_cause(evidence: Sequence[Evidence]) -> Evidence:
    """Return the piece of evidence nearest to the cause. `evidence` is in the order of arrival.

    A rank that dies breaks the connections of its peers, whose errors may arrive before
    its loss is noticed. So the order is: errors that a rank raised by itself before any
    loss, lost ranks, errors about broken connections, stalled ranks, missed deadlines. A
    rank that raises and then exits is reported by what it raised.
    """
    lost = [item for item in evidence if isinstance(item, LostRank)]
    errors = [
        item for item in evidence if isinstance(item, RaisedError | FailedOutside)
    ]
    own_errors = [item for item in errors if not is_secondary(item)]
    # A rank that raises and then exits is lost, too. Its error arrived first and
    # explains more.
    if own_errors and (
        not lost or evidence.index(own_errors[0]) < evidence.index(lost[0])
    ):
        return own_errors[0]
    stalled = [item for item in evidence if isinstance(item, StalledRanks)]
    for candidates in (lost, own_errors, errors, stalled):
        if candidates:
            return candidates[0]
    return evidence[0]


def find_blocking_ranks(missed: PassedDeadline) -> tuple[int, ...]:
    """Return the ranks that hold the others up, of those that have calls to reply to.

    Ranks that do not answer at all come first: their process is frozen or their node is
    gone. Otherwise the ranks that are furthest behind in the program's calls are the
    cause, because the others wait for them inside a transfer or a collective. Ranks
    that wait for the program's answer are not, since the program waits for what another
    rank asks.
    """
    silent = tuple(rank for rank in missed.unfinished if rank not in missed.statuses)
    if silent:
        return silent
    busy = [
        rank for rank in missed.unfinished if not missed.statuses[rank].is_asking
    ] or list(missed.unfinished)
    # Ranks run calls in one total order, so the smallest number is furthest behind.
    earliest = min(missed.statuses[rank].call for rank in busy)
    return tuple(rank for rank in busy if missed.statuses[rank].call == earliest)


def explain(
    cause: Evidence,
    running: Mapping[int, str],
    name: Callable[[int], str] = default_name,
) -> CallFailed:
    """Return the error for the program.

    Args:
        running: by rank, the call that it had not replied to yet; a rank without a call has no entry.
        name: returns the name of a rank in messages.
    """
    if isinstance(cause, RaisedError):
        place = (
            f"{cause.call}, {cause.error.stage}" if cause.error.stage else cause.call
        )
        text = f"{name(cause.rank)} failed in {place}: {cause.error.kind}"
        if cause.error.text:
            text += f": {cause.error.text}"
        # A MegaverlError's message is written for the user. Any other exception needs
        # its traceback.
        if not cause.error.is_expected:
            text += f"\n{cause.error.traceback.rstrip()}"
        return CallFailed(text, [cause.rank], cause.call)
    if isinstance(cause, LostRank):
        call = running.get(cause.rank, "")
        if not call:
            text = f"{name(cause.rank)} is gone: {cause.beat or cause.reason}"
            return CallFailed(text, [cause.rank], call)
        text = f"{name(cause.rank)} was lost in {call}: {cause.reason}."
        if cause.beat is not None:
            text += f" When it last answered, {cause.beat}."
        return CallFailed(text, [cause.rank], call)
    if isinstance(cause, FailedOutside):
        return CallFailed(cause.text, [cause.rank], "")
    if isinstance(cause, StalledRanks):
        calls = dict.fromkeys(running[rank] for rank in cause.ranks if rank in running)
        call = next(iter(calls), "")
        text = f"{cause.text}. Call: {', '.join(calls)}" if calls else cause.text
        return CallFailed(text, cause.ranks, call)
    blocking = find_blocking_ranks(cause)
    names = (
        name(blocking[0]) if len(blocking) == 1 else f"ranks {_list_ranks(blocking)}"
    )
    call = cause.unfinished[blocking[0]]
    text = f"{names} did not finish {call} in time"
    if call != cause.call:
        text += f", and held up {cause.call}"
    stages = [
        describe_status(name(rank), cause.statuses.get(rank)) for rank in blocking[:4]
    ]
    return CallFailed(
        f"{text} ({cause.seconds:g} s): {'; '.join(stages)}.", blocking, call
    )


def describe_status(name: str, status: Status | None) -> str:
    """Return what a rank is doing, as part of a sentence.

    Args:
        name: the rank's name in messages.
    """
    if status is None:
        return f"{name} does not answer (its process is stopped, or its node is not reachable)"
    if status.is_idle:
        return f"{name} waits for a call after {status.name}"
    if not status.name:
        return f"{name} does not serve the program: {status.beat or status.stage}"
    if status.is_asking:
        return f"{name} waits in {status.name} for the program's answer"
    text = (
        f"{name} is in {status.name}, stage {status.stage}, for {status.seconds:.0f} s"
    )
    return text if status.beat is None else f"{text}, at {status.beat.where}"


def _list_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    return shown if len(ranks) <= limit else f"{shown} and {len(ranks) - limit} more"
