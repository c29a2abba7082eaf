"""Serving of a run's programs on one rank of the job."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from megaverl.config import Config
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.status_board import StatusBoard
from megaverl.dataflow.program_runner import run_program
from megaverl.monitoring.console import Console
from megaverl.trainer.job import PreemptionHandler, Stages
from megaverl.trainer.sample_rows import RowMover


def serve_program(
    program: Callable[[Controller], Coroutine[Any, Any, None]],
    workers: Mapping[str, object],
    *,
    config: Config,
    stages: Stages,
    leave: PreemptionHandler,
    console: Console,
    dialogue: Dialogue | None = None,
) -> None:
    """Serve a program of the run until it ends. Every rank of the job takes part.

    Args:
        program: makes the program, which runs on the coordinator's rank.
        workers: workers of this rank by role.
        stages: this rank's place in the job. They show the controller what this rank does.
        leave: notes signals, which reach the program with the replies to its calls.
        dialogue: lets workers' methods ask the program.

    Raises:
        TrainingStopped: another rank failed or was lost. The message names it.
    """
    context, liveness = stages.job.context, stages.job.liveness
    seconds = config.run.timeout_minutes * 60
    stages.board = StatusBoard(observe=None if liveness is None else liveness.answer)
    if liveness is not None:
        # The watch names the rank that stalls before a deadline names a call.
        seconds += liveness.watch.until_found
    mover = RowMover(context)
    # If roles share all ranks, a rank that waits has nothing else to do, so its wait is
    # not recorded as a stage.
    waiting = nullcontext if context.placement.is_colocated else partial(stages, "wait")
    run_program(
        context,
        program,
        workers,
        mover=mover,
        board=stages.board,
        timeouts=CallTimeouts(call=seconds),
        signal=lambda: leave.number,
        waiting=waiting,
        log=console.print,
        liveness=liveness,
        dialogue=dialogue,
    )
    stages.board = None
    # Sent tensors must stay alive until their receivers have taken them.
    mover.settle()
