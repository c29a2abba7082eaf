"""Training engines of a role: Megatron-core, or a Hugging Face model under FSDP2. Rollouts on inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.distributed.collectives import together
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.distributed.job_context import default_group
from megaverl.errors import ConfigError
from megaverl.models.folder import read_model
from megaverl.rollout.server_engine import ServerEngine
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable
from megaverl.workers.rollout import Rollout
from megaverl.workers.server_sync import ServerSync
from megaverl.workers.trainable import TrainableModel

if TYPE_CHECKING:
    from megaverl.trainer.build import Builder


def make_model(
    folder: Path,
    run: Config,
    config: GridConfig,
    grid: Grid,
    groups: ProcessGroupManager,
    *,
    role: str,
    dtype: torch.dtype,
    value_head: int,
    beside_logits: bool,
) -> TrainingModel:
    """Create the model of a folder's config.json on a grid. Collective over all ranks of the grid.

    The weights are random, or left for the caller to load (`model.init: weights`).

    Args:
        config: section of the role.
        value_head, beside_logits: see `MegatronModel` and `FSDPModel`.

    Raises:
        ConfigError, ModelError, GridError: the engine does not support the model or the settings.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "seed": run.run.seed,
        "value_head": value_head,
        "beside_logits": beside_logits,
        "role": role,
        "initialize": run.model.init != "weights",
        "chunked_logits": config.chunked_logits,
        "pack_samples": config.pack_samples,
    }
    if isinstance(config, TrainedConfig):
        options |= {
            "lora": config.lora,
            "activation_checkpointing": config.activation_checkpointing,
        }
    if config.engine == "fsdp":
        options |= (
            {"freeze": config.freeze} if isinstance(config, TrainedConfig) else {}
        )
        trust, trained = run.model.trust_remote_code, isinstance(config, TrainedConfig)
        return FSDPModel(
            folder,
            grid,
            groups,
            fsdp=config.fsdp,
            trained=trained,
            trust_remote_code=trust,
            **options,
        )
    spec = (
        read_model(folder)[1]
        if value_head and not beside_logits
        else ModelSpec.from_folder(folder)
    )
    return MegatronModel(spec, grid, overrides=config.megatron, **options)


def make_trainable(
    model: TrainingModel,
    config: TrainedConfig,
    optimizer: dict[str, Any],
    total_updates: int,
) -> TrainableModel:
    """Create the optimizer of a model and return both as one object.

    Args:
        total_updates: number of optimizer steps of the whole run.

    Raises:
        ConfigError: the engine's optimizer does not support the settings.
    """
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": config.scheduler,
        "total_updates": total_updates,
        "gradient_accumulation": config.gradient_accumulation,
        "offload": config.offload,
    }
    if isinstance(model, FSDPModel):
        return FSDPTrainable(model, **options)
    assert isinstance(model, MegatronModel)
    return MegatronTrainable(model, ddp=config.ddp, **options)


WEIGHTS = "rollout_weights"  # folder inside the run's folder


def server_rollout(
    builder: Builder,
    actor: TrainingModel | None,
    group: dist.ProcessGroup | None = None,
) -> tuple[ServerSync, Rollout | None]:
    """Create this rank's part in the weight transfer to inference servers, and its client if it has one.

    Collective over the ranks of this role group.

    Args:
        actor: actor on this rank, whose weights the servers receive. None: the actor is on other ranks, or the servers
            keep the weights of the model's folder.
        group: ranks of actor and rollout, if they share none.

    Raises:
        ConfigError: the model takes images, which servers do not receive.
    """
    config, world = builder.config, default_group()
    servers = config.rollout.servers
    if builder.images is not None:
        raise ConfigError(
            f"rollout.engine=server: servers receive only tokens, and {config.model.path} takes images. Use vllm."
        )
    engine: ServerEngine | None = None
    # The engines' ranks are clients of the servers: all ranks if actor and rollout
    # share them, else those without an actor.
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
        # Each run has its own subfolder, because old contents of the folder are
        # deleted.
        folder=Path(servers.folder) / config.run.name
        if servers.folder is not None
        else config.run_dir / WEIGHTS,
        source_folder=builder.folder,
        dtype=builder.dtype,
        tolerance=servers.fingerprint_tolerance,
        max_tokens=config.max_tokens,
        direct=servers if servers.transfer == "direct" else None,
    )
    if group is None and actor is None:
        sync.use_folder(builder.files().wait())
    return sync, Rollout(engine, world, sync) if engine is not None else None
