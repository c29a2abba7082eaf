"""Serving of a run's programs on one rank of the job."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from megaverl.config import Config
from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.monitoring.console import Console
from megaverl.trainer.job import Job, PreemptionHandler, Stages
from megaverl.trainer.sample_rows import RowMover


def serve_program(
    program: Callable[[Controller], Coroutine[Any, Any, None]],
    workers: Mapping[str, object],
    *,
    config: Config,
    stages: Stages,
    leave: PreemptionHandler | None = None,
    console: Console,
    dialogue: Dialogue | None = None,
) -> None:
    """Serve a program of the run until it ends. Every rank of the job takes part.

    Args:
        program: makes the program, which runs on the coordinator's rank.
        workers: workers of this rank by role.
        stages: this rank's place in the job. They show the controller what this rank does.
        leave: notes signals, which reach the program with the replies to its calls. None: they end the process.
        dialogue: lets workers' methods ask the program.

    Raises:
        TrainingStopped: another rank failed or was lost. The message names it.
    """
    context = stages.job.context
    mover = RowMover(context)
    # If roles share all ranks, a rank that waits has nothing else to do, so its wait is
    # not recorded as a stage.
    waiting = nullcontext if context.placement.is_colocated else partial(stages, "wait")
    with _connected(stages.job, config, console) as connection:
        connection.serve(
            program,
            workers,
            mover,
            waiting=waiting,
            signal=lambda: leave.number if leave is not None else 0,
            dialogue=dialogue,
        )
    # Sent tensors must stay alive until their receivers have taken them.
    mover.settle()


@contextmanager
def _connected(
    job: Job, config: Config, console: Console
) -> Iterator[ControllerConnection]:
    """Yield the job's connection to its controller, or one for this program if the job has none."""
    if job.connection is not None:
        yield job.connection
        return
    timeouts = CallTimeouts(call=config.run.timeout_minutes * 60)
    with ControllerConnection(job.context, timeouts, log=console.print) as connection:
        job.connection = connection
        try:
            yield connection
        finally:
            job.connection = None
