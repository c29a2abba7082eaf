"""The rollout of a run whose engines are servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megaverl.distributed.collectives import together
from megaverl.distributed.worlds import default_group
from megaverl.errors import ConfigError
from megaverl.rollout.server_engine import ServerEngine
from megaverl.workers.model import TrainingModel
from megaverl.workers.rollout import Rollout
from megaverl.workers.server_sync import ServerSync

if TYPE_CHECKING:
    from megaverl.trainer.build import Builder

WEIGHTS = "rollout_weights"  # in the run's folder


def server_rollout(
    builder: Builder, actor: TrainingModel | None, group: dist.ProcessGroup | None = None
) -> tuple[ServerSync, Rollout | None]:
    """This rank's part in giving servers their weights, and its way to them if it has one; every rank of its world
    takes part.

    Args:
        actor: the actor on this rank, whose weights the servers get; None: it is elsewhere, or the model's folder
            stays as it is.
        group: the ranks of actor and rollout, where they share none.
    """
    config, world = builder.config, default_group()
    servers = config.rollout.servers
    if builder.images is not None:
        raise ConfigError(
            f"rollout.engine=server: servers are sent tokens alone, and {config.model.path} takes images. Use vllm."
        )
    engine: ServerEngine | None = None
    if group is None or actor is None:
        with together(world):
            engine = ServerEngine(
                builder.folder,
                config.rollout,
                run_dir=config.run_dir,
                max_model_len=config.max_tokens,
                stop_token_ids=builder.tokenizer.stop_token_ids,
            )
    sync = ServerSync(
        actor,
        engine,
        world,
        group or world,
        # of its own: what is in there goes when it is old
        folder=Path(servers.folder) / config.run.name if servers.folder is not None else config.run_dir / WEIGHTS,
        source_folder=builder.folder,
        dtype=builder.dtype,
        tolerance=servers.fingerprint_tolerance,
        max_tokens=config.max_tokens,
    )
    if group is None and actor is None:
        sync.use_folder(builder.files().wait())
    return sync, Rollout(engine, world, sync) if engine is not None else None
