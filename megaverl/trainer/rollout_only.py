"""Generation apart from training: rollouts of the weights in `model.path`, scored and stored for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.distributed.collectives import on_first_rank
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.build import Builder
from megaverl.trainer.generate import Metrics, generate, score
from megaverl.trainer.job import Job, Stages, unheard
from megaverl.trainer.refill import refill
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.workers.reward import Scores


def generate_only(config: Config, console: Console, job: Job | None = None) -> None:
    """Store the rollouts of `trainer.steps` steps in the run folder; every rank takes part.

    The prompts and the draws of a step are those that a training run would take. One that was cut off goes on
    after the last step that it has stored, unless `checkpoint.resume` is never.
    """
    builder = Builder(config)
    stages = Stages(Timeline(), job.liveness.note if job else unheard)
    stream = builder.prompts()
    rollout, reward, player = builder.rollout(None), builder.reward(), builder.player()
    folder = RolloutFolder(builder.run_dir / "rollouts")
    first, position = on_first_rank(lambda: _start(folder, config))
    stream.seek(position)
    for step in range(first, config.trainer.steps):
        stages.step = step + 1

        def one_round(
            prompts: Sequence[PromptRecord], first_group: int, step: int = step
        ) -> tuple[RolloutBatch, Scores, Metrics]:
            with stages("rollout"):
                batch, metrics = generate(config, rollout, prompts, step, first_group=first_group, player=player)
            with stages("reward"):
                scores, measured = score(reward, batch)
            return batch, scores, metrics | measured

        if config.algorithm.dynamic_sampling.metric is None:
            batch, scores, metrics = one_round(stream.take(config.data.prompts_per_step), 0)
        else:
            batch, scores, metrics = refill(config, stream, one_round, step)
        stored = StoredRollouts(step, rollout.weight_version, batch, scores, metrics)
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
