"""Run that stores scored rollouts for a later replay, and trains nothing (`trainer.rollout_only`).

store_rollouts     the program, on the coordinator's rank
  sample           responses and their rewards, as in a run that trains (`program.sample`)
  store            one file per step
"""

from __future__ import annotations

from functools import partial

from megaverl.config import Config
from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import on_first_rank
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, Stages
from megaverl.trainer.program import policy_step, sample
from megaverl.trainer.role_groups import make_run
from megaverl.trainer.role_workers import RewardWorker, RolloutWorker
from megaverl.trainer.roles import Roles
from megaverl.trainer.run_state import RunState
from megaverl.trainer.sample_rows import SampleStore, SampleValue
from megaverl.trainer.serving import serve_program
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.workers import RemoteWorker
from megaverl.workers.reward import Scores


class StorageGroup(WorkerGroup):
    """All ranks. The first one writes the rollouts."""

    @remote
    def store(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int
    ) -> None:
        """Store the rollouts of a step in the run folder."""


class StorageWorker:
    """Worker that stores rollouts (`StorageGroup`).

    Args:
        state: this rank's roles and the metrics of the running step.
        store: converts values of the program to batches.
        folder: receives the rollouts.
    """

    def __init__(
        self,
        state: RunState,
        store: SampleStore,
        folder: RolloutFolder,
        console: Console,
    ) -> None:
        self._state, self._store = state, store
        self._folder, self._console = folder, console

    def store(self, rollouts: SampleValue, scores: Scores, step: int) -> None:
        """Store the rollouts of a step in the run folder."""
        operators = self._state.step
        metrics = operators.measured(step)
        operators.end_measuring(step)
        operators.metrics = {}
        # The step that replays the rollouts has an epoch of its own.
        metrics.pop("train/epoch", None)
        version = self._state.roles.engines.weight_version
        batch = self._store.batch(rollouts)
        stored = StoredRollouts(step, version, batch, scores, metrics)
        with self._state.stages("store"):
            on_first_rank(partial(self._folder.append, stored))
        num_steps = self._state.config.trainer.steps
        self._console.step(step + 1, num_steps, stored.metrics)


def generate_only(config: Config, console: Console, job: Job) -> None:
    """Store the rollouts of `trainer.steps` steps in the run folder. Collective over all ranks.

    Each step takes the same prompts and seeds as a training run. An interrupted run
    continues after its last stored step, unless `checkpoint.resume` is never.
    """
    context = job.context
    builder = Builder(config)
    stages = Stages(Timeline(), job)
    prompts, rollout = builder.prompts(), builder.rollout(None)
    roles = Roles(
        # No model is trained, so a stand-in takes the actor's place.
        actor=RemoteWorker("actor"),
        rollout=rollout,
        reward=builder.reward(),
        critic=None,
        reference=None,
        kl=builder.kl_controller(),
        player=builder.player(),
    )
    state = RunState(config, roles, context, stages, console)
    folder = RolloutFolder(builder.config.run_dir / "rollouts")
    first, position = on_first_rank(lambda: _start(folder, config))
    prompts.seek(position)
    store = SampleStore()
    workers = {
        "rollout": RolloutWorker(state, prompts, store),
        "reward": RewardWorker(state, store, {}),
        "storage": StorageWorker(state, store, folder, console),
    }

    async def store_rollouts(controller: Controller) -> None:
        run = make_run(
            config,
            controller,
            context.placement,
            step=policy_step,
            has_engines=True,
            restored_steps=frozenset(),
        )
        # Every stored step is complete, so there is nothing to save.
        run.may_leave_inside = False
        storage = StorageGroup("storage", range(controller.num_ranks), controller)
        for step in range(first, config.trainer.steps):
            samples = await sample(run, step)
            await storage.store(*samples, step)

    serve_program(
        store_rollouts,
        workers,
        config=config,
        stages=stages,
        console=console,
    )
    console.print(f"rollouts of {config.trainer.steps} steps are in {folder.folder}")


def _start(folder: RolloutFolder, config: Config) -> tuple[int, int]:
    """Return the first step to generate, and the number of prompts that the stored steps took.

    Steps that are stored after the first missing one are dropped.
    """
    first = position = 0
    resume = config.checkpoint.resume
    if resume in ("auto", "unfinished") and (folder.folder / "index.jsonl").exists():
        entries = folder.entries()
        # `unfinished` does not continue a run that has stored all steps, but starts it
        # again.
        if resume == "unfinished" and all(
            step in entries for step in range(config.trainer.steps)
        ):
            entries = {}
        while first in entries:
            position += int(
                entries[first]["metrics"].get(
                    "rollout/generated_groups", config.data.prompts_per_step
                )
            )
            first += 1
    folder.forget(first)
    return first, position
