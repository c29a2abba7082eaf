"""Controller: sends the calls of a program to the ranks, in one order for all, and collects the replies.

    program (async def)            controller                                ranks of a group
    run.actor.update(batch)  --->  CallRequest 7 to ranks 0..3, moves first  --->   receive rows, run update()
    await ...                <---  result, once every rank replied    <---   Reply 7

It lives as long as the job, in one asyncio event loop: that of a thread of the
coordinator's rank, or of the simulation. While it runs a program and between programs
it asks the ranks what they do, and ends the run when one is lost or stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

import msgspec

from megaverl.controller.failures import (
    CallFailed,
    Evidence,
    FailedOutside,
    LostRank,
    PassedDeadline,
    RaisedError,
    StalledRanks,
    default_name,
    describe_status,
    explain,
    find_cause,
    is_secondary,
)
from megaverl.controller.messages import (
    NO_QUESTION,
    Argument,
    CallRequest,
    End,
    Ended,
    Failed,
    Left,
    PlainArgument,
    ProgramAnswer,
    Question,
    Reply,
    RowTransfer,
    Status,
    ValueArgument,
    ValuesArgument,
    Where,
    decode_for_controller,
    decode_value,
    encode,
    encode_value,
)
from megaverl.controller.moves import Rows, plan_moves
from megaverl.controller.references import PendingCall, Ref
from megaverl.controller.transport import ControllerTransport, Lost
from megaverl.distributed.heartbeat import (
    Heartbeat,
    RankWatch,
    who_is_silent,
    who_stalls,
)
from megaverl.errors import TrainingStopped
from megaverl.user_code import describe

T = TypeVar("T")
Wanted = Mapping[int, Rows | None]


@dataclass(frozen=True)
class CallTimeouts:
    """Limits on the controller's waiting, in seconds.

    Attributes:
        call: for the replies to one call.
        slow: until it logs which ranks a call waits for; then again after the same time.
        answer: for the answer to `Where`.
        grace: after the first sign of a failure, for signs nearer to the cause.
        leave: until the ranks have left a program that failed, and until they have left the job.
    """

    call: float = 1800.0
    slow: float = 30.0
    answer: float = 1.0
    grace: float = 0.5
    leave: float = 10.0


# Further grace times to wait for the cause of errors that are only its consequence.
LOSS_GRACES = 3
# Ranks for which one second between two rounds of questions is enough. With more ranks
# the time grows, so that the answers take the same share of the controller's time.
RANKS_A_SECOND = 256


@dataclass(eq=False)
class _Running:
    """Call that some ranks have not replied to.

    Attributes:
        waiting: ranks that have not replied.
        ranks: ranks that run the method; others only send rows.
        ask: hands the program what a rank asks while it runs the method.
    """

    id: int
    name: str
    ranks: tuple[int, ...]
    waiting: set[int]
    finish: Callable[[dict[int, Reply]], Any]
    future: asyncio.Future[Any]
    ask: Callable[[int, bytes], None] = lambda rank, value: None
    replies: dict[int, Reply] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Controller:
    """Sends calls to ranks and collects their replies.

    Args:
        transport: carries the messages.
        num_ranks: ranks of the job.
        node_of: node of a rank; rows stay inside nodes where they can.
        log: receives one line for a person.
        watch: watch over the ranks: it finds ranks that hold the others up, and ranks that do not answer. None: only
            broken connections and deadlines of calls end the run.
        name: returns the name of a rank in messages.
        observe: returns what the coordinator's rank does, for the other ranks; None: it is not observed.

    Attributes:
        signal: number of the signal that asked a rank to leave the run, as replies have told so far; 0: none has.

    Example:
        controller = Controller(transport, num_ranks=8)
        controller.start()
        actor = ActorGroup("actor", range(8), controller)
        result = await controller.run(program(actor))    # sends End to all ranks, also when the program raises
        await controller.close()
    """

    def __init__(
        self,
        transport: ControllerTransport,
        num_ranks: int,
        *,
        timeouts: CallTimeouts | None = None,
        node_of: Callable[[int], int] = lambda rank: 0,
        log: Callable[[str], None] = print,
        watch: RankWatch | None = None,
        name: Callable[[int], str] = default_name,
        observe: Callable[[], Heartbeat] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.signal = 0
        self.timeouts = timeouts or CallTimeouts()
        self._transport = transport
        self._node_of = node_of
        self._log = log
        self._watch = watch
        self._name = name
        self._observe = observe
        # Rank -> its last answer with a heartbeat, and when it came.
        self._answers: dict[int, tuple[Status, float]] = {}
        self._next_call = 1
        self._running: dict[int, _Running] = {}
        self._released: dict[int, list[int]] = {}
        self._evidence: list[Evidence] = []
        self._failure: CallFailed | None = None
        # Fails when the program must end; None: none runs.
        self._failed: asyncio.Future[None] | None = None
        # Why the run ends, once the ranks have been told.
        self._reason = ""
        self._tasks: set[asyncio.Task[None]] = set()
        # Ranks that have not left the job, and those that have not left the program.
        self._present = set(range(num_ranks))
        self._in_program: set[int] = set()
        self._questions: dict[int, dict[int, Status]] = {}
        self._next_question = 1

    # --- the program ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Greet the ranks, begin to read messages, and to watch the ranks. All of them are connected."""
        self._send_question(range(self.num_ranks), NO_QUESTION)
        self._start(self._read())
        if self._watch is not None:
            self._start(self._watch_ranks(self._watch))

    async def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Run a program to its end, then send `End` to all ranks and wait until they have left it.

        Raises:
            CallFailed: a call failed, or the run had failed before; the error names the rank and the call.
        """
        if self._reason:
            program.close()
            raise self._failure or TrainingStopped(
                f"the run has failed before: {self._reason}"
            )
        self._failed = asyncio.get_running_loop().create_future()
        self._in_program = set(self._present)
        task = asyncio.ensure_future(program)
        reason = "the program failed"
        try:
            # A program that waits for nothing of the ranks must still end when a rank
            # is lost.
            either: list[asyncio.Future[Any]] = [task, self._failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            # A call that the program did not await may have failed just before the
            # program's end.
            if not task.done() or (task.exception() is None and self._evidence):
                await self._failed
            result = task.result()
            reason = ""
            return result
        except CallFailed as error:
            reason = str(error)
            raise
        except Exception as error:
            reason = f"the program raised {describe(error)}"
            raise
        finally:
            task.cancel()
            failed, self._failed = self._failed, None
            if not failed.cancel():
                # The program may have raised the same error first.
                failed.exception()
            await self._end(reason)

    async def close(self) -> None:
        """Wait until the other ranks have left the job, for `CallTimeouts.leave` at most. A failed run ends as well."""
        deadline = self._now() + self.timeouts.leave
        while self._present and self._now() < deadline:
            await asyncio.sleep(min(0.01, self.timeouts.leave))
        for task in self._tasks:
            task.cancel()

    async def _end(self, reason: str) -> None:
        """Send `End`, and wait until the ranks have left the program.

        Calls that still run are waited for when nothing has failed.
        """
        self._send_end(reason)
        deadline = self._now() + (self.timeouts.leave if reason else self.timeouts.call)
        while self._in_program and self._now() < deadline:
            await asyncio.sleep(min(0.01, self.timeouts.leave))
            if self._failure is not None and not reason:
                # A rank was lost while ranks were leaving. The program's result is
                # complete, and the other ranks have been notified.
                break
        for running in self._running.values():
            _cancel_timers(running)
        self._running.clear()

    def _send_end(self, reason: str) -> None:
        """Tell all ranks that the program has ended, or why the run fails."""
        self._reason = self._reason or reason
        self._transport.send(range(self.num_ranks), encode(End(reason)))

    # --- calls ------------------------------------------------------------------------------------------------------

    def call(
        self,
        ranks: Sequence[int],
        role: str,
        method: str,
        arguments: Sequence[object],
        *,
        finish: Callable[[dict[int, Reply]], T],
        keeps: bool = False,
        wanted: Mapping[int, Wanted] | None = None,
        asking: Sequence[int] = (),
    ) -> PendingCall[T]:
        """Send one call and return a handle. Ranks run calls in the order in which `call` was called.

        Args:
            ranks: ranks that run the method.
            arguments: references, lists of references, and plain values.
            finish: makes the result from the replies of `ranks`.
            keeps: ranks keep the returned value; the result is to be a reference.
            wanted: by id of a referenced value, what each rank needs of it. Default: ranks that hold some rows keep to
                these, others receive the whole value.
            asking: ranks that ask the program while they run the method.
        """
        name = f"{role}.{method}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        # Every failure is raised by `run`; a call that is never awaited must not also
        # be reported as forgotten.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._failure is not None:
            future.set_exception(self._failure)
            return PendingCall(name, future)
        id = self._next_call
        self._next_call += 1
        # Plan before sending: the references then already list the new holders, so a
        # later call in this turn of the loop does not move the same rows twice.
        moves = self._plan_moves(ranks, arguments, wanted or {})
        # Ranks that only send or receive rows take part too, since a transfer is part
        # of the call that needs it.
        involved = sorted(
            {*ranks, *(move.source for move in moves), *(move.dest for move in moves)}
        )
        running = _Running(id, name, tuple(ranks), set(involved), finish, future)
        self._running[id] = running
        # The handle must not refer to `running`, which refers to it: a cycle would keep
        # the result, and with it a value on the ranks, until the garbage collector runs.
        answered = tuple(ranks)
        pending = PendingCall(
            name, future, asking, lambda value: self._answer(id, answered, value)
        )
        running.ask = pending.take_question
        encoded = tuple(map(_encode_argument, arguments))
        request = CallRequest(id, role, method, encoded, keeps=keeps)
        self._send_call(request, ranks, moves, involved)
        self._start_later(self.timeouts.call, self._explain_deadline, running)
        if self.timeouts.slow < self.timeouts.call:
            self._start_later(self.timeouts.slow, self._report_slow, running)
        return pending

    def _answer(self, id: int, ranks: tuple[int, ...], value: object) -> None:
        if id in self._running:
            self._transport.send(ranks, encode(ProgramAnswer(id, encode_value(value))))

    def make_reference(self, id: int, replies: Mapping[int, Reply]) -> Ref[Any]:
        """Return a reference to the value that the ranks kept for call `id`."""
        descriptions = [
            reply.description for reply in replies.values() if reply.description
        ]
        rows = {rank: replies[rank].rows for rank in sorted(replies)}
        return Ref(id, rows, descriptions[0] if descriptions else b"", self._release)

    def _plan_moves(
        self,
        ranks: Sequence[int],
        arguments: Sequence[object],
        wanted: Mapping[int, Wanted],
    ) -> list[RowTransfer]:
        moves: list[RowTransfer] = []
        planned: set[int] = set()
        for ref in list_references(arguments):
            if ref.id in planned:
                continue
            planned.add(ref.id)
            needs = wanted.get(ref.id)
            if needs is None:
                needs = {rank: ref.rows.get(rank) for rank in ranks}
            moves += plan_moves(ref.id, ref.rows, needs, self._node_of)
            # From now on the ranks in `needs` hold what they receive. Messages to one
            # rank stay in order, so the rows are there before any later call reads
            # them.
            everything = _all_rows(ref)
            for rank, needed in needs.items():
                rows = everything if needed is None else needed
                ref.rows[rank] = (
                    _union(ref.rows[rank], rows) if rank in ref.rows else rows
                )
        return moves

    def _send_call(
        self,
        request: CallRequest,
        ranks: Sequence[int],
        moves: Sequence[RowTransfer],
        involved: Sequence[int],
    ) -> None:
        """Send one message to all ranks that need the same one, and a message of its own to each of the others."""
        # Only ranks with moves or releases need a message of their own. For all others
        # the call is encoded once, however many ranks there are.
        special = {
            rank for move in moves for rank in (move.source, move.dest)
        } | self._released.keys()
        common = [rank for rank in ranks if rank not in special]
        if common:
            self._transport.send(common, encode(request))
        # Ranks that do not run the method only send or receive rows.
        only_moves = CallRequest(request.id, request.role, "", ())
        for rank in sorted(special.intersection(involved)):
            own_moves = tuple(
                move for move in moves if rank in (move.source, move.dest)
            )
            # Releases ride on the next call instead of costing a message. In call
            # order, a rank cannot drop a value that an earlier call still reads.
            releases = tuple(self._released.pop(rank, ()))
            message = msgspec.structs.replace(
                request if rank in ranks else only_moves,
                moves=own_moves,
                releases=releases,
            )
            self._transport.send([rank], encode(message))

    def _release(self, value: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            # The program may drop a reference anywhere, even while a call is being
            # sent. So only note it here.
            self._released.setdefault(rank, []).append(value)

    # --- what comes back --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            event = await self._transport.receive()
            if isinstance(event, Lost):
                self._note_lost(event)
                continue
            try:
                message = decode_for_controller(event.message)
            except msgspec.DecodeError as error:
                self._note_lost(
                    Lost(event.rank, f"it sent a message that cannot be read ({error})")
                )
                continue
            if isinstance(message, Reply):
                self._take_reply(event.rank, message)
            elif isinstance(message, Question):
                if message.call in self._running:
                    self._running[message.call].ask(event.rank, message.value)
            elif isinstance(message, Status):
                self._take_status(event.rank, message)
            elif isinstance(message, Ended):
                self._in_program.discard(event.rank)
            elif isinstance(message, Failed):
                self._note(
                    FailedOutside(event.rank, message.text, message.is_secondary)
                )
            elif isinstance(message, Left):
                self._take_goodbye(event.rank)

    def _take_status(self, rank: int, status: Status) -> None:
        answers = self._questions.get(status.question)
        if answers is not None:
            answers[rank] = status
        if status.beat is not None:
            self._answers[rank] = (status, self._now())

    def _take_goodbye(self, rank: int) -> None:
        self._forget(rank)
        # Who looks at the run sees that this rank has ended well.
        last = self._answers.get(rank)
        if last is not None and last[0].beat is not None:
            left = msgspec.structs.replace(
                last[0], beat=replace(last[0].beat, left=True)
            )
            self._answers[rank] = (left, last[1])

    def _forget(self, rank: int) -> None:
        self._present.discard(rank)
        self._in_program.discard(rank)

    def _take_reply(self, rank: int, reply: Reply) -> None:
        running = self._running.get(reply.call)
        self.signal = max(self.signal, reply.signal)
        # A late reply to a call that has failed, or a second one.
        if running is None or rank not in running.waiting:
            return
        if reply.error is not None:
            # The rank stays among those that the call waits for, so that an error names
            # its call.
            self._note(RaisedError(rank, running.name, reply.error))
            return
        running.waiting.discard(rank)
        if rank in running.ranks:
            running.replies[rank] = reply
        if running.waiting:
            return
        del self._running[running.id]
        _cancel_timers(running)
        if running.future.done():
            return
        try:
            running.future.set_result(running.finish(running.replies))
        except Exception as error:  # a reply of another type than the program declares
            running.future.set_exception(error)

    # --- failures ---------------------------------------------------------------------------------------------------

    def _note_lost(self, event: Lost) -> None:
        if event.rank not in self._present:
            return  # it has said goodbye
        self._forget(event.rank)
        last = self._answers.get(event.rank)
        beat = None if last is None else last[0].beat
        self._note(LostRank(event.rank, event.reason, beat))

    def _note(self, evidence: Evidence) -> None:
        """Keep a sign of a failure. The first one starts the grace time, at whose end the cause is decided."""
        # Ranks that have been told that the run fails end one after another.
        if self._reason:
            return
        self._evidence.append(evidence)
        if len(self._evidence) == 1:
            self._start(self._fail())

    async def _fail(self) -> None:
        """Decide the cause, once signs nearer to it have had time to arrive, and end every call with it."""
        await asyncio.sleep(self.timeouts.grace)
        for _ in range(LOSS_GRACES):
            # Errors about broken connections come before the loss of the rank that
            # broke them, which the next probe notices.
            if not all(is_secondary(item) for item in self._evidence):
                break
            await asyncio.sleep(self.timeouts.grace)
        cause = find_cause(self._evidence)
        calls = self._unfinished()
        if isinstance(cause, LostRank):
            # A killed process loses its last reply, too. It was hardly in a call for
            # which it only moved rows.
            calls |= self._unfinished(runs=True)
        self._failure = explain(cause, calls, self._name)
        for running in self._running.values():
            _cancel_timers(running)
            if not running.future.done():
                running.future.set_exception(self._failure)
        self._stop(self._failure)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the controller's own. Its exceptions end the run, so that nothing fails silently."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_task_end)
        return task

    def _note_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """End the program with an error, or the job if no program runs."""
        if self._failed is None:
            is_expected = isinstance(error, CallFailed)
            self._send_end(
                str(error)
                if is_expected
                else f"the controller raised {describe(error)}"
            )
        elif not self._failed.done():
            self._failed.set_exception(error)

    def _start_later(
        self,
        seconds: float,
        work: Callable[[_Running], Coroutine[Any, Any, None]],
        running: _Running,
    ) -> None:
        """Start a task for a call that is still running after `seconds`."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, lambda: self._start(work(running)))
        running.timers.append(timer)

    async def _explain_deadline(self, running: _Running) -> None:
        # The call that passed its deadline need not be the slow one, so all ranks with
        # unfinished calls are asked, and `explain` compares them.
        statuses = await self.ask(sorted(self._unfinished()))
        if running.id in self._running:
            self._note(
                PassedDeadline(
                    running.name, self.timeouts.call, self._unfinished(), statuses
                )
            )

    def _unfinished(self, *, runs: bool = False) -> dict[int, str]:
        """Return, by rank, the earliest call that the rank has not replied to.

        Args:
            runs: leave out calls for which a rank only moves rows.
        """
        calls: dict[int, str] = {}
        for id in sorted(self._running):
            running = self._running[id]
            for rank in sorted(running.waiting):
                if not runs or rank in running.ranks:
                    calls.setdefault(rank, running.name)
        return calls

    async def _report_slow(self, running: _Running) -> None:
        waiting = sorted(running.waiting & self._present)
        statuses = await self.ask(waiting)
        # The call may have ended while the ranks were asked.
        if not running.waiting or running.future.done():
            return
        lines = [
            describe_status(self._name(rank), statuses.get(rank))
            for rank in waiting[:4]
        ]
        more = f", and {len(waiting) - 4} more ranks" if len(waiting) > 4 else ""
        self._log(f"{running.name} still waits: {'; '.join(lines)}{more}")
        self._start_later(self.timeouts.slow, self._report_slow, running)

    async def _watch_ranks(self, watch: RankWatch) -> None:
        """Ask all ranks what they do, and note those that stall or are silent, until one is found."""
        # With many ranks ask less often, so that answers take a bounded share of the
        # controller's time.
        interval = max(watch.interval, self.num_ranks / RANKS_A_SECOND)
        begin, never = self._now(), set(self._present)
        while not self._evidence and not self._reason:
            await asyncio.sleep(interval)
            await self.ask(sorted(self._present))
            now = self._now()
            # A rank that has never answered has no heartbeat, so `who_is_silent` below
            # cannot report it. Late answers count too.
            never = (never - self._answers.keys()) & self._present
            if never and now - begin > watch.lost_after:
                names = ", ".join(map(self._name, sorted(never)))
                text = f"{names} has not been heard of for {now - begin:.0f} s, since the job began"
                self._note(StalledRanks(tuple(sorted(never)), text))
                return
            beats: dict[int, Heartbeat] = {}
            busy: dict[int, Heartbeat] = {}
            silent: dict[int, float] = {}
            for rank, (status, answered_at) in sorted(self._answers.items()):
                if status.beat is None:
                    continue
                beats[rank] = status.beat
                if rank not in self._present:
                    continue
                silent[rank] = now - answered_at
                # A rank that waits for a call holds nobody up. One that does not answer
                # may: others that wait for it must not count as waiting for each other.
                if not status.is_idle:
                    busy[rank] = status.beat
            watch.show(beats)
            ranks, text = who_is_silent(beats, silent, watch.lost_after, self._name)
            if not text:
                ranks, text = who_stalls(busy, watch.stalled_after, self._name)
            if text:
                self._note(StalledRanks(tuple(ranks), text))

    async def ask(self, ranks: Sequence[int]) -> dict[int, Status]:
        """Return what ranks say they are doing. A rank that does not answer in time has no entry."""
        question = self._next_question
        self._next_question += 1
        answers: dict[int, Status] = {}
        self._questions[question] = answers
        self._send_question(ranks, question)
        deadline = self._now() + self.timeouts.answer
        # `_read` fills `answers`. Polling is enough here: nobody waits for this result
        # in the time-critical path.
        while len(answers) < len(ranks) and self._now() < deadline:
            await asyncio.sleep(self.timeouts.answer / 20)
        # A later answer would only grow the dictionary.
        del self._questions[question]
        return answers

    def _send_question(self, ranks: Sequence[int], question: int) -> None:
        beat = None if self._observe is None else self._observe()
        self._transport.send(ranks, encode(Where(question, beat)))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def first_value(kind: type[T]) -> Callable[[dict[int, Reply]], T]:
    """Return a `finish` for `Controller.call` that takes the value of the group's first rank."""

    def finish(replies: dict[int, Reply]) -> T:
        return decode_value(replies[min(replies)].value, kind)

    return finish


def list_references(arguments: Sequence[object]) -> list[Ref[Any]]:
    """Return the references among arguments of a call, those in lists included."""
    references: list[Ref[Any]] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            references.append(argument)
        elif _is_list_of_references(argument):
            references += argument
    return references


def _is_list_of_references(argument: object) -> TypeGuard[list[Ref[Any]]]:
    return (
        isinstance(argument, list)
        and bool(argument)
        and all(isinstance(item, Ref) for item in argument)
    )


def _encode_argument(argument: object) -> Argument:
    if isinstance(argument, Ref):
        return ValueArgument(argument.id)
    if _is_list_of_references(argument):
        return ValuesArgument(tuple(ref.id for ref in argument))
    return PlainArgument(encode_value(argument))


def _all_rows(ref: Ref[Any]) -> Rows | None:
    """Return the numbers of all rows of a value; None: it does not consist of rows."""
    numbers: set[int] = set()
    for rows in ref.rows.values():
        if rows is None:
            return None
        numbers.update(rows)
    return tuple(sorted(numbers))


def _union(held: Rows | None, received: Rows | None) -> Rows | None:
    return (
        None if held is None or received is None else tuple(sorted({*held, *received}))
    )


def _cancel_timers(running: _Running) -> None:
    for timer in running.timers:
        timer.cancel()
    running.timers.clear()
