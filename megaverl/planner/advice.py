"""Advice on GPU memory: the phases that do not fit, and the nearest settings that would fit.

`megaverl plan` prints the result, and `placed_run.check_memory` puts it into the error
of a run that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megaverl.config import Config
from megaverl.config.wording import divisors
from megaverl.errors import ConfigError, RolloutError
from megaverl.planner.job import GB, PlannedJob, make_job
from megaverl.planner.memory import UTILIZATION, MemoryModel, RankMemory, phases_of

MOST_TRIED = 400
MOST_TOGETHER = 3
# Where a follower has the actor's value of a key, it keeps following the actor when that key changes.
# Their grids and caps are the actor's where they were the same.
FOLLOWERS = ("critic", "reference")

# A changed key with its new value, or the option "--nodes" with a number of nodes.
Setting = tuple[str, Any]


@dataclass(frozen=True)
class Shortage:
    """A phase, or the KV cache, that needs more memory than a GPU has.

    Attributes:
        phase: the phase of the step, or "KV cache".
        rank: the rank that needs most.
        needed, available: bytes.
    """

    phase: str
    rank: int
    needed: float
    available: float

    def __str__(self) -> str:
        over = (self.needed - self.available) / GB
        if self.phase == "KV cache":
            return (
                f"KV cache: {self.available / GB:.2f} GB are left for it, {over:.2f} GB less than one sequence of "
                "full length needs"
            )
        return (
            f"{self.phase}: rank {self.rank} needs {self.needed / GB:.1f} GB of {self.available / GB:.1f}, "
            f"{over:.1f} GB too much"
        )


@dataclass(frozen=True)
class Advice:
    """The nearest settings that fit. `settings` is empty if nothing nearby fits.

    Attributes:
        settings: keys to change, with their new values.
        tried: number of combinations that were counted.
        peak: bytes in use on the fullest rank with these settings.
    """

    settings: tuple[Setting, ...]
    tried: int
    peak: float = 0.0

    def __str__(self) -> str:
        if not self.settings:
            return f"none of {self.tried} settings nearby fits: use more nodes, or a smaller model."
        words = [
            f"{k} {v}" if k.startswith("--") else f"{k}={yaml_text(v)}"
            for k, v in self.settings
        ]
        return f"{' '.join(words)}  (then {self.peak / GB:.1f} GB on the fullest rank)"


def shortages(
    job: PlannedJob, memory: list[RankMemory], memory_factor: float = 1.0
) -> list[Shortage]:
    """List every phase in which a rank needs more memory than its GPU has, and a KV cache too small for one sequence.

    Args:
        memory_factor: fraction of each GPU's memory that may be used.
    """
    shortages_found, available = [], memory_factor * job.machine.memory
    for phase in phases_of(memory):
        worst = max(memory, key=lambda rank: rank.phases.get(phase, 0.0))
        if worst.phases[phase] > available:
            shortages_found.append(
                Shortage(phase, worst.rank, worst.phases[phase], available)
            )
    engine = memory[0].engine
    if engine.concurrency < 1:
        shortages_found.append(
            Shortage(
                "KV cache",
                0,
                engine.longest * engine.bytes_per_token,
                max(0.0, engine.cache),
            )
        )
    return shortages_found


def advise(job: PlannedJob) -> Advice:
    """Try combinations of settings, the nearest first, and return the first one that fits.

    One change is tried before two, and two before three. Candidates are sleep, offload
    of the reference and of the optimizer, vLLM's share of the memory, micro-batch
    tokens, chunked logits, activation checkpointing, pp, tp, cp, the engine's tp, and
    more nodes. Precision and the algorithm are left alone.
    """
    singles = list(_candidates(job))
    tried = 0
    for num_settings in range(1, MOST_TOGETHER + 1):
        # Two values of one key exclude each other, so a combination names each key
        # once.
        choices = [
            c
            for c in combinations(singles, num_settings)
            if len({_subject(s) for _, s in c}) == num_settings
        ]
        for choice in sorted(choices, key=lambda c: sum(cost for cost, _ in c)):
            if tried == MOST_TRIED:
                return Advice((), tried)
            tried += 1
            settings = tuple(setting for _, setting in choice)
            try:
                changed_job = with_settings(job, settings)
                memory = MemoryModel(changed_job).ranks(changed_job.stage_ranks())
            except (ConfigError, RolloutError):
                # The grid does not divide the world or the model, or vLLM cannot build
                # this engine.
                continue
            if not shortages(changed_job, memory):
                return Advice(settings, tried, max(rank.peak for rank in memory))
    return Advice((), tried)


def _candidates(job: PlannedJob) -> Iterator[tuple[float, Setting]]:
    """Yield (cost, setting). The cost is the distance from the configuration plus the slowdown of the run."""
    config, actor = job.config, job.config.actor
    if not config.rollout.sleep:
        yield 1.0, ("rollout.sleep", True)
    if config.uses_reference and not config.reference.offload:
        yield 1.0, ("reference.offload", True)
    share = round(
        float(config.rollout.vllm.get("gpu_memory_utilization", UTILIZATION)) * 100
    )
    for percent in range(20, 96, 5):
        if percent != share:
            yield (
                1.0 + abs(percent - share) / 20,
                ("rollout.vllm.gpu_memory_utilization", percent / 100),
            )
    tokens, steps = actor.micro_batch_tokens, 0
    while tokens > config.max_tokens:
        tokens, steps = max(config.max_tokens, tokens // 2), steps + 1
        yield 1.0 + 0.5 * steps, ("actor.micro_batch_tokens", tokens)
    if (
        actor.activation_checkpointing == "none"
        and "recompute_granularity" not in actor.megatron
    ):
        yield 2.0, ("actor.activation_checkpointing", "full")
    if not actor.chunked_logits:
        yield 2.0, ("actor.chunked_logits", True)
    if not actor.offload.optimizer:
        # Offload costs a little more than chunked logits and recomputation, since it
        # moves bytes in every update.
        yield 2.6, ("actor.offload", {"optimizer": True, "gradients": True})
    for size in divisors(job.spec.num_layers):
        if actor.pp < size <= 8 * actor.pp:
            yield 2.0 + size / actor.pp / 4, ("actor.pp", size)
    for size in divisors(job.machine.gpus_per_node):
        if size > actor.tp:
            yield 2.0 + size / actor.tp / 2, ("actor.tp", size)
        if size > actor.cp and actor.engine == "megatron":
            yield 2.5 + size / actor.cp / 2, ("actor.cp", size)
        if size > config.rollout.tp:
            yield 2.0 + size / config.rollout.tp / 2, ("rollout.tp", size)
    for factor in (2, 4, 8):
        nodes = -(-job.world * factor // job.machine.gpus_per_node)
        yield 4.0 + factor, ("--nodes", nodes)


def _subject(setting: Setting) -> str:
    return setting[0]


def with_settings(job: PlannedJob, settings: tuple[Setting, ...]) -> PlannedJob:
    """Return the job with these settings applied; critic and reference follow the actor where they had the same value.

    Raises:
        ConfigError: the new grid does not fit the model or the number of ranks.
    """
    values, world = job.config.to_dict(), job.world
    for key, value in settings:
        if key == "--nodes":
            world = value * job.machine.gpus_per_node
            continue
        section, name, *rest = key.split(".")
        actor_value = values["actor"].get(name)
        followers = [
            role
            for role in FOLLOWERS
            if section == "actor" and values[role].get(name, ...) == actor_value
        ]
        for place in (section, *followers):
            _set(values[place], [name, *rest], value)
    return make_job(Config.model_validate(values), job.spec, world, job.machine)


def _set(mapping: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        mapping = mapping.setdefault(name, {})
    if isinstance(value, dict):
        mapping[path[-1]] = {**mapping.get(path[-1], {}), **value}
    else:
        mapping[path[-1]] = value


def yaml_text(value: Any) -> str:
    """Format a value as it is written after `key=` on the command line."""
    if isinstance(value, dict):
        return "'{" + ", ".join(f"{k}: {yaml_text(v)}" for k, v in value.items()) + "}'"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
