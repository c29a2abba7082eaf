"""Tasks of other harnesses at the validations of a training run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from megaverl.errors import HarnessError
from megaverl.monitoring.evaluations import write_suite
from megaverl.trainer.build import Builder
from megaverl.trainer.harness.engine_door import (
    EngineDoor,
    evaluate_task,
    metrics_of,
)
from megaverl.trainer.role_groups import Run


def tasks_at_validation(builder: Builder) -> Callable[[Run, int], Awaitable[None]]:
    """Return the part of a validation that evaluates `evaluation.tasks` with the engines' current weights.

    A task that fails is a warning, because the run's training does not depend on it. A
    run that is asked to leave gives up the task that is running.
    """
    tokenizer, chat = builder.tokenizer, builder.encoder().uses_chat_template

    async def evaluate_tasks(run: Run, done: int) -> None:
        with EngineDoor(run.config, tokenizer, chat=chat) as door:
            for task in run.config.evaluation.harness_tasks:
                try:
                    results = await evaluate_task(
                        door,
                        run.rollout,
                        task,
                        run.config,
                        stops=lambda: bool(run.controller.signal),
                    )
                except HarnessError as error:
                    run.session.warn(f"validation after step {done}: {error}")
                    continue
                if results is None:
                    return
                for result in results:
                    write_suite(run.config.run_dir, result)
                run.session.record_tasks(done, metrics_of(results))

    return evaluate_tasks
