"""Job: how a rank joins it, how it publishes its current stage, and how it handles signals to leave.

After SIGTERM or SIGUSR1 the run saves at the next safe point, and every rank exits with
the same exit code.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch

from megaverl.config import Config
from megaverl.config.errors import InvalidConfig
from megaverl.config.grids import (
    CLAIMS,
    is_placed,
    placed_mistakes,
    resolve_placement,
    role_grids,
    used_roles,
)
from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts
from megaverl.controller.failures import default_name
from megaverl.distributed.flight_record import write_flight_record
from megaverl.distributed.heartbeat import Heartbeat, RankWatch
from megaverl.distributed.job_context import JobContext, default_group_context, join
from megaverl.distributed.placement import Node, ResolvedPlacement, parse_claims
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.rendezvous import NodeInfo, digests, introduce
from megaverl.distributed.store import job_store
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.monitoring.tracker import installed
from megaverl.platform import platform
from megaverl.processes import freeze_objects, thaw_objects
from megaverl.signal_handlers import handling
from megaverl.version import __version__

PYTHON_THRESHOLD = (700, 10, 10)  # default thresholds of Python's garbage collector
# Seconds that the transports wait longer than the run allows, so that the controller can
# name the lost rank first.
SPEAKS_FIRST = 60.0
# Seconds between writes of `ranks.json`.
WRITES_EVERY = 2.0
# Seconds without an answer before a rank counts as lost. Calls that hold the
# interpreter are shorter.
LOST_AFTER = 30.0
# Longer on GPUs, where calls that compile and load kernels hold the interpreter. This
# value is not measured.
LOST_AFTER_ON_GPUS = 120.0
# Components that compute. Their versions must be the same on all nodes.
MUST_AGREE = ("torch", "megatron-core", "vllm", "transformers")

PlacementCheck = Callable[[Config, ResolvedPlacement], None]


@dataclass
class Job:
    """This rank's place in the job, and its connection to the job's controller.

    Attributes:
        connection: None between the programs of a job whose process group a program created by itself (`alone`).
    """

    context: JobContext
    connection: ControllerConnection | None = None


@dataclass
class WatchedJob(Job):
    """Job that `join_job` has joined. Its controller watches the ranks from then on."""

    connection: ControllerConnection


def patience(minutes: float) -> timedelta:
    """Return the timeout of the transports for a run that lets ranks be silent for `minutes`."""
    return timedelta(seconds=minutes * 60 + SPEAKS_FIRST)


def join_job(
    config: Config, command: str, console: Console, check: PlacementCheck | None = None
) -> WatchedJob:
    """Join the job: exchange facts with the other ranks, resolve the placement and create the process groups.

    Args:
        check: called with the configuration and the placement before any group is created.

    Raises:
        ConfigError: nodes differ in configuration or versions, roles cannot be placed, or `check` failed. Raised on
            every rank.
        TrainingStopped: ranks do not join in time, a port is taken, or another job uses the same address.
    """
    store, rank, size = job_store(timedelta(minutes=config.run.timeout_minutes))
    sections = config.to_dict()
    facts = NodeInfo(
        claims=claimed_roles(),
        agreed=digests(sections, _versions()),
        sections=sections,
        memory=_gpu_memory(),
    )
    nodes = introduce(
        store, rank, size, facts, timedelta(minutes=config.run.timeout_minutes)
    )
    # Every rank computes the placement from the same facts, so all get the same result
    # or the same error.
    placement = place(config, command, size, nodes)
    if check is not None:
        check(config, placement)
    role_group = placement.role_group_of(rank).name
    write_flight_record(
        config.run_dir / "logs", "" if placement.is_colocated else role_group
    )
    context = join(placement, store, rank, patience(config.run.timeout_minutes))
    seconds = config.run.timeout_minutes * 60
    console.speaks = rank == reporter(placement)
    if not placement.is_colocated or placement.notes:
        console.print("\n".join(placement.lines()))
    watch = RankWatch(
        stalled_after=seconds,
        interval=min(1.0, seconds / 10),
        # No longer than the run lets ranks be silent.
        lost_after=min(LOST_AFTER_ON_GPUS if platform.is_cuda else LOST_AFTER, seconds),
        grace=min(4.0, seconds / 2),
        show=RanksFile(config.run_dir),
    )
    connection = ControllerConnection(
        context,
        # The watch names the rank that stalls before a deadline names a call.
        CallTimeouts(call=seconds + watch.until_found),
        watch=watch,
        # With all roles on all ranks, the name of a role group adds nothing to a rank's
        # number.
        name=default_name if placement.is_colocated else context.describe,
        log=console.print,
        show_error=console.error,
    )
    return WatchedJob(context, connection)


def alone(config: Config) -> Job:
    """Return the job of a program that created the default group itself. Every role has all ranks of the group."""
    roles = [*used_roles(config, "train"), "rollout", "reward", "coordinator"]
    return Job(default_group_context(roles, patience(config.run.timeout_minutes)))


def place(
    config: Config, command: str, size: int, nodes: tuple[Node, ...]
) -> ResolvedPlacement:
    """Resolve the placement of the roles from `placement` and the nodes' `--role`.

    Without either, every role has every rank.

    Raises:
        ConfigError: `--role` was given to a command other than train, or the roles cannot be placed.
    """
    claims = any(node.claims for node in nodes)
    if claims and command != "train":
        raise ConfigError(
            f"--role: `megaverl {command}` has all roles on all ranks. Leave it out."
        )
    roles = used_roles(config, command)
    if is_placed(config, command) or claims:
        placement = resolve_placement(
            config.placement, role_grids(config, roles), size, nodes
        )
        if mistakes := list(placed_mistakes(config, placement)):
            raise InvalidConfig(mistakes, "placement")
        return placement
    return resolve(
        {}, size, dict.fromkeys([*roles, "rollout", "reward", "coordinator"]), nodes
    )


def reporter(placement: ResolvedPlacement) -> int:
    """Return the rank that prints messages and keeps the run's records: the actor's first."""
    return placement.ranks["actor"][0]


def claimed_roles() -> tuple[str, ...]:
    """Return the roles that this node was started with (`--role`).

    Raises:
        ConfigError: a role does not exist.
    """
    text = os.environ.get(CLAIMS, "")
    try:
        return parse_claims(text) if text else ()
    except ValueError as error:
        raise ConfigError(f"--role: {error}") from error


def _gpu_memory() -> float:
    """Return the memory of this rank's GPU in bytes, or 0 without a GPU."""
    return (
        float(torch.cuda.get_device_properties(platform.device).total_memory)
        if platform.is_cuda
        else 0.0
    )


def _versions() -> dict[str, str]:
    versions = {
        component: known[1]
        for component in MUST_AGREE
        if (known := installed(component))
    }
    return {"megaverl": __version__, **versions}


class RanksFile:
    """Writer of `ranks.json`, the state of all ranks for `megaverl watch`. The coordinator writes it every 2 s."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._written = run_dir / "ranks.json", -math.inf

    def __call__(self, beats: Mapping[int, Heartbeat]) -> None:
        if (now := time.monotonic()) - self._written < WRITES_EVERY:
            return
        self._written = now
        ranks = {str(rank): asdict(beat) for rank, beat in sorted(beats.items())}
        # Readers must never see a partly written file.
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # the run does not depend on this file
            part.write_text(
                json.dumps({"time": time.time(), "ranks": ranks}), encoding="utf-8"
            )
            os.replace(part, self._path)


@dataclass
class Stages:
    """Named stages of a step, entered one after another.

    Attributes:
        timeline: records a span for each stage.
        job: its controller learns each stage, with the step if there is one.
        step: running step, counted from 1, or None between steps.

    Example:
        stages = Stages(timeline, job)
        with stages("rollout"):
            generate()
    """

    timeline: Timeline
    job: Job
    step: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter a stage. Record a span and publish the stage's name."""
        self.status(name)
        with self.timeline.span(name):
            yield

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Attribute the stages inside to a step (counted from 0), which may be ahead of the one that trains."""
        before, self.step = self.step, step + 1
        try:
            with self.timeline.ahead(step):
                yield
        finally:
            self.step = before

    def status(self, name: str) -> None:
        """Publish the beginning of a stage without recording a span."""
        if self.job.connection is not None:
            self.job.connection.status(name, self.step)


HANDLED = (signal.SIGTERM, signal.SIGUSR1)


class Leaving(Exception):
    """Exception that is raised on every rank of a run that was asked to leave and has saved.

    Attributes:
        code: exit code of every rank (`resuming.how_to_go_on`).
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class PreemptionHandler:
    """Handler of signals that ask the run to leave. It only stores the signal.

    The signal reaches the run's program with the rank's next reply, and the program
    leaves at a safe point.

    Attributes:
        number: number of the signal that this rank has received, or 0.

    Example:
        leave = PreemptionHandler()
        with leave.listening():
            serve_program(program, workers, leave=leave, ...)
    """

    number = 0

    def listening(self) -> AbstractContextManager[None]:
        """Return a context in which the signals are handled."""
        return handling(HANDLED, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@contextmanager
def kept_objects() -> Iterator[None]:
    """Exclude the existing objects from garbage collection until the end.

    megatron-core collects garbage twice in every save. With all libraries imported,
    each collection takes half a second. Objects created later are collected with
    Python's default thresholds. Existing garbage is collected first, because frozen
    garbage would keep its tensors in memory until the end.
    """
    gc.collect()
    freeze_objects()
    # Includes objects created since an earlier call froze the others.
    gc.freeze()
    gc.set_threshold(*PYTHON_THRESHOLD)
    try:
        yield
    finally:
        thaw_objects()
