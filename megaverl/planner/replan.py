"""A layout for the steps that a run really has: what it has measured of its lengths and phases corrects the prediction.

Operators take longer or shorter than predicted by a factor each, which another layout's are expected to have too; of a
layout that the run has already been on, its own are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.config import Config
from megaverl.config.loader import AUTO_KEYS, Make
from megaverl.planner.candidates import Settings, key_of
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.job import find_spec, make_job
from megaverl.planner.search import LayoutSearch, hardware_of
from megaverl.planner.simulator import Prediction, simulate

LEAST_GAIN = 0.03  # of a step, below which a layout is not called better
Factors = dict[str, float]


@dataclass(frozen=True)
class Observation:
    """What a run has measured of its steps.

    Attributes:
        prompts, responses: tokens of samples.
        seconds: operator -> what it took in a step.
    """

    prompts: Sequence[float]
    responses: Sequence[float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Replanned:
    """A layout beside the one that a run is on.

    Attributes:
        settings: of the better one; of the same, where there is none.
        before, after: seconds of a step, as corrected.
        factors: operator -> measured by predicted, of the layout that the run is on.
    """

    settings: Settings
    before: float
    after: float
    factors: Factors

    @property
    def gain(self) -> float:
        """Share of a step that is saved."""
        return 1 - self.after / self.before

    @property
    def is_better(self) -> bool:
        return self.gain >= LEAST_GAIN

    def pays(self, steps: int, restart: float) -> bool:
        """Whether so many steps save more than the seconds of a restart."""
        return self.is_better and steps * (self.before - self.after) > restart


def factors_of(seconds: Mapping[str, float], prediction: Prediction) -> Factors:
    """Operator -> measured by predicted seconds; of one that has not both, what it is of all together."""
    predicted = {phase.name: phase.seconds for phase in prediction.phases}
    both = [name for name, taken in predicted.items() if taken > 0 and seconds.get(name, 0.0) > 0]
    if not both:
        return {}
    overall = sum(seconds[name] for name in both) / sum(predicted[name] for name in both)
    return {name: seconds[name] / predicted[name] if name in both else overall for name in predicted}


def replan(config: Config, make: Make, world: int, seen: Observation, known: Mapping[Any, Factors]) -> Replanned:
    """The best layout for what a run has measured; the keys that were `auto` are chosen anew, or, where there are
    none, all that could be.

    Args:
        make: the configuration with settings laid over what was written.
        known: `key_of` the settings of layouts that the run was on before -> their factors.

    Raises:
        ConfigError: the model or the machine is not known.
    """
    hardware, spec = hardware_of(config, world), find_spec(config)
    lengths = LengthDistribution.measured(seen.prompts, seen.responses)
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
