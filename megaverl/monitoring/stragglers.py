"""Ranks that are slower than others at the same work, by their own work alone.

Ranks that compute together finish together: in every collective the quick ones wait for the slow one, and how long a
stage took says nothing of whose fault that is. So what is compared is work without waiting. On a CPU that is the
processor seconds of each stage: whoever waits uses none. On a GPU it is the time of kernels, by name and size and
without NCCL's, as CUPTI sees it. nvidia-resiliency-ext's `CuptiManager` measures that (0.4 to 0.7; it needs CUDA); its
own reports are not used, as they compare the host's time of a section, with its waits, and gather pickled objects.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import reduce_json
from megaverl.errors import ConfigError
from megaverl.monitoring.timeline import Timeline

# stage -> what was done in it -> (seconds each time, how often)
Work = Mapping[str, Mapping[str, tuple[float, float]]]

SCORE = 0.75  # of the usual speed: as in nvidia-resiliency-ext, whoever is below is named
LEAST_SHARE = 0.05  # of all usual work: what a stage must take longer by, to count
KEPT_KERNELS = 64  # those that take longest
KERNELS = "kernels"
CUPTI = ("nvidia_resiliency_ext.attribution.straggler.cupti", "nvidia_resiliency_ext.straggler.cupti")


class Slow(NamedTuple):
    """A rank, its speed as a share of the usual one, and where it loses most: seconds of it and of ranks like it."""

    rank: int
    score: float
    stage: str
    seconds: float
    usual: float


class ProcessorMeter:
    """Processor seconds of this process, by stage, in all steps."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def begin(self) -> None:
        """The last step before a comparison begins; this one measures all the time."""

    def take(self) -> Work:
        """What counts of what was done since this was last asked."""
        return {stage: {"": (seconds, 1.0)} for stage, seconds in self._timeline.take_work().items()}


class KernelMeter:
    """Kernels of this rank's GPU, by name, block and grid, in one step; NCCL's left out, as they wait for other ranks.

    Raises:
        ConfigError: nvidia-resiliency-ext or its CUPTI is not here.
    """

    def __init__(self) -> None:
        self._measures = False
        problems = []
        for module in CUPTI:
            try:
                self._cupti: Any = importlib.import_module(module).CuptiManager()
                self._cupti.initialize()
                return
            except ImportError as error:
                problems.append(str(error))
        raise ConfigError(
            f"run.stragglers_every: on GPUs kernels are timed by nvidia-resiliency-ext and CUPTI, which cannot be "
            f"loaded ({'; '.join(problems)}). Install it (pip install 'megaverl[resiliency]', or ./launch/bootstrap.sh "
            "--gpu resiliency-py312), with libcupti.so of CUDA's toolkit in the library path; or set 0."
        )

    def begin(self) -> None:
        if not self._measures:
            self._cupti.reset_results()
            self._cupti.start_profiling()
        self._measures = True

    def take(self) -> Work:
        torch.cuda.synchronize()
        if self._measures:
            self._cupti.stop_profiling()
        self._measures = False
        found = {
            _short(name): (stats.median / 1e6, float(stats.num_calls))
            for name, stats in self._cupti.get_results().items()
            if "nccl" not in name.lower()
        }
        longest = sorted(found, key=lambda name: -found[name][0] * found[name][1])[:KEPT_KERNELS]
        return {KERNELS: {name: found[name] for name in longest}}


def _short(name: str) -> str:
    """A kernel's name may have thousands of letters."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


class Stragglers:
    """Compares the ranks of a group every few steps. Every rank makes one, and calls both methods alike.

    Args:
        like: ranks that say the same do the same work.
        every: steps from one comparison to the next. A GPU's kernels are measured in the last step before it.
        name: of a rank, for a message. say: tells the person.
    """

    def __init__(
        self,
        meter: ProcessorMeter | KernelMeter,
        like: str,
        every: int,
        *,
        group: dist.ProcessGroup | None = None,
        name: Callable[[int], str] = "rank {}".format,
        say: Callable[[str], None] = print,
    ) -> None:
        self._meter, self._like, self._every, self._group = meter, like, every, group
        self._name, self._say = name, say

    def begin(self, step: int) -> None:
        """Before a step, counted from 0."""
        if (step + 1) % self._every == 0:
            self._meter.begin()

    def compare(self, done: int) -> dict[str, float]:
        """After so many steps: metrics, the same on every rank, where a comparison is due; and who is slow is said.

        `stragglers/count`, and of the slowest rank of all `stragglers/slowest_rank` and its `stragglers/slowest_score`,
        the share of the usual speed that it has.
        """
        if done % self._every:
            return {}
        found = reduce_json([self._like, self._meter.take()], _slowest, self._group)
        ranks = [Slow(*each) for each in found]
        slow = [each for each in ranks if each.score < SCORE]
        for each in slow:
            self._say(
                f"{self._name(each.rank)} is slow: {each.stage} has taken {each.seconds:.3g} s of its own work, and "
                f"{each.usual:.3g} s on ranks that do the same; it has {each.score:.0%} of their speed"
            )
        metrics = {"stragglers/count": float(len(slow))}
        if ranks:
            metrics |= {"stragglers/slowest_rank": float(ranks[0].rank), "stragglers/slowest_score": ranks[0].score}
        return metrics


def _slowest(said: Sequence[tuple[str, Work]]) -> list[Slow]:
    """Of what every rank says: those that are slow, and the slowest in any case, that first."""
    found = slowness([like for like, _ in said], [work for _, work in said])
    return [each for number, each in enumerate(found) if not number or each.score < SCORE]


def slowness(like: Sequence[str], works: Sequence[Work]) -> list[Slow]:
    """How each rank's work compares with that of ranks like it, slowest first; ranks that are like no other are left
    out.

    A rank's time for a stage is what each thing done in it took there, times how often it is usually done, of what all
    ranks have done: a rank that had more to do is not slow for it. The usual is the lower median over the ranks.
    """
    found: list[Slow] = []
    for kind in dict.fromkeys(like):
        ranks = [rank for rank, each in enumerate(like) if each == kind]
        if len(ranks) > 1:
            found += _of_alike({rank: works[rank] for rank in ranks})
    return sorted(found, key=lambda each: (each.score, each.rank))


def _of_alike(works: Mapping[int, Work]) -> Iterator[Slow]:
    stages = set.intersection(*(set(work) for work in works.values()))
    seconds = {stage: _seconds({rank: work[stage] for rank, work in works.items()}) for stage in sorted(stages)}
    usual = {stage: median_low(list(of_stage.values())) for stage, of_stage in seconds.items()}
    least = LEAST_SHARE * sum(usual.values())
    for rank in works:
        lost = {stage: seconds[stage][rank] - usual[stage] for stage in seconds}
        worst = max(lost, key=lambda stage: lost[stage], default=None)
        if worst is None:
            continue
        own, others = seconds[worst][rank], usual[worst]
        score = min(1.0, others / own) if own > 0 and lost[worst] > least else 1.0
        yield Slow(rank, score, worst, own, others)


def _seconds(of_ranks: Mapping[int, Mapping[str, tuple[float, float]]]) -> dict[int, float]:
    """Of each rank, for the same number of the same things."""
    common = set.intersection(*(set(things) for things in of_ranks.values()))
    often = {thing: median_low([things[thing][1] for things in of_ranks.values()]) for thing in common}
    return {rank: sum(things[thing][0] * often[thing] for thing in sorted(common)) for rank, things in of_ranks.items()}
