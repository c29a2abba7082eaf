"""Joining the job from a Python program: under torchrun as one of its ranks, else as a job of one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megaverl.config import Config, smallest_world
from megaverl.errors import SAVED_AND_LEFT, ConfigError, TrainingStopped
from megaverl.processes import free_port
from megaverl.trainer.api.settings import JOB_OF_ONE, Description, resolve

if TYPE_CHECKING:
    from megaverl.trainer.job import Job


class _Joined:
    """The job that this process has joined; there is one at most."""

    job: Job | None = None
    config: Config | None = None


def under_torchrun() -> bool:
    """Whether this process was started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not JOB_OF_ONE


def init_distributed(config: Description) -> Job:
    """Make this process a rank of its job: the default process group, the roles' ranks, the watch over lost ranks.

    Under torchrun every rank calls it; otherwise the job is this one process. A second call gives the same job, which
    has one placement.

    Args:
        config: of the run, in any form that a trainer takes.

    Returns: the job: `fabric` (who is where), `liveness` (who is still there).

    Raises:
        ConfigError: a configuration that cannot be, or one that needs more ranks than there are.
        TrainingStopped: ranks that do not come, or another job at the same address.
    """
    resolved = resolve(config)
    if not under_torchrun():
        needed = smallest_world(resolved)
        if needed > 1:
            raise ConfigError(
                f"this configuration needs {needed} ranks, and this process is alone. Start the program with "
                f"torchrun --nproc-per-node {needed} PROGRAM.py"
            )
    if _Joined.job is not None and _Joined.config is not None:
        if resolved.placement != _Joined.config.placement:
            raise ConfigError(
                "placement: this program has joined its job with another one. Give all trainers the same."
            )
        return _Joined.job
    if not under_torchrun():
        JOB_OF_ONE.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        JOB_OF_ONE.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
        os.environ |= JOB_OF_ONE
    from megaverl.checkpoint.training_state import seed_generators
    from megaverl.dataflow.carrier import use_fabric
    from megaverl.monitoring.console import Console
    from megaverl.platform import platform
    from megaverl.trainer.job import join_job

    platform.start()
    _Joined.job = join_job(resolved, "train", Console(int(os.environ["RANK"])))
    _Joined.config = resolved
    use_fabric(_Joined.job.fabric)
    seed_generators(resolved.run.seed)
    atexit.register(_leave)
    return _Joined.job


@contextmanager
def explained() -> Iterator[None]:
    """Around work with the other ranks: where one of them is gone, an error here says so, and not what gloo or NCCL do.

    Raises:
        TrainingStopped: a rank is lost, with its verdict.
        SystemExit: with `errors.SAVED_AND_LEFT`: the run was asked to leave, and has saved.
    """
    try:
        yield
    except Exception as error:
        from megaverl.trainer.job import Leaving

        job = _Joined.job
        if isinstance(error, Leaving):
            if job is None or job.fabric.rank == 0:
                print(error, file=sys.stderr, flush=True)
            raise SystemExit(SAVED_AND_LEFT) from error
        if job is not None and (verdict := job.liveness.explain(error)):
            raise TrainingStopped(verdict) from error
        raise


def _leave() -> None:
    """At the program's end: with the others, unless an error ends it, which is reported to them."""
    import torch.distributed as dist

    from megaverl.distributed.collectives import barrier

    job, error = _Joined.job, getattr(sys, "last_value", None)
    if job is None:
        return
    if error is not None:
        job.liveness.explain(error)
        return
    job.liveness.status("the end of its program")
    try:
        barrier(job.fabric.control)
    except TrainingStopped as broken:
        print(f"error: {job.liveness.explain(broken) or broken}", file=sys.stderr, flush=True)
        os._exit(1)
    job.liveness.leave()
    dist.destroy_process_group()
