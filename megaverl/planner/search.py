"""Search for the fastest layout that fits: grid, micro-batches, recomputation and engines (`megaverl plan --auto`).

A candidate is the recipe with some keys set. A lower bound of its bytes drops most
candidates. The others are visited by predicted seconds, and their memory is counted
rank by rank until enough of them fit. Within a grid, a slower setting with less memory
is visited only if the one before it does not fit.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megaverl.config import Config
from megaverl.config.checks import cross_mistakes
from megaverl.config.grids import is_placed
from megaverl.config.key_types import type_at
from megaverl.config.loader import AUTO_KEYS, Make
from megaverl.config.typed_yaml import read_argument
from megaverl.config.yaml_source import put
from megaverl.errors import ConfigError, RolloutError
from megaverl.gpus import gpu_name
from megaverl.planner.advice import shortages, yaml_text
from megaverl.planner.buffers import BufferOptions
from megaverl.planner.candidates import (
    SHARE,
    SHARES,
    Candidates,
    Key,
    SearchSpace,
    Settings,
    key_of,
    read_choice,
    shown,
)
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware, known
from megaverl.planner.job import GB, Machine, PlannedJob, Role, find_spec, make_job
from megaverl.planner.memory import MemoryModel
from megaverl.planner.operators import parameters_of_stage
from megaverl.planner.simulator import Prediction, likely_lengths, simulate
from megaverl.sharding.model_spec import ModelSpec

# Fraction of a GPU's memory that may be filled, as fragmentation is not counted.
ROOM = 0.97
GAIN = 0.01  # least fraction of the step that a separate grid for a role must save
TIE = 1e-9
MOST_COUNTED = 400  # limit of candidates whose memory is counted rank by rank


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        settings: key -> value, laid over the recipe.
        peak: bytes of the fullest rank; None where nobody counts them (processors, engines other than vLLM).
    """

    settings: Settings
    job: PlannedJob = field(repr=False)
    prediction: Prediction = field(repr=False)
    peak: float | None = None

    @property
    def grid(self) -> str:
        """The grids of the actor, of roles with a grid of their own, and of the engines."""
        job = self.job
        grids = [
            f"{role.name} {role.grid}"
            for role in job.roles[1:]
            if role.grid != job.actor.grid
        ]
        away = (
            ""
            if job.placement.is_colocated
            else f" on {len(job.rollout.ranks)} ranks of their own"
        )
        return ", ".join(
            [str(job.actor.grid), *grids, f"engines tp{job.rollout.tp}{away}"]
        )

    def worse_than(self, best: Choice) -> str:
        """Name the operators that take longer than in the best layout, and the one that is faster."""
        names = dict.fromkeys(
            phase.name for phase in (*self.prediction.phases, *best.prediction.phases)
        )
        more = {
            name: self.prediction.seconds_of(name) - best.prediction.seconds_of(name)
            for name in names
        }
        by_phase = sorted(more.items(), key=lambda entry: (-entry[1], entry[0]))
        least = 0.002 * best.prediction.step_seconds
        slower = [
            f"{name} +{seconds:.3g} s" for name, seconds in by_phase if seconds > least
        ][:2]
        faster = [
            f"{name} {seconds:.3g} s"
            for name, seconds in reversed(by_phase)
            if seconds < -least
        ][:1]
        return "; ".join([", ".join(slower) or "no phase by much", *faster])


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        choices: the best layouts, fastest first, each with another grid.
        looked_at: number of candidates whose step was predicted.
        counted: number of candidates whose memory was counted rank by rank.
    """

    choices: tuple[Choice, ...]
    looked_at: int
    counted: int


@dataclass
class _Candidate:
    """A training layout with an engine.

    Attributes:
        rungs: training settings, from the fastest to those with the least memory.
        engine: settings of the engine.
        rung: index of the current training settings.
        share: upper limit of the engine's memory share beside these settings; None: the engine's own share.
    """

    rungs: Sequence[Settings]
    engine: Settings
    rung: int = 0
    share: float | None = None

    @property
    def settings(self) -> Settings:
        return (
            self.rungs[self.rung]
            | self.engine
            | ({} if self.share is None else {SHARE: self.share})
        )


# Heap entry, ordered by seconds of a step and then by settings. Without a prediction
# the seconds are a lower bound.
_Entry = tuple[float, Key, _Candidate, PlannedJob, Prediction | None]


class LayoutSearch:
    """Search over all layouts of a recipe on `world` ranks.

    Args:
        make: returns the recipe's configuration with settings laid over it.
        keys: keys of `AUTO_KEYS` to choose; all others keep the recipe's value.
        staleness: steps that engines on separate ranks may be ahead; 0 proposes no separate engines.
        further: whether offload and the engine's share of the memory are chosen too, if nothing fits without.
        factors: operator -> measured time divided by predicted time, for all layouts.
    """

    def __init__(
        self,
        make: Make,
        spec: ModelSpec,
        world: int,
        hardware: Hardware,
        *,
        keys: Collection[str] = AUTO_KEYS,
        lengths: LengthDistribution | None = None,
        machine: Machine | None = None,
        staleness: int = 0,
        further: bool = True,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.factors = factors
        self.make, self.spec, self.world, self.hardware = make, spec, world, hardware
        self.keys, self.staleness, self.further = set(keys), staleness, further
        self.machine = machine or hardware.machine()
        self.config = make({})
        self.counts_memory = (
            hardware.cores is None and self.config.rollout.engine == "vllm"
        )
        self.looked_at = self.counted = 0
        self._refusal = ""  # reason of the first candidate that a run would refuse
        # engine -> rollout with the largest memory share.
        self._rollout_seconds: dict[Key, float] = {}
        self.lengths = lengths or likely_lengths(self.config)

    def best(self, number: int = 5) -> Found:
        """Return the `number` fastest layouts that fit, each with another grid. The
        order of candidates does not matter.

        Raises:
            ConfigError: nothing fits.
        """
        waiting: list[_Entry] = []
        for group in self._candidates():
            self._push_group(waiting, group)
        kept: dict[str, Choice] = {}
        # Layouts that fit only with a smaller engine share, and so are slower than
        # their first prediction. They return to the heap with their new time, so that
        # faster layouts are still taken first.
        slowed: dict[Key, Choice] = {}
        while waiting and len(kept) < number and self.counted < MOST_COUNTED:
            seconds, key, candidate, job, prediction = heapq.heappop(waiting)
            if prediction is None:
                self._push(waiting, candidate)
                continue
            name = _grid_name(job)
            if name in kept:
                continue
            choice, is_hopeless = slowed.pop(key, None), False
            if choice is None:
                choice, is_hopeless = self._counted(candidate, job, prediction)
                if choice is not None and (
                    slower := choice.prediction.step_seconds
                ) > seconds * (1 + TIE):
                    slowed[key] = choice
                    heapq.heappush(
                        waiting, (slower, key, candidate, job, choice.prediction)
                    )
                    continue
            if choice is not None:
                kept[name] = self._apart(choice) if self.further else choice
            elif not is_hopeless:
                candidate.rung += 1
                self._push(waiting, candidate)
        if not kept:
            refused = (
                f" One of them was refused: {self._refusal}" if self._refusal else ""
            )
            raise ConfigError(
                f"auto: no layout of {self.world:,} ranks holds this run; {self.looked_at} were looked at. Use more "
                f"nodes, or run `megaverl plan` without --auto for what is missing.{refused}"
            )
        choices = sorted(
            kept.values(),
            key=lambda kept_choice: (
                kept_choice.prediction.step_seconds,
                key_of(kept_choice.settings),
            ),
        )
        return Found(tuple(choices), self.looked_at, self.counted)

    def _candidates(self) -> Iterator[list[_Candidate]]:
        """Yield, for every training layout, its combinations with each engine."""
        placed = self._job({}) if is_placed(self.config) else None
        space = SearchSpace(
            self.world,
            self.machine.gpus_per_node,
            self.keys,
            away=self.world - len(placed.actor.ranks) if placed else 0,
            staleness=self.staleness,
            counts_memory=self.counts_memory,
            further=self.further,
        )
        candidates = Candidates(self.config, self.spec, space)
        self._apart_grids = candidates.apart
        for rungs, engines in candidates.groups():
            yield [_Candidate(rungs, engine) for engine in engines]

    def _push_group(self, waiting: list[_Entry], group: Sequence[_Candidate]) -> None:
        """Predict a training layout with its first engine, and push it with all its engines.

        Roles that share ranks run in turn. So with another engine, a step takes at
        least that engine's best rollout and the rest of the step; this bound orders the
        heap until the step itself is predicted.
        """
        first, *variants = group
        base = self._push(waiting, first)
        if base is None:
            return
        _, _, _, job, prediction = base
        assert prediction is not None
        rest = (
            prediction.step_seconds
            - prediction.seconds_of("rollout")
            - prediction.seconds_of("reshard")
        )
        for variant in variants:
            variant.rung = first.rung
            if not job.placement.is_colocated:
                self._push(waiting, variant)
                continue
            key = key_of(variant.engine)
            if key in self._rollout_seconds:
                heapq.heappush(
                    waiting,
                    (
                        rest + self._rollout_seconds[key],
                        key_of(variant.settings),
                        variant,
                        job,
                        None,
                    ),
                )
            # The first training layout that works with an engine gives its rollout time
            # for all others.
            elif self._push(waiting, variant) is not None:
                at_best = variant.rungs[variant.rung] | variant.engine
                single_job = self._job(at_best)
                if single_job is not None:
                    predicted = self._predict(single_job)
                    self._rollout_seconds[key] = predicted.seconds_of("rollout")

    def _push(self, waiting: list[_Entry], candidate: _Candidate) -> _Entry | None:
        """Predict the candidate's fastest settings that may fit, and push them; return None if no settings may fit."""
        while candidate.rung < len(candidate.rungs):
            candidate.share = None
            job = self._job(candidate.settings)
            if job is not None and candidate.engine.get(SHARE, 0.0) > (
                most := self._most_share(job)
            ):
                candidate.share = most
                job = self._job(candidate.settings)
            if job is None:
                return None
            if not self.counts_memory or least_bytes(job) <= ROOM * self.machine.memory:
                self.looked_at += 1
                prediction = self._predict(job)
                entry = (
                    prediction.step_seconds,
                    key_of(candidate.settings),
                    candidate,
                    job,
                    prediction,
                )
                heapq.heappush(waiting, entry)
                return entry
            candidate.rung += 1
        return None

    def _most_share(self, job: PlannedJob) -> float:
        """Return the largest memory share for an engine beside gradients and optimizer state that stay on the GPU.

        Weights are not subtracted, since the engine may share them.
        """
        role = job.actor
        if (
            not self.counts_memory
            or role.shards is not None
            or not job.placement.colocated("actor", "rollout")
        ):
            return 1.0
        kept = max(
            _stage_bytes(job, role, stage, generating=True)
            for stage in range(role.grid.pp)
        )
        free = 100 * (ROOM - kept / self.machine.memory)
        return next((share for share in SHARES if share <= free), SHARES[-1]) / 100

    def _apart(self, choice: Choice) -> Choice:
        """Give the reference or the critic a separate grid if that shortens the step."""
        for name in ("reference", "critic"):
            role = next((role for role in choice.job.roles if role.name == name), None)
            if (
                role is None
                or name in self.config.placement.changed()
                or role.shards is not None
            ):
                continue
            tried = []
            for grid in self._apart_grids(name, len(role.ranks)):
                settings = choice.settings | grid
                job = self._job(settings)
                if job is None:
                    continue
                self.looked_at += 1
                prediction = self._predict(job)
                if (
                    prediction.step_seconds
                    < (1 - GAIN) * choice.prediction.step_seconds
                ):
                    tried.append(
                        (
                            prediction.step_seconds,
                            key_of(settings),
                            settings,
                            job,
                            prediction,
                        )
                    )
            for _, _, settings, job, prediction in sorted(
                tried, key=lambda entry: entry[:2]
            )[:4]:
                candidate, _ = self._counted(
                    _Candidate([settings], {}), job, prediction
                )
                if candidate is not None:
                    choice = candidate
                    break
        return choice

    def _predict(self, job: PlannedJob) -> Prediction:
        return simulate(job, self.hardware, lengths=self.lengths, factors=self.factors)

    def _job(self, settings: Settings) -> PlannedJob | None:
        """Return the job with these settings, or None if the run, the model or the number of ranks rules them out."""
        try:
            return make_job(
                self.make(settings),
                self.spec,
                self.world,
                self.machine,
                deal_later=True,
            )
        except (ConfigError, ValueError):
            # pydantic reports a bad value as ValueError.
            return None

    def _counted(
        self, candidate: _Candidate, job: PlannedJob, prediction: Prediction
    ) -> tuple[Choice | None, bool]:
        """Count the memory of a candidate.

        Returns:
            (the choice if it fits, whether settings with less training memory would not help either).
        """
        settings = candidate.settings
        if mistakes := list(cross_mistakes(job.config, "train", False, self.world)):
            self._refusal = self._refusal or f"{mistakes[0].key}: {mistakes[0].message}"
            return None, True
        if not self.counts_memory:
            return Choice(settings, job, prediction), False
        self.counted += 1
        try:
            memory = MemoryModel(job).ranks(job.stage_ranks())
        except (ConfigError, RolloutError) as error:
            # Some problems show only when a layout is built, such as a tp that vLLM
            # does not support.
            self._refusal = self._refusal or str(error)
            return None, True
        missing = shortages(job, memory, ROOM)
        if missing and self.further and self._only_engine(missing):
            # Only the engine's share is too large: reduce it by what is missing instead
            # of giving up the training settings.
            over = max(shortage.needed - shortage.available for shortage in missing)
            share = (
                float(job.config.rollout.vllm.get("gpu_memory_utilization", 0.92))
                - over / self.machine.memory
            )
            fitting = next(
                (percent for percent in SHARES if percent <= 100 * share), None
            )
            reduced = self._job(settings | {SHARE: fitting / 100}) if fitting else None
            if reduced is None:
                return None, False
            settings, job = settings | {SHARE: (fitting or 0) / 100}, reduced
            memory = MemoryModel(job).ranks(job.stage_ranks())
            missing, prediction = (
                shortages(job, memory, ROOM),
                self._predict(job),
            )
        if missing:
            return None, False
        return Choice(
            settings, job, prediction, max(rank.peak for rank in memory)
        ), False

    @staticmethod
    def _only_engine(missing: Sequence[Any]) -> bool:
        return all(
            shortage.phase in ("generate", "engine start", "reshard")
            for shortage in missing
        )


def _grid_name(job: PlannedJob) -> str:
    """Return a name that layouts share if they differ only in micro-batches and recomputation."""
    return f"{job.actor.grid} {job.rollout.tp} {len(job.rollout.ranks)}"


def least_bytes(job: PlannedJob) -> float:
    """Return a lower bound of the fullest rank's bytes in the actor's update: no padding, no reserve, no other role."""
    role = job.actor
    if role.shards is not None:
        return 0.0
    model = MemoryModel(job)
    stage_totals = []
    for stage in range(role.grid.pp):
        activations, _ = model.activations(role.name, stage)
        stage_totals.append(_stage_bytes(job, role, stage) + activations)
    return max(stage_totals)


def _stage_bytes(
    job: PlannedJob, role: Role, stage: int, *, generating: bool = False
) -> float:
    """Return the bytes of weights, gradients and optimizer state on a rank of a stage.

    Args:
        generating: leave out weights and what is offloaded during generation.
    """
    trained, (plain, expert) = role.trained, parameters_of_stage(role, stage)
    assert trained is not None
    if trained.lora is not None or trained.offload.parameters:
        return (
            0.0
            if trained.offload.parameters or generating
            else job.itemsize * (plain + expert)
        )
    replicas = role.grid.dp * role.grid.cp
    optimizer = getattr(role.config, "optimizer", {})
    options = BufferOptions.read(
        trained.ddp, optimizer, replicas, on_gpus=job.machine.on_gpus
    )
    gradients = 4 if options.grads_in_fp32 else job.itemsize
    # The second is no smaller than the first.
    num_moments = 1 if options.muon else options.num_moments
    moments = options.exp_avg_itemsize * num_moments
    state = (
        0.0
        if trained.offload.optimizer
        else (1 - options.offload) * (options.main_itemsize + moments)
    )
    shares = (replicas, role.grid.expert_dp) if options.distributed else (1, 1)
    bytes_per_weight = gradients + job.itemsize
    if generating:
        bytes_per_weight = 0 if trained.offload.gradients else gradients
    return (plain + expert) * bytes_per_weight + state * (
        plain / shares[0] + expert / shares[1]
    )


def as_text(result: Found, seconds: float, hardware: Hardware) -> str:
    """Format the choices for a terminal."""
    lines = [
        f"{result.looked_at:,} layouts that may fit predicted, {result.counted} counted rank by rank, "
        f"in {seconds:.0f} s ({hardware.name}); the best of each grid:"
    ]
    best = result.choices[0]
    for number, choice in enumerate(result.choices, 1):
        predicted = choice.prediction
        memory = "" if choice.peak is None else f", {choice.peak / GB:.1f} GB"
        lines += [
            "",
            f"{number}. {choice.grid}: {predicted.step_seconds:.3g} s a step, "
            f"{predicted.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {100 * predicted.mfu:.0f} %{memory}",
            f"   {' '.join(f'{key}={yaml_text(value)}' for key, value in shown(choice.settings).items())}",
        ]
        if choice is not best:
            more = 100 * (predicted.step_seconds / best.prediction.step_seconds - 1)
            lines.append(f"   {more:.1f} % slower: {choice.worse_than(best)}")
    phases = sorted(best.prediction.phases, key=lambda phase: -phase.seconds)
    lines += [
        "",
        "the best, by phase: "
        + ", ".join(
            f"{slowest_phase.name} {slowest_phase.seconds:.3g} s"
            for slowest_phase in phases[:6]
        ),
    ]
    return "\n".join(lines)


def chosen_recipe(
    result: Found,
    recipe: str,
    path: str,
    overrides: Sequence[str],
    hardware: Hardware,
    world: int,
) -> str:
    """Return YAML that extends the recipe with the command line's overrides and the chosen settings.

    Args:
        recipe: path of the recipe's file.
        path: path that the result is written to; `base` is relative to it.
    """
    best, values = result.choices[0], dict[str, Any]()
    for override in overrides:
        key, _, text = override.partition("=")
        at = tuple(key.split("."))
        put(values, at, read_argument(text, type_at(at), type_at, at))
    for key, value in best.settings.items():
        put(values, key.split("."), value)
    seconds = best.prediction.step_seconds
    comment = (
        f"# Chosen by `megaverl plan --auto` for {world:,} ranks of {hardware.name}: {best.grid};\n"
        f"# {seconds:.3g} s a step predicted. Everything else is the recipe's below.\n"
    )
    base = os.path.relpath(recipe, Path(path).parent)
    return comment + yaml.safe_dump({"base": base} | values, sort_keys=False)


def choose(make: Make, keys: tuple[str, ...], world: int) -> tuple[Settings, str]:
    """Choose the keys that are `auto` for a run on `world` ranks: equal on every rank, and after a resume.

    Returns:
        The settings, and a line for the log that gives the reason.

    Raises:
        ConfigError: nothing fits, or the model or the machine is unknown.
    """
    config = make({})
    if (stored := _stored(config, keys, world)) is not None:
        return (
            stored,
            f"auto: {_said(stored)}, as {config.chosen_file} has it of the run that goes on.",
        )
    hardware = hardware_of(config, world)
    search = LayoutSearch(
        make, find_spec(config), world, hardware, keys=keys, further=False
    )
    result = search.best(1)
    settings = result.choices[0].settings
    seconds = result.choices[0].prediction.step_seconds
    return settings, (
        f"auto: {_said(settings)}; of {result.looked_at} layouts of {world} ranks that may fit the fastest on "
        f"{hardware.name}, {seconds:.3g} s a step (predicted)."
    )


def _stored(config: Config, keys: tuple[str, ...], world: int) -> Settings | None:
    settings = read_choice(config, world)
    return settings if settings is not None and set(keys) <= set(settings) else None


def hardware_of(config: Config, world: int) -> Hardware:
    """Return the description of `run.hardware`, else of this machine's GPU, else of its CPU.

    Raises:
        ConfigError: no description matches the GPU's name.
    """
    if config.run.hardware is not None:
        return Hardware.read(config.run.hardware)
    gpu = gpu_name()
    if gpu is None:
        return replace(
            Hardware.read("cpu"),
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        )
    # "NVIDIA A100-SXM4-40GB" has both words of a100_40gb, and "NVIDIA A100 80GB PCIe"
    # only that of a100
    words = set(re.split(r"[\s-]+", gpu.lower()))
    names = [name for name in known() if words.issuperset(name.split("_"))]
    if not names:
        raise ConfigError(
            f"run.hardware: nothing is known of {gpu}. Name one of {', '.join(known())}, or a file."
        )
    return Hardware.read(max(names, key=len))


def _said(settings: Settings) -> str:
    return " ".join(f"{key}={yaml_text(value)}" for key, value in settings.items())
