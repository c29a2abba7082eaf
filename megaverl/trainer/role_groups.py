"""Handles on the roles of a run, for its program: one method for each method of the role's workers.

`role_workers` has the methods that run on the ranks, under the same names.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
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


class HeldOutResult(msgspec.Struct, frozen=True):
    """Result of a validation.

    Attributes:
        metrics: by name.
        samples: the first samples as records, in JSON, which holds integers of any size.
    """

    metrics: dict[str, float]
    samples: str


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

    def record_validation(self, done: int, result: HeldOutResult) -> PendingCall[None]:
        """Remember, write and show the validation after `done` steps."""
        return self.report("record_validation", NoneType, done, result)

    def save_if_due(self, done: int) -> PendingCall[bool]:
        """Save a checkpoint if `checkpoint.save_every` says so, after the best validation, and after the last step.

        Returns:
            Whether the ranks leave now, because the run goes on on another layout (`run.replan`).
        """
        return self.report("save_if_due", bool, done)

    def leave(self, signal: int, rollouts: Ref[RolloutBatch] | None, scores: Ref[Scores] | None) -> PendingCall[None]:
        """Save, with samples of the running step; every rank leaves when the program has ended."""
        return self.report("leave", NoneType, signal, rollouts, scores)

    def share(self, rollouts: Ref[RolloutBatch]) -> PendingCall[None]:
        """Bring all responses to every rank, for the Python program that runs there."""
        return self.report("share", NoneType, rollouts)

    def given(self, step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Return the responses that the Python program has given on every rank."""
        return self.keep("given", step)


class RolloutGroup(SampleGroup):
    """Ranks of the engines."""

    def generate(self, step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Generate `algorithm.group_size` responses to each of the step's prompts."""
        return self.keep("generate", step)

    def begin_responses(self, step: int) -> PendingCall[None]:
        """Generate the first part of each response; new weights may come before the rest of it."""
        return self.report("begin_responses", NoneType, step)

    def finish_responses(self, step: int) -> PendingCall[Ref[RolloutBatch]]:
        """Generate the rest of each response that was begun."""
        return self.keep("finish_responses", step)

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

    def generate_held_out(self) -> PendingCall[Ref[RolloutBatch]]:
        """Generate `trainer.validation_samples` responses to every held-out prompt."""
        return self.keep("generate_held_out")

    def measure_held_out(self, responses: Ref[RolloutBatch], scores: Ref[Scores]) -> PendingCall[HeldOutResult]:
        """Return what the scores of responses to held-out prompts say of the policy."""
        return self.report("measure_held_out", HeldOutResult, responses, scores)


class RewardGroup(SampleGroup):
    """Ranks that compute rewards."""

    def score_held_out(self, responses: Ref[RolloutBatch]) -> PendingCall[Ref[Scores]]:
        """Compute the rewards of responses to held-out prompts, which count in no step's metrics."""
        return self.keep("score_held_out", responses)

    def score(self, rollouts: Ref[RolloutBatch], step: int) -> PendingCall[Ref[Scores]]:
        """Compute the reward of each response."""
        return self.keep_of(rollouts, "score", step)

    def score_arriving(self, step: int) -> PendingCall[None]:
        """Compute rewards of samples while the engines generate others; `score` then has them."""
        return self.report("score_arriving", NoneType, step)

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


class IslandGroup(WorkerGroup):
    """Rank that adds up what islands of the actor send: the coordinator's."""

    def join_updates(self, step: int) -> PendingCall[bool]:
        """Add up the gradients, or the changes, of all islands in the updates of a step; return True."""
        return self.report("join_updates", bool, step)


class AgentGroup(SampleGroup):
    """Ranks of one agent of a game, which has an actor and a critic of its own (`environment.agents: own`)."""

    def train(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int) -> PendingCall[None]:
        """Train the agent on its own samples, by advantages of its own; its engine gets the new weights."""
        return self.report_of(rollouts, "train", NoneType, scores, step)


class OperatorFacts(msgspec.Struct, frozen=True):
    """Operator of a flow.

    Attributes:
        takes, gives: names of values.
        ranks: that run it; None: all.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    ranks: tuple[int, ...] | None = None


class StepFlow(msgspec.Struct, frozen=True):
    """Operators of a step that are to run, in order, and the names of the values that are there before."""

    operators: tuple[OperatorFacts, ...]
    given: tuple[str, ...]


class OperatorGroup(SampleGroup):
    """All ranks, for a step that is a flow of operators.

    Attributes:
        change_prompts: an operator runs before responses are generated.
    """

    change_prompts = False

    def begin(self, step: int, made: list[str]) -> PendingCall[Ref[Any]]:
        """Begin a step; return the values that are there before its operators run, which describe its `StepFlow`.

        Args:
            made: names of values that need not be made.
        """
        return self.keep("begin", step, made)

    def call(self, operator: OperatorFacts, rollouts: Ref[Any] | None, inputs: list[Ref[Any]]) -> PendingCall[Ref[Any]]:
        """Run an operator on its ranks; return all of its outputs as one value.

        Args:
            rollouts: responses of the step, whose rows the ranks work on.
        """
        ranks = self.ranks if operator.ranks is None else operator.ranks
        wanted = None
        if rollouts is not None:
            wanted = self._assignments.wanted(ranks, rollouts, inputs)
        return WorkerGroup(self.role, ranks, self._controller).keep("call", operator.name, inputs, wanted=wanted)

    def pick(self, values: Ref[Any], name: str) -> PendingCall[Ref[Any]]:
        """Return one of several values, on the ranks that hold these."""
        return WorkerGroup(self.role, values.holders, self._controller).keep("pick", values, name)


class SamplesAhead(Protocol):
    """Samples of later steps, which the engines generate while others train (`rollouts_ahead.RolloutsAhead`)."""

    async def take(self, step: int) -> EarlySamples:
        """Return the samples of a step, once they are there; all steps before are behind all ranks."""

    async def until_begun(self, step: int) -> None:
        """Wait until the engines have begun everything that is generated with the weights before the step's update."""

    async def until_new_weights(self, step: int) -> None:
        """Wait until the engines have the weights that come in the middle of a step's responses."""

    def stop(self) -> None:
        """Begin nothing more."""


# A program of one step. Returns the samples that the step has trained on, for the records.
StepProgram = Callable[["Run", int], Awaitable[Samples]]


@dataclass
class Run:
    """Roles of a run, as its program sees them.

    Attributes:
        session: all ranks, for what surrounds the steps.
        held_out_reward: ranks that score a validation: the engines' unless reward models are on others.
        critic, reference: None where the algorithm does without.
        agents: agents of a game by name, where each has an actor and a critic of its own; else empty.
        step: program of one step.
        islands: adds up what islands of the actor send; None: there is one island.
        operators: operators of a flow, for `program.flow_step`.
        worlds: ranks that receive samples from the engines' ranks; none where roles share all ranks.
        assignments: which samples each of these ranks works on.
        has_engines: responses are generated; otherwise those of another run are replayed.
        validates: there are held-out prompts, and steps after which the run validates.
        is_given: a Python program gives the responses of each step on every rank (`PPOTrainer`).
        may_leave_inside: a run that is asked to leave may do so inside a step.
        restored_steps: steps whose samples come from the checkpoint that the run goes on from.
        ahead: samples of later steps; None: engines and training take turns.
        scores_arriving: samples are scored while the engines generate others.
        scores_ahead: whether rewards are computed ahead of training, too.
    """

    config: Config
    controller: Controller
    session: SessionGroup
    recorder: RecorderGroup
    rollout: RolloutGroup
    reward: RewardGroup
    held_out_reward: RewardGroup
    actor: ActorGroup
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    islands: IslandGroup | None
    agents: Mapping[str, AgentGroup]
    step: StepProgram
    operators: OperatorGroup
    worlds: Sequence[WorldGroup]
    assignments: Assignments
    has_engines: bool = True
    validates: bool = False
    is_given: bool = False
    may_leave_inside: bool = True
    restored_steps: Set[int] = frozenset()
    ahead: SamplesAhead | None = None
    scores_arriving: bool = False
    scores_ahead: bool = False

    @property
    def has_rounds(self) -> bool:
        """Return whether samples are made in rounds of generating and scoring (dynamic sampling)."""
        is_dynamic = self.config.algorithm.dynamic_sampling.metric is not None
        return is_dynamic and self.has_engines and not self.is_given

    async def assign(self, rollouts: Ref[RolloutBatch]) -> None:
        """Settle who works on which samples, now that their lengths are known; each rank then receives its own.

        Samples that a Python program gives are on every rank, which works on all of them.
        """
        if not self.worlds or self.is_given:
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
    agents: Sequence[str] = (),
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

    has_models = any(entry.path is not None for entry in config.reward)
    models_are_apart = has_models and not placement.colocated("reward", "rollout")
    scores_held_out = ranks_of("reward") if models_are_apart else ranks_of("rollout")
    recorders = everyone if is_shared else ranks_of("actor")[:1]
    return Run(
        config=config,
        controller=controller,
        session=SessionGroup("session", everyone, controller),
        recorder=RecorderGroup("recorder", recorders, controller, assignments),
        rollout=group(RolloutGroup, "rollout"),
        reward=group(RewardGroup, "reward"),
        held_out_reward=RewardGroup("reward", scores_held_out, controller),
        actor=group(ActorGroup, "actor"),
        critic=group(CriticGroup, "critic") if config.uses_critic else None,
        reference=group(ReferenceGroup, "reference") if config.uses_ref_log_probs else None,
        islands=IslandGroup("islands", [placement.coordinator], controller) if len(placement.islands) > 1 else None,
        agents={name: AgentGroup(f"agent.{name}", everyone, controller, assignments) for name in agents},
        step=step,
        operators=OperatorGroup("operators", everyone, controller, assignments),
        worlds=[] if is_shared else worlds,
        assignments=assignments,
        has_engines=has_engines,
        validates=has_engines and bool(config.data.validation and config.trainer.validate_every),
        may_leave_inside=is_shared and has_engines,
        restored_steps=restored_steps,
    )
