"""Replanning: find a better layout from a run's measurements, and report its gain.

Measured sequence lengths and operator times correct the planner's prediction. The ratio
of measured to predicted time of each operator is assumed to hold for other layouts,
too.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaverl.config import Config
from megaverl.config.loader import AUTO_KEYS, Make
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.planner.candidates import Settings, shown
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.job import find_spec, make_job
from megaverl.planner.search import LayoutSearch, hardware_of
from megaverl.planner.simulator import Prediction, simulate

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
    """

    settings: Settings
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Return the share of a step's time that the layout saves."""
        return 1 - self.after / self.before

    @property
    def is_better(self) -> bool:
        """Return whether the gain is large enough to matter."""
        return self.gain >= LEAST_GAIN


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


def replan(config: Config, make: Make, world: int, seen: Observation) -> Replanned:
    """Search the best layout for a run's measurements.

    The keys that were `auto` are chosen again. If there were none, all keys that could
    be `auto` are.

    Args:
        make: returns the configuration with changed settings.

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
        factors=factors,
    )
    best = search.best(1).choices[0]
    after = best.prediction.step_seconds
    if after >= before:
        return Replanned(dict(config.chosen), before, before)
    return Replanned(best.settings, before, after)


WARM_UP = 1  # steps after a start that are not measured


class Replanning:
    """Handler of `trainer.replan_every`. The rank that keeps the records searches.

    Args:
        keeps: whether this rank keeps the records.
    """

    def __init__(self, config: Config, console: Console, *, keeps: bool) -> None:
        self.config, self.console, self.keeps = config, console, keeps
        self.every = config.trainer.replan_every
        self._world = int(os.environ.get("WORLD_SIZE", "1"))
        self._prompts: list[int] = []
        self._responses: list[int] = []
        self._seconds: list[dict[str, float]] = []
        self._steps = 0

    def look(
        self, done: int, metrics: Mapping[str, float], batch: RolloutBatch
    ) -> dict[str, float]:
        """Record a step. If a search is due, print and return the gain of the best layout, as metrics."""
        if not self.every or not self.keeps:
            return {}
        self._steps += 1
        # The first step after a start is slower, because caches are empty and kernels
        # are compiled.
        if self._steps > WARM_UP:
            lengths = sequence_lengths(batch)
            self._prompts += lengths.prompt_lengths
            self._responses += lengths.response_lengths
            self._seconds.append(
                {
                    name.removeprefix("time/").removesuffix("_ms"): value / 1e3
                    for name, value in metrics.items()
                    if name.startswith("time/") and name.endswith("_ms")
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
            better = replan(self.config, self.config.layered, self._world, seen)
        except ConfigError as error:
            # The model and the machine do not change during the run, so a later search
            # would fail as well.
            self.console.warn(f"trainer.replan_every: {error}")
            self.every = 0
            return {}
        self._say(better, done)
        return {
            "plan/gain": better.gain,
            "plan/step_ms": better.before * 1e3,
            "plan/better_step_ms": better.after * 1e3,
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
        self.console.print(
            f"replan: {settings} would take {plan.after:.3g} s a step instead of {plan.before:.3g} s "
            f"({100 * plan.gain:.0f} % less, as predicted and corrected by {done} steps)."
        )
