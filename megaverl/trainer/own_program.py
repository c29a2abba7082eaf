"""User-defined step (`trainer.program`): an async function that replaces the built-in step.

Example:
    from megaverl.trainer.program import sample, send_weights, train_on

    async def step(run, step):
        samples = await sample(run, step)
        updates = await train_on(run, step, samples)
        await send_weights(run, step, updates)
        return samples
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from megaverl.controller.references import Ref
from megaverl.errors import ConfigError, MegaverlError, TrainingStopped
from megaverl.plugins import load_function
from megaverl.trainer.program import RunLeft
from megaverl.trainer.role_groups import Run, Samples, StepProgram
from megaverl.user_code import describe, show, user_code, where_raised

KEY = "trainer.program"


def load_step(name: str) -> StepProgram:
    """Load the function that `trainer.program` names.

    Raises:
        ConfigError: there is no such function, or it is not declared with `async def`.
    """
    function = load_function(name, KEY)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{KEY}: {name} is not declared with `async def`, and could not await the calls of roles."
        )

    async def step(run: Run, number: int) -> Samples:
        def explain(error: BaseException) -> TrainingStopped:
            return TrainingStopped(
                f"{KEY}: {name} raised {describe(error)}{where_raised(error)} in step {number + 1}."
            )

        kept = (RunLeft, MegaverlError)
        try:
            with user_code(explain, keep=kept):
                returned: Any = await function(run, number)
        except TrainingStopped as error:
            # If the controller cancelled the program, the cancellation is passed on
            # unchanged.
            if isinstance(error.__cause__, asyncio.CancelledError):
                raise error.__cause__ from None
            raise
        if not (
            isinstance(returned, tuple)
            and len(returned) == 2
            and all(isinstance(part, Ref) for part in returned)
        ):
            raise TrainingStopped(
                f"{KEY}: {name} returned {show(returned)} in step {number + 1}; expected the samples that it "
                "has trained on: rollouts and scores, as `sample` returns them."
            )
        return Samples(*returned)

    return step
