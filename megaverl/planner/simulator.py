"""Predict one step of a job by playing its operators as events on their ranks.

Operators (`operators`) that share ranks run in turn, those on separate ranks run in
parallel, and asynchronous ones run ahead of training by up to `rollout.max_staleness`
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megaverl.config import Config
from megaverl.errors import ConfigError
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import PlannedJob, find_spec, make_job
from megaverl.planner.operators import Operation, StepLoad, operations
from megaverl.planner.traffic import ReshardTraffic

EPSILON = 1e-12


@dataclass(frozen=True)
class PredictedPhase:
    """A predicted operator of the step.

    Attributes:
        begin, end: seconds since the end of the step before; negative for work that ran ahead of it.
        ranks: global ranks.
        lanes: (part, first rank, begin, end) of its parts, such as the passes of a pipeline's stages.
    """

    name: str
    role: str
    ranks: tuple[int, ...] = field(repr=False)
    begin: float = 0.0
    end: float = 0.0
    lanes: tuple[tuple[str, int, float, float], ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Prediction:
    """A predicted step in its steady state.

    Attributes:
        step_seconds: seconds from the end of one step to the end of the next.
        phases: operators, by begin.
        critical_path: (operator, seconds) in sequence; together they make up the step.
        tokens_per_second_per_gpu: prompt and response tokens that the step trained on, per second and rank of the job.
        mfu: model operations of the whole step (generation, scoring, update; without recomputation) divided by the peak
            of all ranks over the step.
        update_mfu: the same for updates alone, over their time and ranks.
        samples: samples of the step.
        tokens: tokens of the step.
        processor_seconds: processor time over all ranks, with messages where ranks share cores, without waits.
    """

    step_seconds: float
    phases: tuple[PredictedPhase, ...]
    critical_path: tuple[tuple[str, float], ...]
    tokens_per_second_per_gpu: float
    mfu: float
    update_mfu: float
    samples: int
    tokens: float
    processor_seconds: float

    def seconds_of(self, name: str) -> float:
        """Return the seconds of an operator; 0 if the step does not have it."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def default_lengths(
    job: PlannedJob,
    prompt: float | None = None,
    response: float | None = None,
    at_limit: float | None = None,
) -> LengthDistribution:
    """Return `likely_lengths` of the job's configuration."""
    return likely_lengths(job.config, prompt, response, at_limit)


def likely_lengths(
    config: Config,
    prompt: float | None = None,
    response: float | None = None,
    at_limit: float | None = None,
) -> LengthDistribution:
    """Assume prompts of half their limit, and responses of 40 % of theirs on average,
    for a run that has not been measured.

    Args:
        prompt, response: mean tokens, where they are known.
        at_limit: share of the responses that run to `max_tokens`; None: see `LengthDistribution.lognormal`.
    """
    longest = float(config.rollout.sampling["max_tokens"])
    mean_prompt = prompt or config.data.max_prompt_tokens / 2
    mean_response = response or 0.4 * longest
    return LengthDistribution.lognormal(
        mean_prompt, mean_response, longest, at_limit=at_limit
    )


def simulate(
    job: PlannedJob,
    hardware: Hardware,
    *,
    lengths: LengthDistribution | None = None,
    traffic: ReshardTraffic | None = None,
    factors: Mapping[str, float] | None = None,
    moving_seconds: float | None = None,
) -> Prediction:
    """Predict a step, in milliseconds and without processes or torch.

    Args:
        lengths: lengths of prompts and responses; None: `default_lengths`.
        traffic: bytes of a reshard from the ranks' own plans (`make_traffic`, which takes seconds for 1,024 ranks).
            None: an estimate of the same bytes.
        factors: operator -> measured time divided by predicted time.
        moving_seconds: of sending weights to the engines in another way than megaverl's; None: predicted.

    Raises:
        ConfigError: the hardware's description has no peak for the job's dtype.
    """
    lengths = lengths or default_lengths(job)
    factors = factors or {}
    load = StepLoad(job, hardware, lengths, traffic, moving_seconds)
    played = [op.times(factors.get(op.name, 1.0)) for op in operations(load)]
    rollout = job.config.rollout
    ahead = rollout.max_staleness if rollout.async_rollout else 0
    # With operators ahead of training, several steps must pass before the pipeline
    # between roles is full.
    is_sequential = not ahead and job.placement.is_colocated
    steps = 1 if is_sequential else 2 * ahead + 3
    timed = _play(played, steps, hardware, job)
    return _predict(load, played, timed, steps - 1 - ahead)


# Step, and name of the operator.
Key = tuple[int, str]
# Key -> (begin, end, the last operator that it waited for).
Timed = dict[Key, tuple[float, float, Key | None]]


def _play(
    ops: Sequence[Operation], steps: int, hardware: Hardware, job: PlannedJob
) -> Timed:
    """Start every operator as soon as its inputs are ready and its ranks are free.

    Operators that run at the same time on ranks with shared cores divide the rate of
    the cores.

    Raises:
        ConfigError: operators wait for each other in a circle, which would be a bug in `_before`.
    """
    waits: dict[Key, list[Key]] = {}
    for step in range(steps):
        for op in ops:
            waits[step, op.name] = _before(ops, step, op, steps)
    by_name = {op.name: op for op in ops}
    timed: Timed = {}
    begun: dict[Key, tuple[float, Key | None]] = {}
    seconds_left: dict[Key, float] = {}  # of the operators that run now
    now = 0.0
    while len(timed) < len(waits):
        for key, before in waits.items():
            if key not in begun and all(earlier in timed for earlier in before):
                last = max(before, key=lambda earlier: timed[earlier][1], default=None)
                begun[key] = (now, last)
                seconds_left[key] = by_name[key[1]].seconds
        if not seconds_left:
            raise ConfigError(_circle(waits, timed))
        # Advance to the moment at which the first running operator ends: until then no
        # rate changes.
        rate = _rate([by_name[name] for _, name in seconds_left], hardware, job)
        passed = min(left / rate for left in seconds_left.values())
        now += passed
        for key in list(seconds_left):
            seconds_left[key] -= passed * rate
            # Several may end together, up to rounding.
            if seconds_left[key] <= EPSILON:
                del seconds_left[key]
                begin, last = begun[key]
                timed[key] = (begin, now, last)
    return timed


def _circle(waits: Mapping[Key, Sequence[Key]], timed: Timed) -> str:
    """Describe a circle of operators that wait for each other."""
    path = [next(key for key in waits if key not in timed)]
    while path[-1] not in path[:-1]:
        path.append(
            next(
                waited_for for waited_for in waits[path[-1]] if waited_for not in timed
            )
        )
    circle = path[path.index(path[-1]) :]
    names = " -> ".join(f"{name} of step {step + 1}" for step, name in circle)
    return (
        f"The step's time cannot be predicted: operators wait for each other in a circle ({names}). This is a bug of "
        "the planner: please report it with the configuration. `megaverl plan` without --hardware, and settings "
        "without `auto`, do without the prediction."
    )


def _before(
    ops: Sequence[Operation], step: int, op: Operation, steps: int
) -> list[Key]:
    """Return the operators that must have ended before this operator of a step begins.

    A role group runs the operators of a step in sequence, then those of the next step.
    The weights of step k arrive after the group's work for step k + `ahead`, and before
    its work for the step after that:

        ahead 0:   rollout 0  reshard 0  rollout 1  reshard 1  rollout 2 ...
        ahead 2:   rollout 0  rollout 1  rollout 2  reshard 0  rollout 3  reshard 1 ...
    """
    before = [(step, name) for name in op.needs]
    place = ops.index(op)
    for number, other in enumerate(ops):
        # Operators without a common role group run in parallel.
        if other is op or not op.role_groups & other.role_groups:
            continue
        if op.name == "reshard":
            # The steps that are played end, so the last reshards wait for what there
            # is.
            before.append((min(step + other.ahead, steps - 1), other.name))
        elif other.name == "reshard":
            before.append((step - 1 - op.ahead, other.name))
        elif number < place:
            before.append((step, other.name))
        else:
            before.append((step - 1, other.name))
    before.append((step - 1, op.name))
    # Nothing precedes the first step.
    return [key for key in dict.fromkeys(before) if key[0] >= 0]


def _rate(active: Sequence[Operation], hardware: Hardware, job: PlannedJob) -> float:
    """Return the fraction of their full speed at which operators run that run at the same time."""
    # GPUs are not shared by operators of different ranks.
    if hardware.cores is None:
        return 1.0
    nodes = -(-job.world // hardware.ranks_per_node)
    cores_wanted = sum(op.cores for op in active)
    if not cores_wanted:
        return 1.0
    return min(1.0, hardware.cores * nodes / cores_wanted)


def _predict(
    load: StepLoad, ops: Sequence[Operation], timed: Timed, last: int
) -> Prediction:
    """Return the prediction of step `last`, which begins where the step before ended."""
    job = load.job
    ends = [max(timed[step, op.name][1] for op in ops) for step in range(last + 1)]
    origin = ends[last - 1] if last else 0.0
    # Rates are divided by it, and an empty step takes no time.
    seconds = max(ends[last] - origin, EPSILON)
    phases = []
    for op in ops:
        begin, end, _ = timed[last, op.name]
        # On shared cores an operator takes longer than alone, and so does each of its
        # parts.
        stretch = (end - begin) / op.seconds if op.seconds else 1.0
        start = begin - origin
        lanes = tuple(
            (label, rank, start + stretch * lane_begin, start + stretch * lane_end)
            for label, rank, lane_begin, lane_end in op.lanes
        )
        phases.append(
            PredictedPhase(op.name, op.role, op.ranks, start, end - origin, lanes)
        )
    # The critical path runs backwards from the last operator, each time to the operator
    # that it waited for last.
    path: list[tuple[str, float]] = []
    key: Key | None = max(
        ((last, op.name) for op in ops), key=lambda last_key: timed[last_key][1]
    )
    while key is not None and timed[key][1] > origin + EPSILON:
        begin, end, before = timed[key]
        path.append((key[1], end - max(begin, origin)))
        key = before
    tokens = load.samples * load.lengths.tokens
    flops = load.model_flops()
    peak = load.peak
    update_flops = sum(
        number for name, number in flops.items() if name.endswith("_update")
    )
    updating = sum(
        phase.seconds * len(phase.ranks)
        for phase in phases
        if phase.name.endswith("_update")
    )
    return Prediction(
        step_seconds=seconds,
        phases=tuple(sorted(phases, key=lambda phase: phase.begin)),
        critical_path=tuple(
            (name, taken) for name, taken in reversed(path) if taken > EPSILON
        ),
        tokens_per_second_per_gpu=tokens / seconds / job.world,
        mfu=sum(flops.values()) / (seconds * job.world * peak),
        update_mfu=update_flops / (updating * peak) if updating else 0.0,
        samples=load.samples,
        tokens=tokens,
        processor_seconds=sum(op.work for op in ops),
    )


class MeasuredRate:
    """Measures a run's throughput and MFU from its own samples and seconds.

    Operations are counted by `StepLoad.model_flops`, like those of a prediction.

    Args:
        hardware: hardware with a known peak; None: the peak is unknown, and no MFU is reported.

    Raises:
        ConfigError, ModelError: the model or a grid cannot be counted.
    """

    def __init__(self, config: Config, world: int, hardware: Hardware | None) -> None:
        self._job = make_job(config, find_spec(config), world, deal_later=True)
        self._hardware = hardware
        # Counting operations needs some hardware, and gives the same number on any.
        self._counted_on = hardware or Hardware.read("cpu")

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Return `train/tokens_per_gpu_per_sec`, `train/tflop_per_gpu_per_sec` and
        `train/mfu` of a step. A rank is a GPU.

        Args:
            lengths: tokens of each sample, prompt and response.
            seconds: duration of the step.
        """
        if not lengths or seconds <= 0:
            return {}
        # The prompt counts as a part of the response, since the operations of training
        # do not tell them apart.
        distribution = LengthDistribution(0.0, tuple(map(float, lengths)))
        load = StepLoad(self._job, self._counted_on, distribution, None)
        planned_flops = sum(load.model_flops().values())
        # Dynamic sampling and filters change the number of samples.
        rate = planned_flops * len(lengths) / load.samples / seconds / self._job.world
        metrics = {
            "train/tokens_per_gpu_per_sec": sum(lengths) / seconds / self._job.world,
            "train/tflop_per_gpu_per_sec": rate / 1e12,
        }
        if self._hardware is not None:
            metrics["train/mfu"] = rate / load.peak
        return metrics
