"""Detects lost and stalled ranks while no program is served, and names them on every rank.

A program's controller watches the ranks itself (`controller.core.Controller`): its
connections break with their processes, and it asks every rank what it does. Before the
first program (start, build, resume), between programs that a Python program serves, and
after the last one (export, end) there is no controller. Then heartbeats in the job's
store take its place:

    every rank, once a second             coordinator, once a second
    main thread: status(stage, step)
    thread: publish heartbeat  ---------> read all heartbeats
            read the failure   <--------- publish the failure reason if a rank is lost or stalled
            reason and the coordinator's
            heartbeat

A rank reads only the coordinator's heartbeat, so its work does not grow with the job.
The coordinator publishes its own while it serves a program, too, so that the others can
say what it did when the controller is lost with it. The first failure reason that is
published stands. Every rank then shows it and ends, unless its main thread ends earlier.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megaverl.distributed.failures import says_peer_is_gone
from megaverl.distributed.flight_record import waits_in
from megaverl.distributed.heartbeat import (
    Heartbeat,
    RankWatch,
    Wait,
    place,
    this_host,
    who_is_gone,
    who_stalls,
)
from megaverl.errors import FAILED
from megaverl.user_code import describe

_REASON = "liveness/failure_reason"
ASKS_AFTER = 10.0  # seconds of waiting after which the flight recorder is read


class Liveness:
    """Liveness of one rank. Every rank of the job creates one, on its main thread.

    Args:
        store: the job's store. It is cloned, because other threads may be blocked in a wait on its connection.
        rank: this rank.
        size: number of ranks.
        coordinator: the rank that reads all heartbeats.
        watch: limits of the watch over the ranks.
        name: returns the name of a rank in messages.
        world: name of this rank's world; ranks with the same name run the same stages.
        log: shows the failure reason before this rank ends.
        end: ends this rank with an exit code.

    Example:
        liveness = Liveness(store, rank, size, coordinator=0, watch=RankWatch(stalled_after=1800.0))
        liveness.status("generate", step=3)
        ...
        liveness.leave()
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        coordinator: int,
        watch: RankWatch,
        name: Callable[[int], str] = lambda rank: f"rank {rank}",
        world: str = "",
        log: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank, self.size, self.coordinator = rank, size, coordinator
        self.watch, self.name, self._say, self._end_rank = watch, name, log, end
        self.failure_reason: str | None = None
        self._found = threading.Event()
        self._stop = threading.Event()
        self._world = world
        # The step, and the stages begun in it.
        self._position: tuple[int, tuple[str, ...]] = (0, ("start",))
        self._doing, self._since = "start", time.monotonic()
        self._left = False
        # A program runs, and its controller has begun to watch the ranks.
        self._is_in_program = self._is_served = False
        self._resumed_at = 0.0
        self._observing = threading.Lock()
        self._rounds = 0  # iterations of the thread that uses the store
        self._main = threading.get_ident()
        # The main thread's current call, and `_called` its start.
        self._call: tuple[int, int, Wait] = (0, 0, "")
        self._called = 0.0
        # None: the flight recorder has not been read yet.
        self._collective: str | None = None
        # rank -> its last heartbeat, and when it changed.
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        connection: Any = store  # torch's annotations lack `clone`
        self._store: dist.Store = connection.clone()
        self._publish()
        # The last rank to arrive creates the key for which all ranks wait.
        if self._store.add("liveness/count", 1) == size:
            self._store.set(_REASON, "")
        self._store.wait([_REASON])  # from here on every rank's key exists
        self._thread = threading.Thread(
            target=self._watch, name="liveness", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._guard, name="liveness-guard", daemon=True).start()

    def status(self, stage: str, step: int | None = None) -> None:
        """Publish that this rank begins a stage of a step.

        It is published immediately, so that it is known if the rank dies in it. Calls
        from other threads, such as a writer's, do not change the rank's position.
        """
        if threading.get_ident() == self._main:
            before, begun = self._position
            now = before if step is None else step
            earlier = (
                (earlier_stage for earlier_stage in begun if earlier_stage != stage)
                if now == before
                else ()
            )
            self._position = (now, (*earlier, stage))
        self._doing, self._since = (
            stage if step is None else f"step {step}: {stage}",
            time.monotonic(),
        )
        if not self._is_served:
            self._try_to_publish()

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Leave the watch over the ranks to a program's controller inside, from its first question on."""
        self._is_in_program = True
        try:
            yield
        finally:
            self._is_in_program = False
            # The silence of the others counts from when they are read again.
            self._resumed_at = time.monotonic()
            self._is_served = False
            self._try_to_publish()

    def answer(self) -> Heartbeat:
        """Return this rank's heartbeat to the controller of a program.

        The controller asks all ranks, so that its question shows that all have
        connected and that it watches them.
        """
        self._is_served = self._is_in_program
        return self.observe()

    def leave(self) -> None:
        """Declare that this rank ends without a failure, and stop the thread."""
        self._left = True
        self._stop.set()
        self._thread.join(timeout=2 * self.watch.interval)
        self._try_to_publish()

    def report_failure(self, text: str) -> str:
        """Propose `text` as the run's failure reason, and return the reason that stands, which is the first one."""
        try:
            reason = self._store.compare_set(_REASON, "", text).decode()
        except RuntimeError:  # the store is lost, so only this rank knows the text
            reason = text
        self.failure_reason = reason
        self._found.set()
        return reason

    def last_heard(self, rank: int) -> str:
        """Return the last known state of a rank as text, or "". Only the coordinator knows all ranks."""
        seen = self._seen.get(rank)
        return str(seen[0]) if seen else ""

    def settle(self, seconds: float, otherwise: str) -> str:
        """Wait up to `seconds` for a failure reason, and return it. If there is none, `otherwise` becomes the reason.

        The caller is a main thread that lost contact and then ends by itself with this
        text.
        """
        if self.failure_reason is not None and self._stop.is_set():
            return self.failure_reason
        self._found.wait(seconds)
        self._stop.set()
        reason = self.failure_reason or self.report_failure(otherwise)
        if self._store_ends_with_me():
            # Let the others read the reason first.
            time.sleep(3 * self.watch.interval)
        return reason

    def _store_ends_with_me(self) -> bool:
        """Return whether the other ranks lose the store when this rank ends.

        That is the case if this rank hosts the store. If torchrun's agent hosts it, the
        agent of the first of several nodes ends with its ranks.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return self.rank == 0
        return (
            os.environ.get("GROUP_RANK") == "0"
            and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        )

    def explain(self, error: BaseException) -> str | None:
        """Return the failure reason if another rank's end caused `error`, else None.

        Without a failure reason, the error becomes the reason, for ranks that wait for
        this one.
        """
        if self.size == 1:
            return None
        if isinstance(error, KeyboardInterrupt):
            self.settle(
                0.0,
                f"{self.name(self.rank)} was in {self._doing} and {_interrupted_here()}",
            )
            return None
        error_text = describe(error)
        own_reason = f"{self.name(self.rank)} failed in {self._doing}: {error_text}"
        reason = self.settle(
            self.watch.lost_after + 3 * self.watch.interval
            if says_peer_is_gone(error)
            else 0.0,
            own_reason,
        )
        # Each rank reports an error that all ranks have.
        return None if reason.endswith(error_text) else reason

    def _guard(self) -> None:
        """End a rank that is cut off: a call to a store behind a dead link may never return, whatever its timeout.

        The guard counts its own iterations instead of reading a clock, so that a busy
        interpreter does not count as silence.
        """
        rounds, seen = 0, self._rounds
        while not self._stop.wait(self.watch.interval):
            rounds, seen = (
                (0, self._rounds) if seen != self._rounds else (rounds + 1, seen)
            )
            if rounds * self.watch.interval > self.watch.lost_after:
                self._end(self._without_a_store(silent=rounds * self.watch.interval))

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self.watch.interval):
                self._rounds += 1
                if not self._is_served or self.rank == self.coordinator:
                    self._publish()
                if reason := self._look():
                    self._end(reason)
                    return
        except RuntimeError as error:  # the store is lost
            if not self._stop.is_set():
                self._end(self._without_a_store(error))

    def _without_a_store(
        self, error: Exception | None = None, silent: float = 0.0
    ) -> str:
        """Return a text about the host of the store, which is gone or has been silent for `silent` seconds.

        The host is torchrun's agent or the first rank, whose last heartbeat may be
        known here.
        """
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        condition = (
            "is gone"
            if error is not None
            else f"has not been heard of for {silent:.0f} s"
        )
        keeper = "torchrun's agent" if agent else self.name(0)
        text = f"{keeper}, which keeps the job's store, {condition}"
        if agent:
            return text + (f" ({error})" if error is not None else "")
        return f"{text}: {self.last_heard(0) or 'nothing was heard of it'}"

    def _look(self) -> str:
        """Return the failure reason, after looking for lost and (on the coordinator) stalled ranks."""
        watches_all = self.rank == self.coordinator and not self._is_served
        ranks = range(self.size) if watches_all else [self.coordinator]
        data = self._store.multi_get(
            [_REASON, *(f"liveness/beat/{rank}" for rank in ranks)]
        )
        if data[0]:
            return bytes(data[0]).decode()
        now = time.monotonic()
        for rank, encoded in zip(ranks, data[1:], strict=True):
            beat = Heartbeat.from_json(bytes(encoded))
            if rank not in self._seen or self._seen[rank][0].number != beat.number:
                self._seen[rank] = (beat, now)
        # The others are not read while a program's controller watches them.
        seen = {rank: self._seen[rank] for rank in ranks}
        beats = {rank: beat for rank, (beat, _) in seen.items()}
        if watches_all:
            self.watch.show(beats)
        silent = {
            rank: now - max(changed, self._resumed_at)
            for rank, (_, changed) in seen.items()
        }
        _, text = who_is_gone(beats, silent, self.watch.lost_after, self.name)
        if not text and watches_all:
            _, text = who_stalls(beats, self.watch.stalled_after, self.name)
        return self.report_failure(text) if text else ""

    def _end(self, reason: str) -> None:
        """Set the failure reason, and end the process unless it ends by itself within the grace period."""
        self.failure_reason = reason
        self._found.set()
        if self._stop.wait(self.watch.grace):
            return
        self.end_now(reason)

    def end_now(self, reason: str) -> None:
        """Show the failure reason and what this rank does, and end the process."""
        # After an interrupt on this machine, the launcher already reports it.
        if not reason.endswith(_interrupted_here()):
            self._say(
                f"{reason}. {self.name(self.rank)} was in {self._doing}; the run ends."
            )
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_rank(FAILED)

    def _try_to_publish(self) -> None:
        try:
            self._publish()
        except RuntimeError:  # the thread notices the lost store too, and reports it
            return

    def _publish(self) -> None:
        self._store.set(f"liveness/beat/{self.rank}", self.observe().to_json())

    def observe(self) -> Heartbeat:
        """Return this rank's heartbeat: its position, and what its main thread waits for. Any thread may call it."""
        with self._observing:
            return self._observe()

    def _observe(self) -> Heartbeat:
        # Reading the main thread's frame from outside works even while that thread is
        # blocked.
        frame = sys._current_frames().get(self._main or 0)
        where, waits_for = place(frame)
        now = time.monotonic()
        call = (id(frame), frame.f_lasti if frame else 0, waits_for)
        # The same frame at the same instruction means that the thread is still in the
        # same call.
        if call != self._call:
            self._call, self._called, self._collective = call, now, None
        asks_after = min(ASKS_AFTER, self.watch.stalled_after / 2)
        if waits_for and self._collective is None and now - self._called > asks_after:
            self._collective = waits_in()
        step, begun = self._position
        return Heartbeat(
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


def _interrupted_here() -> str:
    return f"was interrupted on {socket.gethostname()}"
