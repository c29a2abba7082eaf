"""One step of a job played as events: when each operator runs on which ranks, and what the step waits for.

Operators (`operators`) run one after the other where they share ranks, side by side where each has its own, and ahead
of training as far as `rollout.max_staleness` lets them.
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
    """An operator of the step on its ranks.

    Attributes:
        begin, end: seconds since the step before has ended; below 0 for what ran ahead of it.
        ranks: of the world.
        lanes: (what, first rank, begin, end) of its parts, such as the passes of a pipeline's stages.
    """

    name: str
    role: str
    ranks: tuple[int, ...] = field(repr=False)
    begin: float = 0.0
    end: float = 0.0
    lanes: tuple[tuple[str, int, float, float], ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Prediction:
    """A step in its steady state.

    Attributes:
        step_seconds: from the end of one to the end of the next.
        phases: in the order of their begin.
        critical_path: (operator, seconds) that one after the other make up the step.
        tokens_per_second_per_gpu: of prompts and responses that the step trained on, over all ranks of the job.
        mfu: model operations of the whole step (generation, scoring, update; none for recomputation) by the peak of all
            ranks over the step. update_mfu: of updates alone, while they run, on their ranks.
        samples: of the step. tokens: of it.
        processor_seconds: of all ranks together, at work and, where ranks share cores, in messages; without waits.
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
        """Of an operator; 0 where the step has none."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def default_lengths(job: PlannedJob, prompt: float | None = None, response: float | None = None) -> LengthDistribution:
    """`likely_lengths` of a job's configuration."""
    return likely_lengths(job.config, prompt, response)


def likely_lengths(config: Config, prompt: float | None = None, response: float | None = None) -> LengthDistribution:
    """What is not known of a run: prompts of half their limit, responses of 40 % of theirs on the mean.

    Args:
        prompt, response: mean tokens, where they are known.
    """
    longest = float(config.rollout.sampling["max_tokens"])
    return LengthDistribution.lognormal(prompt or config.data.max_prompt_tokens / 2, response or 0.4 * longest, longest)


def simulate(
    job: PlannedJob,
    hardware: Hardware,
    *,
    lengths: LengthDistribution | None = None,
    traffic: ReshardTraffic | None = None,
    factors: Mapping[str, float] | None = None,
) -> Prediction:
    """Predict a step. Milliseconds of arithmetic, no processes, no torch.

    Args:
        lengths: of prompts and responses; `default_lengths` where it is not given.
        traffic: of a reshard as the ranks' own plans have it (`make_traffic`, seconds for 1,024 ranks); an estimate of
            the same bytes where it is not given.
        factors: operator -> what a run has measured of it by what is predicted.

    Raises:
        ConfigError: the hardware says nothing of the job's dtype.
    """
    lengths = lengths or default_lengths(job)
    load = StepLoad(job, hardware, lengths, traffic)
    played = [op.times((factors or {}).get(op.name, 1.0)) for op in operations(load)]
    ahead = job.config.rollout.max_staleness if job.config.rollout.async_rollout else 0
    steps = 1 if not ahead and job.placement.is_colocated else 2 * ahead + 3
    timed = _play(played, steps, hardware, job)
    return _predict(load, played, timed, steps - 1 - ahead)


# One operator of one step: (begin, end, what it waited for last)
Timed = dict[tuple[int, str], tuple[float, float, tuple[int, str] | None]]


def _play(ops: Sequence[Operation], steps: int, hardware: Hardware, job: PlannedJob) -> Timed:
    """Start every operator as soon as its inputs are there and its ranks are free.

    Operators that run at the same time on ranks that share cores share the cores' rate.

    Raises:
        ConfigError: operators that wait for each other in a circle. This is a bug of `_before`.
    """
    waits = {(step, op.name): _before(ops, step, op, steps) for step in range(steps) for op in ops}
    by_name = {op.name: op for op in ops}
    timed: Timed = {}
    begun: dict[tuple[int, str], tuple[float, tuple[int, str] | None]] = {}
    left: dict[tuple[int, str], float] = {}
    now = 0.0
    while len(timed) < len(waits):
        for key, before in waits.items():
            if key not in begun and all(each in timed for each in before):
                last = max(before, key=lambda each: timed[each][1], default=None)
                begun[key] = (now, last)
                left[key] = by_name[key[1]].seconds
        if not left:
            raise ConfigError(_circle(waits, timed))
        rates = _rates([(key, by_name[key[1]]) for key in left], hardware, job)
        passed = min(left[key] / rates[key] for key in left)
        now += passed
        for key in list(left):
            left[key] -= passed * rates[key]
            if left[key] <= EPSILON:
                del left[key]
                begin, last = begun[key]
                timed[key] = (begin, now, last)
    return timed


def _circle(waits: Mapping[tuple[int, str], Sequence[tuple[int, str]]], timed: Timed) -> str:
    """Describe operators that wait for each other, where none can begin."""
    path = [next(key for key in waits if key not in timed)]
    while path[-1] not in path[:-1]:
        path.append(next(each for each in waits[path[-1]] if each not in timed))
    circle = path[path.index(path[-1]) :]
    names = " -> ".join(f"{name} of step {step + 1}" for step, name in circle)
    return (
        f"The step's time cannot be predicted: operators wait for each other in a circle ({names}). This is a bug of "
        "the planner: please report it with the configuration. `megaverl plan` without --hardware, and settings "
        "without `auto`, do without the prediction."
    )


def _before(ops: Sequence[Operation], step: int, op: Operation, steps: int) -> list[tuple[int, str]]:
    """Return what must have ended before an operator of a step begins.

    A world runs the operators of a step one after the other, and then those of the next step. Weights of step k reach
    it behind what it does of step k + `ahead`, and before what it does of the step after that:

        ahead 0:   rollout 0  reshard 0  rollout 1  reshard 1  rollout 2 ...
        ahead 2:   rollout 0  rollout 1  rollout 2  reshard 0  rollout 3  reshard 1 ...
    """
    before = [(step, name) for name in op.needs]
    place = ops.index(op)
    for number, other in enumerate(ops):
        if other is op or not op.worlds & other.worlds:
            continue
        if op.name == "reshard":
            before.append((min(step + other.ahead, steps - 1), other.name))
        elif other.name == "reshard":
            before.append((step - 1 - op.ahead, other.name))
        else:
            before.append((step if number < place else step - 1, other.name))
    before.append((step - 1, op.name))
    return [each for each in dict.fromkeys(before) if each[0] >= 0]


def _rates(
    active: list[tuple[tuple[int, str], Operation]], hardware: Hardware, job: PlannedJob
) -> dict[tuple[int, str], float]:
    if hardware.cores is None:
        return dict.fromkeys((key for key, _ in active), 1.0)
    nodes = -(-job.world // hardware.ranks_per_node)
    wanted = sum(op.cores for _, op in active)
    return dict.fromkeys((key for key, _ in active), min(1.0, hardware.cores * nodes / wanted) if wanted else 1.0)


def _predict(load: StepLoad, ops: Sequence[Operation], timed: Timed, last: int) -> Prediction:
    job = load.job
    ends = [max(timed[step, op.name][1] for op in ops) for step in range(last + 1)]
    origin = ends[last - 1] if last else 0.0
    seconds = max(ends[last] - origin, EPSILON)
    phases = []
    for op in ops:
        begin, end, _ = timed[last, op.name]
        stretch = (end - begin) / op.seconds if op.seconds else 1.0
        start = begin - origin
        lanes = tuple((what, rank, start + stretch * a, start + stretch * b) for what, rank, a, b in op.lanes)
        phases.append(PredictedPhase(op.name, op.role, op.ranks, start, end - origin, lanes))
    path: list[tuple[str, float]] = []
    key: tuple[int, str] | None = max(((last, op.name) for op in ops), key=lambda each: timed[each][1])
    while key is not None and timed[key][1] > origin + EPSILON:
        begin, end, before = timed[key]
        path.append((key[1], end - max(begin, origin)))
        key = before
    tokens = load.samples * load.lengths.tokens
    flops = load.model_flops()
    peak = load.peak
    updating = sum(phase.seconds * len(phase.ranks) for phase in phases if phase.name.endswith("_update"))
    return Prediction(
        step_seconds=seconds,
        phases=tuple(sorted(phases, key=lambda phase: phase.begin)),
        critical_path=tuple((name, taken) for name, taken in reversed(path) if taken > EPSILON),
        tokens_per_second_per_gpu=tokens / seconds / job.world,
        mfu=sum(flops.values()) / (seconds * job.world * peak),
        update_mfu=sum(each for name, each in flops.items() if name.endswith("_update")) / (updating * peak)
        if updating
        else 0.0,
        samples=load.samples,
        tokens=tokens,
        processor_seconds=sum(op.work for op in ops),
    )


class MeasuredRate:
    """How much of what its ranks could compute a run does: of its own samples and seconds, by the formula of
    `StepLoad.model_flops`.

    Args:
        hardware: of which the peak is known; None: it is not, and there is no utilisation.

    Raises:
        ConfigError, ModelError: a model or a grid that cannot be counted.
    """

    def __init__(self, config: Config, world: int, hardware: Hardware | None) -> None:
        self._job = make_job(config, find_spec(config), world, deal_later=True)
        self._hardware, self._counted_on = hardware, hardware or Hardware.read("cpu")

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """`train/tokens_per_gpu_per_sec`, `train/tflop_per_gpu_per_sec` and `train/mfu` of a step. A rank is a GPU.

        Args:
            lengths: tokens of each sample, prompt and response.
        """
        if not lengths or seconds <= 0:
            return {}
        each = LengthDistribution(0.0, tuple(map(float, lengths)))
        load = StepLoad(self._job, self._counted_on, each, None)
        rate = sum(load.model_flops().values()) * len(lengths) / load.samples / seconds / self._job.world
        found = {"train/tokens_per_gpu_per_sec": sum(lengths) / seconds / self._job.world}
        found["train/tflop_per_gpu_per_sec"] = rate / 1e12
        return found | ({"train/mfu": rate / load.peak} if self._hardware is not None else {})
