"""One rank's part in the programs of a run: creates the rank's workers and serves the calls of a program."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from signal import Signals
from typing import Any, Protocol

from megaverl.config import Config
from megaverl.controller.core import Controller
from megaverl.data.batch import RolloutBatch
from megaverl.data.streaming import Prompts
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.monitoring.profiler import Profiler
from megaverl.trainer.agents import make_agent_workers, make_agents
from megaverl.trainer.arriving_samples import SampleSender, can_arrive
from megaverl.trainer.build import Builder
from megaverl.trainer.harness.validation_tasks import tasks_at_validation
from megaverl.trainer.job import Leaving, PreemptionHandler, Stages
from megaverl.trainer.own_program import load_step
from megaverl.trainer.program import (
    agents_step,
    asynchronous_step,
    flow_step,
    given_step,
    policy_step,
    sample_ahead,
)
from megaverl.trainer.role_groups import (
    Run,
    StepProgram,
    changes_prompts,
    make_run,
)
from megaverl.trainer.role_workers import (
    ActorWorker,
    CriticWorker,
    IslandWorker,
    OperatorWorker,
    ReceiverWorker,
    ReferenceWorker,
    RewardWorker,
    RolloutWorker,
    WeightsWorker,
)
from megaverl.trainer.rollouts_ahead import RolloutsAhead
from megaverl.trainer.run_state import RunState
from megaverl.trainer.sample_rows import SampleStore, SampleValue
from megaverl.trainer.saving import Saving
from megaverl.trainer.schedule import Schedule
from megaverl.trainer.serving import serve_program
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import StoredRollouts
from megaverl.trainer.validation import HeldOutResult, Validation
from megaverl.workers.reward import Scores


class StepsOfARun(Protocol):
    """The part of a trainer (`loop.Trainer`) that the programs of its run use.

    Attributes:
        next_step: next step of the run, counted from 0.
        measured: metrics of the last validation, or else of the last step, on ranks that have them.
        cut_off: samples of the next step, if the run resumed from a checkpoint inside a step.
        leave: notes a signal that asks the run to leave.
    """

    config: Config
    console: Console
    builder: Builder
    run_state: RunState
    step: RLStep
    prompts: Prompts
    validation: Validation
    stages: Stages
    profiler: Profiler
    saving: Saving
    leave: PreemptionHandler
    next_step: int
    measured: dict[str, float]
    cut_off: StoredRollouts | None

    def begin_step(self, step: int) -> None: ...

    def report(self, done: int) -> dict[str, float]: ...

    def save_if_due(self, done: int) -> None: ...

    def leave_run(
        self, signal: str, rollouts: RolloutBatch | None, scores: Scores | None
    ) -> Leaving: ...


class ServedRun:
    """Server of a run's programs on this rank. It serves one program after another, from the run's current step.

    Args:
        trainer: this rank's trainer, which has already restored its checkpoint.
        is_given: whether a Python program provides the responses of each step (`PPOTrainer`).

    Attributes:
        session: worker for the work around the steps.

    Raises:
        ConfigError: an operator would change prompts whose responses are generated ahead of their step.

    Example:
        served = ServedRun(trainer)
        served.serve(lambda run: train(run, trainer.next_step))  # on every rank; returns when the program has ended
    """

    def __init__(self, trainer: StepsOfARun, *, is_given: bool = False) -> None:
        self._is_given = is_given
        self._trainer, self._state = trainer, trainer.run_state
        self._config = trainer.config
        state, operators = trainer.run_state, trainer.step
        self._context, self._placement = state.context, state.context.placement
        self._schedule = Schedule.of(self._config, self._placement)
        state.start(trainer.next_step)
        trainer.profiler.end(trainer.next_step)
        store = SampleStore()
        if not self._placement.is_colocated:
            store = SampleStore(self._context, state.routing.readers(state.flow))
        # Rounds of dynamic sampling must not run again for steps whose samples the
        # checkpoint holds.
        restored = dict(operators.waiting) if self._config.samples_in_rounds else {}
        if trainer.cut_off is not None:
            restored[trainer.cut_off.step] = trainer.cut_off
        restored_scores = {
            step: stored.scores
            for step, stored in restored.items()
            if stored.scores is not None
        }
        self._restored_steps = frozenset(restored)
        sender = self._make_sender()
        operators.outlet = sender
        self._rollout = RolloutWorker(
            state,
            trainer.prompts,
            store,
            lambda: trainer.validation.prompts,
            sender,
        )
        self._rollout.cut_off, trainer.cut_off = trainer.cut_off, None
        self._reward = RewardWorker(state, store, restored_scores)
        self.session = SessionWorker(trainer, store)
        self._workers: dict[str, object] = {
            "session": self.session,
            "recorder": RecorderWorker(state, store),
            "receiver": ReceiverWorker(store),
            "rollout": self._rollout,
            "reward": self._reward,
            "reference": ReferenceWorker(state, store),
            "critic": CriticWorker(state, store),
            "actor": ActorWorker(state, store),
            "weights": WeightsWorker(state, store),
            "islands": IslandWorker(state),
            "operators": OperatorWorker(
                state, trainer.prompts, store, self._rollout, self._reward
            ),
        }
        self._agents = list(state.roles.agents)
        self._workers |= make_agent_workers(state, store)
        self._step = self._choose_step()
        if self._is_ahead and changes_prompts(state.flow.plan):
            raise ConfigError(
                "trainer.operators: an operator that runs before the rollout cannot change the prompts of a later "
                "step. Set rollout.async_rollout=false, or let it change the rollouts."
            )

    def give(self, rollouts: StoredRollouts) -> None:
        """Make the next step train on these responses, and use their scores if they have any.

        Every rank must provide the same responses.
        """
        self.session.next_given = rollouts
        if rollouts.scores is not None:
            self._reward.restored[rollouts.step] = rollouts.scores

    @property
    def has_shared(self) -> bool:
        """Return whether the last program has copied responses to every rank, and nobody has taken them."""
        return self.session.shared is not None

    def take_shared(self) -> RolloutBatch:
        """Return the responses that the last program copied to every rank, and release them."""
        shared, self.session.shared = self.session.shared, None
        assert shared is not None, "the program shares responses before it ends"
        return shared

    def serve(self, program: Callable[[Run], Coroutine[Any, Any, None]]) -> None:
        """Serve a program until it ends. Every rank of the job takes part.

        Raises:
            Leaving: the run was asked to leave, and has saved.
            TrainingStopped: another rank failed or was lost. The message names it.
        """
        trainer = self._trainer
        serve_program(
            lambda controller: program(self._make_run(controller)),
            self._workers,
            config=self._config,
            stages=trainer.stages,
            leave=trainer.leave,
            console=trainer.console,
            dialogue=self._state.dialogue,
        )
        if self.session.leaving is not None:
            raise self.session.leaving

    def _make_sender(self) -> SampleSender | None:
        """Return the sender of finished samples, on the first rank of an engine. Else None."""
        # All ranks of an engine return the same responses, so only its first rank sends
        # them.
        engines = self._placement.ranks["rollout"][:: self._config.rollout.tp]
        if not self._scores_arriving or self._context.rank not in engines:
            return None
        return SampleSender(self._context, self._config.samples_per_step)

    @property
    def _scores_arriving(self) -> bool:
        """Return whether samples are scored while the engines generate others."""
        if (
            self._placement.is_colocated
            or self._config.trainer.program is not None
            or self._is_given
        ):
            return False
        is_free = not self._is_ahead or self._schedule.rewards_ahead > 0
        return is_free and can_arrive(self._config, self._placement)

    def _choose_step(self) -> StepProgram:
        """Return the program of one step."""
        if self._config.trainer.program is not None:
            return load_step(self._config.trainer.program)
        if self._config.trainer.operators:
            return flow_step
        if self._agents:
            return agents_step
        if self._is_given and self._may_run_ahead:
            return given_step
        return asynchronous_step if self._is_ahead else policy_step

    @property
    def _is_ahead(self) -> bool:
        """Return whether the engines generate ahead of training, at their own pace."""
        # A Python program's calls begin and end on all ranks together.
        return self._may_run_ahead and not self._is_given

    @property
    def _may_run_ahead(self) -> bool:
        return self._config.rollout.async_rollout and not self._placement.is_colocated

    def _make_run(self, controller: Controller) -> Run:
        run = make_run(
            self._config,
            controller,
            self._placement,
            step=self._step,
            has_engines=self._trainer.step.replayed is None,
            restored_steps=self._restored_steps,
        )
        run.agents = make_agents(run, self._agents, controller)
        run.operators.plan = self._state.flow.plan
        if run.validates and self._config.evaluation.tasks:
            run.evaluate_tasks = tasks_at_validation(self._trainer.builder)
        run.is_given = self._is_given
        run.scores_arriving = self._scores_arriving
        if self._is_ahead:
            run.scores_ahead = (
                self._schedule.rewards_ahead > 0 and not self._config.trainer.operators
            )
            run.ahead = RolloutsAhead(
                self._schedule,
                partial(sample_ahead, run),
                self._trainer.next_step,
                self._config.trainer.steps,
                is_in_flight=self._config.rollout.in_flight_updates,
            )
        elif self._may_run_ahead:
            run.may_generate_next = self._may_generate_next
        return run

    def _may_generate_next(self, step: int) -> bool:
        """Return whether the engines may begin the step after `step` before `step` is complete."""
        is_last = step + 1 >= self._config.trainer.steps
        return not is_last and self._schedule.begins_after(step + 1) <= step


class SessionWorker:
    """Worker for the work around the steps of a run, on one rank (`role_groups.SessionGroup`).

    Attributes:
        leaving: exception to raise on every rank after the program, if the run was left before its end.
        next_given: responses that a Python program provides for the next step.
        shared: responses that the program copied to every rank.
    """

    def __init__(self, trainer: StepsOfARun, store: SampleStore) -> None:
        self._trainer, self._store = trainer, store
        self.leaving: Leaving | None = None
        self.next_given: StoredRollouts | None = None
        self.shared: RolloutBatch | None = None

    def begin_step(self, step: int) -> None:
        """Start the meters and records of a step."""
        self._trainer.begin_step(step)
        self._trainer.run_state.begin_step(step)

    def report_step(self, done: int) -> None:
        """End the step on this rank, then write and display its metrics."""
        trainer = self._trainer
        trainer.run_state.end_step(done - 1)
        trainer.next_step = done
        trainer.profiler.end(done)
        trainer.measured = trainer.report(done)

    def record_validation(self, done: int, result: HeldOutResult) -> None:
        """Store, write and display a validation."""
        self._trainer.validation.note(done, result)
        self._trainer.measured = dict(result.metrics)

    def record_tasks(self, done: int, metrics: dict[str, float]) -> None:
        """Write and display the scores of a harness's task."""
        trainer = self._trainer
        trainer.validation.records.log(done, metrics)
        trainer.console.print(
            f"evaluation after step {done}: "
            + "  ".join(
                f"{name.removeprefix('evaluation/')} {value:.3f}"
                for name, value in metrics.items()
            )
        )

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._trainer.console.warn(text)

    def save_if_due(self, done: int) -> None:
        """Save if a checkpoint is due, and commit an earlier one that has been written."""
        self._trainer.save_if_due(done)
        self._trainer.saving.look()

    def leave(
        self, signal: int, rollouts: RolloutBatch | None, scores: Scores | None
    ) -> None:
        """Save a checkpoint with the samples of the running step, and note that the run leaves."""
        self.leaving = self._trainer.leave_run(Signals(signal).name, rollouts, scores)

    def share(self, rollouts: SampleValue) -> None:
        """Keep the responses for the Python program of this rank."""
        self.shared = self._store.batch(rollouts)

    def given(self, step: int) -> SampleValue:
        """Return the responses that the Python program of this rank provided."""
        responses, self.next_given = self.next_given, None
        assert responses is not None, (
            "every rank gives the responses before the program runs"
        )
        operators = self._trainer.step
        with operators.measuring(step):
            operators.metrics |= responses.metrics
        # Rows are selected only if roles share all ranks. Otherwise every rank works on
        # all samples that were provided.
        return self._store.give(operators.own_rows(responses.batch))


class RecorderWorker:
    """Worker that keeps a step's samples for the run's records (`role_groups.RecorderGroup`)."""

    def __init__(self, state: RunState, store: SampleStore) -> None:
        self._state, self._store = state, store

    def take(self, rollouts: SampleValue, scores: Scores) -> None:
        """Keep the samples of a step until it is reported."""
        self._state.keep_samples(self._store.batch(rollouts), scores)
