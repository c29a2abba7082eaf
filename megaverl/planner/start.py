"""What the planner knows of a run that is about to start: memory that its GPUs do not have."""

from __future__ import annotations

from pathlib import Path

from megaverl.config import Config
from megaverl.config.placement import PlacementConfig
from megaverl.distributed.placement import ResolvedPlacement, ranks_text
from megaverl.errors import ConfigError
from megaverl.planner.advice import advise, shortages
from megaverl.planner.job import make_job
from megaverl.planner.machine import Machine
from megaverl.planner.memory import MemoryModel
from megaverl.sharding.model_spec import ModelSpec


def check_memory(config: Config, placement: ResolvedPlacement) -> None:
    """Refuse a run whose ranks need more memory than their GPUs have, unless `placement.check_memory` is false.

    Every rank comes to the same, as all have heard of the nodes. Nodes without a GPU, a model that is not in a folder
    yet, and engines other than vLLM are not counted.

    Raises:
        ConfigError: what does not fit, and the nearest settings that would.
    """
    gpus = [node for node in placement.nodes if node.memory]
    known = (Path(config.model.path) / "config.json").is_file() and config.rollout.engine == "vllm"
    if not gpus or not known or not config.placement.check_memory or config.trainer.rollout_only:
        return
    machine = Machine(gpus_per_node=placement.nodes[0].size, memory=min(node.memory for node in gpus))
    job = make_job(by_ranks(config, placement), ModelSpec.from_folder(config.model.path), placement.size, machine)
    if missing := shortages(job, MemoryModel(job).ranks()):
        raise ConfigError(
            f"the planner finds that {placement.num_with_device} GPUs with {machine.memory / 1e9:.1f} GB each do not "
            "hold this run:\n" + "\n".join(f"  - {shortage}" for shortage in missing) + "\nNearest that would: "
            f"{str(advise(job)).rstrip('.')}. `megaverl plan` shows all of it; placement.check_memory=false starts it "
            "all the same."
        )


def by_ranks(config: Config, placement: ResolvedPlacement) -> Config:
    """The configuration with every role's ranks written out, whoever has said where they are."""
    if placement.is_colocated:
        return config
    places = {role: ranks_text(ranks) for role, ranks in placement.ranks.items()}
    said = PlacementConfig(**places, actor_islands=len(placement.islands))  # type: ignore[arg-type]
    return config.model_copy(update={"placement": said})
