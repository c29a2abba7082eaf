"""What every rank says of itself once a second, and what follows from what all of them say. Pure but for `here`."""

from __future__ import annotations

import json
import linecache
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Literal

import psutil

Wait = Literal["", "device", "ranks"]

# Frames up from the innermost in which a wait for other ranks may show.
_DEPTH = 6
_WAITS = (
    "torch/distributed/",
    "megaverl/distributed/collectives.py",
    "megaverl/distributed/messages.py",
    "megaverl/coordinator/__init__.py",
)
_CALLS = (".wait(", "barrier(", "batch_isend_irecv(")
# Where Python waits until a device has computed, and with it for the collectives that were launched before.
_READS = (".item(", ".tolist(", ".cpu(", ".numpy(", ".to(", ".copy_(", "synchronize(", "float(", "int(", "bool(")


@dataclass(frozen=True)
class Heartbeat:
    """Of one rank.

    Attributes:
        number: grows with every beat. doing: what it began last, `seconds` ago.
        waits_for: what its main thread waits in: a call for other ranks, or for its device, which may itself wait for
            other ranks, as under NCCL; empty: it works. waited: seconds in this one call.
        where: its main thread is, as file:line (function).
        host: the machine and the space of process ids in it. left: it ended of its own accord.
        world: those of one name go through the same stages. step: in which it is, or was last.
        begun: the stages that it has begun in that step, the last one last.
        collective: that its process waits in for long, in words; empty: none is known of.
    """

    number: float
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
        """How far it is, among those of its world."""
        return self.world, self.step, self.begun

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | str) -> Heartbeat:
        found = json.loads(data)
        return cls(**found | {"begun": tuple(found["begun"])})

    def __str__(self) -> str:
        machine = self.host.split("/")[0]
        waits = f", waiting in {self.collective}" if self.collective else ""
        return f"it was in {self.doing} for {self.seconds:.0f} s (process {self.pid} on {machine}){waits}"


def this_host() -> str:
    """The machine, and the space of process ids in it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"


def process_is_gone(beat: Heartbeat) -> bool:
    """Whether the process of a beat has ended, if it is of this machine; of another's nothing is known."""
    if beat.host != this_host():
        return False
    try:
        return psutil.Process(beat.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def who_is_gone(
    beats: Mapping[int, Heartbeat],
    silent: Mapping[int, float],
    lost_after: float,
    name: Callable[[int], str],
    is_gone: Callable[[Heartbeat], bool] = process_is_gone,
) -> str:
    """The ranks that are no more; empty where all are.

    Args:
        silent: rank -> seconds since its beat last changed.
    """
    found = []
    for rank, beat in sorted(beats.items()):
        if beat.left:
            continue
        if is_gone(beat):
            found.append(f"{name(rank)} is gone: {beat}")
        elif silent.get(rank, 0.0) > lost_after:
            found.append(f"{name(rank)} has not been heard of for {silent[rank]:.0f} s: {beat}")
    return "; ".join(found)


def is_behind(beat: Heartbeat, other: Heartbeat) -> bool:
    """Whether a rank has yet to come to where another one of its world is, by what both say."""
    if beat.world != other.world or not beat.begun or not other.begun:
        return False
    if beat.step != other.step:
        return beat.step < other.step
    # a stage that only one of the two has, such as writing what was measured, puts neither behind
    return beat.begun[-1] in other.begun and other.begun[-1] not in beat.begun


def blame(beats: Mapping[int, Heartbeat], stalled_after: float) -> tuple[list[int], int] | None:
    """Which ranks hold the others up, and who has waited for them too long; None where nobody has.

    What ranks say decides first: nobody is to blame who has passed another rank of its world. Between the last ones
    their calls decide: a rank at work is to blame before one that reads from its device, which may wait for others,
    and this one before one in a call that waits for other ranks, which is to blame where others have passed it: its
    wait is for something else, such as a disk. A rank that has begun something new within the time is not to blame:
    it may have several things to do while others wait for the last of them.

    Returns:
        The ranks to blame, none where all of several wait for each other, and the rank that has waited.
    """
    here = {rank: beat for rank, beat in sorted(beats.items()) if not beat.left}
    places = {beat.reached: beat for beat in here.values()}  # a few, however many ranks there are
    is_last = {where: not any(is_behind(other, beat) for other in places.values()) for where, beat in places.items()}
    is_passed = {where: any(is_behind(beat, other) for other in places.values()) for where, beat in places.items()}
    last = [rank for rank, beat in here.items() if is_last[beat.reached]]
    at_work = [rank for rank in last if not here[rank].waits_for]
    reading = [rank for rank in last if here[rank].waits_for == "device"]
    passed = [rank for rank in last if is_passed[here[rank].reached]]
    suspects = at_work or reading or passed
    to_blame = [rank for rank in suspects if here[rank].seconds > stalled_after]
    if len(to_blame) == len(here) > 1 and all(here[rank].waited > stalled_after for rank in to_blame):
        to_blame = []
    elif suspects and not to_blame:
        return None
    waited = {rank: beat.waited for rank, beat in here.items() if rank not in to_blame}
    for rank in waited:  # nothing shows that it waits, but it has been further for so long
        if any(is_behind(here[other], here[rank]) for other in to_blame):
            waited[rank] = here[rank].seconds
    longest = max(waited, key=waited.__getitem__, default=-1)
    return (to_blame, longest) if waited.get(longest, 0.0) > stalled_after else None


def who_stalls(beats: Mapping[int, Heartbeat], stalled_after: float, name: Callable[[int], str]) -> str:
    """What to say of those whom `blame` finds; empty where nobody stalls."""
    found = blame(beats, stalled_after)
    if found is None:
        return ""
    to_blame, witness = found
    texts = [f"{name(rank)} stalls: {beats[rank]}, at {beats[rank].where}" for rank in to_blame]
    if not texts:
        here = [(name(rank), beat) for rank, beat in sorted(beats.items()) if not beat.left]
        texts = ["all ranks wait for each other", *(f"{one}: {beat}, at {beat.where}" for one, beat in here)]
    waits = beats[witness]
    seconds = waits.waited if waits.waited > stalled_after else waits.seconds
    what = f", in {waits.collective}" if waits.collective and to_blame else ""
    text = f". {name(witness)} has waited for {seconds:.0f} s in {waits.doing}{what} (run.timeout_minutes)"
    return "; ".join(texts) + text


def place(frame: FrameType | None) -> tuple[str, Wait]:
    """Where a thread is, outermost of its waits if it waits for other ranks, and what it waits for."""
    if frame is None:
        return "nowhere", ""
    where = _text(frame)
    reads = any(call in _line(frame) for call in _READS)
    found: FrameType | None = frame
    for _ in range(_DEPTH):
        if found is None:
            break
        if any(part in found.f_code.co_filename for part in _WAITS) or any(call in _line(found) for call in _CALLS):
            return _text(found), "ranks"
        found = found.f_back
    return where, "device" if reads else ""


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # no number as a call begins or ends


def _text(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
