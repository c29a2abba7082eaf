"""Execution of a program on the ranks of a job. The coordinator's rank makes the calls, and all ranks serve them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.failures import CallFailed, ControllerLost, default_name
from megaverl.controller.relay import Relay
from megaverl.controller.serving import Served, run_blocking, serve
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.thread import ControllerThread
from megaverl.controller.zmq_transport import ZmqController, ZmqRank
from megaverl.dataflow.value_mover import ValueMover
from megaverl.distributed.collectives import broadcast_json, reduce_json
from megaverl.distributed.curve_sockets import Address
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.liveness import Liveness
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.store import own_address
from megaverl.errors import TrainingStopped

# Number of ranks from which each node has a relay. The controller then has one
# connection per node instead of one per rank. Below it, direct connections take less
# time (`tools/bench_controller.py`).
RELAYED_FROM = 128


def run_program(
    context: JobContext,
    program: Callable[[Controller], Coroutine[Any, Any, None]],
    workers: Mapping[str, object],
    *,
    mover: ValueMover,
    board: StatusBoard,
    timeouts: CallTimeouts,
    waiting: Callable[[], AbstractContextManager[Any]],
    signal: Callable[[], int] = lambda: 0,
    log: Callable[[str], None] = print,
    liveness: Liveness | None = None,
    dialogue: Dialogue | None = None,
) -> None:
    """Serve a program until it ends. Every rank of the job takes part.

    Args:
        program: runs on the coordinator's rank, in its own thread next to the calls that the rank serves.
        workers: workers of this rank by role.
        mover: transfers values between ranks.
        board: shows the stage of this rank to the controller.
        timeouts: limits on the duration of a call.
        waiting: opens a context around the wait for each call.
        signal: returns the number of the signal that asked this rank to leave the run, or 0.
        log: prints one line for the user, on the coordinator's rank.
        liveness: names the ranks of the job and knows its failure reason. It leaves the watch over the ranks to the
            controller. None: only broken connections and missed deadlines are noticed.
        dialogue: lets workers' methods ask the program.

    Raises:
        TrainingStopped: another rank failed or was lost. The message names it.
        BaseException: any exception that a call raised on this rank.
    """
    coordinator = context.placement.coordinator
    thread: ControllerThread[None] | None = None

    def control(transport: ZmqController) -> Coroutine[Any, Any, None]:
        controller = Controller(
            transport,
            context.placement.size,
            timeouts=timeouts,
            node_of=context.placement.node_of,
            log=log,
            watch=None if liveness is None else liveness.watch,
            name=default_name if liveness is None else liveness.name,
        )
        return controller.run(program(controller))

    if context.rank == coordinator:
        thread = ControllerThread(own_address(), context.placement.size, control)
    # The other ranks need the controller's address to connect to it.
    encoded = broadcast_json(
        thread.address.encode().hex() if thread is not None else None,
        coordinator,
        context.control,
    )
    controller = Address.decode(bytes.fromhex(encoded))
    nearest = node_address(controller, context.placement, context.rank, context.control)
    end_process = None if liveness is None else liveness.end_now
    # Until the failure reason of the program stands, liveness looks for none of its own.
    with nullcontext() if liveness is None else liveness.handed_over():
        with (
            nearest as address,
            ZmqRank(address, context.rank, board, end_process=end_process) as transport,
        ):
            try:
                served = run_blocking(
                    serve(
                        context.rank,
                        transport,
                        workers,
                        mover,
                        board,
                        signal,
                        waiting,
                        dialogue,
                    )
                )
            except ControllerLost as error:
                reason = str(error)
                if liveness is not None:
                    # The coordinator's process may have ended, which liveness then finds.
                    reason = liveness.settle(liveness.watch.until_found, reason)
                raise TrainingStopped(reason) from None
        _finish(served, thread, liveness)


def _finish(
    served: Served, thread: ControllerThread[None] | None, liveness: Liveness | None
) -> None:
    """Raise the error that is closest to the cause on this rank, if the program failed."""

    def agree(reason: str) -> str:
        return reason if liveness is None else liveness.settle(0.0, reason)

    # Every rank reports the same reason, so that it stands in all logs.
    reason = agree(served.reason) if served.reason else ""
    # This rank's own error has a traceback into the user's code, so it goes before the
    # reason that all ranks share.
    if served.error is not None:
        raise served.error
    if thread is not None:
        try:
            thread.result()
        except CallFailed as error:
            raise TrainingStopped(reason or agree(str(error))) from None
    if reason:
        raise TrainingStopped(reason)


@contextmanager
def node_address(
    controller: Address,
    placement: ResolvedPlacement,
    rank: int,
    group: dist.ProcessGroup | None,
) -> Iterator[Address]:
    """Yield the address that a rank connects to: the controller's, or that of its node's relay in a large job.

    The first rank of each node hosts the relay until the context ends. Collective over
    all ranks of the job.

    Args:
        rank: this rank in the job.
        group: all ranks of the job; None for the default group.
    """
    if placement.size < RELAYED_FROM or len(placement.nodes) == 1:
        yield controller
        return
    node = placement.node_of(rank)
    node_ranks = [
        member for member in range(placement.size) if placement.node_of(member) == node
    ]
    relay = (
        Relay(controller, own_address(), node, node_ranks)
        if rank == node_ranks[0]
        else None
    )
    try:
        of_this_rank = (
            {} if relay is None else {str(node): relay.address.encode().hex()}
        )
        # Collective: the relays listen before any rank learns their address.
        addresses = reduce_json(of_this_rank, _merge, group)
        yield Address.decode(bytes.fromhex(addresses[str(node)]))
    finally:
        if relay is not None:
            relay.close()


def _merge(parts: list[dict[str, str]]) -> dict[str, str]:
    return {node: address for part in parts for node, address in part.items()}
