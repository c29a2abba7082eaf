"""Heartbeats of ranks, and the decision from them which rank is lost or stalled.

The job's controller asks every rank for its heartbeat and applies these rules
(`RankWatch` has their limits).

All functions are pure except `this_host` and `place`.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Literal

Wait = Literal["", "device", "ranks"]

# Number of innermost frames that are searched for a wait for other ranks.
_DEPTH = 6
_WAITS = (
    "torch/distributed/",
    "megaverl/distributed/collectives.py",
    "megaverl/distributed/messages.py",
    "megaverl/controller/dialogue.py",
)
_CALLS = (".wait(", "barrier(", "batch_isend_irecv(")
# Calls that block until the device has finished, including the collectives launched
# before.
_READS = (
    ".item(",
    ".tolist(",
    ".cpu(",
    ".numpy(",
    ".to(",
    ".copy_(",
    "synchronize(",
    "float(",
    "int(",
    "bool(",
)


@dataclass(frozen=True)
class Heartbeat:
    """State of one rank.

    Attributes:
        doing: name of the stage that it began last.
        seconds: time since then.
        waits_for: what its main thread blocks on: "ranks", "device" (which may itself wait for other ranks, as under
            NCCL), or "" if it is working.
        waited: seconds in this call.
        where: position of its main thread, as file:line (function).
        host: machine and process id namespace.
        pid: process id.
        left: it ended on its own, without a failure.
        world: ranks with the same name run the same stages.
        step: current or last step.
        begun: stages begun in that step, the latest last.
        collective: description of the collective that it has been blocked in for long; "" if none is known.
    """

    doing: str
    seconds: float
    waits_for: Wait
    waited: float
    where: str
    host: str
    pid: int
    left: bool = False
    world: str = ""
    step: int = 0
    begun: tuple[str, ...] = ()
    collective: str = ""

    @property
    def reached(self) -> tuple[str, int, tuple[str, ...]]:
        """Progress of the rank, to compare with other ranks of its world: (world, step, stages begun)."""
        return self.world, self.step, self.begun

    @classmethod
    def from_json(cls, data: bytes | str) -> Heartbeat:
        fields = json.loads(data)
        return cls(**fields | {"begun": tuple(fields["begun"])})

    def __str__(self) -> str:
        machine = self.host.split("/")[0]
        waits = f", waiting in {self.collective}" if self.collective else ""
        return f"it was in {self.doing} for {self.seconds:.0f} s (process {self.pid} on {machine}){waits}"


def show_nothing(beats: Mapping[int, Heartbeat]) -> None:
    """Do nothing with heartbeats."""


@dataclass(frozen=True)
class RankWatch:
    """Limits of a watch over the ranks, in seconds.

    Attributes:
        stalled_after: how long a rank may wait for others.
        interval: between two rounds of questions to all ranks.
        lost_after: silence after which a rank counts as lost. It must exceed the longest call that holds the
            interpreter.
        grace: how long a rank may take to end by itself after a failure.
        show: gets the last heartbeats of all ranks whenever they are read.
    """

    stalled_after: float
    interval: float = 1.0
    lost_after: float = 30.0
    grace: float = 4.0
    show: Callable[[Mapping[int, Heartbeat]], object] = show_nothing

    @property
    def until_found(self) -> float:
        """Seconds within which a stalled rank is named after `stalled_after`: four rounds of questions."""
        return 4 * self.interval + 0.5


def this_host() -> str:
    """Return the machine and the process id namespace."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"


def who_is_silent(
    beats: Mapping[int, Heartbeat],
    silent: Mapping[int, float],
    lost_after: float,
    name: Callable[[int], str],
) -> tuple[list[int], str]:
    """Return the ranks that are lost, and a text that names them.

    Args:
        beats: rank -> last heartbeat.
        silent: rank -> seconds since that heartbeat.
        lost_after: seconds of silence after which a rank counts as lost.
        name: name of a rank in the text.
    """
    texts = {
        rank: f"{name(rank)} has not been heard of for {silent[rank]:.0f} s: {beat}"
        for rank, beat in sorted(beats.items())
        if not beat.left and silent.get(rank, 0.0) > lost_after
    }
    return list(texts), "; ".join(texts.values())


def is_behind(beat: Heartbeat, other: Heartbeat) -> bool:
    """Return whether a rank has not yet reached the stage that another rank of its world is in."""
    if beat.world != other.world or not beat.begun or not other.begun:
        return False
    if beat.step != other.step:
        return beat.step < other.step
    # A stage that only one of the two runs, such as writing metrics, puts neither
    # behind.
    return beat.begun[-1] in other.begun and other.begun[-1] not in beat.begun


def blame(
    beats: Mapping[int, Heartbeat], stalled_after: float
) -> tuple[list[int], int] | None:
    """Find the ranks that block the others, and the rank that has waited longest for them.

    First, only ranks that are not ahead of another rank of their world are suspects.
    Among these, suspicion goes in this order:

        1. ranks that are working
        2. ranks that read from their device, which may wait for others
        3. ranks that wait for other ranks although others have passed them: they wait for something else, such as a
        disk

    A rank that began a stage within `stalled_after` is not blamed: it may have several
    stages to run while others wait for the last of them.

    Returns:
        The ranks to blame (empty if several ranks all wait for each other) and the rank that has waited, or None if no
        rank has waited for longer than `stalled_after` seconds.
    """
    present = {rank: beat for rank, beat in sorted(beats.items()) if not beat.left}
    # Few entries even with many ranks.
    places = {beat.reached: beat for beat in present.values()}
    is_last = {
        where: not any(is_behind(other, beat) for other in places.values())
        for where, beat in places.items()
    }
    is_passed = {
        where: any(is_behind(beat, other) for other in places.values())
        for where, beat in places.items()
    }
    last = [rank for rank, beat in present.items() if is_last[beat.reached]]
    at_work = [rank for rank in last if not present[rank].waits_for]
    reading = [rank for rank in last if present[rank].waits_for == "device"]
    passed = [rank for rank in last if is_passed[present[rank].reached]]
    suspects = at_work or reading or passed
    to_blame = [rank for rank in suspects if present[rank].seconds > stalled_after]
    # If every rank is a suspect and has waited, no single rank is at fault: all wait
    # for each other.
    if len(to_blame) == len(present) > 1 and all(
        present[rank].waited > stalled_after for rank in to_blame
    ):
        to_blame = []
    elif suspects and not to_blame:
        return None
    waited = {
        rank: beat.waited for rank, beat in present.items() if rank not in to_blame
    }
    # A rank that is ahead of a blamed rank counts as waiting, even if its call does not
    # show it.
    for rank in waited:
        if any(is_behind(present[blamed], present[rank]) for blamed in to_blame):
            waited[rank] = present[rank].seconds
    longest = max(waited, key=waited.__getitem__, default=-1)
    return (to_blame, longest) if waited.get(longest, 0.0) > stalled_after else None


def who_stalls(
    beats: Mapping[int, Heartbeat], stalled_after: float, name: Callable[[int], str]
) -> tuple[list[int], str]:
    """Return the ranks that `blame` finds, and a text about them, which is "" if none stalls."""
    blamed = blame(beats, stalled_after)
    if blamed is None:
        return [], ""
    to_blame, witness = blamed
    texts = [
        f"{name(rank)} stalls: {beats[rank]}, at {beats[rank].where}"
        for rank in to_blame
    ]
    if not texts:
        present = [
            (name(rank), beat) for rank, beat in sorted(beats.items()) if not beat.left
        ]
        texts = [
            "all ranks wait for each other",
            *(f"{rank_name}: {beat}, at {beat.where}" for rank_name, beat in present),
        ]
    waits = beats[witness]
    seconds = waits.waited if waits.waited > stalled_after else waits.seconds
    collective = f", in {waits.collective}" if waits.collective and to_blame else ""
    text = f". {name(witness)} has waited for {seconds:.0f} s in {waits.doing}{collective} (run.timeout_minutes)"
    return to_blame, "; ".join(texts) + text


def place(frame: FrameType | None) -> tuple[str, Wait]:
    """Return the position of a thread, and what it waits for.

    If it waits for other ranks, the position is the outermost frame of that wait.
    """
    if frame is None:
        return "nowhere", ""
    where = _text(frame)
    is_reading = any(call in _line(frame) for call in _READS)
    outer: FrameType | None = frame
    for _ in range(_DEPTH):
        if outer is None:
            break
        if any(part in outer.f_code.co_filename for part in _WAITS) or any(
            call in _line(outer) for call in _CALLS
        ):
            return _text(outer), "ranks"
        outer = outer.f_back
    return where, "device" if is_reading else ""


def _line(frame: FrameType) -> str:
    # None while a call begins or ends.
    return _source_line(frame.f_code.co_filename, frame.f_lineno or 0)


@functools.lru_cache(maxsize=2048)
def _source_line(filename: str, number: int) -> str:
    """Return a line of a source file, without keeping the file in memory, as linecache would."""
    was_kept = filename in linecache.cache
    line = linecache.getline(filename, number)
    if not was_kept:
        linecache.cache.pop(filename, None)
    return line


def _text(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
