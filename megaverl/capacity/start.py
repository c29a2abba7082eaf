"""What the planner knows of a run that is about to start: memory that its GPUs do not have."""

from __future__ import annotations

import os
from pathlib import Path

from megaverl.capacity.advice import advise, shortages
from megaverl.capacity.job import make_job
from megaverl.capacity.machine import Machine
from megaverl.capacity.memory import MemoryModel
from megaverl.config import Config
from megaverl.config.placement import CLAIMS
from megaverl.errors import ConfigError
from megaverl.models.spec import ModelSpec


def check_before_start(config: Config) -> None:
    """On a rank of torchrun's, where there are GPUs: see that the run's placement and grids fit into them.

    Raises:
        ConfigError: what does not fit, and the nearest settings that would.
    """
    import torch

    wanted, _ = config.placement.wanted()
    by_name = any(place.nodes or place.num_nodes for place in wanted.values()) or bool(os.environ.get(CLAIMS))
    if not torch.cuda.is_available() or by_name or config.trainer.rollout_only:
        return
    machine = Machine(
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        memory=float(torch.cuda.get_device_properties(0).total_memory),
    )
    check_memory(config, int(os.environ.get("WORLD_SIZE", "1")), machine)


def check_memory(config: Config, world: int, machine: Machine) -> None:
    """Refuse a run whose ranks need more memory than `machine` has, unless `placement.check_memory` is false.

    A model that is not in a folder yet, and engines other than vLLM, are not counted.

    Raises:
        ConfigError: see above.
    """
    known = (Path(config.model.path) / "config.json").is_file() and config.rollout.engine == "vllm"
    if not known or not config.placement.check_memory:
        return
    job = make_job(config, ModelSpec.from_folder(config.model.path), world, machine)
    if missing := shortages(job, MemoryModel(job).ranks()):
        raise ConfigError(
            f"the planner finds that {world} GPUs with {machine.memory / 1e9:.1f} GB each do not hold this run:\n"
            + "\n".join(f"  - {shortage}" for shortage in missing)
            + f"\nNearest that would: {str(advise(job)).rstrip('.')}. `megaverl plan` shows all of it; "
            "placement.check_memory=false starts it all the same."
        )
