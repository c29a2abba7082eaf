"""A lost or stalled rank is named on every rank: all write to the store what they do, the coordinator reads it.

A thread of each rank writes a heartbeat a second, and reads the coordinator's and whether there is a failure reason;
the coordinator's thread reads all. So the work of a rank does not grow with the job. Who finds a rank gone writes the
failure reason; the first one stands. Every rank then shows it and ends, unless its main thread ends by itself before.

Which collective a rank waits in is read from torch's flight recorder, as JSON. torch keeps the last collectives of a
process, of NCCL and of gloo in a recorder each (torch 2.13: `torch/csrc/distributed/c10d/FlightRecorder.hpp` and
`FlightRecorderDetail.hpp`; NCCL's messages between two ranks are in it as well, gloo's are not).
`TORCH_NCCL_TRACE_BUFFER_SIZE` is how many, 0: none.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d

from megaverl.distributed.heartbeat import Heartbeat, Wait, place, this_host, who_is_gone, who_stalls
from megaverl.errors import FAILED
from megaverl.user_code import describe

# Of NCCL, where torch is built with it, and of the other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_WRITES_TO = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_flight_record(folder: Path, world: str = "") -> None:
    """Let torch, where its own deadline passes first, write its recorder into a folder that is there, as one file a
    rank for its `torchfrtrace`. What the environment names already stays.

    Args:
        world: of this rank, where there are several, each with ranks from 0.
    """
    if not any(name in os.environ for name in _WRITES_TO):
        words = ["nccl_trace", *re.findall(r"\w+", world), "rank_"]
        os.environ[_WRITES_TO[-1]] = str(folder.absolute() / "_".join(words))


def waits_in() -> str:
    """The collective that this process began first of those that are not over; '' where it is in none, or the
    recorder is off. Nobody is waited for: a device is asked how far it is."""
    entries: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for name in _DUMPS:
        if dump := getattr(_distributed_c10d, name, None):
            trace = json.loads(dump())
            entries += [(entry, trace.get("pg_config", {})) for entry in unfinished(trace.get("entries", ()))]
    if not entries:
        return ""
    entry, groups = min(entries, key=lambda found: found[0]["time_created_ns"])
    return describe_collective(entry, groups, time.time_ns())


def unfinished(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What is not over: NCCL's are found to be complete, gloo's are only retired."""
    return [entry for entry in entries if entry["state"] != "completed" and not entry["retired"]]


def describe_collective(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]], now: int) -> str:
    """As "all_reduce 17 of the group tp (ranks [0, 1]), BFloat16 [4096, 1024], begun 312 s ago".

    Args:
        groups: the recorder's `pg_config`: by name, what each is and which ranks it has.
        now: in nanoseconds since 1970.
    """
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, what = entry["process_group"]
    ranks = groups.get(name, {}).get("ranks", "[]")
    text = f"{operation} {number} of the group {what if what not in ('', 'undefined') else name}"
    text += f" (ranks {ranks})" if ranks != "[]" else ""
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    if dtypes:
        more = f" and {len(dtypes) - 1} more" if len(dtypes) > 1 else ""
        text += f", {dtypes[0]} {sizes[0]}{more}"
    return f"{text}, {_STATES[entry['state']]} {(now - entry['time_created_ns']) / 1e9:.0f} s ago"


# A device has come to it, or it waits there behind another.
_STATES = {"scheduled": "queued", "started": "begun"}


class Collectives(NamedTuple):
    """What a process sent into collectives of one kind, in one group.

    Attributes:
        ranks: of the group; empty: torch does not say. calls: how many. nbytes: of all inputs.
    """

    ranks: tuple[int, ...]
    operation: str
    calls: int
    nbytes: int


def recorded_collectives(since: int) -> tuple[list[Collectives], bool]:
    """Those that this process began after a moment (nanoseconds since 1970), and whether that is all of them: the
    recorder keeps the last ones only. Messages between two ranks are in it under NCCL alone."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = {}
    is_whole = True
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is None:
            continue
        trace = json.loads(dump())
        entries, groups = trace.get("entries", ()), trace.get("pg_config", {})
        if entries and entries[0]["record_id"] > 0 and entries[0]["time_created_ns"] >= since:
            is_whole = False
        for entry in entries:
            if entry["time_created_ns"] < since:
                continue
            number, what = entry["process_group"]
            ranks = re.findall(r"\d+", groups.get(number, {}).get("ranks", "") or what.partition("(")[2])
            operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
            sums = found.setdefault((tuple(map(int, ranks)), operation), [0, 0])
            sums[0] += 1
            sums[1] += sum(
                _BYTES_OF.get(t, 1) * prod(n) for t, n in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            )
    return [Collectives(*key, *sums) for key, sums in sorted(found.items())], is_whole


# torch's names of dtypes there; of others (8-bit floats, integers, booleans) it is one byte.
_BYTES_OF = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2}


_REASON = "liveness/failure_reason"
ASKS_AFTER = 10.0  # seconds of waiting, at most: then the flight recorder is asked what for
# What the transports say when the other side is gone.
_SILENCE = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Timed out waiting|timed out|Socket|gloo|NCCL|recvBytes|TCPStore"
)


@dataclass(frozen=True)
class Timeouts:
    """Seconds: between beats; without a beat until a rank counts as lost (a call that holds the interpreter is
    shorter); that a rank may wait for others; that a rank may take to end by itself once there is a failure reason."""

    stalled_after: float
    interval: float = 1.0
    lost_after: float = 30.0
    grace: float = 4.0

    @property
    def until_found(self) -> float:
        """Seconds within which a rank that is gone is found to be: two beats to miss it, two to say so."""
        return 4 * self.interval + 0.5


class Liveness:
    """Of one rank; every rank of the job makes one.

    Args:
        store: the job's; a connection of its own is made, since others may be blocked in a wait.
        coordinator: the rank that reads all beats.
        name: how a rank is called in a message.
        world: of this rank; those of one name go through the same stages.
        say: shows the failure reason before this rank is ended.
        end: ends this rank, with an exit code.
        show: given all ranks' beats where they are read.

    The thread that makes it is the rank's main one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        coordinator: int,
        timeouts: Timeouts,
        name: Callable[[int], str] = lambda rank: f"rank {rank}",
        world: str = "",
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        end: Callable[[int], object] = os._exit,
        show: Callable[[Mapping[int, Heartbeat]], object] = lambda beats: None,
    ) -> None:
        self.rank, self.size, self.coordinator = rank, size, coordinator
        self.timeouts, self.name, self._say, self._end_rank = timeouts, name, say, end
        self._show = show
        self.failure_reason: str | None = None
        self._found = threading.Event()
        self._stop = threading.Event()
        self._world = world
        self._position: tuple[int, tuple[str, ...]] = (0, ("start",))  # the step, and what of it has begun
        self._doing, self._since = "start", time.monotonic()
        self._left = False
        self._rounds = 0  # of the thread that speaks with the store
        self._main = threading.get_ident()
        self._call: tuple[int, int, Wait] = (0, 0, "")  # in which the main thread waits, and since when
        self._called = 0.0
        self._collective: str | None = None  # that is waited in, where the flight recorder was asked
        self._seen: dict[int, tuple[Heartbeat, float]] = {}  # rank -> its last beat, and when it changed
        connection: Any = store  # torch's own annotations leave `clone` out
        self._store: dist.Store = connection.clone()
        self._publish()
        if self._store.add("liveness/count", 1) == size:
            self._store.set(_REASON, "")
        self._store.wait([_REASON])  # from here on every key is there
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="liveness-guard", daemon=True).start()

    def status(self, stage: str, step: int | None = None) -> None:
        """This rank begins a stage of a step, or of what is between two; published at once, so that it is known of a
        rank that ends in it. A thread beside the main one, such as a writer, does not say how far this rank is."""
        if threading.get_ident() == self._main:
            before, begun = self._position
            now = before if step is None else step
            earlier = (one for one in begun if one != stage) if now == before else ()
            self._position = (now, (*earlier, stage))
        self._doing, self._since = stage if step is None else f"step {step}: {stage}", time.monotonic()
        self._try_to_publish()

    def leave(self) -> None:
        """This rank ends of its own accord, and so may the others."""
        self._left = True
        self._stop.set()
        self._thread.join(timeout=2 * self.timeouts.interval)
        self._try_to_publish()

    def report_failure(self, text: str) -> str:
        """Make this the reason why the run fails, for all ranks; returns the one that stands."""
        try:
            reason = self._store.compare_set(_REASON, "", text).decode()
        except RuntimeError:  # no store any more: the text is for this rank alone
            reason = text
        self.failure_reason = reason
        self._found.set()
        return reason

    def last_heard(self, rank: int) -> str:
        """What a rank was doing when this one last heard of it; the coordinator hears of all."""
        seen = self._seen.get(rank)
        return str(seen[0]) if seen else ""

    def wait(self, seconds: float) -> bool:
        """Whether there is a failure reason, or comes within so long."""
        return self._found.wait(seconds)

    def settle(self, seconds: float, otherwise: str) -> str:
        """The failure reason, waited for so long; where there is none, `otherwise` becomes it.

        For a main thread that was cut off: it then ends by itself, with these words.
        """
        self._found.wait(seconds)
        self._stop.set()
        reason = self.failure_reason or self.report_failure(otherwise)
        if self._store_ends_with_me():
            time.sleep(3 * self.timeouts.interval)  # others must read it first
        return reason

    def _store_ends_with_me(self) -> bool:
        """Whether others lose the store when this rank ends: it keeps it, or the agent that does, of several nodes'
        the first, ends with its ranks."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return self.rank == 0
        return os.environ.get("GROUP_RANK") == "0" and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1

    def explain(self, error: BaseException) -> str | None:
        """What to say of an error on this rank: the failure reason, if it comes of another rank's end, else None.

        Without one the error is made the reason, for ranks that wait for this one.
        """
        if self.size == 1:
            return None
        if isinstance(error, KeyboardInterrupt):
            self.settle(0.0, f"{self.name(self.rank)} was in {self._doing} and {_interrupted_here()}")
            return None
        what = describe(error)
        own = f"{self.name(self.rank)} failed in {self._doing}: {what}"
        silent = _SILENCE.search(_chain(error)) is not None
        reason = self.settle(self.timeouts.lost_after + 3 * self.timeouts.interval if silent else 0.0, own)
        return None if reason.endswith(what) else reason  # an error that all ranks have, each of them tells

    def _guard(self) -> None:
        """Ends a rank that is cut off: a call to a store behind a dead link may not come back, whatever its timeout.

        It counts its own rounds, so that an interpreter that was busy elsewhere counts for nothing.
        """
        rounds, seen = 0, self._rounds
        while not self._stop.wait(self.timeouts.interval):
            rounds, seen = (0, self._rounds) if seen != self._rounds else (rounds + 1, seen)
            if rounds * self.timeouts.interval > self.timeouts.lost_after:
                self._end(self._without_a_store(silent=rounds * self.timeouts.interval))

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self.timeouts.interval):
                self._rounds += 1
                self._publish()
                if reason := self._look():
                    self._end(reason)
                    return
        except RuntimeError as error:  # the store's
            if not self._stop.is_set():
                self._end(self._without_a_store(error))

    def _without_a_store(self, error: Exception | None = None, silent: float = 0.0) -> str:
        """Whoever keeps it is gone, or silent for so many seconds: torchrun's agent, or the first rank, whose last beat
        may be known here."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        what = "is gone" if error is not None else f"has not been heard of for {silent:.0f} s"
        keeper = "torchrun's agent" if agent else self.name(0)
        text = f"{keeper}, which keeps the job's store, {what}"
        if agent:
            return text + (f" ({error})" if error is not None else "")
        return f"{text}: {self.last_heard(0) or 'nothing was heard of it'}"

    def _look(self) -> str:
        """The failure reason, if there is one or this rank finds it."""
        ranks = range(self.size) if self.rank == self.coordinator else [self.coordinator]
        data = self._store.multi_get([_REASON, *(f"liveness/beat/{rank}" for rank in ranks)])
        if data[0]:
            return bytes(data[0]).decode()
        now = time.monotonic()
        for rank, found in zip(ranks, data[1:], strict=True):
            beat = Heartbeat.from_json(bytes(found))
            if rank not in self._seen or self._seen[rank][0].number != beat.number:
                self._seen[rank] = (beat, now)
        beats = {rank: beat for rank, (beat, _) in self._seen.items()}
        if self.rank == self.coordinator:
            self._show(beats)
        silent = {rank: now - changed for rank, (_, changed) in self._seen.items()}
        text = who_is_gone(beats, silent, self.timeouts.lost_after, self.name)
        if not text and self.rank == self.coordinator:
            text = who_stalls(beats, self.timeouts.stalled_after, self.name)
        return self.report_failure(text) if text else ""

    def _end(self, reason: str) -> None:
        """Pass on the reason, and end the process unless it ends by itself."""
        self.failure_reason = reason
        self._found.set()
        if self._stop.wait(self.timeouts.grace):
            return
        if not reason.endswith(_interrupted_here()):  # here, who started the ranks says so
            self._say(f"{reason}. {self.name(self.rank)} was in {self._doing}; the run ends.")
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_rank(FAILED)

    def _try_to_publish(self) -> None:
        try:
            self._publish()
        except RuntimeError:  # the thread finds out as well that there is no store any more, and tells
            return

    def _publish(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        where, waits_for = place(frame)
        now = time.monotonic()
        call = (id(frame), frame.f_lasti if frame else 0, waits_for)
        if call != self._call:
            self._call, self._called, self._collective = call, now, None
        asks_after = min(ASKS_AFTER, self.timeouts.stalled_after / 2)
        if waits_for and self._collective is None and now - self._called > asks_after:
            self._collective = waits_in()
        step, begun = self._position
        beat = Heartbeat(
            number=time.time(),
            doing=self._doing,
            seconds=now - self._since,
            waits_for=waits_for,
            waited=now - self._called if waits_for else 0.0,
            where=where,
            host=this_host(),
            pid=os.getpid(),
            left=self._left,
            world=self._world,
            step=step,
            begun=begun,
            collective=self._collective or "",
        )
        self._store.set(f"liveness/beat/{self.rank}", beat.to_json())


def _interrupted_here() -> str:
    return f"was interrupted on {socket.gethostname()}"


def _chain(error: BaseException | None) -> str:
    """The texts of an error and of its causes."""
    texts = []
    while error is not None:
        texts.append(describe(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)
