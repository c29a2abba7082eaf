"""Simulated cluster in virtual time: real controller and programs; ranks, connections and faults are simulated.

Thousands of ranks run in one thread. Nothing sleeps: whenever every task waits, the
clock jumps to the next event. All randomness comes from one seed, so a run that fails
is repeated exactly by its seed.

Example:
    cluster = SimulatedCluster(num_ranks=4, seed=7, faults=[Fault("kill", rank=2, event=31)])
    outcome = cluster.run(lambda controller: program(controller), make_workers)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.failures import ControllerLost
from megaverl.controller.messages import (
    End,
    Left,
    RowTransfer,
    ToRank,
    Where,
    decode_for_rank,
    encode,
)
from megaverl.controller.serving import serve
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.transport import Lost, Received
from megaverl.distributed.heartbeat import Heartbeat, RankWatch

T = TypeVar("T")
# Seconds in which a rank's main thread must have left its call once the run has failed.
LEAVES_AFTER = 10.0

FaultKind = Literal["kill", "freeze", "disconnect", "kill_controller"]


class Deadlock(RuntimeError):
    """Every task waits for another one, and no event is left."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop whose clock is simulated: instead of waiting it moves the clock.

    Attributes:
        tasks: all tasks so far. `asyncio.all_tasks` would go through those of earlier loops too, until these are
            collected.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]  # a heap

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[asyncio.Task[Any]] = []
        self._now = 0.0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task as every loop does, and keep it."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self.tasks.append(task)
        return task

    def _run_once(self) -> None:
        """Run what is ready, or else what comes next; what is scheduled for the same time comes with it."""
        while self._scheduled and (not self._ready or self._is_next_due()):
            if not (timer := heapq.heappop(self._scheduled)).cancelled():
                self._now = max(self._now, timer.when())
                self._ready.append(timer)
        if not self._ready:
            raise Deadlock("every task waits for another one, and no event is left")
        for _ in range(len(self._ready)):
            if not (handle := self._ready.popleft()).cancelled():
                handle._run()

    def _is_next_due(self) -> bool:
        return self._scheduled[0].when() <= self._now


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at one event of a run.

    Attributes:
        kind: "kill": the rank's process ends; "freeze": it stops without ending, as SIGSTOP does; "disconnect": its
            connection to the controller breaks; "kill_controller": the controller's process ends.
        rank: the rank; ignored for "kill_controller".
        event: number of the event, counted over the run: every message sent, message delivered, start and end of a
            call on a rank, and end of a transfer between ranks.
    """

    kind: FaultKind
    rank: int
    event: int


@dataclass(frozen=True)
class Latencies:
    """Ranges of random delays, in seconds.

    Attributes:
        message: a control message on its way.
        join: until a rank listens.
        loss: from a rank's end until the other end of a connection notices.
        between: what a rank does between two programs.
    """

    message: tuple[float, float] = (0.0001, 0.005)
    join: tuple[float, float] = (0.0, 0.1)
    loss: tuple[float, float] = (0.001, 0.2)
    between: tuple[float, float] = (0.0, 2.0)


class _ProcessEnded(BaseException):
    """Raised inside a simulated rank whose process has ended."""


@dataclass(eq=False)
class _Rank:
    """Simulated process.

    Attributes:
        inbox: messages of the controller; None: the connection broke.
        reason: why the run fails, as far as this rank has been told.
        is_gone: the process has ended. is_frozen: it has stopped without ending.
    """

    number: int
    board: StatusBoard
    dialogue: Dialogue = field(default_factory=Dialogue)
    inbox: asyncio.Queue[ToRank | None] = field(default_factory=asyncio.Queue)
    reason: str = ""
    task: asyncio.Task[str] | None = None
    is_frozen: bool = False
    is_gone: bool = False


@dataclass(eq=False)
class _Waiting:
    """End of a transfer that waits for the other end."""

    rank: int
    value: object
    future: asyncio.Future[object]


@dataclass(frozen=True)
class SimulatedOutcome:
    """End of a simulated run.

    Attributes:
        result: what the program returned, or None.
        error: what it raised, or None. A controller that was killed has neither.
        rank_ends: by rank, the reason of its `End`, "killed", "frozen", or the name of the exception that ended it.
        seconds: virtual time of the whole run.
        num_events: events of the run; faults are placed at their numbers.
    """

    result: object
    error: BaseException | None
    rank_ends: tuple[str, ...]
    seconds: float
    num_events: int


class SimulatedCluster:
    """Ranks, their connections to the controller, and the transfers between them.

    Args:
        seed: of all delays.
        faults: what goes wrong.
        observe: returns what a rank's main thread does, for a watch over the ranks; None: nobody observes it.

    Attributes:
        num_events: events so far.
        random: source of all random numbers of the run; workers take theirs from it too.
    """

    def __init__(
        self,
        num_ranks: int,
        seed: int,
        *,
        faults: Sequence[Fault] = (),
        latencies: Latencies | None = None,
        observe: Callable[[int], Heartbeat] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.random = random.Random(seed)
        self.latencies = latencies or Latencies()
        self.num_events = 0
        self._faults = {fault.event: fault for fault in faults}
        self._loop = VirtualTimeLoop()
        self._ranks = [
            _Rank(number, StatusBoard(self._loop.time, observed))
            for number in range(num_ranks)
            for observed in [functools.partial(observe, number) if observe else None]
        ]
        self._to_controller: asyncio.Queue[Received | Lost] = asyncio.Queue()
        self._arrivals: dict[tuple[int, str], float] = {}
        self._transfers: dict[tuple[int, int], deque[_Waiting]] = {}
        self._controller_task: asyncio.Task[object] | None = None
        self._is_controller_gone = False

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self,
        program: Callable[[Controller], Coroutine[Any, Any, object]],
        make_workers: Callable[[SimulatedCluster, int], Mapping[str, object]],
        *,
        num_programs: int = 1,
        timeouts: CallTimeouts | None = None,
        watch: RankWatch | None = None,
    ) -> SimulatedOutcome:
        """Run a program until it and all ranks have ended.

        Args:
            num_programs: how often the job runs the program, one after another.
            make_workers: makes the workers of a rank, by role. Their methods may be coroutines that await `work`.

        Raises:
            Deadlock: the run does not end.
        """
        try:
            return self._loop.run_until_complete(
                self._run(program, make_workers, num_programs, timeouts, watch)
            )
        finally:
            for task in self._loop.tasks:
                task.cancel()
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
            self._loop.close()

    async def _run(
        self,
        program: Callable[[Controller], Coroutine[Any, Any, object]],
        make_workers: Callable[[SimulatedCluster, int], Mapping[str, object]],
        num_programs: int,
        timeouts: CallTimeouts | None,
        watch: RankWatch | None,
    ) -> SimulatedOutcome:
        controller = Controller(
            _ControllerEnd(self),
            self.num_ranks,
            timeouts=timeouts,
            log=lambda line: None,
            watch=watch,
        )
        for rank in self._ranks:
            rank.task = asyncio.ensure_future(
                self._serve(rank, make_workers(self, rank.number), num_programs)
            )
        self._controller_task = asyncio.ensure_future(
            _run_job(controller, program, num_programs)
        )
        await asyncio.wait({self._controller_task})
        self._controller_ends()
        for rank in self._ranks:
            # A frozen process stays until somebody ends it, as torchrun's agent does.
            assert rank.task is not None
            if rank.is_frozen:
                rank.is_gone = True
                rank.task.cancel()
            await asyncio.wait({rank.task})
        task = self._controller_task
        error = None if task.cancelled() else task.exception()
        result = None if task.cancelled() or error is not None else task.result()
        ends = tuple(map(_describe_end, self._ranks))
        return SimulatedOutcome(result, error, ends, self._loop.time(), self.num_events)

    async def _serve(
        self, rank: _Rank, workers: Mapping[str, object], num_programs: int
    ) -> str:
        await asyncio.sleep(self.random.uniform(*self.latencies.join))
        end = _RankEnd(self, rank)
        try:
            for number in range(num_programs):
                if number:
                    # What a rank does between programs, such as an export.
                    await self.work(rank.number, self.latencies.between)
                await serve(
                    rank.number,
                    end,
                    workers,
                    _SimulatedMover(self, rank),
                    rank.board,
                    dialogue=rank.dialogue,
                )
                if rank.reason:
                    break
            end.send(encode(Left()))
            return rank.reason
        finally:
            self._process_ends(rank)

    async def ask(self, number: int, question: object | None, kind: type[T]) -> T:
        """Ask the program from the running call of a rank, and return its answer (`dialogue.Dialogue`)."""
        return await self._ranks[number].dialogue.ask(question, kind)

    async def work(self, number: int, seconds: tuple[float, float]) -> None:
        """Spend a random time on a rank, as the computation of a call does."""
        rank = self._ranks[number]
        await self._pass_event(rank)
        await asyncio.sleep(self.random.uniform(*seconds))
        await self._pass_event(rank)

    # --- events and faults --------------------------------------------------------------------------------------------

    def _count_event(self) -> None:
        """Count one event; a fault that is placed here happens."""
        fault = self._faults.get(self.num_events)
        self.num_events += 1
        if fault is None:
            return
        if fault.kind == "kill_controller":
            assert self._controller_task is not None
            self._controller_task.cancel()
            self._controller_ends()
            return
        rank = self._ranks[fault.rank]
        if fault.kind == "kill":
            self._process_ends(rank)
            if rank.task is not None:
                rank.task.cancel()
        elif fault.kind == "freeze":
            rank.is_frozen = True
        else:
            self._break_connection(rank, "its connection broke")
            self._close_at_rank(rank)

    async def _pass_event(self, rank: _Rank) -> None:
        """Count an event inside a rank. A frozen rank goes no further, and neither does one whose process has ended."""
        self._count_event()
        await self._stay_if_frozen(rank)

    async def _stay_if_frozen(self, rank: _Rank) -> None:
        if rank.is_gone:
            raise _ProcessEnded
        if rank.is_frozen:
            await asyncio.get_running_loop().create_future()

    def _process_ends(self, rank: _Rank) -> None:
        """Let the controller and peers notice, each after a while, that a process has ended."""
        if rank.is_gone:
            return
        rank.is_gone = True
        self._break_connection(rank, "its process ended")
        self._loop.call_later(
            self.random.uniform(*self.latencies.loss), self._break_transfers
        )

    def _break_connection(self, rank: _Rank, reason: str) -> None:
        delay = self.random.uniform(*self.latencies.loss)
        self._deliver_later(
            rank.number,
            "up",
            delay,
            lambda: self._to_controller.put_nowait(Lost(rank.number, reason)),
        )

    def _break_transfers(self) -> None:
        """Fail every transfer whose other end's process has ended."""
        for (source, dest), waiting in self._transfers.items():
            for end in list(waiting):
                peer = self._ranks[dest if end.rank == source else source]
                if peer.is_gone and not end.future.done():
                    end.future.set_exception(
                        ConnectionError(f"rank {peer.number} closed the connection")
                    )
                    waiting.remove(end)

    def _controller_ends(self) -> None:
        """Let all ranks notice that the controller's process has ended."""
        if self._is_controller_gone:
            return
        self._is_controller_gone = True
        for rank in self._ranks:
            delay = self.random.uniform(*self.latencies.loss)
            self._deliver_later(
                rank.number, "down", delay, functools.partial(self._close_at_rank, rank)
            )

    # --- messages -----------------------------------------------------------------------------------------------------

    def _deliver_later(
        self, number: int, direction: str, delay: float, deliver: Callable[[], None]
    ) -> None:
        """Deliver after a delay, but never before what was sent earlier on the same connection."""
        # Strictly later: the event loop's heap does not keep the order of timers with
        # the same time.
        earliest = math.nextafter(
            self._arrivals.get((number, direction), 0.0), math.inf
        )
        arrival = max(self._loop.time() + delay, earliest)
        self._arrivals[number, direction] = arrival
        self._loop.call_at(arrival, deliver)

    def _send_down(self, number: int, message: bytes) -> None:
        self._count_event()
        delay = self.random.uniform(*self.latencies.message)
        self._deliver_later(
            number, "down", delay, lambda: self._arrive_at_rank(number, message)
        )

    def _arrive_at_rank(self, number: int, message: bytes) -> None:
        self._count_event()
        rank = self._ranks[number]
        if rank.is_gone or rank.is_frozen:
            return
        decoded = decode_for_rank(message)
        if isinstance(decoded, Where):
            # A fault may end the process at this very event.
            with contextlib.suppress(_ProcessEnded):
                self._send_up(rank, encode(rank.board.answer(decoded.question)))
            return
        rank.inbox.put_nowait(decoded)
        if isinstance(decoded, End) and decoded.reason:
            rank.reason = rank.reason or decoded.reason
            self._loop.call_later(LEAVES_AFTER, self._end_stuck, rank)

    def _close_at_rank(self, rank: _Rank) -> None:
        """Let a rank notice that its connection to the controller broke."""
        rank.inbox.put_nowait(None)
        self._loop.call_later(LEAVES_AFTER, self._end_stuck, rank)

    def _end_stuck(self, rank: _Rank) -> None:
        """End a process whose main thread has not left a call, as a rank's side thread does after a failed run."""
        if not rank.is_gone and not rank.is_frozen:
            self._process_ends(rank)
            assert rank.task is not None
            rank.task.cancel()

    def _send_up(self, rank: _Rank, message: bytes) -> None:
        self._count_event()
        if rank.is_gone:
            raise _ProcessEnded
        delay = self.random.uniform(*self.latencies.message)

        def arrive() -> None:
            self._count_event()
            self._to_controller.put_nowait(Received(rank.number, message))

        self._deliver_later(rank.number, "up", delay, arrive)

    # --- transfers between ranks --------------------------------------------------------------------------------------

    async def _meet(self, rank: _Rank, source: int, dest: int, value: object) -> object:
        """Wait at one end of a transfer for the other end; return the value. A send blocks until it is received."""
        await self._stay_if_frozen(rank)
        peer = self._ranks[dest if rank.number == source else source]
        if peer.is_gone:
            raise ConnectionError(f"rank {peer.number} closed the connection")
        waiting = self._transfers.setdefault((source, dest), deque())
        if waiting and waiting[0].rank != rank.number:
            end = waiting.popleft()
            sent = value if rank.number == source else end.value
            end.future.set_result(sent)
            await self._pass_event(rank)
            return sent
        end = _Waiting(rank.number, value, asyncio.get_running_loop().create_future())
        waiting.append(end)
        received = await end.future
        await self._pass_event(rank)
        return received


async def _run_job(
    controller: Controller,
    program: Callable[[Controller], Coroutine[Any, Any, object]],
    num_programs: int,
) -> object:
    """Run the programs of a job; return what the last one returned."""
    controller.start()
    result: object = None
    try:
        for _ in range(num_programs):
            result = await controller.run(program(controller))
        return result
    finally:
        await controller.close()


class _ControllerEnd:
    """Controller's end of all connections (`transport.ControllerTransport`)."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        for rank in ranks:
            if not self._cluster._is_controller_gone:
                self._cluster._send_down(rank, message)

    async def receive(self) -> Received | Lost:
        return await self._cluster._to_controller.get()


class _RankEnd:
    """One rank's end of its connection (`transport.RankTransport`)."""

    def __init__(self, cluster: SimulatedCluster, rank: _Rank) -> None:
        self._cluster = cluster
        self._rank = rank

    def send(self, message: bytes) -> None:
        self._cluster._send_up(self._rank, message)

    async def receive(self) -> ToRank:
        await self._cluster._stay_if_frozen(self._rank)
        message = await self._rank.inbox.get()
        await self._cluster._pass_event(self._rank)
        if message is None:
            raise ControllerLost(
                f"rank {self._rank.number}: the connection to the controller broke."
            )
        return message


class _SimulatedMover:
    """Transfers of one rank (`serving.Mover`). Values with rows have `select_rows` and `merge_rows`."""

    def __init__(self, cluster: SimulatedCluster, rank: _Rank) -> None:
        self._cluster = cluster
        self._rank = rank

    async def send(self, move: RowTransfer, value: Any) -> None:
        part = value if move.rows is None else value.select_rows(move.rows)
        await self._cluster._meet(self._rank, move.source, move.dest, part)

    async def receive(self, move: RowTransfer, present: Any) -> object:
        part: Any = await self._cluster._meet(self._rank, move.source, move.dest, None)
        return (
            part if present is None or move.rows is None else present.merge_rows(part)
        )


def _describe_end(rank: _Rank) -> str:
    """Return how a rank ended, as in `Outcome.rank_ends`."""
    task = rank.task
    assert task is not None
    error = None if task.cancelled() else task.exception()
    if rank.is_frozen:
        return "frozen"
    if task.cancelled() or isinstance(error, _ProcessEnded):
        return "killed"
    return type(error).__name__ if error is not None else task.result()
