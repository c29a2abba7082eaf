"""A lost or stalled rank ends the run with its name: every rank tells the store what it is doing, and reads it.

A thread of each rank writes a beat a second and reads one neighbour's, so that the work does not grow with the
world. Who finds its neighbour gone (no process, or no beat) writes the verdict, which all read; each then shows it
and ends. A rank that waits in a collective for longer than the run allows looks for the one that does not wait.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from megaverl.coordinator.beats import process_is_gone, this_host
from megaverl.metrics.console import Console

INTERVAL = 1.0  # seconds between beats
LOST_AFTER = 30.0  # seconds without a beat; a call that holds the interpreter is shorter than that
SPEAKS_FIRST = 60.0  # seconds that the transports wait beyond what the run allows: the watchdog can name the rank
GRACE = 4.0  # seconds in which a rank may end by itself once there is a verdict
_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout")
# What the transports say when the other side is gone.
_SILENCE = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Timed out waiting|timed out|Socket|gloo|NCCL|recvBytes|TCPStore"
)


class Watchdog:
    """Of one rank. Under a world of one it does nothing.

    Args:
        stalled_after: seconds for which a rank may wait for the others.
        exit_code: of a rank that is ended by a verdict.
    """

    def __init__(self, console: Console, *, stalled_after: float, exit_code: int = 1) -> None:
        self.console, self.stalled_after, self.exit_code = console, stalled_after, exit_code
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._doing, self._since = "start", time.monotonic()
        self._left = False
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._waits: tuple[int, int, float] | None = None
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}  # rank -> its last beat and when it changed
        self._thread: threading.Thread | None = None
        self._verdict: str | None = None
        if self.size > 1:
            self._store = _own_connection()
            self._publish()
            if self.rank == 0:
                self._store.set("verdict", "")
            dist.barrier()  # from here on every key is there
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def note(self, what: str) -> None:
        """This rank begins `what`."""
        self._doing, self._since = what, time.monotonic()
        if self._thread is not None:
            self._try_to_publish()

    def leave(self) -> None:
        """This rank ends of its own accord, and so may the others."""
        self._left = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * INTERVAL)
            self._thread = None
            self._try_to_publish()

    def explain(self, error: BaseException) -> str | None:
        """What to say of an error on this rank: the verdict, if it comes of another rank's end, else None.

        Without one, the error is made the verdict for ranks that wait for this one.
        """
        if self._thread is None:
            return None
        if _SILENCE.search(_chain(error)):
            deadline = time.monotonic() + LOST_AFTER + 3 * INTERVAL
            while self._verdict is None and time.monotonic() < deadline:
                time.sleep(0.1)
        self._stop.set()
        if self._verdict is None and _TIMEOUT.search(_chain(error)):
            self._verdict = self._accuse(self._who_stalls())
        if self._verdict is None:
            reason = f"{type(error).__name__}: {error}"
            self._accuse(f"rank {self.rank} failed in {self._doing}: {reason}")
            return None
        return self._verdict

    def _watch(self) -> None:
        try:
            while not self._stop.wait(INTERVAL):
                self._publish()
                if verdict := self._look():
                    self._end(verdict)
                    return
        except (RuntimeError, ValueError) as error:  # the store's errors
            if not self._stop.is_set():
                self._end(self._without_a_store(error))

    def _look(self) -> str:
        neighbour = self._neighbour()
        beats = self._read(["verdict", f"beat/{neighbour}", "beat/0"])
        if beats[0]:
            return beats[0].decode()
        for rank, data in ((neighbour, beats[1]), (0, beats[2])):
            beat = json.loads(data)
            if rank not in self._seen or self._seen[rank][0]["number"] != beat["number"]:
                self._seen[rank] = (beat, time.monotonic())
        beat, changed = self._seen[neighbour]
        if not beat["left"] and neighbour != self.rank:
            if process_is_gone(beat["host"], beat["pid"]):
                return self._accuse(f"rank {neighbour} is gone: {_was(beat)}.")
            if time.monotonic() - changed > LOST_AFTER:
                silent = time.monotonic() - changed
                return self._accuse(f"rank {neighbour} has not been heard of for {silent:.0f} s: {_was(beat)}.")
        if self._waited() > self.stalled_after:
            return self._accuse(self._who_stalls())
        return ""

    def _neighbour(self) -> int:
        """The next rank that has not left."""
        for distance in range(1, self.size):
            rank = (self.rank + distance) % self.size
            if rank not in self._seen or not self._seen[rank][0]["left"]:
                return rank
        return self.rank

    def _who_stalls(self) -> str:
        """Of all ranks, the one that others wait for."""
        beats = [json.loads(data) for data in self._read([f"beat/{rank}" for rank in range(self.size)])]
        beats[self.rank]["waits"] = True  # it was until now
        busy = [rank for rank, beat in enumerate(beats) if not beat["waits"] and not beat["left"]]
        told = "; ".join(f"rank {rank} stalls: {_was(beats[rank])}, at {beats[rank]['where']}" for rank in busy)
        if not busy:
            told = "all ranks wait: " + "; ".join(
                f"rank {rank} {_was(beat)}, at {beat['where']}" for rank, beat in enumerate(beats)
            )
        return f"{told}. Others have waited for {self.stalled_after:.0f} s (run.timeout_minutes)."

    def _accuse(self, text: str) -> str:
        """Make this the verdict; the first one stands."""
        try:
            return self._store.compare_set("verdict", "", text).decode()
        except (RuntimeError, ValueError):  # no store any more: the text is for this rank alone
            return text

    def _end(self, verdict: str) -> None:
        """Show the verdict and end the process, unless it ends by itself."""
        self._verdict = verdict
        if self._stop.wait(GRACE):
            return
        self.console.error(f"{verdict} This rank was in {self._doing}; the run ends.")
        self._left = True
        self._try_to_publish()
        sys.stdout.flush()
        os._exit(self.exit_code)

    def _publish(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        where, waits = _place(frame)
        now = time.monotonic()
        if not waits or frame is None:
            self._waits = None
        elif self._waits is None or self._waits[:2] != (id(frame), frame.f_lasti):
            self._waits = (id(frame), frame.f_lasti, now)
        beat = {
            "number": time.time(),
            "doing": self._doing,
            "for": round(now - self._since, 1),
            "host": this_host(),
            "pid": os.getpid(),
            "waits": waits,
            "where": where,
            "left": self._left,
        }
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _try_to_publish(self) -> None:
        try:
            self._publish()
        except (RuntimeError, ValueError):  # the thread finds it out as well, and tells
            return

    def _waited(self) -> float:
        waits = self._waits
        return time.monotonic() - waits[2] if waits else 0.0

    def _read(self, keys: list[str]) -> list[bytes]:
        return list(self._store.multi_get(keys))

    def _without_a_store(self, error: Exception) -> str:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return f"torchrun's agent, which keeps the store, is gone ({error})."
        beat = self._seen.get(0)
        return f"rank 0, which keeps the store, is gone: {_was(beat[0]) if beat else 'nothing was heard of it'}."


def patience(minutes: float) -> timedelta:
    """How long the transports wait where a run allows ranks so many minutes."""
    return timedelta(seconds=minutes * 60 + SPEAKS_FIRST)


def _own_connection() -> dist.Store:
    """A client of the job's store apart from torch's: that one may be blocked in a wait."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=LOST_AFTER),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"megaverl/watchdog/{attempt}/", store)


def _was(beat: dict[str, Any]) -> str:
    return f"it was in {beat['doing']} for {beat['for']:.0f} s (process {beat['pid']} on {beat['host'].split('/')[0]})"


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, and whether that is a wait for other ranks."""
    if frame is None:
        return "nowhere", False
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line)
    waits = "torch/distributed/" in name or ".wait(" in text or "barrier(" in text
    return f"{'/'.join(name.split('/')[-2:])}:{line} ({frame.f_code.co_name})", waits


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(texts)
