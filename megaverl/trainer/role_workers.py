"""Workers of the roles: the methods that run on the ranks when the program calls.

`role_groups` contains the handles, whose methods have the same names and are documented
there. All ranks of a role run a method in the same order (SPMD) on their main threads,
including the role's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.streaming import Prompts
from megaverl.dataflow.runner import ShapeChecker
from megaverl.distributed.collectives import together
from megaverl.errors import ConfigError
from megaverl.trainer.arriving_samples import SampleSender, receive_samples
from megaverl.trainer.dynamic_sampling import SamplingRounds
from megaverl.trainer.harness.engine_rows import (
    EngineAnswers,
    EngineRows,
    answer_rows,
)
from megaverl.trainer.mix import name_of_mix
from megaverl.trainer.partial_rollouts import InFlightUpdates
from megaverl.trainer.run_state import RunState
from megaverl.trainer.sample_rows import (
    Fields,
    SampleFacts,
    SampleRows,
    SampleStore,
    SampleValue,
)
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import StoredRollouts
from megaverl.trainer.validation import (
    HeldOutResult,
    held_out_responses,
    measure_held_out,
)
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import Rollout


class ReceiverWorker:
    """Worker that decides which samples each rank of its role group works on."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def assign(self, value: int, facts: SampleFacts) -> dict[int, list[int]]:
        """Decide which rows of a value each rank of this role group works on."""
        return self._store.assign(value, facts)

    def deliver(self, rollouts: SampleValue, values: list[object]) -> None:
        """Return immediately. The transfer of the arguments to this rank is the purpose of the call."""


class RolloutWorker:
    """Worker that generates responses.

    Args:
        state: this rank's roles and the metrics of the running steps.
        prompts: the run's prompts, positioned at the next step.
        store: converts between batches and values of the program.
        held_out: returns the held-out prompts.
        sender: sends finished samples to the ranks that score them, or None if this rank sends none.

    Attributes:
        cut_off: samples of the step in which the run was left before, from its checkpoint.
        taken: by step, the prompts of generated responses. The operator worker removes the entries that it uses.
    """

    def __init__(
        self,
        state: RunState,
        prompts: Prompts,
        store: SampleStore,
        held_out: Callable[[], Sequence[PromptRecord]] = tuple,
        sender: SampleSender | None = None,
    ) -> None:
        self._state, self._prompts, self._store = state, prompts, store
        self._held_out, self._sender = held_out, sender
        self._operators, self._stages = state.step, state.stages
        self._config = state.config
        self.cut_off: StoredRollouts | None = None
        self.taken: dict[int, Sequence[PromptRecord]] = {}
        self._rounds: SamplingRounds | None = None

    def generate(self, step: int) -> SampleValue:
        """Return the step's responses: from an interrupted run, from a replayed run, or newly generated.

        Raises:
            ConfigError: a program would generate whole responses although the engines should receive new weights in
                the middle of each.
        """
        operators = self._operators
        if isinstance(operators.in_progress, InFlightUpdates):
            raise ConfigError(
                "rollout.in_flight_updates: the program calls run.rollout.generate, which generates each response with "
                "one version of the weights. Take the samples with run.ahead.take(step), or remove the key."
            )
        operators.epochs[step] = self._prompts.epoch
        # The samples of the interrupted step belong to the first step after the resume,
        # so they are used once.
        restored, self.cut_off = self.cut_off, None
        if restored is None and self._config.samples_in_rounds:
            restored = self._take_waiting(step)
        with self._state.sampling(step):
            if restored is not None:
                operators.metrics |= restored.metrics
                batch = operators.own_rows(restored.batch)
            else:
                batch = self._generate(self._take_prompts(step), step)
            self._end_samples(step, batch)
        return self._store.give(batch)

    def begin_responses(self, step: int) -> None:
        """Take the step's prompts and generate the first part of each response."""
        self._operators.epochs[step] = self._prompts.epoch
        with self._state.sampling(step):
            prompts = self._take_prompts(step)
            with self._stages("rollout"):
                self._operators.begin_responses(prompts, step)

    def finish_responses(self, step: int) -> SampleValue:
        """Generate the second part of each response. Return all responses."""
        with self._state.sampling(step):
            with self._stages("rollout"):
                batch = self._operators.finish_responses(step)
            self._end_samples(step, batch)
        return self._store.give(batch)

    def _end_samples(self, step: int, batch: RolloutBatch) -> None:
        """Record that the step has its samples. Its metrics are those of the samples."""
        self._operators.metrics["train/epoch"] = self._prompts.epoch
        self._state.end_samples(step, batch)

    def _take_prompts(self, step: int) -> Sequence[PromptRecord]:
        self._state.begin_samples(step, self._prompts)
        prompts = self._prompts.take(self._operators.num_prompts)
        # The flow passes the prompts to its operators as a value
        # (`OperatorWorker.begin`).
        if self._config.trainer.operators:
            self.taken[step] = prompts
        return prompts

    def _generate(self, prompts: Sequence[PromptRecord], step: int) -> RolloutBatch:
        with self._stages("rollout"):
            if self._operators.replayed is not None:
                return self._operators.replay(prompts, step)
            # Restored samples are not sent, and the reward ranks do not wait for them
            # (`score_arriving`).
            generates = step not in self._operators.waiting
            batch = self._operators.generate(prompts, step)
            if generates and self._sender is not None:
                self._sender.end()
            return batch

    def begin_rounds(self, step: int) -> int:
        """Start the rounds of dynamic sampling. Return the number of prompts of the first round."""
        self._operators.epochs[step] = self._prompts.epoch
        self._state.begin_samples(step, self._prompts)
        self._rounds = SamplingRounds(self._config, step)
        return self._rounds.num_prompts

    def generate_round(self, step: int, num_prompts: int) -> SampleValue:
        """Generate responses to the next `num_prompts` prompts."""
        prompts = self._prompts.take(num_prompts)
        with self._state.sampling(step), self._stages("rollout"):
            return self._store.give(
                self._operators.generate(
                    prompts, step, self._running_rounds.num_generated
                )
            )

    def add_round(self, rollouts: SampleValue, scores: Scores, step: int) -> int:
        """Add a scored round. Return the number of prompts of the next round, or 0 if there are enough groups.

        Raises:
            TrainingStopped: there are too few groups after `dynamic_sampling.max_rounds`.
        """
        rounds = self._running_rounds
        with self._operators.measuring(step):
            rounds.add(
                self._store.batch(rollouts), scores, dict(self._operators.metrics)
            )
            if rounds.is_complete:
                self._operators.metrics |= rounds.metrics
                self._end_samples(step, rounds.rollouts)
                self._state.end_scores(step, rounds.scores)
        return rounds.num_prompts

    def informative_rollouts(self, step: int) -> SampleValue:
        """Return this rank's samples of the groups that were kept from all rounds."""
        return self._store.give(self._operators.own_rows(self._running_rounds.rollouts))

    def informative_scores(self) -> Scores:
        """Return the rewards of all groups that were kept."""
        return self._running_rounds.scores

    def generate_greedy(self, rollouts: SampleValue, step: int) -> SampleValue:
        """Generate a greedy response to the prompt of each group, [groups]."""
        with self._stages("greedy"):
            return self._store.give(
                self._operators.greedy(self._store.batch(rollouts), step)
            )

    def generate_held_out(self) -> SampleValue:
        """Generate responses to the held-out prompts."""
        roles = self._state.roles
        with self._stages("validation"):
            batch = held_out_responses(
                self._config,
                roles.engines,
                self._held_out(),
                roles.player,
                self._state.held_out_readers,
            )
            self._reset_cache()
        return self._store.give(batch)

    def answer_rows(self, rows: EngineRows) -> EngineAnswers:
        """Generate and score for the process of a harness, with the engines' current weights."""
        rollout = self._state.roles.engines
        # The configuration refuses tasks if each agent has weights of its own.
        assert isinstance(rollout, Rollout)
        with self._stages("validation"):
            answers = answer_rows(self._config, rollout, rows)
            self._reset_cache()
        return answers

    def _reset_cache(self) -> None:
        """Reset the engine's cache, so that responses of later steps do not depend on when the run validates."""
        with together():
            self._state.roles.engines.engine.reset_prefix_cache()

    def measure_held_out(self, responses: SampleValue, scores: Scores) -> HeldOutResult:
        """Compute validation metrics and sample records from scored responses."""
        reward = self._state.roles.reward
        batch = self._store.batch(responses)
        return measure_held_out(self._config, reward, batch, scores)

    @property
    def _running_rounds(self) -> SamplingRounds:
        assert self._rounds is not None, "the program begins the rounds of a step first"
        return self._rounds

    def _take_waiting(self, step: int) -> StoredRollouts | None:
        """Return samples whose rounds an interrupted run had completed, and skip their prompts. Else None."""
        stored = self._operators.waiting.pop(step, None)
        if stored is not None:
            self._state.begin_samples(step, self._prompts)
            self._prompts.take(int(stored.metrics["rollout/generated_groups"]))
        return stored


class RoleWorker:
    """Base of the workers that compute on samples.

    Args:
        state: this rank's roles and the metrics of the running steps.
        store: converts between batches and values of the program.
        operators: operators of the roles that compute. None: those of the state.
    """

    def __init__(
        self,
        state: RunState,
        store: SampleStore,
        operators: RLStep | None = None,
    ) -> None:
        self._state, self._stages = state, state.stages
        self._operators = operators or state.step
        self._store = store

    def _experience(
        self, rollouts: SampleValue, experience: Fields | SampleRows
    ) -> RolloutBatch:
        """Return the rollouts together with the fields that an update trains on."""
        batch = self._store.batch(rollouts)
        fields = self._store.fields(experience, batch)
        return batch.with_(
            **{name: tensor for name, tensor in fields.items() if tensor is not None}
        )


class RewardWorker(RoleWorker):
    """Worker that computes rewards.

    Attributes:
        restored: rewards by step, from the checkpoint that the run resumed from.
    """

    def __init__(
        self, state: RunState, store: SampleStore, restored: Mapping[int, Scores]
    ) -> None:
        super().__init__(state, store)
        self.restored = dict(restored)

    def score(self, rollouts: SampleValue, step: int) -> Scores:
        """Return the rewards of the responses. Rewards that an interrupted run saved are not computed again."""
        restored = self.restored.pop(step, None)
        if restored is not None:
            return restored
        # A replay has not run `generate` on this rank, so its stored rewards are read
        # here.
        self._operators.begin(step, self._operators.epochs.get(step))
        self._operators.read_replayed(step)
        is_round = (
            self._operators.config.samples_in_rounds and not self._state.generates
        )
        with self._state.sampling(step):
            with self._stages("reward"):
                scores = self._operators.score(
                    self._store.batch(rollouts), is_round=is_round
                )
            self._state.end_scores(step, scores)
        return scores

    def score_arriving(self, step: int) -> None:
        """Score samples of this rank as they arrive, until every engine has ended the step."""
        operators, context = self._operators, self._state.context
        # These responses were generated before an interruption, so no engine will send
        # them.
        if step in operators.waiting:
            return
        operators.begin(step, operators.epochs.get(step))
        engines = context.placement.ranks["rollout"][:: operators.config.rollout.tp]
        with self._state.sampling(step):
            for row, sample in receive_samples(
                context, engines, partial(self._stages, "wait")
            ):
                with self._stages("reward"):
                    operators.score_some([row], sample)

    def score_held_out(self, responses: SampleValue) -> Scores:
        """Compute the rewards of responses to held-out prompts, outside of any step's metrics."""
        reward = self._state.roles.reward
        with self._stages("validation"):
            scores = reward.score(self._store.batch(responses))
        # Values logged by reward functions belong to the metrics of training steps, not
        # to a validation.
        reward.forget_logged()
        return scores

    def score_greedy(self, greedy: SampleValue) -> Fields:
        """Compute `greedy_rewards` [groups]."""
        with self._stages("greedy_rewards"):
            return {
                "greedy_rewards": self._operators.greedy_rewards(
                    self._store.batch(greedy)
                )
            }


class ReferenceWorker(RoleWorker):
    """Worker that computes log-probs of the frozen reference policy."""

    def log_probs(self, rollouts: SampleValue) -> Fields | SampleRows:
        """Compute `ref_log_probs` [B, R]."""
        batch = self._store.batch(rollouts)
        with self._stages("ref_log_probs"):
            return self._store.give_fields(
                {"ref_log_probs": self._operators.ref_log_probs(batch)}, batch
            )


class CriticWorker(RoleWorker):
    """Worker that computes values and trains the critic."""

    def values(self, rollouts: SampleValue) -> Fields | SampleRows:
        """Compute `values` [B, R] and `last_values` [B]."""
        batch = self._store.batch(rollouts)
        with self._stages("values"):
            return self._store.give_fields(dict(self._operators.values(batch)), batch)

    def update(
        self, rollouts: SampleValue, experience: Fields | SampleRows, step: int
    ) -> bool:
        """Run the critic's optimizer steps."""
        batch = self._experience(rollouts, experience)
        with self._stages("critic_update"):
            self._operators.update_critic(batch, step)
        return True


class ActorWorker(RoleWorker):
    """Worker that trains the policy."""

    def old_log_probs(self, rollouts: SampleValue, step: int) -> Fields | SampleRows:
        """Compute `old_log_probs` [B, R]. With `critic.share_backbone`, also compute values in the same pass."""
        batch = self._store.batch(rollouts)
        with self._stages("old_log_probs"):
            if self._operators.config.shares_backbone:
                fields = self._operators.log_probs_and_values(batch, step)
            else:
                fields = {"old_log_probs": self._operators.old_log_probs(batch, step)}
        return self._store.give_fields(fields, batch)

    def score_norms(self, rollouts: SampleValue) -> Fields:
        """Compute `score_norms` [B, R], the squared gradient of each log-prob with respect to the logits."""
        with self._stages("score_norms"):
            return {
                "score_norms": self._operators.score_norms(self._store.batch(rollouts))
            }

    def implicit_rewards(
        self, rollouts: SampleValue, scores: Scores, reference: Fields | SampleRows
    ) -> Fields:
        """Update PRIME's reward model, then compute `implicit_rewards` [B, R]."""
        batch = self._store.batch(rollouts)
        ref_log_probs = self._store.fields(reference, batch)["ref_log_probs"]
        assert ref_log_probs is not None
        with self._stages("implicit_rewards"):
            return {
                "implicit_rewards": self._operators.implicit_rewards(
                    batch, scores, ref_log_probs
                )
            }

    def advantages(
        self, rollouts: SampleValue, scores: Scores, signals: list[Fields | SampleRows]
    ) -> Fields | SampleRows:
        """Compute advantages. Return only the fields that the batch does not have yet."""
        batch = self._store.batch(rollouts)
        fields: Fields = {}
        for signal in signals:
            fields |= self._store.fields(signal, batch)
        with self._stages("advantages"):
            experience = self._operators.advantages(batch, scores, **fields)
        # Only new tensors are values of the program. The other ranks already have the
        # rest of the batch.
        new: Fields = {
            name: tensor
            for name, tensor in experience.tensors.items()
            if batch.tensors.get(name) is not tensor
        }
        return self._store.give_fields(new, batch)

    def update(
        self, rollouts: SampleValue, experience: Fields | SampleRows, step: int
    ) -> bool:
        """Run the actor's optimizer steps. Return False while only the critic warms up."""
        batch = self._experience(rollouts, experience)
        with self._stages("actor_update"):
            return self._operators.update_actor(batch, step)

    def update_mix(
        self, rollouts: SampleValue, scores: Scores, index: int, step: int
    ) -> None:
        """Run the additional update that entry `index` of `mix` describes."""
        batch = self._store.batch(rollouts)
        with self._stages(name_of_mix(self._operators.config, index)):
            self._operators.mix.update(index, batch, scores, step)

    def update_draft(self, rollouts: SampleValue, step: int) -> None:
        """Train the draft model of the engines on the responses."""
        batch = self._store.batch(rollouts)
        with self._stages("draft_update"):
            self._operators.update_draft(batch, step)


class WeightsWorker(RoleWorker):
    """Worker that transfers the actor's weights to the engines."""

    def sync(self, is_updated: bool) -> None:
        """Transfer the actor's weights to the engines, if they were updated."""
        self._state.begin_sync()
        with self._stages("reshard"):
            self._operators.reshard(is_updated)


class IslandWorker:
    """Worker that sums the updates which the actor's islands send. It runs on the coordinator's rank."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def join_updates(self, role: str, step: int) -> bool:
        """Sum what all islands send in the next updates of a role. Return True."""
        with self._state.stages("islands"):
            self._state.join_islands(role, step)
        return True


class OperatorWorker:
    """Worker that runs the operators of a flow.

    Args:
        state: this rank's roles and the metrics of the running steps.
        prompts: the run's prompts, positioned at the next step.
        store: converts values of the program to batches.
        rollout: this rank's rollout worker, whose prompts the flow reuses.
        rewards: this rank's reward worker, with rewards from the checkpoint that the run resumed from.
    """

    def __init__(
        self,
        state: RunState,
        prompts: Prompts,
        store: SampleStore,
        rollout: RolloutWorker,
        rewards: RewardWorker,
    ) -> None:
        self._state, self._prompts, self._store = state, prompts, store
        self._rollout, self._rewards = rollout, rewards
        self._by_name = {
            operator.name: operator for operator in state.flow.plan.operators
        }
        self._shapes = ShapeChecker()
        self._given: dict[str, Any] = {}

    def begin(self, step: int, made: list[str]) -> list[str]:
        """Take the step's prompts, unless responses to them already exist.

        Args:
            made: names of values that already exist.

        Returns:
            Names of the values that the operators are given: the prompts, the step, and restored rewards.
        """
        operators = self._state.step
        self._shapes = ShapeChecker()
        epoch = operators.epochs.get(step, self._prompts.epoch)
        prompts = self._rollout.taken.pop(step, [])
        # Ranks with an engine have already taken the prompts of existing responses from
        # the stream.
        has_taken = "rollouts" in made and (
            self._state.generates or operators.config.samples_in_rounds
        )
        if not has_taken:
            prompts = self._prompts.take(operators.num_prompts)
        if "rollouts" not in made:
            operators.metrics["train/epoch"] = self._prompts.epoch
        operators.begin(step, epoch)
        self._given = {"prompts": prompts, "step": step}
        restored = self._rewards.restored.pop(step, None)
        if restored is not None:
            self._given["scores"] = restored
        return list(self._given)

    def given(self, name: str) -> Any:
        """Return a value that exists before the operators run, once."""
        return self._given.pop(name)

    def call(self, name: str, inputs: list[Any]) -> dict[str, Any]:
        """Run an operator on its inputs, given in the order of `Operator.takes`. Return its outputs by name."""
        operator = self._by_name[name]
        values = dict(zip(operator.takes, map(self._as_batch, inputs), strict=True))
        with self._state.stages(name):
            return self._shapes.call(operator, values)

    def pick(self, values: dict[str, Any], name: str) -> Any:
        """Return one of the outputs of an operator."""
        return values[name]

    def _as_batch(self, value: Any) -> Any:
        return self._store.batch(value) if isinstance(value, SampleRows) else value
