"""This rank's connection to the job's controller, from the start of the job to its end.

Over it the rank serves programs, tells what it does, and learns why the run fails:

    coordinator's rank                              every rank (the coordinator's too)
    controller thread                               main thread       side thread
    runs programs  -------- CallRequest, End -----> serve()
    asks all ranks -------- Where ------------------------------>     answers with a heartbeat
    lost, stalled? -------- End(reason) ------------------------>     ends the process if the main thread does not

The first failure reason stands, and every rank reports it. A rank that hears nothing of
the controller names the coordinator's rank by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.failures import CallFailed, ControllerLost, default_name
from megaverl.controller.messages import NO_QUESTION, Failed, Left, encode
from megaverl.controller.relay import node_address
from megaverl.controller.serving import Mover, run_blocking, serve
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.thread import ControllerThread
from megaverl.controller.zmq_transport import ZmqController, ZmqRank
from megaverl.distributed.collectives import broadcast_json, reduce_json
from megaverl.distributed.curve_sockets import Address
from megaverl.distributed.failures import says_peer_is_gone
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.rank_observer import ASKS_AFTER, RankObserver
from megaverl.distributed.store import own_address
from megaverl.errors import FAILED, TrainingStopped
from megaverl.user_code import describe

# Set by torchrun's agent, which is then the parent of a rank.
STARTED_BY_AGENT = "TORCHELASTIC_RUN_ID"


class ControllerConnection:
    """Connection of one rank. Every rank of the job makes one, on its main thread. Collective over the job.

    Args:
        context: this rank's place in the job.
        timeouts: limits on the controller's waiting.
        watch: limits of the watch over the ranks; None: only broken connections and missed deadlines are noticed.
        name: returns the name of a rank in messages.
        log: prints one line for the user, on the coordinator's rank.
        show_error: shows the failure reason before this rank ends.
        end: ends this rank's process with an exit code.

    Example:
        connection = ControllerConnection(context, CallTimeouts(call=1800.0), watch=RankWatch(stalled_after=1800.0))
        connection.status("build")
        connection.serve(program, workers, mover)
        connection.leave()
    """

    def __init__(
        self,
        context: JobContext,
        timeouts: CallTimeouts,
        *,
        watch: RankWatch | None = None,
        name: Callable[[int], str] = default_name,
        log: Callable[[str], None] = print,
        show_error: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.name = name
        self._context, self._timeouts, self._watch = context, timeouts, watch
        self._log, self._show_error, self._end = log, show_error, end
        self._main = threading.get_ident()
        # Why the run has failed, once this rank has left it.
        self._reason = ""
        asks_after = ASKS_AFTER if watch is None else watch.stalled_after / 2
        self._observer = RankObserver(
            context.role_group.name, min(ASKS_AFTER, asks_after)
        )
        self._board = StatusBoard(observe=self._observer.observe)
        coordinator = context.placement.coordinator
        self._thread: ControllerThread | None = None
        if context.rank == coordinator:
            self._thread = ControllerThread(
                own_address(),
                context.placement.size,
                self._make_controller,
                join_timeout=context.timeout.total_seconds(),
            )
        # The other ranks need the controller's address to connect to it.
        encoded = broadcast_json(
            None if self._thread is None else self._thread.address.encode().hex(),
            coordinator,
            context.control,
        )
        controller = Address.decode(bytes.fromhex(encoded))
        self._relay = ExitStack()
        nearest = node_address(
            controller,
            context.placement,
            context.rank,
            lambda part: reduce_json(part, merge_dictionaries, context.control),
        )
        self._transport = ZmqRank(
            self._relay.enter_context(nearest),
            context.rank,
            self._board,
            coordinator=name(coordinator),
            leave_after=10.0 if watch is None else watch.grace,
            lost_after=None if watch is None else watch.lost_after,
            launcher=os.getppid() if STARTED_BY_AGENT in os.environ else None,
            end_process=self._end_process,
        )
        if self._thread is not None:
            self._thread.wait_until_joined()
        self._transport.wait_for_greeting(context.timeout.total_seconds())

    def __enter__(self) -> ControllerConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def reason(self) -> str | None:
        """Return why the run fails; None: nothing is known to have failed."""
        return self._reason or self._transport.reason

    def status(self, stage: str, step: int | None = None) -> None:
        """Note that this rank begins a stage of a step."""
        self._observer.enter(stage, step)
        self._board.enter(self._observer.doing)
        # While a program runs its controller asks often enough, and messages to it cost
        # time.
        if self._board.is_outside and threading.get_ident() == self._main:
            self._transport.send(encode(self._board.answer(NO_QUESTION)))

    def serve(
        self,
        program: Callable[[Controller], Coroutine[Any, Any, None]],
        workers: Mapping[str, object],
        mover: Mover,
        *,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        signal: Callable[[], int] = lambda: 0,
        dialogue: Dialogue | None = None,
    ) -> None:
        """Serve a program until it ends. Every rank of the job takes part.

        Args:
            program: runs on the coordinator's rank, in the controller's thread.
            workers: workers of this rank by role.
            mover: transfers values between ranks.
            waiting: opens a context around the wait for each call.
            signal: returns the number of the signal that asked this rank to leave the run, or 0.
            dialogue: lets workers' methods ask the program.

        Raises:
            TrainingStopped: another rank failed or was lost, or the run had failed before. The message names the rank.
            BaseException: any exception that a call raised on this rank.
        """
        if self._reason:
            raise TrainingStopped(f"the run has failed before: {self._reason}")
        result = None if self._thread is None else self._thread.start(program)
        try:
            served = run_blocking(
                serve(
                    self._context.rank,
                    self._transport,
                    workers,
                    mover,
                    self._board,
                    signal,
                    waiting,
                    dialogue,
                )
            )
        except ControllerLost as error:
            raise TrainingStopped(str(error)) from None
        finally:
            # From here on this rank ends by itself.
            self._transport.stay()
        # This rank's own error has a traceback into the user's code, so it goes before
        # the reason that all ranks share.
        if served.error is not None:
            raise served.error
        if result is not None:
            try:
                result.result()
            except CallFailed as error:
                raise TrainingStopped(served.reason or str(error)) from None
        if served.reason:
            raise TrainingStopped(served.reason)

    def explain(self, error: BaseException) -> str | None:
        """Leave the job, and return why the run fails if another rank's end caused `error`, else None.

        If nothing has failed before, the error becomes the reason, for all ranks.
        """
        if self._context.placement.size == 1:
            return None
        text, name = describe(error), self.name(self._context.rank)
        own = f"{name} failed in {self._observer.doing}: {text}"
        is_interrupted = isinstance(error, KeyboardInterrupt)
        if is_interrupted:
            own = f"{name} was in {self._observer.doing} and {_interrupted_here()}"
        reason = self._fail(own, says_peer_is_gone(error))
        # Each rank reports an error that all ranks have.
        return None if is_interrupted or reason.endswith(text) else reason

    def leave(self) -> None:
        """Leave the job without a failure. All ranks have finished their work."""
        if self._reason:
            return
        self._transport.send(encode(Left()))
        self._close()

    def _fail(self, own: str, is_secondary: bool) -> str:
        """Leave the job with a failure, and return its reason: `own`, or an earlier one."""
        if self._reason:
            return self._reason
        transport = self._transport
        if transport.reason is None:
            transport.send(encode(Failed(own, is_secondary)))
        # The controller answers within its grace times. A rank that is cut off learns it
        # when it counts the controller as lost.
        seconds = self._timeouts.leave
        if self._watch is not None:
            seconds += self._watch.lost_after
        self._reason = transport.wait_for_reason(seconds) or own
        transport.stay()
        transport.send(encode(Left()))
        self._close()
        return self._reason

    def _close(self) -> None:
        self._transport.close()
        # Both wait for other ranks, so that these learn the reason first.
        self._relay.close()
        if self._thread is not None:
            self._thread.close()

    def _make_controller(self, transport: ZmqController) -> Controller:
        placement = self._context.placement
        return Controller(
            transport,
            placement.size,
            timeouts=self._timeouts,
            node_of=placement.node_of,
            log=self._log,
            watch=self._watch,
            name=self.name,
            observe=self._observer.observe,
        )

    def _end_process(self, reason: str) -> None:
        """Show the failure reason and what this rank does, and end the process."""
        # After an interrupt on this machine, the launcher already reports it.
        if not reason.endswith(_interrupted_here()):
            own = f"{self.name(self._context.rank)} was in {self._observer.doing}"
            self._show_error(f"{reason}. {own}; the run ends.")
        sys.stdout.flush()
        sys.stderr.flush()
        self._end(FAILED)


def merge_dictionaries(parts: list[dict[str, str]]) -> dict[str, str]:
    """Return one dictionary with the entries of all."""
    return {key: value for part in parts for key, value in part.items()}


def _interrupted_here() -> str:
    return f"was interrupted on {socket.gethostname()}"
