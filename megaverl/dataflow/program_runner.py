"""Execution of a program on the ranks of a job. The coordinator's rank makes the calls, and all ranks serve them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.failures import CallFailed, ControllerLost
from megaverl.controller.serving import Served, StatusBoard, run_blocking, serve
from megaverl.controller.thread import ControllerThread
from megaverl.controller.zmq_transport import Address, ZmqRank
from megaverl.dataflow.value_mover import ValueMover
from megaverl.distributed.collectives import broadcast_json
from megaverl.distributed.store import own_address
from megaverl.distributed.worlds import Fabric
from megaverl.errors import TrainingStopped


def run_program(
    fabric: Fabric,
    program: Callable[[Controller], Coroutine[Any, Any, None]],
    workers: Mapping[str, object],
    *,
    mover: ValueMover,
    board: StatusBoard,
    timeouts: CallTimeouts,
    signal: Callable[[], int],
    waiting: Callable[[], AbstractContextManager[Any]],
    explain: Callable[[str], str],
    log: Callable[[str], None],
    dialogue: Dialogue | None = None,
) -> None:
    """Serve a program until it ends. Every rank of the job takes part.

    Args:
        program: runs on the coordinator's rank, in its own thread next to the calls that the rank serves.
        workers: workers of this rank by role.
        mover: transfers values between ranks.
        board: shows the stage of this rank to the controller.
        timeouts: limits on the duration of a call.
        signal: returns the number of the signal that asked this rank to leave the run, or 0.
        waiting: opens a context around the wait for each call.
        explain: returns the reason why the run fails, as far as this rank knows it.
        log: prints one line for the user, on the coordinator's rank.
        dialogue: lets workers' methods ask the program.

    Raises:
        TrainingStopped: another rank failed or was lost. The message names it.
        BaseException: any exception that a call raised on this rank.
    """
    coordinator = fabric.placement.coordinator
    thread: ControllerThread[None] | None = None
    if fabric.rank == coordinator:
        thread = ControllerThread(
            own_address(),
            fabric.placement.size,
            program,
            timeouts=timeouts,
            node_of=fabric.placement.node_of,
            log=log,
        )
    # The other ranks need the controller's address to connect to it.
    encoded = broadcast_json(thread.address.encode().hex() if thread is not None else None, coordinator, fabric.control)
    with ZmqRank(Address.decode(bytes.fromhex(encoded)), fabric.rank, board) as transport:
        try:
            served = run_blocking(serve(fabric.rank, transport, workers, mover, board, signal, waiting, dialogue))
        except ControllerLost as error:
            raise TrainingStopped(explain(str(error))) from None
    _finish(served, thread, explain)


def _finish(served: Served, thread: ControllerThread[None] | None, explain: Callable[[str], str]) -> None:
    """Raise the error that is closest to the cause on this rank, if the program failed."""
    if served.error is not None:
        raise served.error
    if thread is not None:
        try:
            thread.result()
        except CallFailed as error:
            raise TrainingStopped(explain(str(error))) from None
    if served.reason:
        raise TrainingStopped(explain(served.reason))
