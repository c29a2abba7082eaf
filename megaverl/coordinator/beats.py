"""What every rank says of itself once a second, and what follows from what all of them say. Pure but for `here`."""

from __future__ import annotations

import json
import linecache
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType

# Frames up from the innermost in which a wait for other ranks may show.
_DEPTH = 6
_WAITS = ("torch/distributed/", "megaverl/coordinator/exchange.py")
_CALLS = (".wait(", "barrier(", "batch_isend_irecv(")


@dataclass(frozen=True)
class Beat:
    """Of one rank.

    Attributes:
        number: grows with every beat. doing: what it began last, `seconds` ago.
        waited: seconds for which it has waited for other ranks; 0: it works.
        where: its main thread is, as file:line (function).
        host: the machine and the space of process ids in it. left: it ended of its own accord.
    """

    number: float
    doing: str
    seconds: float
    waited: float
    where: str
    host: str
    pid: int
    left: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | str) -> Beat:
        return cls(**json.loads(data))

    def __str__(self) -> str:
        machine = self.host.split("/")[0]
        return f"it was in {self.doing} for {self.seconds:.0f} s (process {self.pid} on {machine})"


def who_is_gone(
    beats: Mapping[int, Beat],
    silent: Mapping[int, float],
    lost_after: float,
    name: Callable[[int], str],
    is_gone: Callable[[Beat], bool],
) -> str:
    """The ranks that are no more; empty where all are.

    Args:
        silent: rank -> seconds since its beat last changed.
        is_gone: whether the process of a beat has ended, as far as can be known from here.
    """
    told = []
    for rank, beat in sorted(beats.items()):
        if beat.left:
            continue
        if is_gone(beat):
            told.append(f"{name(rank)} is gone: {beat}")
        elif silent.get(rank, 0.0) > lost_after:
            told.append(f"{name(rank)} has not been heard of for {silent[rank]:.0f} s: {beat}")
    return "; ".join(told)


def who_stalls(beats: Mapping[int, Beat], stalled_after: float, name: Callable[[int], str]) -> str:
    """Whom others have waited for longer than they may; empty where nobody has.

    A rank that has begun something new within that time is not stalled: it may have several things to do while others
    wait for the last of them.
    """
    here = {rank: beat for rank, beat in sorted(beats.items()) if not beat.left}
    waiting = [rank for rank, beat in here.items() if beat.waited > stalled_after]
    if not waiting:
        return ""
    longest = max(waiting, key=lambda rank: here[rank].waited)
    by_whom = f"{name(longest)} has waited for {here[longest].waited:.0f} s in {here[longest].doing}"
    busy = [rank for rank, beat in here.items() if beat.waited == 0.0]
    told = [
        f"{name(rank)} stalls: {here[rank]}, at {here[rank].where}"
        for rank in busy
        if here[rank].seconds > stalled_after
    ]
    if busy and not told:
        return ""
    if not busy:
        told = ["all ranks wait for each other", *(f"{name(r)}: {beat}, at {beat.where}" for r, beat in here.items())]
    return "; ".join(told) + f". {by_whom} (run.timeout_minutes)"


def place(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, outermost of its waits if it waits, and whether it waits for other ranks."""
    if frame is None:
        return "nowhere", False
    where = _text(frame)
    found: FrameType | None = frame
    for _ in range(_DEPTH):
        if found is None:
            break
        name = found.f_code.co_filename
        line = linecache.getline(name, found.f_lineno or 0)  # None in the middle of a call's beginning or end
        if any(part in name for part in _WAITS) or any(call in line for call in _CALLS):
            return _text(found), True
        found = found.f_back
    return where, False


def _text(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"


def this_host() -> str:
    """The machine, and the space of process ids in it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"


def process_is_gone(host: str, pid: int) -> bool:
    """Whether a process of this machine has ended; of another's nothing is known."""
    if host != this_host() or not os.path.isdir("/proc/self"):
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
