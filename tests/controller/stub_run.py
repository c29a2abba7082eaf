"""A training run whose workers compute with small integers: programs, workers and a disk for simulated clusters.

Everything that a run must not get wrong is visible in the numbers: the digest of the
weights depends on every row of every step, on the order of steps, and on the weight
version that generated each row.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.moves import Rows
from megaverl.controller.references import PendingCall, Ref
from tests.controller.every_rank import EveryRank
from tests.controller.simulation import (
    Fault,
    Latencies,
    SimulatedCluster,
    SimulatedOutcome,
)

ROWS = 8
PRIME = 2_147_483_647
MINI_BATCHES, NUM_ASKING = 2, 2
WORK = (0.001, 0.05)  # seconds of a call
TIMEOUTS = CallTimeouts(call=5.0, slow=60.0, answer=0.5, grace=0.5, leave=2.0)
LONGEST = 30.0  # virtual seconds after which no run may still be there


def mix(*numbers: int) -> int:
    """Return a number that depends on all numbers and their order."""
    total = 17
    for number in numbers:
        total = (total * 48_271 + number + 1) % PRIME
    return total


@dataclass(frozen=True)
class Batch:
    """Rows of a step: by number, the value of each and the version of the weights that made it."""

    rows: dict[int, int]
    versions: dict[int, int]

    def held_rows(self) -> Rows:
        return tuple(sorted(self.rows))

    def select_rows(self, rows: Sequence[int]) -> Batch:
        return Batch(
            {row: self.rows[row] for row in rows},
            {row: self.versions[row] for row in rows},
        )

    def merge_rows(self, other: Batch) -> Batch:
        assert not self.rows.keys() & other.rows.keys(), "a row arrived twice"
        return Batch(self.rows | other.rows, self.versions | other.versions)

    def describe(self) -> int:
        return ROWS


@dataclass(frozen=True)
class Gradient:
    """Report of one rank on one mini-batch."""

    rank: int
    step: int
    number: int


@dataclass
class Disk:
    """Storage that outlives a run.

    Attributes:
        parts: by step and rank, the saved weights, and the batch that was generated ahead.
        committed: the step that a run goes on from. commits: all of them, in order.
    """

    parts: dict[tuple[int, int], tuple[int, int, Batch | None]] = field(
        default_factory=dict
    )
    committed: int = 0
    commits: list[int] = field(default_factory=list)

    def commit(self, step: int, ranks: Sequence[int]) -> None:
        assert all((step, rank) in self.parts for rank in ranks), (
            "committed before every part was written"
        )
        assert step == self.committed + 1, "a step is committed twice, or out of order"
        self.committed = step
        self.commits.append(step)


class Worker:
    """All roles of a rank. Methods are coroutines that take a random virtual time."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        layout: Layout,
        disk: Disk,
        trace: list[str],
    ) -> None:
        self._cluster, self._rank, self._layout, self._disk, self._trace = (
            cluster,
            rank,
            layout,
            disk,
            trace,
        )
        self._weights, self._version = 1, 0
        self._engine_weights, self._engine_version = 1, 0
        self._trained: list[int] = []

    async def _work(self, name: str, step: int) -> None:
        await self._cluster.work(self._rank, WORK)
        self._trace.append(f"{self._rank} {name} {step}")

    async def generate(self, step: int) -> Batch:
        await self._work("generate", step)
        ranks = self._layout.rollout
        mine = range(ranks.index(self._rank), ROWS, len(ranks))
        rows = {row: mix(step, row, self._engine_weights) for row in mine}
        return Batch(rows, dict.fromkeys(rows, self._engine_version))

    async def score(self, batch: Batch) -> Batch:
        await self._work("score", 0)
        return Batch(
            {row: mix(value, 3) for row, value in batch.rows.items()}, batch.versions
        )

    async def update(self, batch: Batch, scores: Batch, step: int, version: int) -> int:
        await self._work("update", step)
        assert sorted(batch.rows) == sorted(scores.rows) == list(range(ROWS)), (
            "rows are missing"
        )
        assert set(batch.versions.values()) == {version}, (
            "samples of several or other weights"
        )
        assert step not in self._trained, "trained twice"
        self._trained.append(step)
        # In every mini-batch some ranks report a gradient, and all go on with what the
        # program makes of the reports.
        asking = self._layout.actor[:NUM_ASKING]
        for number in range(MINI_BATCHES):
            report = (
                Gradient(self._rank, step, number) if self._rank in asking else None
            )
            verdict = await self._cluster.ask(self._rank, report, int)
            assert verdict == mix(step, number, *asking), (
                "the verdict of another update"
            )
        values = [mix(batch.rows[row], scores.rows[row]) for row in range(ROWS)]
        self._weights = mix(self._weights, step, *values)
        self._version = step + 1
        return self._weights

    async def give_weights(self) -> tuple[int, int]:
        await self._work("give", self._version)
        return self._weights, self._version

    async def load(self, weights: tuple[int, int]) -> int:
        await self._work("load", weights[1])
        self._engine_weights, self._engine_version = weights
        return weights[1]

    async def save(self, step: int) -> int:
        await self._work("save", step)
        self._disk.parts[step, self._rank] = (self._weights, self._version, None)
        return step

    async def save_ahead(self, step: int, ahead: Batch) -> int:
        await self._work("save", step)
        self._disk.parts[step, self._rank] = (self._weights, self._version, ahead)
        return step

    async def restore(self, step: int) -> int:
        await self._work("restore", step)
        self._weights, self._version, _ = self._disk.parts[step, self._rank]
        return self._version

    async def restore_ahead(self, step: int) -> Batch:
        await self._work("restore", step)
        batch = self._disk.parts[step, self._rank][2]
        assert batch is not None
        return batch


@dataclass(frozen=True)
class Layout:
    """Ranks of the roles."""

    rollout: tuple[int, ...]
    actor: tuple[int, ...]

    @classmethod
    def shared(cls, num_ranks: int) -> Layout:
        return cls(tuple(range(num_ranks)), tuple(range(num_ranks)))

    @classmethod
    def split(cls, num_ranks: int) -> Layout:
        half = num_ranks // 2
        return cls(tuple(range(half)), tuple(range(half, num_ranks)))


class RolloutGroup(WorkerGroup):
    def generate(self, step: int) -> PendingCall[Ref[Batch]]:
        return self.keep("generate", step)

    def score(self, batch: Ref[Batch]) -> PendingCall[Ref[Batch]]:
        return self.keep("score", batch)

    def load(self, weights: Ref[tuple[int, int]]) -> PendingCall[int]:
        return self.report("load", int, weights)


class ActorGroup(EveryRank):
    def update(
        self, batch: Ref[Batch], scores: Ref[Batch], step: int, version: int
    ) -> PendingCall[list[int]]:
        everything = {rank: None for rank in self.ranks}
        wanted = {batch.id: everything, scores.id: everything}
        asking = self.ranks[:NUM_ASKING]
        return self.report_all(
            "update", int, batch, scores, step, version, wanted=wanted, asking=asking
        )

    def give_weights(self) -> PendingCall[Ref[tuple[int, int]]]:
        return self.keep("give_weights")

    def save(self, step: int) -> PendingCall[int]:
        return self.report("save", int, step)

    def save_ahead(self, step: int, ahead: Ref[Batch]) -> PendingCall[int]:
        everything = {rank: None for rank in self.ranks}
        return self.report(
            "save_ahead", int, step, ahead, wanted={ahead.id: everything}
        )

    def restore(self, step: int) -> PendingCall[int]:
        return self.report("restore", int, step)

    def restore_ahead(self, step: int) -> PendingCall[Ref[Batch]]:
        return self.keep("restore_ahead", step)


@dataclass(frozen=True)
class Run:
    """What a program works with."""

    rollout: RolloutGroup
    actor: ActorGroup
    disk: Disk
    steps: int


async def decide(update: PendingCall[list[int]]) -> list[int]:
    """Answer every mini-batch of an update, and return the update's result."""
    count = 0
    while reports := await update.questions(Gradient):
        assert len({(report.step, report.number) for report in reports}) == 1, (
            "reports of several mini-batches"
        )
        update.answer(
            mix(
                reports[0].step, reports[0].number, *(report.rank for report in reports)
            )
        )
        count += 1
    assert count == MINI_BATCHES
    return await update


async def on_policy(run: Run) -> int:
    """Generate, score, train, synchronise and save, one after the other."""
    first = run.disk.committed
    if first:
        await run.actor.restore(first)
        await run.rollout.load(await run.actor.give_weights())
    digest = 0
    for step in range(first, run.steps):
        batch = await run.rollout.generate(step)
        scores = await run.rollout.score(batch)
        digests = await decide(run.actor.update(batch, scores, step, version=step))
        assert len(set(digests)) == 1, "ranks have different weights"
        digest = digests[0]
        await run.rollout.load(await run.actor.give_weights())
        await run.actor.save(step + 1)
        run.disk.commit(step + 1, run.actor.ranks)
    return digest


async def one_ahead(run: Run) -> int:
    """Generate the next step's samples while the actor trains, with weights one version old."""
    first, digest = run.disk.committed, 0
    if first:
        await run.actor.restore(first)
        await run.rollout.load(await run.actor.give_weights())
        batch = await run.actor.restore_ahead(first)
    else:
        batch = await run.rollout.generate(0)
    for step in range(first, run.steps):
        scores = await run.rollout.score(batch)
        # The rows leave the engines' ranks with the update, before these begin the next
        # samples.
        updated = run.actor.update(batch, scores, step, version=max(step - 1, 0))
        coming = run.rollout.generate(step + 1)
        digests = await decide(updated)
        assert len(set(digests)) == 1, "ranks have different weights"
        digest = digests[0]
        batch = await coming
        await run.rollout.load(await run.actor.give_weights())
        await run.actor.save_ahead(step + 1, batch)
        run.disk.commit(step + 1, run.actor.ranks)
    return digest


PROGRAMS: dict[str, Callable[[Run], Coroutine[Any, Any, int]]] = {
    "on_policy": on_policy,
    "one_ahead": one_ahead,
}


@dataclass
class Simulated:
    """One simulated run and what it left."""

    outcome: SimulatedOutcome
    disk: Disk
    trace: list[str]


def simulate(
    program: str,
    layout: Layout,
    num_ranks: int,
    *,
    seed: int,
    steps: int = 2,
    faults: Sequence[Fault] = (),
    num_programs: int = 1,
    disk: Disk | None = None,
    latencies: Latencies | None = None,
) -> Simulated:
    """Run a program on a simulated cluster, from where the disk stands.

    Args:
        num_programs: programs that the job runs one after another, each for `steps` steps.
    """
    disk = disk if disk is not None else Disk()
    trace: list[str] = []
    cluster = SimulatedCluster(num_ranks, seed, faults=faults, latencies=latencies)

    def make_workers(cluster: SimulatedCluster, rank: int) -> dict[str, object]:
        worker = Worker(cluster, rank, layout, disk, trace)
        return {"rollout": worker, "actor": worker}

    def start(controller: Controller) -> Coroutine[Any, Any, int]:
        rollout = RolloutGroup("rollout", layout.rollout, controller)
        actor = ActorGroup("actor", layout.actor, controller)
        last = min(disk.committed + steps, num_programs * steps)
        return PROGRAMS[program](Run(rollout, actor, disk, last))

    outcome = cluster.run(
        start, make_workers, num_programs=num_programs, timeouts=TIMEOUTS
    )
    return Simulated(outcome, disk, trace)
