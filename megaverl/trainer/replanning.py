"""Replanning: find a better layout from a run's measurements, and continue on it after a checkpoint.

Measured sequence lengths and operator times correct the planner's prediction. The ratio
of measured to predicted time of each operator is assumed to hold for other layouts,
too. For a layout that the run has used before, its own measured ratios are known. The
run switches layouts at a checkpoint, in new processes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.loader import AUTO_KEYS, Make
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import STARTS_AGAIN, ConfigError
from megaverl.monitoring.console import Console
from megaverl.planner.candidates import (
    Settings,
    key_of,
    read_choice,
    shown,
    write_choice,
)
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.job import find_spec, make_job
from megaverl.planner.search import LayoutSearch, hardware_of
from megaverl.planner.simulator import Prediction, simulate
from megaverl.trainer.job import Leaving

# Smallest share of a step's time by which a layout counts as better.
LEAST_GAIN = 0.03
Factors = dict[str, float]


@dataclass(frozen=True)
class Observation:
    """Measurements of a run's steps.

    Attributes:
        prompts, responses: number of tokens of each sample.
        seconds: duration of each operator in a step.
    """

    prompts: Sequence[float]
    responses: Sequence[float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Replanned:
    """Layout that replanning found, compared with the layout that the run is on.

    Attributes:
        settings: settings of the better layout, or of the current one if none is better.
        before, after: corrected predictions of a step's seconds on the current and on this layout.
        factors: ratio of measured to predicted seconds by operator, on the current layout.
    """

    settings: Settings
    before: float
    after: float
    factors: Factors

    @property
    def gain(self) -> float:
        """Return the share of a step's time that the layout saves."""
        return 1 - self.after / self.before

    @property
    def is_better(self) -> bool:
        """Return whether the gain is large enough to matter."""
        return self.gain >= LEAST_GAIN

    def pays(self, steps: int, restart: float) -> bool:
        """Return whether `steps` steps save more seconds than `restart`, the duration of a restart."""
        return self.is_better and steps * (self.before - self.after) > restart


def factors_of(seconds: Mapping[str, float], prediction: Prediction) -> Factors:
    """Return the ratio of measured to predicted seconds by operator.

    Operators without a measurement or prediction get the ratio of all other operators
    together.
    """
    predicted = {phase.name: phase.seconds for phase in prediction.phases}
    both = [
        name
        for name, taken in predicted.items()
        if taken > 0 and seconds.get(name, 0.0) > 0
    ]
    if not both:
        return {}
    # Ratio over all operators with both values, for those that lack one.
    overall = sum(seconds[name] for name in both) / sum(
        predicted[name] for name in both
    )
    return {
        name: seconds[name] / predicted[name] if name in both else overall
        for name in predicted
    }


def replan(
    config: Config,
    make: Make,
    world: int,
    seen: Observation,
    known: Mapping[Any, Factors],
) -> Replanned:
    """Search the best layout for a run's measurements.

    The keys that were `auto` are chosen again. If there were none, all keys that could
    be `auto` are.

    Args:
        make: returns the configuration with changed settings.
        known: ratios of layouts that the run has used before, by `key_of` their settings.

    Raises:
        ConfigError: the model or the machine is unknown.
    """
    hardware, spec = hardware_of(config, world), find_spec(config)
    lengths = LengthDistribution.measured(seen.prompts, seen.responses)
    # Keys with explicit values stay fixed, unless no key was `auto`.
    keys = tuple(key for key in AUTO_KEYS if key in config.chosen) or AUTO_KEYS
    now = make_job(config, spec, world, hardware.machine())
    factors = factors_of(seen.seconds, simulate(now, hardware, lengths=lengths))
    before = simulate(now, hardware, lengths=lengths, factors=factors).step_seconds
    search = LayoutSearch(
        make,
        spec,
        world,
        hardware,
        keys=keys,
        lengths=lengths,
        further=False,
        factors=lambda settings: known.get(key_of(settings), factors),
    )
    best = search.best(1).choices[0]
    after = best.prediction.step_seconds
    if after >= before:
        return Replanned(dict(config.chosen), before, before, factors)
    return Replanned(best.settings, before, after, factors)


WARM_UP = 1  # steps after a start that are not measured


class StartingAgain(Leaving):
    """Exception of a run that has saved and continues on another layout. Ranks exit with `errors.STARTS_AGAIN`."""

    code = STARTS_AGAIN


class Replanning:
    """Handler of `trainer.replan_every` and `run.replan`. The rank that keeps the records searches; all ranks leave.

    Args:
        keeps: whether this rank keeps the records.
    """

    def __init__(self, config: Config, console: Console, *, keeps: bool) -> None:
        self.config, self.console = config, console
        self.every, self.keeps = config.trainer.replan_every, keeps
        self.found: Replanned | None = None
        self._world = int(os.environ.get("WORLD_SIZE", "1"))
        self._prompts: list[int] = []
        self._responses: list[int] = []
        self._seconds: list[dict[str, float]] = []
        self._steps = 0
        self._start = 0.0

    def look(
        self, done: int, metrics: Mapping[str, float], batch: RolloutBatch
    ) -> dict[str, float]:
        """Record a step. If a search is due, print and return the gain of the best layout, as metrics."""
        if not self.every or not self.keeps:
            return {}
        self._steps += 1
        if self._steps == 1:
            self._start = self.seconds_until(metrics)
        # The first step after a start is slower, because caches are empty and kernels
        # are compiled.
        if self._steps > WARM_UP:
            lengths = sequence_lengths(batch)
            self._prompts += lengths.prompt_lengths
            self._responses += lengths.response_lengths
            times = {
                name.removeprefix("time/"): value
                for name, value in metrics.items()
                if name.startswith("time/")
            }
            self._seconds.append(
                {
                    n.removesuffix("_ms"): v / 1e3
                    for n, v in times.items()
                    if n.endswith("_ms")
                }
            )
        if done % self.every or not self._seconds:
            return {}
        names = dict.fromkeys(name for seconds in self._seconds for name in seconds)
        seconds = {
            name: statistics.median(
                measured.get(name, 0.0) for measured in self._seconds
            )
            for name in names
        }
        seen = Observation(self._prompts, self._responses, seconds)
        self._prompts, self._responses, self._seconds = [], [], []
        try:
            better = replan(
                self.config, self.config.layered, self._world, seen, self._known()
            )
        except ConfigError as error:
            # The model and the machine do not change during the run, so a later search
            # would fail as well.
            self.console.warn(f"trainer.replan_every: {error}")
            self.every = 0
            return {}
        self.found = (
            better
            if better.pays(self.config.trainer.steps - done, self._start)
            else None
        )
        self._say(better, done)
        return {
            "plan/gain": better.gain,
            "plan/step_ms": better.before * 1e3,
            "plan/better_step_ms": better.after * 1e3,
        }

    def seconds_until(self, metrics: Mapping[str, float]) -> float:
        """Return the seconds from the start of this process to its first step, which a restart would take.

        Args:
            metrics: metrics of the first step, which has just ended.
        """
        started: float = psutil.Process().create_time()
        return time.time() - started - metrics.get("time/step_ms", 0.0) / 1e3

    def saved(
        self, done: int, group: dist.ProcessGroup | None, settle: Callable[[], bool]
    ) -> None:
        """Leave the run after a checkpoint if a better layout was found. Collective over `group`.

        Args:
            settle: waits until the checkpoint is complete and returns False if it failed.

        Raises:
            StartingAgain: the run continues on the better layout.
        """
        steps = self.config.trainer.steps
        if done == steps or not (self.config.run.replan and self.config.chosen):
            return
        # Only the rank with the records has searched, so the result is shared first.
        if not reduce_json(self.found is not None, any, group) or not settle():
            return
        if (better := self.found) is not None:
            measured = [
                *self._measured(),
                {"settings": dict(self.config.chosen), "factors": better.factors},
            ]
            write_choice(self.config, self._world, better.settings, measured)
        raise StartingAgain(
            f"replan: saved after {done} of {steps} steps, which go on on the other layout."
        )

    def _measured(self) -> list[dict[str, Any]]:
        """Return the measurements of other layouts that the run has used. The current layout has a newer one."""
        own_key = key_of(self.config.chosen)
        choices = read_choice(self.config, self._world).get("measured", [])
        return [choice for choice in choices if key_of(choice["settings"]) != own_key]

    def _known(self) -> dict[Any, dict[str, float]]:
        return {
            key_of(choice["settings"]): choice["factors"] for choice in self._measured()
        }

    def _say(self, plan: Replanned, done: int) -> None:
        if not plan.is_better:
            self.console.print(
                f"replan: no layout that fits is better than this one, {plan.before:.3g} s a step."
            )
            return
        settings = " ".join(
            f"{key}={value}" for key, value in shown(plan.settings).items()
        )
        taken = ""
        if self.config.run.replan and self.config.chosen:
            taken = (
                "; taken at the next checkpoint"
                if self.found
                else "; too few steps are left for a restart"
            )
        self.console.print(
            f"replan: {settings} would take {plan.after:.3g} s a step instead of {plan.before:.3g} s "
            f"({100 * plan.gain:.0f} % less, as predicted and corrected by {done} steps){taken}."
        )
