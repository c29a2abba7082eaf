"""A rank and its job: joining it, what the rank is doing for the others to know, and signals to leave it.

SIGTERM and SIGUSR1: the run saves at the next safe point, and every rank leaves with the same exit code.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.errors import InvalidConfig
from megaverl.config.grids import CLAIMS, is_placed, placed_mistakes, resolve_placement, role_grids, used_roles
from megaverl.controller.serving import StatusBoard
from megaverl.distributed.collectives import reduce_json
from megaverl.distributed.heartbeat import Heartbeat
from megaverl.distributed.liveness import Liveness, Timeouts, write_flight_record
from megaverl.distributed.placement import Node, ResolvedPlacement, parse_claims
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.rendezvous import NodeInfo, digests, introduce
from megaverl.distributed.store import job_store
from megaverl.distributed.worlds import Fabric, join, of_default_group
from megaverl.errors import SAVED_AND_LEFT, ConfigError
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.monitoring.tracker import installed
from megaverl.platform import platform
from megaverl.processes import freeze_objects, thaw_objects
from megaverl.version import __version__

PYTHON_THRESHOLD = (700, 10, 10)  # of the garbage collector
SPEAKS_FIRST = 60.0  # seconds that the transports wait beyond what the run allows: the liveness can name the rank
WRITES_EVERY = 2.0  # seconds
LOST_AFTER = 30.0  # seconds without a word; a call that holds the interpreter is shorter than that
LOST_AFTER_ON_GPUS = 120.0  # there kernels are compiled and loaded by calls that hold it; no measurement is known
# What the ranks compute with: it must be the same everywhere.
MUST_AGREE = ("torch", "megatron-core", "vllm", "transformers")

PlacementCheck = Callable[[Config, ResolvedPlacement], None]


@dataclass
class Job:
    """This rank's place in the job, and what the others know of it."""

    fabric: Fabric
    liveness: Liveness


def patience(minutes: float) -> timedelta:
    """How long the transports wait where a run allows ranks so many minutes."""
    return timedelta(seconds=minutes * 60 + SPEAKS_FIRST)


def join_job(config: Config, command: str, console: Console, check: PlacementCheck | None = None) -> Job:
    """Meet the other ranks, agree on who is where, and make this rank's world the default group.

    Args:
        check: of who is where, before any group is made.

    Raises:
        ConfigError: nodes that differ in configuration or versions, roles that cannot be placed, what `check` finds;
            on every rank.
        TrainingStopped: ranks that do not come, a port that is taken, another job at the same address.
    """
    store, rank, size = job_store(timedelta(minutes=config.run.timeout_minutes))
    sections = config.to_dict()
    facts = NodeInfo(
        claims=claimed_roles(), agreed=digests(sections, _versions()), sections=sections, memory=_gpu_memory()
    )
    nodes = introduce(store, rank, size, facts, timedelta(minutes=config.run.timeout_minutes))
    placement = place(config, command, size, nodes)
    if check is not None:
        check(config, placement)
    world = placement.world_of(rank).name
    write_flight_record(config.run_dir / "logs", "" if placement.is_colocated else world)
    fabric = join(placement, store, rank, patience(config.run.timeout_minutes))
    seconds = config.run.timeout_minutes * 60
    console.speaks = rank == reporter(placement)
    if not placement.is_colocated or placement.notes:
        console.print("\n".join(placement.lines()))
    liveness = Liveness(
        store,
        rank,
        size,
        coordinator=placement.coordinator,
        timeouts=Timeouts(
            stalled_after=seconds,
            interval=min(1.0, seconds / 10),
            lost_after=min(LOST_AFTER_ON_GPUS if platform.is_cuda else LOST_AFTER, seconds),
            grace=min(4.0, seconds / 2),
        ),
        world=world,
        name=(lambda number: f"rank {number}") if placement.is_colocated else fabric.describe,
        say=console.error,
        show=RanksFile(config.run_dir),
    )
    return Job(fabric, liveness)


def alone(config: Config) -> Fabric:
    """Of a program that has made the default group itself: every role has all of its ranks."""
    roles = [*used_roles(config, "train"), "rollout", "reward", "coordinator"]
    return of_default_group(roles, patience(config.run.timeout_minutes))


def place(config: Config, command: str, size: int, nodes: tuple[Node, ...]) -> ResolvedPlacement:
    """Who is where: as `placement` and the nodes' `--role` say; without either, every role has every rank."""
    claims = any(node.claims for node in nodes)
    if claims and command != "train":
        raise ConfigError(f"--role: `megaverl {command}` has all roles on all ranks. Leave it out.")
    roles = used_roles(config, command)
    if is_placed(config, command) or claims:
        placement = resolve_placement(config.placement, role_grids(config, roles), size, nodes)
        if mistakes := list(placed_mistakes(config, placement)):
            raise InvalidConfig(mistakes, "placement")
        return placement
    return resolve({}, size, dict.fromkeys([*roles, "rollout", "reward", "coordinator"]), nodes)


def reporter(placement: ResolvedPlacement) -> int:
    """The rank that speaks to the person and keeps the run's records: the actor's first."""
    return placement.ranks["actor"][0]


def claimed_roles() -> tuple[str, ...]:
    """What this node was started as (`--role`).

    Raises:
        ConfigError: no such role.
    """
    text = os.environ.get(CLAIMS, "")
    try:
        return parse_claims(text) if text else ()
    except ValueError as error:
        raise ConfigError(f"--role: {error}") from error


def _gpu_memory() -> float:
    """Bytes of this rank's GPU; 0 where it has none."""
    return float(torch.cuda.get_device_properties(platform.device).total_memory) if platform.is_cuda else 0.0


def _versions() -> dict[str, str]:
    found = {component: known[1] for component in MUST_AGREE if (known := installed(component))}
    return {"megaverl": __version__, **found}


class RanksFile:
    """What all ranks are doing, for `megaverl watch`: the coordinator writes it every two seconds."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._written = run_dir / "ranks.json", -math.inf

    def __call__(self, beats: Mapping[int, Heartbeat]) -> None:
        if (now := time.monotonic()) - self._written < WRITES_EVERY:
            return
        self._written = now
        ranks = {str(rank): asdict(beat) for rank, beat in sorted(beats.items())}
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # nothing depends on it
            part.write_text(json.dumps({"time": time.time(), "ranks": ranks}), encoding="utf-8")
            os.replace(part, self._path)


class Stages:
    """Named stages of a step, entered one after the other.

    Args:
        timeline: gets a span for each.
        job: its liveness knows of each as it begins, and of the step that it is in, if it is in one.

    Attributes:
        board: shows the stage to the controller, where this rank serves a program.
    """

    def __init__(self, timeline: Timeline, job: Job | None = None) -> None:
        self.timeline, self.job = timeline, job
        self.step: int | None = None
        self.board: StatusBoard | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around a stage."""
        self.status(name)
        with self.timeline.span(name):
            yield

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Inside, stages are those of a step (counted from 0) that may be ahead of the one that trains."""
        before, self.step = self.step, step + 1
        try:
            with self.timeline.ahead(step):
                yield
        finally:
            self.step = before

    def status(self, name: str) -> None:
        """A stage begins that has no span of its own."""
        if self.job is not None:
            self.job.liveness.status(name, self.step)
        if self.board is not None:
            self.board.enter(name)


HANDLED = (signal.SIGTERM, signal.SIGUSR1)


class Leaving(Exception):
    """Raised on every rank of a run that was asked to leave and has saved.

    Attributes:
        code: exit code of every rank: `errors.SAVED_AND_LEFT` where the same command goes on from there.
    """

    code = SAVED_AND_LEFT

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code


class PreemptionHandler:
    """Whether somebody wants this run to leave. A signal only notes it; the ranks agree at safe points."""

    def __init__(self) -> None:
        self._signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals for as long as this lasts; before and after, they do what they did."""
        before = {number: signal.signal(number, self._note) for number in HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def number(self) -> int:
        """Number of the signal that this rank has received; 0: none."""
        return self._signal

    def agreed(self, group: dist.ProcessGroup | None = None) -> str | None:
        """The name of a signal that any rank has got, the same on all; every rank (of `group`) takes part."""
        number = reduce_json(self._signal, max, group)
        return signal.Signals(number).name if number else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


@contextmanager
def kept_objects() -> Iterator[None]:
    """What is there now stays until the end, so it need not be looked through for garbage.

    megatron-core collects garbage twice in every save, which with all libraries imported takes half a second a time.
    What is made from here on is looked at as often as Python has it. Garbage is collected first: frozen, it would hold
    its tensors until the end.
    """
    gc.collect()
    freeze_objects()
    gc.freeze()  # also what was made since somebody else asked
    gc.set_threshold(*PYTHON_THRESHOLD)
    try:
        yield
    finally:
        thaw_objects()
