"""Generation without training: rollouts of the weights in `model.path`, scored and stored for a replay."""

from __future__ import annotations

from functools import partial

from megaverl.config import Config
from megaverl.distributed.collectives import on_first_rank
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, Stages
from megaverl.trainer.roles import Roles
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.workers import RemoteWorker


def generate_only(config: Config, console: Console, job: Job | None = None) -> None:
    """Store the rollouts of `trainer.steps` steps in the run folder; every rank takes part.

    The prompts and the draws of a step are those that a training run would take. One that was cut off goes on
    after the last step that it has stored, unless `checkpoint.resume` is never.
    """
    builder = Builder(config)
    stages = Stages(Timeline(), job)
    stream, rollout = builder.prompts(), builder.rollout(None)
    roles = Roles(
        actor=RemoteWorker("actor"),
        rollout=rollout,
        reward=builder.reward(),
        critic=None,
        reference=None,
        kl=builder.kl_controller(),
        player=builder.player(),
    )
    operators = RLStep(config, roles, span=stages)
    folder = RolloutFolder(builder.run_dir / "rollouts")
    first, position = on_first_rank(lambda: _start(folder, config))
    stream.seek(position)
    for step in range(first, config.trainer.steps):
        stages.step, operators.metrics = step + 1, {}
        values = operators.gathered(stream, step)
        if not values:
            with stages("rollout"):
                values["rollouts"] = operators.generate(stream.take(config.data.prompts_per_step), step)
            with stages("reward"):
                values["scores"] = operators.score(values["rollouts"])
        batch, scores = values["rollouts"], values["scores"]
        stored = StoredRollouts(step, rollout.weight_version, batch, scores, operators.metrics)
        with stages("store"):
            on_first_rank(partial(folder.append, stored))
        console.step(step + 1, config.trainer.steps, stored.metrics)
    console.print(f"rollouts of {config.trainer.steps} steps are in {folder.folder}")


def _start(folder: RolloutFolder, config: Config) -> tuple[int, int]:
    """The first step to generate, and the prompts that those before it took; what is stored after is dropped."""
    first = position = 0
    if config.checkpoint.resume == "auto" and (folder.folder / "index.jsonl").exists():
        entries = folder.entries()
        while first in entries:
            position += int(entries[first]["metrics"].get("rollout/generated_groups", config.data.prompts_per_step))
            first += 1
    folder.forget(first)
    return first, position
