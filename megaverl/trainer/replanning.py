"""Whether a run would do better on another layout, by what it has measured; taken at a checkpoint, in new processes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch.distributed as dist

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import STARTS_AGAIN, ConfigError
from megaverl.monitoring.console import Console
from megaverl.planner.candidates import key_of, read_choice, shown, write_choice
from megaverl.planner.replan import Observation, Replanned, replan
from megaverl.trainer.job import Leaving

WARM_UP = 1  # steps after a start that are not counted


class StartingAgain(Leaving):
    """The run has saved, and goes on on another layout: every rank ends with `errors.STARTS_AGAIN`."""

    code = STARTS_AGAIN


class Replanning:
    """What `trainer.replan_every` and `run.replan` ask for. The rank that keeps the records looks; all ranks leave.

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

    def look(self, done: int, metrics: Mapping[str, float], batch: RolloutBatch) -> dict[str, float]:
        """Note a step; where that is due, say what a better layout would gain, as metrics."""
        if not self.every or not self.keeps:
            return {}
        self._steps += 1
        if self._steps == 1:
            self._start = self.seconds_until(metrics)
        if self._steps > WARM_UP:
            lengths = sequence_lengths(batch)
            self._prompts += lengths.prompt_lengths
            self._responses += lengths.response_lengths
            times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
            self._seconds.append({n.removesuffix("_ms"): v / 1e3 for n, v in times.items() if n.endswith("_ms")})
        if done % self.every or not self._seconds:
            return {}
        names = dict.fromkeys(name for each in self._seconds for name in each)
        seconds = {name: statistics.median(each.get(name, 0.0) for each in self._seconds) for name in names}
        seen = Observation(self._prompts, self._responses, seconds)
        self._prompts, self._responses, self._seconds = [], [], []
        try:
            found = replan(self.config, self.config.layered, self._world, seen, self._known())
        except ConfigError as error:
            self.console.warn(f"trainer.replan_every: {error}")
            self.every = 0
            return {}
        self.found = found if found.pays(self.config.trainer.steps - done, self._start) else None
        self._say(found, done)
        return {"plan/gain": found.gain, "plan/step_ms": found.before * 1e3, "plan/better_step_ms": found.after * 1e3}

    def seconds_until(self, metrics: Mapping[str, float]) -> float:
        """From the start of this process until its first step, which is over: what a restart takes."""
        return time.time() - psutil.Process().create_time() - metrics.get("time/step_ms", 0.0) / 1e3

    def saved(self, done: int, group: dist.ProcessGroup | None, settle: Callable[[], bool]) -> None:
        """After a checkpoint: where a better layout was found, have the run go on on it. Every rank of `group` comes.

        Args:
            settle: waits until the checkpoint is whole; False: it is not.

        Raises:
            StartingAgain: it does.
        """
        steps = self.config.trainer.steps
        if done == steps or not (self.config.run.replan and self.config.chosen):
            return
        if not reduce_json(self.found is not None, any, group) or not settle():
            return
        if (found := self.found) is not None:
            measured = [*self._measured(), {"settings": dict(self.config.chosen), "factors": found.factors}]
            write_choice(self.config, self._world, found.settings, measured)
        raise StartingAgain(f"replan: saved after {done} of {steps} steps, which go on on the other layout.")

    def _measured(self) -> list[dict[str, Any]]:
        """Layouts that the run was on before; of this one, what it has just measured counts."""
        own = key_of(self.config.chosen)
        said = read_choice(self.config, self._world).get("measured", [])
        return [each for each in said if key_of(each["settings"]) != own]

    def _known(self) -> dict[Any, dict[str, float]]:
        return {key_of(each["settings"]): each["factors"] for each in self._measured()}

    def _say(self, found: Replanned, done: int) -> None:
        if not found.is_better:
            self.console.print(f"replan: no layout that fits is better than this one, {found.before:.3g} s a step.")
            return
        settings = " ".join(f"{key}={value}" for key, value in shown(found.settings).items())
        taken = ""
        if self.config.run.replan and self.config.chosen:
            taken = "; taken at the next checkpoint" if self.found else "; too few steps are left for a restart"
        self.console.print(
            f"replan: {settings} would take {found.after:.3g} s a step instead of {found.before:.3g} s "
            f"({100 * found.gain:.0f} % less, as predicted and corrected by {done} steps){taken}."
        )
