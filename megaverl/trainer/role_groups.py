"""Handles of a run's roles, which its program calls: one method for each method of the role's workers.

`role_workers` contains the methods that run on the ranks, under the same names. A
method with `remote` sends a call to the ranks of its role and returns immediately with
a `PendingCall` of the annotated value.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from megaverl.config import Config
from megaverl.controller.core import Controller, Wanted, list_references
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.moves import Rows
from megaverl.controller.references import PendingCall, Ref
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.plan import CompiledFlow
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.trainer.harness.engine_rows import EngineAnswers, EngineRows
from megaverl.trainer.islands import reporting_ranks
from megaverl.trainer.rollouts_ahead import RolloutsAhead
from megaverl.trainer.sample_rows import Fields, SampleFacts
from megaverl.trainer.update_decisions import decide_together
from megaverl.trainer.validation import HeldOutResult
from megaverl.workers.decisions import Rules
from megaverl.workers.reward import Scores

T = TypeVar("T")
G = TypeVar("G")

RowsByRank = dict[int, list[int]]


class Samples(NamedTuple):
    """References to the responses of a step and their rewards."""

    rollouts: Ref[RolloutBatch]
    scores: Ref[Scores]


class Assignments:
    """Table of the rows of a step's samples that each rank works on, for roles on separate ranks.

    Values computed from samples follow the same rows: a rank needs the same rows of the
    log-probs as of the responses.
    """

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Ref[Any], dict[int, Rows]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, samples: Ref[Any], rows: RowsByRank) -> None:
        """Record which rows of `samples` each rank works on."""
        known = self._rows.setdefault(samples, {})
        known.update({rank: tuple(numbers) for rank, numbers in rows.items()})

    def wanted(
        self, ranks: Sequence[int], arguments: Sequence[object]
    ) -> dict[int, Wanted] | None:
        """Return the rows of each argument that every rank needs for a call.

        Args:
            ranks: ranks that receive the call.
            arguments: arguments of the call. The first are the responses that all row-wise arguments belong to.

        Returns:
            Rows by rank for each reference's id, or None if no rows were assigned and every rank already has its input.
        """
        samples = arguments[0] if arguments else None
        if not isinstance(samples, Ref) or (known := self._rows.get(samples)) is None:
            return None
        # Ranks that were assigned no rows, such as those of the engines, use the rows
        # that they hold.
        wanted: Wanted = {
            rank: known.get(rank, samples.rows.get(rank)) for rank in ranks
        }
        # Values that are whole on their ranks (rows None) are transferred whole, so
        # they need no entry.
        return {
            ref.id: wanted
            for ref in list_references(arguments)
            if None not in ref.rows.values()
        }


class SampleGroup(WorkerGroup):
    """Worker group whose calls take the samples of a step as their first argument: ranks receive only their rows."""

    def __init__(
        self,
        role: str,
        ranks: Sequence[int],
        controller: Controller,
        assignments: Assignments | None = None,
    ) -> None:
        super().__init__(role, ranks, controller)
        self._assignments = assignments or Assignments()

    def _wanted(self, arguments: Sequence[object]) -> dict[int, Wanted] | None:
        return self._assignments.wanted(self.ranks, arguments)


class ReceiverGroup(SampleGroup):
    """Role group that receives samples from the engines' ranks, for one role or several."""

    @remote
    def deliver(self, rollouts: Ref[RolloutBatch], values: list[Ref[Any]]) -> None:
        """Transfer samples to these ranks before the sending ranks start a long operation.

        Args:
            values: references to further values of these samples, such as their scores.
        """

    @remote
    def assign(self, value: int, facts: SampleFacts) -> RowsByRank:
        """Decide which rows of the samples each of these ranks works on.

        Args:
            value: id of the reference to the samples.
            facts: the lengths of the samples, and what else the decision needs.
        """


class RecorderGroup(SampleGroup):
    """Ranks that keep samples of a step for the run's records. One of them writes the records."""

    @remote
    def take(self, rollouts: Ref[RolloutBatch], scores: Ref[Scores]) -> None:
        """Keep the samples of a step until the step has been reported."""


class SessionGroup(WorkerGroup):
    """All ranks of the run, for the work around a step: timing, reporting, validation records and checkpoints."""

    @remote
    def begin_step(self, step: int) -> None:
        """Start the timers and meters of a step. Steps count from 0."""

    @remote
    def report_step(self, done: int) -> None:
        """Write and display the metrics of the last completed step.

        Args:
            done: number of completed steps.
        """

    @remote
    def record_validation(self, done: int, result: HeldOutResult) -> None:
        """Store, write and display the validation after `done` steps."""

    @remote
    def record_tasks(self, done: int, metrics: dict[str, float]) -> None:
        """Write and display the scores of a harness's task after `done` steps."""

    @remote
    def warn(self, text: str) -> None:
        """Print a warning."""

    @remote
    def save_if_due(self, done: int) -> None:
        """Save a checkpoint if one is due after `done` steps.

        A checkpoint is due according to `checkpoint.save_every`, after the best
        validation so far and after the last step.
        """

    @remote
    def leave(
        self,
        signal: int,
        rollouts: Ref[RolloutBatch] | None,
        scores: Ref[Scores] | None,
    ) -> None:
        """Save a checkpoint with the samples of the running step. Every rank exits when the program has ended.

        Args:
            signal: number of the signal that asked the run to leave.
        """

    @remote
    def share(self, rollouts: Ref[RolloutBatch]) -> None:
        """Copy all responses to every rank, for the Python program that runs there."""

    @remote
    def given(self, step: int) -> Ref[RolloutBatch]:
        """Return the responses that the Python program provided on every rank."""


class RolloutGroup(SampleGroup):
    """Ranks of the rollout engines."""

    @remote
    def generate(self, step: int) -> Ref[RolloutBatch]:
        """Generate `algorithm.group_size` responses to each of the step's prompts."""

    @remote
    def begin_responses(self, step: int) -> None:
        """Generate the first part of each response. The engines may receive new weights before the second part."""

    @remote
    def finish_responses(self, step: int) -> Ref[RolloutBatch]:
        """Generate the second part of each response."""

    @remote
    def begin_rounds(self, step: int) -> int:
        """Start the rounds of dynamic sampling. Return the number of prompts of the first round."""

    @remote
    def generate_round(self, step: int, num_prompts: int) -> Ref[RolloutBatch]:
        """Generate responses to the next `num_prompts` prompts."""

    @remote
    def add_round(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int
    ) -> int:
        """Add a round. Return the number of prompts of the next round, or 0 if there are enough groups.

        The call fails with TrainingStopped after `dynamic_sampling.max_rounds` rounds.
        """

    @remote
    def informative_rollouts(self, step: int) -> Ref[RolloutBatch]:
        """Return the responses that were kept from all rounds."""

    @remote
    def informative_scores(self) -> Ref[Scores]:
        """Return the rewards of the responses that were kept from all rounds."""

    @remote
    def generate_greedy(
        self, rollouts: Ref[RolloutBatch], step: int
    ) -> Ref[RolloutBatch]:
        """Generate a greedy response to the prompt of each group, [groups]."""

    @remote
    def generate_held_out(self) -> Ref[RolloutBatch]:
        """Generate `trainer.validation_samples` responses to every held-out prompt."""

    @remote
    def answer_rows(self, rows: EngineRows) -> EngineAnswers:
        """Generate and score for the process of a harness."""

    @remote
    def measure_held_out(
        self, responses: Ref[RolloutBatch], scores: Ref[Scores]
    ) -> HeldOutResult:
        """Compute validation metrics from scored responses to the held-out prompts."""


class RewardGroup(SampleGroup):
    """Ranks that compute rewards."""

    @remote
    def score_held_out(self, responses: Ref[RolloutBatch]) -> Ref[Scores]:
        """Compute the rewards of responses to held-out prompts. They are excluded from the step's metrics."""

    @remote
    def score(self, rollouts: Ref[RolloutBatch], step: int) -> Ref[Scores]:
        """Compute the reward of each response."""

    @remote
    def score_arriving(self, step: int) -> None:
        """Compute rewards of samples as they arrive, while the engines generate others. `score` then reuses them."""

    @remote
    def score_greedy(self, greedy: Ref[RolloutBatch]) -> Ref[Fields]:
        """Compute `greedy_rewards` [groups]."""


class ReferenceGroup(SampleGroup):
    """Ranks of the frozen reference policy."""

    @remote
    def log_probs(self, rollouts: Ref[RolloutBatch]) -> Ref[Fields]:
        """Compute `ref_log_probs` [B, R]."""


class IslandGroup(WorkerGroup):
    """Coordinator's ranks, which sum the gradients that the actor's islands send.

    There are several if they hold the global model.
    """

    @remote
    def join_updates(self, role: str, step: int) -> bool:
        """Sum the gradients, or the weight changes, of all islands in the next updates of a role. Return True."""


class TrainedGroup(SampleGroup):
    """Ranks of a model that the run trains.

    Attributes:
        reporting: ranks that report on each gradient of an update to the program and wait for its decision. Empty if
            the ranks decide by themselves.
        islands: rank that sums the gradients of the model's islands, or None if the model is not on islands.
        rules: rules of decisions over this model's gradients alone.
    """

    reporting: tuple[int, ...] = ()
    islands: IslandGroup | None = None
    rules = Rules()
    # Running tasks, which Python would otherwise collect.
    _decisions: ClassVar[set[asyncio.Task[None]]] = set()

    def begin_update(
        self, rollouts: Ref[RolloutBatch], experience: Ref[Fields], step: int
    ) -> PendingCall[bool]:
        """Start the model's optimizer steps. Its ranks may then wait for the decisions of `program.finish_updates`.

        Returns:
            Whether the model was updated. The actor is not while only the critic warms up.
        """
        self.join_islands(step)
        return self.report(
            "update", bool, rollouts, experience, step, asking=self.reporting
        )

    def update(
        self, rollouts: Ref[RolloutBatch], experience: Ref[Fields], step: int
    ) -> PendingCall[bool]:
        """Run the model's optimizer steps, and decide on its gradients without regard to other models.

        Returns:
            Whether the model was updated. The actor is not while only the critic warms up.
        """
        update = self.begin_update(rollouts, experience, step)
        if self.reporting:
            # The ranks wait for the decisions, whether or not the program awaits the
            # update.
            decisions = asyncio.create_task(decide_together([update], self.rules))
            self._decisions.add(decisions)
            decisions.add_done_callback(self._forget)
        return update

    def join_islands(self, step: int) -> None:
        """Let the coordinator's rank sum the gradients of the model's islands, before its update is sent."""
        if self.islands is not None:
            self.islands.join_updates(self.role, step)

    def _forget(self, decisions: asyncio.Task[None]) -> None:
        self._decisions.discard(decisions)
        if not decisions.cancelled():
            decisions.exception()  # the update raises the same error


class CriticGroup(TrainedGroup):
    """Ranks of the critic."""

    @remote
    def values(self, rollouts: Ref[RolloutBatch]) -> Ref[Fields]:
        """Compute `values` [B, R], and `last_values` [B] at the end of truncated responses."""


class ActorGroup(TrainedGroup):
    """Ranks of the policy that is trained.

    Attributes:
        weight_ranks: ranks with the global model, which send the weights to the engines. Empty: the actor's ranks do.
        weights: name of the workers that transfer the policy's weights to the engines.
    """

    weight_ranks: Sequence[int] = ()
    weights = "weights"

    @remote
    def old_log_probs(self, rollouts: Ref[RolloutBatch], step: int) -> Ref[Fields]:
        """Compute `old_log_probs` [B, R] of the policy before the step's updates.

        With `critic.share_backbone` the same forward pass also returns `values` and
        `last_values`.
        """

    @remote
    def score_norms(self, rollouts: Ref[RolloutBatch]) -> Ref[Fields]:
        """Compute `score_norms`, the squared gradient of each log-prob with respect to the logits."""

    @remote
    def implicit_rewards(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], reference: Ref[Fields]
    ) -> Ref[Fields]:
        """Train PRIME's reward model on the outcomes, then compute its `implicit_rewards` [B, R] per token."""

    @remote
    def advantages(
        self,
        rollouts: Ref[RolloutBatch],
        scores: Ref[Scores],
        signals: list[Ref[Fields]],
    ) -> Ref[Fields]:
        """Compute `advantages` [B, R] and collect the signals that the updates train on in addition to the rollouts."""

    @remote
    def update_mix(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], index: int, step: int
    ) -> None:
        """Run the additional update that entry `index` of `mix` describes, if this step is one of its steps."""

    @remote
    def update_draft(self, rollouts: Ref[RolloutBatch], step: int) -> None:
        """Train the draft model of the engines on the responses (`draft.train`)."""

    def sync_weights(
        self, rollout: RolloutGroup, is_updated: bool
    ) -> PendingCall[None]:
        """Reshard the actor's weights into the engines. The ranks of both roles take part.

        Args:
            is_updated: False if the actor did not train in this step, so that the engines already have its weights.
        """
        ranks = sorted({*self.ranks, *self.weight_ranks, *rollout.ranks})
        return WorkerGroup(self.weights, ranks, self._controller).report(
            "sync", NoneType, is_updated
        )


# Prefix of the operator of a flow that stands for the training of one agent.
AGENT = "agent_"


def changes_prompts(plan: CompiledFlow) -> bool:
    """Return whether an operator of a step runs before responses are generated."""
    return plan.operators[0].name != "rollout"


class OperatorGroup(SampleGroup):
    """All ranks, for a step that is a flow of operators.

    Attributes:
        plan: compiled flow of the step.
    """

    plan: CompiledFlow

    @remote
    def begin(self, step: int, made: list[str]) -> list[str]:
        """Start a step. Return the names of further values that exist before its operators run.

        Args:
            made: names of values that already exist and need no operator.
        """

    @remote
    def given(self, name: str) -> Ref[Any]:
        """Return a value that exists before the operators run."""

    def call(
        self,
        operator: str,
        rollouts: Ref[Any] | None,
        inputs: list[Ref[Any]],
        reporting: Sequence[int] = (),
    ) -> PendingCall[Ref[Any]]:
        """Run an operator on its ranks and return all of its outputs as one value.

        Args:
            rollouts: responses of the step, whose assigned rows each rank works on.
            reporting: ranks that report on gradients to the program, if the operator is an update.
        """
        placed = self.plan.ranks[operator]
        ranks = self.ranks if placed is None else placed
        wanted = self._assignments.wanted(ranks, [rollouts, *inputs])
        group = WorkerGroup(self.role, ranks, self._controller)
        return group.keep("call", operator, inputs, wanted=wanted, asking=reporting)

    def pick(self, values: Ref[Any], name: str) -> PendingCall[Ref[Any]]:
        """Return one of the outputs of an operator, on the ranks that hold them."""
        return WorkerGroup(self.role, values.holders, self._controller).keep(
            "pick", values, name
        )


class TrainsAgent(Protocol):
    """Agent of a game, with its own actor and critic. Implemented by `agents.GameAgent`."""

    async def train(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int
    ) -> None:
        """Train the agent on its own samples and advantages, then update its engine's weights."""


# Program of one step. It returns the samples that the step trained on, for the records.
StepProgram = Callable[["Run", int], Awaitable[Samples]]


@dataclass
class Run:
    """Roles and settings of a run, as its program sees them.

    Attributes:
        session: all ranks, for the work around a step.
        held_out_reward: ranks that score a validation. These are the engines' ranks unless reward models have separate
            ranks.
        critic, reference: None if the algorithm does not use them.
        step: program of one step.
        operators: operators of a flow, for `program.flow_step`.
        receivers: role groups that receive samples from the engines' ranks; empty if roles share all ranks.
        assignments: rows of the samples that each rank works on.
        has_engines: whether engines generate responses. If False, the run replays the responses of another run.
        validates: whether there are held-out prompts or tasks of harnesses, and `trainer.validate_every` is set.
        evaluate_tasks: evaluates the tasks of harnesses after a number of steps, or None if there are none.
        is_given: whether a Python program provides the responses of each step on every rank (`PPOTrainer`).
        may_leave_inside: whether a run that is asked to leave may do so inside a step.
        restored_steps: steps whose samples come from the checkpoint that the run resumed from.
        agents: agents of a game by name, if each has its own actor and critic; otherwise empty.
        ahead: source of samples of later steps, or None if engines and training alternate.
        scores_arriving: whether samples are scored while the engines generate others.
        scores_ahead: whether rewards, too, are computed ahead of training.
        may_generate_next: returns whether the engines may generate the step after this one while it trains, for a
            Python program. None: they never do.
        next_rollouts: responses of the next step, which the engines are generating for a Python program.
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
    step: StepProgram
    operators: OperatorGroup
    receivers: Sequence[ReceiverGroup]
    assignments: Assignments
    has_engines: bool = True
    validates: bool = False
    evaluate_tasks: Callable[[Run, int], Awaitable[None]] | None = None
    is_given: bool = False
    may_leave_inside: bool = True
    restored_steps: Set[int] = frozenset()
    agents: Mapping[str, TrainsAgent] = field(default_factory=dict)
    ahead: RolloutsAhead | None = None
    scores_arriving: bool = False
    scores_ahead: bool = False
    may_generate_next: Callable[[int], bool] | None = None
    next_rollouts: PendingCall[Ref[RolloutBatch]] | None = None

    @property
    def has_rounds(self) -> bool:
        """Return whether samples are made in rounds of generating and scoring (dynamic sampling)."""
        return self.config.samples_in_rounds and self.has_engines and not self.is_given

    @property
    def is_critic_apart(self) -> bool:
        """Return whether the critic has separate ranks, and trains at the same time as the actor."""
        return self.critic is not None and self.critic.ranks != self.actor.ranks

    async def assign(self, rollouts: Ref[RolloutBatch]) -> None:
        """Assign samples to ranks now that their lengths are known, and start sending each rank its rows.

        There is nothing to assign if roles share all ranks, or if a Python program
        provides all samples on every rank.
        """
        if not self.receivers or self.is_given:
            return
        # Send all calls before awaiting any, so that the role groups decide at the same
        # time.
        facts = rollouts.describe(SampleFacts)
        decisions = [receiver.assign(rollouts.id, facts) for receiver in self.receivers]
        for decision in decisions:
            self.assignments.add(rollouts, await decision)
        await self.deliver(rollouts)

    async def deliver(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores] | None = None
    ) -> None:
        """Send samples that were generated ahead to the ranks that will train on them.

        The calls are sent now, before the engines begin the next samples. The receiving
        ranks may still be training.
        """
        if self.ahead is None:
            return
        for receiver in self.receivers:
            if scores is None:
                receiver.deliver(rollouts, [])
            # Scores go only to the actor's role group, which computes the advantages.
            elif not set(receiver.ranks).isdisjoint(self.actor.ranks):
                receiver.deliver(rollouts, [scores])


def make_run(
    config: Config,
    controller: Controller,
    placement: ResolvedPlacement,
    *,
    step: StepProgram,
    has_engines: bool,
    restored_steps: Set[int],
) -> Run:
    """Build the handles of a run's roles on the ranks that the placement assigns to them."""
    everyone = range(controller.num_ranks)
    assignments = Assignments()
    is_shared = placement.is_colocated
    engines = placement.ranks["rollout"]
    consumers = {"reward", "reference", "critic", "actor"}
    receivers = [
        ReceiverGroup("receiver", group.ranks, controller, assignments)
        for group in placement.role_groups
        # A role group inside the engines' ranks already has all samples that the
        # engines generated.
        if consumers.intersection(group.roles) and not set(group.ranks) <= set(engines)
    ]

    def ranks_of(role: str) -> Sequence[int]:
        return everyone if is_shared else placement.ranks[role]

    def group(kind: Callable[..., G], role: str) -> G:
        return kind(role, ranks_of(role), controller, assignments)

    has_models = any(entry.path is not None for entry in config.reward)
    models_are_apart = has_models and not placement.colocated("reward", "rollout")
    scores_held_out = ranks_of("reward") if models_are_apart else ranks_of("rollout")
    # With separate ranks, only the reporter (the actor's first rank) keeps samples for
    # the records.
    recorders = everyone if is_shared else ranks_of("actor")[:1]
    run = Run(
        config=config,
        controller=controller,
        session=SessionGroup("session", everyone, controller),
        recorder=RecorderGroup("recorder", recorders, controller, assignments),
        rollout=group(RolloutGroup, "rollout"),
        reward=group(RewardGroup, "reward"),
        held_out_reward=RewardGroup("reward", scores_held_out, controller),
        actor=group(ActorGroup, "actor"),
        critic=group(CriticGroup, "critic") if config.uses_critic else None,
        reference=group(ReferenceGroup, "reference")
        if config.uses_ref_log_probs
        else None,
        step=step,
        operators=OperatorGroup("operators", everyone, controller, assignments),
        receivers=[] if is_shared else receivers,
        assignments=assignments,
        has_engines=has_engines,
        validates=has_engines
        and bool(config.data.validation or config.evaluation.tasks)
        and config.trainer.validate_every > 0,
        may_leave_inside=is_shared and has_engines,
        restored_steps=restored_steps,
    )
    for trained in (run.actor, run.critic):
        if trained is None:
            continue
        trained.rules = Rules.from_config(config)
        trained.reporting = reporting_ranks(config, placement, trained.role)
        if len(placement.islands) > 1 and placement.colocated(trained.role, "actor"):
            trained.islands = IslandGroup(
                "islands", placement.ranks["coordinator"], controller
            )
    if config.aggregates_gradients:
        run.actor.weight_ranks = placement.ranks["coordinator"]
    return run
