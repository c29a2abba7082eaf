"""Plan a run on the GPUs it has been given: derive vLLM's share of their memory, and refuse a run that does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from megaverl.config import Config
from megaverl.config.roles import PlacementConfig
from megaverl.distributed.placement import ResolvedPlacement, ranks_text
from megaverl.errors import ConfigError
from megaverl.planner.advice import advise, shortages, with_settings
from megaverl.planner.job import GB, Machine, PlannedJob, make_job
from megaverl.planner.memory import UTILIZATION, MemoryModel
from megaverl.sharding.model_spec import ModelSpec

SHARE = "gpu_memory_utilization"
# Fraction of a GPU that a plan may fill, since it does not count everything and memory
# fragments.
ROOM = 0.97
STEP = 0.05
LEAST, MOST = 0.1, 0.9
UNKNOWN = 0.5  # share for a model that the planner cannot count
# Phases in which a sleeping engine's memory is in use. Its share does not affect the
# other phases.
OF_ENGINE = ("engine start", "generate", "reshard")


def derive_share(job: PlannedJob) -> float | None:
    """Return the share of a GPU's memory that vLLM may take beside the other roles on its ranks.

    vLLM's own default, 0.92, is for a GPU that it has to itself. The share is the
    largest multiple of 0.05 with which every phase of a step fits. If even the smallest
    share does not fit, it is returned, and `shortages` reports what is missing.

    Returns:
        None if vLLM's default suits, if the configuration sets a share or a cache size, and if there is no GPU.
    """
    if not _is_open(job.config) or not job.machine.on_gpus:
        return None
    engines = set(job.rollout.ranks)
    if not any(engines.intersection(role.ranks) for role in job.roles):
        return None
    share, sleeps = MOST, job.config.rollout.sleep
    while True:
        trial = with_share(job, share)
        missing = shortages(trial, MemoryModel(trial).ranks(trial.stage_ranks()), ROOM)
        depends = (
            shortage
            for shortage in missing
            if shortage.phase != "KV cache"
            and (not sleeps or shortage.phase in OF_ENGINE)
        )
        over = max(
            (shortage.needed - shortage.available for shortage in depends), default=0.0
        )
        if over <= 0 or share <= LEAST:
            return share
        # Without 1e-9, rounding errors just below a multiple of STEP would cost one
        # more step.
        lower = math.floor((share - over / job.machine.memory) / STEP + 1e-9) * STEP
        share = round(max(LEAST, min(lower, share - STEP)), 2)


def _is_open(config: Config) -> bool:
    fields = config.rollout.vllm
    return (
        config.rollout.engine == "vllm"
        and SHARE not in fields
        and not fields.get("kv_cache_memory_bytes")
    )


def with_share(job: PlannedJob, share: float) -> PlannedJob:
    """Return the job with this share of a GPU for its engines."""
    return with_settings(job, ((f"rollout.vllm.{SHARE}", share),))


def explain(share: float) -> str:
    """Return the line that a run and a plan print for a derived share."""
    return (
        f"rollout.vllm.{SHARE}: {share:.2f}, the most that leaves room for the other roles on the engine's GPUs "
        f"(vLLM's own {UTILIZATION} is for a GPU of its own)"
    )


def with_engine_share(config: Config, placement: ResolvedPlacement) -> Config:
    """Return the configuration with the engine's derived share of its GPUs, unless the user has set one.

    Every rank derives the same share, as all ranks know all nodes.
    """
    gpus = [node for node in placement.nodes if node.memory]
    if not gpus or not _is_open(config):
        return config
    job = placed_job(config, placement)
    if job is None:
        return _with_unknown_share(config) if placement.is_colocated else config
    share = derive_share(job)
    return config if share is None else config.with_vllm({SHARE: share}, explain(share))


def _with_unknown_share(config: Config) -> Config:
    reason = (
        f"rollout.vllm.{SHARE}: {UNKNOWN:.2f}, as other roles share its GPUs and the planner cannot "
        "count this model"
    )
    return config.with_vllm({SHARE: UNKNOWN}, reason)


def placed_job(
    config: Config, placement: ResolvedPlacement, *, with_least_engine: bool = False
) -> PlannedJob | None:
    """Return the run's job on these nodes, or None for a model that the planner cannot count.

    That is a model whose folder does not exist yet, or whose engine layout would have
    to be read from vLLM.

    Args:
        with_least_engine: count such an engine with the least that it can hold (`make_job`, `builds_engine`).
    """
    gpus = [node for node in placement.nodes if node.memory]
    if not gpus or not (Path(config.model.path) / "config.json").is_file():
        return None
    spec = ModelSpec.outline(config.model.path)
    if not spec.is_tabled and not with_least_engine:
        return None
    spec = replace(spec, trusts_code=config.model.trust_remote_code)
    machine = Machine(
        gpus_per_node=placement.nodes[0].size, memory=min(node.memory for node in gpus)
    )
    return make_job(
        by_ranks(config, placement), spec, placement.size, machine, builds_engine=False
    )


def check_memory(config: Config, placement: ResolvedPlacement) -> None:
    """Refuse a run whose ranks need more memory than their GPUs have, unless `placement.check_memory` is false.

    Every rank comes to the same result, as all ranks know all nodes. Nodes without a
    GPU, a model without a folder, and engines other than vLLM are not counted. For a
    model without a table, no other settings are searched.

    Raises:
        ConfigError: names what does not fit, and the nearest settings that would.
    """
    left_out = (
        config.rollout.engine != "vllm"
        or not config.placement.check_memory
        or config.trainer.rollout_only
    )
    share = None if left_out else with_engine_share(config, placement)
    job = (
        None if share is None else placed_job(share, placement, with_least_engine=True)
    )
    if job is None:
        return
    if missing := shortages(job, MemoryModel(job).ranks()):
        nearest = (
            f"Nearest that would: {str(advise(job)).rstrip('.')}. "
            if job.spec.is_tabled
            else ""
        )
        raise ConfigError(
            f"the planner finds that {placement.num_with_device} GPUs with {job.machine.memory / GB:.1f} GB each do "
            "not hold this run:\n"
            + "\n".join(f"  - {shortage}" for shortage in missing)
            + f"\n{nearest}"
            "`megaverl plan` shows all of it; placement.check_memory=false starts it all the same."
        )


def by_ranks(config: Config, placement: ResolvedPlacement) -> Config:
    """Return the configuration with every role's ranks written out, including those that the placement has chosen."""
    if placement.is_colocated:
        return config
    places = {role: ranks_text(ranks) for role, ranks in placement.ranks.items()}
    section = PlacementConfig(**places, actor_islands=len(placement.islands))  # type: ignore[arg-type]
    return config.model_copy(update={"placement": section})
