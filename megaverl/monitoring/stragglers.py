"""Find ranks that are slower than others at the same work, from the time of their own work alone.

Ranks that compute together finish together: in every collective, fast ranks wait for
the slow one. So the duration of a stage does not show which rank is slow, and work must
be compared without waits. On a CPU this is the processor time of each stage, since a
waiting rank uses none. On a GPU it is the time of kernels by name and size, without
NCCL's, as CUPTI measures it through nvidia-resiliency-ext's `CuptiManager` (0.4 to 0.7;
needs CUDA). That package's own reports are not used: they compare the host's time of a
section, including its waits, and gather pickled objects.
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

# Stage -> kernel (or "" for all of it) -> (seconds per call, number of calls).
Work = Mapping[str, Mapping[str, tuple[float, float]]]

# A rank below this fraction of the usual speed is slow, as in nvidia-resiliency-ext.
SCORE = 0.75
# A stage counts only if it loses more than this fraction of all usual work.
LEAST_SHARE = 0.05
KEPT_KERNELS = 64  # number of kernels that are compared: those with the most time
KERNELS = "kernels"
CUPTI = (
    "nvidia_resiliency_ext.attribution.straggler.cupti",
    "nvidia_resiliency_ext.straggler.cupti",
)


class Slow(NamedTuple):
    """A rank, its fraction of the usual speed, and the stage where it loses most.

    `seconds` is its own time in the stage, `usual` that of ranks with the same work.
    """

    rank: int
    score: float
    stage: str
    seconds: float
    usual: float


class ProcessorMeter:
    """Measures processor seconds of this process by stage, in all steps."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def begin(self) -> None:
        """Do nothing: this meter runs all the time."""

    def take(self) -> Work:
        """Return the work since the last call."""
        return {
            stage: {"": (seconds, 1.0)}
            for stage, seconds in self._timeline.take_work().items()
        }


class KernelMeter:
    """Measures kernels of this rank's GPU in one step, by name, block and grid. NCCL's
    are left out, as they wait for ranks.

    Raises:
        ConfigError: nvidia-resiliency-ext or its CUPTI is missing.
    """

    def __init__(self) -> None:
        self._measures = False
        problems = []
        # Both names occur in released versions.
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
        """Start profiling."""
        if not self._measures:
            self._cupti.reset_results()
            self._cupti.start_profiling()
        self._measures = True

    def take(self) -> Work:
        """Stop profiling and return the work of the kernels with the most time."""
        # Kernels that are still running would be missing.
        torch.cuda.synchronize()
        if self._measures:
            self._cupti.stop_profiling()
        self._measures = False
        kernels = {
            _short(name): (stats.median / 1e6, float(stats.num_calls))
            for name, stats in self._cupti.get_results().items()
            if "nccl" not in name.lower()
        }
        longest = sorted(
            kernels, key=lambda name: -kernels[name][0] * kernels[name][1]
        )[:KEPT_KERNELS]
        return {KERNELS: {name: kernels[name] for name in longest}}


def _short(name: str) -> str:
    """Hash a kernel's name, which may have thousands of letters."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


class Stragglers:
    """Compares the ranks of a group every few steps. Every rank makes one, and calls both methods in the same steps.

    Args:
        like: ranks with the same value do the same work.
        every: steps between comparisons. A GPU's kernels are measured in the last step before one.
        name: returns a rank's name for messages.
        log: shows a message to the user.
    """

    def __init__(
        self,
        meter: ProcessorMeter | KernelMeter,
        like: str,
        every: int,
        *,
        group: dist.ProcessGroup | None = None,
        name: Callable[[int], str] = "rank {}".format,
        log: Callable[[str], None] = print,
    ) -> None:
        self._meter, self._like, self._every, self._group = meter, like, every, group
        self._name, self._say = name, log

    def begin(self, step: int) -> None:
        """Prepare for a step, counted from 0."""
        if (step + 1) % self._every == 0:
            self._meter.begin()

    def compare(self, done: int) -> dict[str, float]:
        """Compare the ranks if a comparison is due after `done` steps, report slow ranks, and return metrics.

        The metrics are equal on every rank: `stragglers/count`, and of the slowest rank
        `stragglers/slowest_rank` and `stragglers/slowest_score`, its fraction of the
        usual speed.
        """
        if done % self._every:
            return {}
        # Collective over the group: the comparison runs on one rank.
        reports = reduce_json([self._like, self._meter.take()], _slowest, self._group)
        ranks = [Slow(*rank) for rank in reports]
        slow = [rank for rank in ranks if rank.score < SCORE]
        for rank in slow:
            self._say(
                f"{self._name(rank.rank)} is slow: {rank.stage} has taken {rank.seconds:.3g} s of its own work, and "
                f"{rank.usual:.3g} s on ranks that do the same; it has {rank.score:.0%} of their speed"
            )
        metrics = {"stragglers/count": float(len(slow))}
        if ranks:
            metrics |= {
                "stragglers/slowest_rank": float(ranks[0].rank),
                "stragglers/slowest_score": ranks[0].score,
            }
        return metrics


def _slowest(reports: Sequence[tuple[str, Work]]) -> list[Slow]:
    """Return the slow ranks, slowest first; if none is slow, only the slowest rank."""
    ranks = slowness([like for like, _ in reports], [work for _, work in reports])
    return [
        rank for number, rank in enumerate(ranks) if not number or rank.score < SCORE
    ]


def slowness(like: Sequence[str], works: Sequence[Work]) -> list[Slow]:
    """Compare each rank's work with that of ranks that do the same; slowest first. Ranks without an equal are left out.

    A rank's time of a stage is its time per call of each kernel, times the usual number
    of calls over all ranks. So a rank with more work is not slow because of it. "Usual"
    is the lower median over the ranks.
    """
    slow: list[Slow] = []
    for kind in dict.fromkeys(like):
        ranks = [rank for rank, other_kind in enumerate(like) if other_kind == kind]
        if len(ranks) > 1:
            slow += _compare_alike({rank: works[rank] for rank in ranks})
    return sorted(slow, key=lambda slow_rank: (slow_rank.score, slow_rank.rank))


def _compare_alike(works: Mapping[int, Work]) -> Iterator[Slow]:
    stages = set.intersection(*(set(work) for work in works.values()))
    # stage -> rank -> seconds
    seconds: dict[str, dict[int, float]] = {}
    usual: dict[str, float] = {}
    for stage in sorted(stages):
        # Only stages that all of these ranks have had.
        seconds[stage] = _seconds({rank: work[stage] for rank, work in works.items()})
        usual[stage] = median_low(list(seconds[stage].values()))
    least = LEAST_SHARE * sum(usual.values())
    for rank in works:
        # Seconds by which this rank exceeds the usual.
        lost = {stage: seconds[stage][rank] - usual[stage] for stage in seconds}
        worst = max(lost, key=lambda stage: lost[stage], default=None)
        if worst is None:
            continue
        rank_seconds, usual_seconds = seconds[worst][rank], usual[worst]
        # A short stage varies much by chance; a rank only counts as slow if it loses a
        # noticeable share of the whole work.
        score = (
            min(1.0, usual_seconds / rank_seconds)
            if rank_seconds > 0 and lost[worst] > least
            else 1.0
        )
        yield Slow(rank, score, worst, rank_seconds, usual_seconds)


def _seconds(
    of_ranks: Mapping[int, Mapping[str, tuple[float, float]]],
) -> dict[int, float]:
    """Return rank -> seconds for the same number of the same calls."""
    common = set.intersection(*(set(operations) for operations in of_ranks.values()))
    calls = {
        operation: median_low(
            [operations[operation][1] for operations in of_ranks.values()]
        )
        for operation in common
    }
    seconds = {}
    for rank, rank_operations in of_ranks.items():
        # Sorted: the order of a set differs between processes, and with it the last bit
        # of a sum.
        seconds[rank] = sum(
            rank_operations[operation][0] * calls[operation]
            for operation in sorted(common)
        )
    return seconds
