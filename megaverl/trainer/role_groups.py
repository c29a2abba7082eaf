"""Handles on the roles of a run, for its program: one method for each method of the role's workers.

`role_workers` has the methods that run on the ranks, under the same names.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from megaverl.config import Config
from megaverl.controller.core import Controller, Wanted, list_references
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.moves import Rows
from megaverl.controller.references import PendingCall, Ref
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.trainer.sample_rows import Fields, SampleFacts
from megaverl.workers.reward import Scores

T = TypeVar("T")
G = TypeVar("G")

RowsByRank = dict[int, list[int]]


class Samples(NamedTuple):
    """Responses of a step and their rewards, as references."""

    rollouts: Ref[RolloutBatch]
    scores: Ref[Scores]


class EarlySamples(NamedTuple):
    """Samples of a step that is to come; the rewards are None where whoever computes them is not ahead of training."""

    rollouts: Ref[RolloutBatch]
    scores: Ref[Scores] | None


class Assignments:
    """Which rows of a step's samples each rank works on, where roles have ranks of their own.

    Results of samples go with them: a rank needs the same rows of the log-probs as of the responses.
    """

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Ref[Any], dict[int, Rows]] = weakref.WeakKeyDictionary()

    def add(self, samples: Ref[Any], rows: RowsByRank) -> None:
        """Note who works on which rows."""
        known = self._rows.setdefault(samples, {})
        known.update({rank: tuple(mine) for rank, mine in rows.items()})

    def wanted(self, ranks: Sequence[int], samples: Ref[Any], arguments: Sequence[object]) -> dict[int, Wanted] | None:
        """Return what a call needs of its arguments; None where every rank has what it needs.

        Args:
            samples: that all arguments which are rows belong to.
        """
        known = self._rows.get(samples)
        if known is None:
            return None
        held = {rank: rows for rank, rows in samples.rows.items() if rank not in known}
        wanted: Wanted = {rank: known.get(rank, held.get(rank)) for rank in ranks}
        references = list_references([samples, *arguments])
        return {ref.id: wanted for ref in references if None not in ref.rows.values()}


class SampleGroup(WorkerGroup):
    """Group whose calls are about the samples of a step, their first argument."""

    def __init__(
        self, role: str, ranks: Sequence[int], controller: Controller, assignments: Assignments | None = None
    ) -> None:
        super().__init__(role, ranks, controller)
        self._assignments = assignments or Assignments()

    def keep_of(self, samples: Ref[Any], method: str, *arguments: object) -> PendingCall[Ref[Any]]:
        """As `keep`, with the rows of the samples that each rank works on."""
        wanted = self._assignments.wanted(self.ranks, samples, arguments)
        return self.keep(method, samples, *arguments, wanted=wanted)

    def report_of(self, samples: Ref[Any], method: str, kind: type[T], *arguments: object) -> PendingCall[T]:
        """As `report`, with the rows of the samples that each rank works on."""
        wanted = self._assignments.wanted(self.ranks, samples, arguments)
        return self.report(method, kind, samples, *arguments, wanted=wanted)


class WorldGroup(SampleGroup):
    """Ranks that work on the same samples, for one role or several."""

    def deliver(self, rollouts: Ref[RolloutBatch], values: list[Ref[Any]]) -> PendingCall[None]:
        """Bring these ranks what they work on, before the ranks that have it begin something long."""
        return self.report_of(rollouts, "deliver", NoneType, values)

    def assign(self, value: int, facts: SampleFacts) -> PendingCall[RowsByRank]:
        """Decide which rows of the samples in a value each of these ranks works on."""
        return self.report("assign", RowsByRank, value, facts)


class RecorderGroup(SampleGroup):
    """Ranks that keep what the records of a step need; one of them writes."""

    def take(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores]) -> PendingCall[None]:
        """Keep the samples of a step until it has been reported."""
        return self.report_of(rollouts, "take", NoneType, scores)


class SessionGroup(WorkerGroup):
    """All ranks of the run: what a step is surrounded by."""

    def begin_step(self, step: int) -> PendingCall[None]:
        """Start the clocks and meters of a step; steps count from 0."""
        return self.report("begin_step", NoneType, step)

    def report_step(self, done: int) -> PendingCall[None]:
        """Write and show what the last of `done` steps has measured."""
        return self.report("report_step", NoneType, done)

    def validate(self, done: int) -> PendingCall[None]:
        """Score responses of the engines to held-out prompts, where there are any."""
        return self.report("validate", NoneType, done)

    def validate_if_due(self, done: int) -> PendingCall[None]:
        """Validate if `trainer.validate_every` says so, and after the last step."""
        return self.report("validate_if_due", NoneType, done)

    def save_if_due(self, done: int) -> PendingCall[bool]:
        """Save a checkpoint if `checkpoint.save_every` says so, after the best validation, and after the last step.

        Returns:
            Whether the ranks leave now, because the run goes on on another layout (`run.replan`).
        """
        return self.report("save_if_due", bool, done)

    def leave(self, signal: int, rollouts: Ref[RolloutBatch] | None, scores: Ref[Scores] | None) -> PendingCall[None]:
        """Save, with samples of the running step; every rank leaves when the program has ended."""
        return self.report("leave", NoneType, signal, rollouts, scores)


class RolloutGroup(SampleGroup):
    """Ranks of the engines."""

    def generate(self, step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Generate `algorithm.group_size` responses to each of the step's prompts."""
        return self.keep("generate", step)

    def begin_rounds(self, step: int) -> PendingCall[int]:
        """Begin the rounds of dynamic sampling; return the number of prompts of the first one."""
        return self.report("begin_rounds", int, step)

    def generate_round(self, step: int, num_prompts: int) -> PendingCall[Ref[RolloutBatch]]:
        """Generate responses to the next prompts."""
        return self.keep("generate_round", step, num_prompts)

    def add_round(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int) -> PendingCall[int]:
        """Add a round; return the number of prompts of the next one, 0 when there are enough groups.

        Fails with TrainingStopped after `dynamic_sampling.max_rounds`.
        """
        return self.report_of(rollouts, "add_round", int, scores, step)

    def informative_rollouts(self, step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Return the responses that all rounds together have kept."""
        return self.keep("informative_rollouts", step)

    def informative_scores(self) -> PendingCall[Ref[Scores]]:
        """Return the rewards of the responses that all rounds together have kept."""
        return self.keep("informative_scores")

    def generate_greedy(self, rollouts: Ref[RolloutBatch], step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Generate the likeliest response to the prompt of each group, [groups]."""
        return self.keep_of(rollouts, "generate_greedy", step)


class RewardGroup(SampleGroup):
    """Ranks that compute rewards."""

    def score(self, rollouts: Ref[RolloutBatch], step: int) -> PendingCall[Ref[Scores]]:
        """Compute the reward of each response."""
        return self.keep_of(rollouts, "score", step)

    def score_greedy(self, greedy: Ref[RolloutBatch]) -> PendingCall[Ref[Fields]]:
        """Compute `greedy_rewards` [groups]."""
        return self.keep_of(greedy, "score_greedy")


class ReferenceGroup(SampleGroup):
    """Ranks of the frozen policy."""

    def log_probs(self, rollouts: Ref[RolloutBatch]) -> PendingCall[Ref[Fields]]:
        """Compute `ref_log_probs` [B, R]."""
        return self.keep_of(rollouts, "log_probs")


class CriticGroup(SampleGroup):
    """Ranks of the critic."""

    def values(self, rollouts: Ref[RolloutBatch]) -> PendingCall[Ref[Fields]]:
        """Compute `values` [B, R], and `last_values` [B] after responses that were cut off."""
        return self.keep_of(rollouts, "values")

    def update(self, rollouts: Ref[RolloutBatch], experience: Ref[Fields], step: int) -> PendingCall[bool]:
        """Take the critic's optimizer steps; return True."""
        return self.report_of(rollouts, "update", bool, experience, step)


class ActorGroup(SampleGroup):
    """Ranks of the policy that is trained."""

    def old_log_probs(self, rollouts: Ref[RolloutBatch], step: int) -> PendingCall[Ref[Fields]]:
        """Compute `old_log_probs` [B, R], of the policy before the step's updates.

        An actor that is its own critic (`critic.share_backbone`) gives `values` and `last_values` of the same pass.
        """
        return self.keep_of(rollouts, "old_log_probs", step)

    def score_norms(self, rollouts: Ref[RolloutBatch]) -> PendingCall[Ref[Fields]]:
        """Compute `score_norms`, the squared gradients of log-probs by logits."""
        return self.keep_of(rollouts, "score_norms")

    def implicit_rewards(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], reference: Ref[Fields]
    ) -> PendingCall[Ref[Fields]]:
        """Train PRIME's reward model on the outcomes, and compute its `implicit_rewards` [B, R] of tokens."""
        return self.keep_of(rollouts, "implicit_rewards", scores, reference)

    def advantages(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], signals: list[Ref[Fields]]
    ) -> PendingCall[Ref[Fields]]:
        """Compute what the updates train on beside the rollouts: `advantages` [B, R] and the signals."""
        return self.keep_of(rollouts, "advantages", scores, signals)

    def update(self, rollouts: Ref[RolloutBatch], experience: Ref[Fields], step: int) -> PendingCall[bool]:
        """Take the actor's optimizer steps; return False while only the critic warms up."""
        return self.report_of(rollouts, "update", bool, experience, step)

    def update_mix(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], index: int, step: int) -> PendingCall[None]:
        """Take the further update that entry `index` of `mix` describes, in the steps that are its own."""
        return self.report_of(rollouts, "update_mix", NoneType, scores, index, step)

    def sync_weights(self, rollout: RolloutGroup, is_updated: bool) -> PendingCall[None]:
        """Reshard the actor's weights into the engines. The ranks of both roles take part."""
        ranks = sorted({*self.ranks, *rollout.ranks})
        return WorkerGroup("weights", ranks, self._controller).report("sync", NoneType, is_updated)


class OperatorFacts(msgspec.Struct, frozen=True):
    """Operator of a flow: its name, and the names of the values that it takes and gives."""

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class StepFlow(msgspec.Struct, frozen=True):
    """Operators of a step that are to run, in order, and the names of the values that are there before."""

    operators: tuple[OperatorFacts, ...]
    given: tuple[str, ...]


class OperatorGroup(WorkerGroup):
    """All ranks, for a step that is a flow of operators."""

    def begin(self, step: int) -> PendingCall[Ref[Any]]:
        """Begin a step; return the values that are there before its operators run, which describe its `StepFlow`."""
        return self.keep("begin", step)

    def call(self, name: str, inputs: list[Ref[Any]]) -> PendingCall[Ref[Any]]:
        """Run an operator; return all of its outputs as one value."""
        return self.keep("call", name, inputs)

    def pick(self, values: Ref[Any], name: str) -> PendingCall[Ref[Any]]:
        """Return one of several values."""
        return self.keep("pick", values, name)


class SamplesAhead(Protocol):
    """Samples of later steps, which the engines generate while others train (`rollouts_ahead.RolloutsAhead`)."""

    async def take(self, step: int) -> EarlySamples:
        """Return the samples of a step, once they are there; all steps before are behind all ranks."""

    async def until_begun(self, step: int) -> None:
        """Wait until the engines have begun everything that is generated with the weights before the step's update."""

    def stop(self) -> None:
        """Begin nothing more."""


# A program of one step. Returns the samples that the step has trained on, for the records.
StepProgram = Callable[["Run", int], Awaitable[Samples]]


@dataclass
class Run:
    """Roles of a run, as its program sees them.

    Attributes:
        session: all ranks, for what surrounds the steps.
        critic, reference: None where the algorithm does without.
        step: program of one step.
        operators: operators of a flow, for `program.flow_step`.
        worlds: ranks that receive samples from the engines' ranks; none where roles share all ranks.
        assignments: which samples each of these ranks works on.
        has_engines: responses are generated; otherwise those of another run are replayed.
        may_leave_inside: a run that is asked to leave may do so inside a step.
        restored_steps: steps whose samples come from the checkpoint that the run goes on from.
        ahead: samples of later steps; None: engines and training take turns.
        scores_ahead: whether rewards are computed ahead of training, too.
    """

    config: Config
    controller: Controller
    session: SessionGroup
    recorder: RecorderGroup
    rollout: RolloutGroup
    reward: RewardGroup
    actor: ActorGroup
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    step: StepProgram
    operators: OperatorGroup
    worlds: Sequence[WorldGroup]
    assignments: Assignments
    has_engines: bool = True
    may_leave_inside: bool = True
    restored_steps: Set[int] = frozenset()
    ahead: SamplesAhead | None = None
    scores_ahead: bool = False

    async def assign(self, rollouts: Ref[RolloutBatch]) -> None:
        """Settle who works on which samples, now that their lengths are known; each rank then receives its own."""
        if not self.worlds:
            return
        facts = rollouts.describe(SampleFacts)
        decisions = [world.assign(rollouts.id, facts) for world in self.worlds]
        for decision in decisions:
            self.assignments.add(rollouts, await decision)
        await self.deliver(rollouts)

    async def deliver(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores] | None = None) -> None:
        """Bring samples that were generated ahead to the ranks that will train on them.

        They leave before the engines begin the next ones; whoever is to receive them may still train.
        """
        if self.ahead is None:
            return
        for world in self.worlds:
            if scores is None:
                world.deliver(rollouts, [])
            elif not set(world.ranks).isdisjoint(self.actor.ranks):
                world.deliver(rollouts, [scores])


def make_run(
    config: Config,
    controller: Controller,
    placement: ResolvedPlacement,
    *,
    step: StepProgram,
    has_engines: bool,
    restored_steps: Set[int],
) -> Run:
    """Return the roles of a run on the ranks that the placement gives them."""
    everyone = range(controller.num_ranks)
    assignments = Assignments()
    is_shared = placement.is_colocated
    engines = placement.ranks["rollout"]
    consumers = {"reward", "reference", "critic", "actor"}
    worlds = [
        WorldGroup("world", world.ranks, controller, assignments)
        for world in placement.worlds
        if consumers.intersection(world.roles) and not set(world.ranks) <= set(engines)
    ]

    def ranks_of(role: str) -> Sequence[int]:
        return everyone if is_shared else placement.ranks[role]

    def group(kind: Callable[..., G], role: str) -> G:
        return kind(role, ranks_of(role), controller, assignments)

    recorders = everyone if is_shared else ranks_of("actor")[:1]
    return Run(
        config=config,
        controller=controller,
        session=SessionGroup("session", everyone, controller),
        recorder=RecorderGroup("recorder", recorders, controller, assignments),
        rollout=group(RolloutGroup, "rollout"),
        reward=group(RewardGroup, "reward"),
        actor=group(ActorGroup, "actor"),
        critic=group(CriticGroup, "critic") if config.uses_critic else None,
        reference=group(ReferenceGroup, "reference") if config.uses_ref_log_probs else None,
        step=step,
        operators=OperatorGroup("operators", everyone, controller),
        worlds=[] if is_shared else worlds,
        assignments=assignments,
        has_engines=has_engines,
        may_leave_inside=is_shared and has_engines,
        restored_steps=restored_steps,
    )
