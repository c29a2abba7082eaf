"""Generation apart from training: rollouts of the weights in `model.path`, scored and stored for a replay."""

from __future__ import annotations

from functools import partial

from megaverl.config import Config
from megaverl.metrics.console import Console
from megaverl.metrics.timeline import Timeline
from megaverl.parallel.collectives import on_first_rank
from megaverl.trainer.build import Builder
from megaverl.trainer.generate import generate, score
from megaverl.trainer.stages import Stages
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.trainer.watchdog import Watchdog


def generate_only(config: Config, console: Console, watchdog: Watchdog | None = None) -> None:
    """Store the rollouts of `trainer.steps` steps in the run folder; every rank takes part.

    The prompts and the draws of a step are those that a training run would take. One that was cut off goes on
    after the last step that it has stored, unless `checkpoint.resume` is never.
    """
    builder = Builder(config)
    stages = Stages(Timeline(), watchdog.note if watchdog else lambda what: None)
    data = builder.dataset(config.data.train)
    sampler = data.sampler(config.data.prompts_per_step, config.run.seed, shuffle=config.data.shuffle)
    rollout, reward = builder.rollout(None), builder.reward()
    folder = RolloutFolder(builder.run_dir / "rollouts")
    first = on_first_rank(lambda: _start(folder, config.checkpoint.resume))
    for step in range(first, config.trainer.steps):
        stages.step = step + 1
        with stages("rollout"):
            batch, metrics = generate(config, rollout, [data[i] for i in sampler.indices(step)], step)
        with stages("reward"):
            scores, measured = score(reward, batch)
        stored = StoredRollouts(step, rollout.weight_version, batch, scores, metrics | measured)
        with stages("store"):
            on_first_rank(partial(folder.append, stored))
        console.step(step + 1, config.trainer.steps, stored.metrics)
    console.print(f"rollouts of {config.trainer.steps} steps are in {folder.folder}")


def _start(folder: RolloutFolder, resume: str) -> int:
    """The first step to generate; what is stored from there on is dropped."""
    first = 0
    if resume == "auto" and (folder.folder / "index.jsonl").exists():
        entries = folder.entries()
        while first in entries:
            first += 1
    folder.forget(first)
    return first
