"""What the roles do on their ranks when the program calls (`role_groups` has the handles under the same names).

All ranks of a role run a method SPMD on their main threads, with the role's collectives inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.streaming import Prompts
from megaverl.dataflow import ShapeChecker
from megaverl.trainer.dynamic_sampling import SamplingRounds
from megaverl.trainer.executor import Executor
from megaverl.trainer.role_groups import OperatorFacts, StepFlow
from megaverl.trainer.sample_rows import Fields, SampleFacts, SampleRows, SampleStore, SampleValue
from megaverl.trainer.schedule import StoredRollouts
from megaverl.workers.reward import Scores


class WorldWorker:
    """Decides which samples each rank of this world works on."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def assign(self, value: int, facts: SampleFacts) -> dict[int, list[int]]:
        return self._store.assign(value, facts)

    def deliver(self, rollouts: SampleValue, values: list[object]) -> None:
        """What the call has brought here is all that it is for."""


class RolloutWorker:
    """Generates responses.

    Args:
        executor: has this rank's roles, and what the running steps have measured.
        prompts: the run's prompts, from where the run stands.
        store: makes values of the program out of batches, and batches out of values.

    Attributes:
        cut_off: samples of the step in which the run left before.
    """

    def __init__(self, executor: Executor, prompts: Prompts, store: SampleStore) -> None:
        self._executor, self._operators, self._stages = executor, executor.step, executor.stages
        self._config, self._prompts, self._store = executor.step.config, prompts, store
        self.cut_off: StoredRollouts | None = None
        self._rounds: SamplingRounds | None = None

    def generate(self, step: int) -> SampleValue:
        """Return the step's responses: those of an interrupted run, of a replayed run, or new ones."""
        operators = self._operators
        operators.epochs[step] = self._prompts.epoch
        restored, self.cut_off = self.cut_off, None
        if restored is None and self._config.algorithm.dynamic_sampling.metric is not None:
            restored = self._take_waiting(step)
        with operators.measuring(step), self._stages.in_step(step):
            if restored is not None:
                operators.metrics |= restored.metrics
                batch = self._select_own(restored.batch)
            else:
                self._executor.begin_samples(step, self._prompts)
                batch = self._generate(self._prompts.take(operators.num_prompts), step)
            operators.metrics["train/epoch"] = self._prompts.epoch
            self._executor.end_samples(step, batch)
        return self._store.give(batch)

    def _generate(self, prompts: Sequence[PromptRecord], step: int) -> RolloutBatch:
        with self._stages("rollout"):
            if self._operators.replayed is not None:
                return self._operators.replay(prompts, step)
            return self._operators.generate(prompts, step)

    def begin_rounds(self, step: int) -> int:
        self._operators.epochs[step] = self._prompts.epoch
        self._executor.begin_samples(step, self._prompts)
        self._rounds = SamplingRounds(self._config, step)
        return self._rounds.num_prompts

    def generate_round(self, step: int, num_prompts: int) -> SampleValue:
        prompts = self._prompts.take(num_prompts)
        with self._operators.measuring(step), self._stages.in_step(step), self._stages("rollout"):
            return self._store.give(self._operators.generate(prompts, step, self._running_rounds.num_generated))

    def add_round(self, rollouts: SampleValue, scores: Scores, step: int) -> int:
        rounds = self._running_rounds
        with self._operators.measuring(step):
            rounds.add(self._store.batch(rollouts), scores, dict(self._operators.metrics))
            if rounds.is_complete:
                self._operators.metrics |= rounds.metrics()
                self._operators.metrics["train/epoch"] = self._prompts.epoch
                self._executor.end_samples(step, rounds.rollouts)
                self._executor.end_scores(step, rounds.scores)
        return rounds.num_prompts

    def informative_rollouts(self, step: int) -> SampleValue:
        return self._store.give(self._select_own(self._running_rounds.rollouts))

    def informative_scores(self) -> Scores:
        return self._running_rounds.scores

    def generate_greedy(self, rollouts: SampleValue, step: int) -> SampleValue:
        with self._stages("greedy"):
            return self._store.give(self._operators.greedy(self._store.batch(rollouts), step))

    @property
    def _running_rounds(self) -> SamplingRounds:
        assert self._rounds is not None, "the program begins the rounds of a step first"
        return self._rounds

    def _take_waiting(self, step: int) -> StoredRollouts | None:
        """Return samples whose rounds an interrupted run had finished; move on past their prompts."""
        stored = self._operators.waiting.pop(step, None)
        if stored is not None:
            self._executor.begin_samples(step, self._prompts)
            self._prompts.take(int(stored.metrics["rollout/generated_groups"]))
        return stored

    def _select_own(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the samples that this rank works on, of a batch that every rank has."""
        readers = self._operators.readers
        return batch if readers is None else readers.of_whole(batch)


class RoleWorker:
    """Worker that computes something of samples.

    Args:
        executor: has this rank's roles, and what the running steps have measured.
        store: makes values of the program out of batches, and batches out of values.
    """

    def __init__(self, executor: Executor, store: SampleStore) -> None:
        self._executor, self._operators, self._stages = executor, executor.step, executor.stages
        self._store = store

    def _experience(self, rollouts: SampleValue, experience: Fields | SampleRows) -> RolloutBatch:
        """Return what an update trains on."""
        batch = self._store.batch(rollouts)
        fields = self._store.fields(experience, batch)
        return batch.with_(**{name: tensor for name, tensor in fields.items() if tensor is not None})


class RewardWorker(RoleWorker):
    """Computes rewards.

    Attributes:
        restored: by step, rewards in the checkpoint that the run goes on from.
    """

    def __init__(self, executor: Executor, store: SampleStore, restored: Mapping[int, Scores]) -> None:
        super().__init__(executor, store)
        self.restored = dict(restored)

    def score(self, rollouts: SampleValue, step: int) -> Scores:
        """Return the rewards, which an interrupted run may have computed already."""
        restored = self.restored.pop(step, None)
        if restored is not None:
            return restored
        self._operators.begin(step, self._operators.epochs.get(step))
        with self._operators.measuring(step), self._stages.in_step(step):
            with self._stages("reward"):
                scores = self._operators.score(self._store.batch(rollouts))
            self._executor.end_scores(step, scores)
        return scores

    def score_greedy(self, greedy: SampleValue) -> Fields:
        with self._stages("greedy_rewards"):
            return {"greedy_rewards": self._operators.greedy_rewards(self._store.batch(greedy))}


class ReferenceWorker(RoleWorker):
    """Computes log-probs of the frozen policy."""

    def log_probs(self, rollouts: SampleValue) -> Fields | SampleRows:
        batch = self._store.batch(rollouts)
        with self._stages("ref_log_probs"):
            return self._store.give_fields({"ref_log_probs": self._operators.ref_log_probs(batch)}, batch)


class CriticWorker(RoleWorker):
    """Computes values, and trains the model that does."""

    def values(self, rollouts: SampleValue) -> Fields | SampleRows:
        batch = self._store.batch(rollouts)
        with self._stages("values"):
            return self._store.give_fields(dict(self._operators.values(batch)), batch)

    def update(self, rollouts: SampleValue, experience: Fields | SampleRows, step: int) -> bool:
        batch = self._experience(rollouts, experience)
        with self._stages("critic_update"):
            self._operators.update_critic(batch, step)
        return True


class ActorWorker(RoleWorker):
    """Trains the policy."""

    def old_log_probs(self, rollouts: SampleValue, step: int) -> Fields | SampleRows:
        batch = self._store.batch(rollouts)
        with self._stages("old_log_probs"):
            if self._operators.config.shares_backbone:
                fields = self._operators.log_probs_and_values(batch, step)
            else:
                fields = {"old_log_probs": self._operators.old_log_probs(batch, step)}
        return self._store.give_fields(fields, batch)

    def score_norms(self, rollouts: SampleValue) -> Fields:
        with self._stages("score_norms"):
            return {"score_norms": self._operators.score_norms(self._store.batch(rollouts))}

    def implicit_rewards(self, rollouts: SampleValue, scores: Scores, reference: Fields | SampleRows) -> Fields:
        batch = self._store.batch(rollouts)
        ref_log_probs = self._store.fields(reference, batch)["ref_log_probs"]
        assert ref_log_probs is not None
        with self._stages("implicit_rewards"):
            return {"implicit_rewards": self._operators.implicit_rewards(batch, scores, ref_log_probs)}

    def advantages(
        self, rollouts: SampleValue, scores: Scores, signals: list[Fields | SampleRows]
    ) -> Fields | SampleRows:
        batch = self._store.batch(rollouts)
        fields: Fields = {}
        for signal in signals:
            fields |= self._store.fields(signal, batch)
        old_log_probs = fields.pop("old_log_probs", None)
        with self._stages("advantages"):
            experience = self._operators.advantages(batch, scores, old_log_probs, **fields)
        new: Fields = {
            name: tensor for name, tensor in experience.tensors.items() if batch.tensors.get(name) is not tensor
        }
        return self._store.give_fields(new, batch)

    def update(self, rollouts: SampleValue, experience: Fields | SampleRows, step: int) -> bool:
        batch = self._experience(rollouts, experience)
        with self._stages("actor_update"):
            return self._operators.update_actor(batch, step)

    def update_mix(self, rollouts: SampleValue, scores: Scores, index: int, step: int) -> None:
        batch = self._store.batch(rollouts)
        mix = self._operators.mix
        with self._stages(mix.name_of(index)):
            mix.update(index, batch, scores, step)


class WeightsWorker(RoleWorker):
    """Moves the actor's weights into the engines."""

    def sync(self, is_updated: bool) -> None:
        self._executor.begin_sync()
        with self._stages("reshard"):
            self._operators.reshard(is_updated)


class StepValues(dict[str, Any]):
    """Several values of a step by name, kept as one.

    Attributes:
        flow: what is to run on them; None on the outputs of an operator.
    """

    flow: StepFlow | None = None

    def describe(self) -> StepFlow | None:
        return self.flow


class OperatorWorker:
    """Runs the operators of a flow.

    Attributes:
        cut_off: samples of the step in which the run left before.
    """

    def __init__(self, executor: Executor, prompts: Prompts) -> None:
        self._operators, self._flow, self._stages = executor.step, executor.flow, executor.stages
        self._prompts, flow = prompts, executor.flow
        self._by_name = {operator.name: operator for operator in flow.plan.operators}
        self._shapes = ShapeChecker()
        self.cut_off: StoredRollouts | None = None

    def begin(self, step: int) -> StepValues:
        """Take the step's prompts; with dynamic sampling also its rounds."""
        operators = self._operators
        operators.begin(step, self._prompts.epoch)
        self._shapes = ShapeChecker()
        restored, self.cut_off = self.cut_off, None
        if restored is not None:
            operators.metrics |= restored.metrics
            batch = restored.batch if operators.readers is None else operators.readers.of_whole(restored.batch)
            made = restored.values | {"rollouts": batch}
        else:
            made = operators.gathered(self._prompts, step)
        prompts = [] if made else self._prompts.take(operators.num_prompts)
        operators.metrics["train/epoch"] = self._prompts.epoch
        values = StepValues({"prompts": prompts, "step": step, **made})
        values.flow = StepFlow(
            tuple(
                OperatorFacts(operator.name, operator.takes, operator.gives)
                for operator in self._flow.plan.operators
                if not operator.gives or any(name not in made for name in operator.gives)
            ),
            tuple(values),
        )
        return values

    def call(self, name: str, inputs: list[Any]) -> StepValues:
        """Run an operator on its inputs, in the order of `Operator.takes`."""
        operator = self._by_name[name]
        values = dict(zip(operator.takes, inputs, strict=True))
        with self._stages(name):
            return StepValues(self._shapes.call(operator, values))

    def pick(self, values: StepValues, name: str) -> Any:
        """Return one of the values."""
        return values[name]
