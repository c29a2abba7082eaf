"""What computes and trains a role: Megatron-core, or the Hugging Face model under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaverl.config import Config
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.classifier import read_model
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.fsdp_trainable import FSDPTrainable
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.megatron_trainable import MegatronTrainable
from megaverl.workers.model import TrainingModel
from megaverl.workers.trainable import TrainableModel


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
    """The model of a folder's config.json on a grid, its weights random, or to be read. Every rank takes part.

    Args:
        config: the role's own section.
        value_head, beside_logits: as `MegatronModel` and `FSDPModel` have them.

    Raises:
        ConfigError, ModelError, GridError: what the engine cannot do.
    """
    given: dict[str, Any] = {
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
        given |= {"lora": config.lora, "activation_checkpointing": config.activation_checkpointing}
    if config.engine == "fsdp":
        given |= {"freeze": config.freeze} if isinstance(config, TrainedConfig) else {}
        trust, trained = run.model.trust_remote_code, isinstance(config, TrainedConfig)
        return FSDPModel(folder, grid, groups, fsdp=config.fsdp, trained=trained, trust_remote_code=trust, **given)
    spec = read_model(folder)[1] if value_head and not beside_logits else ModelSpec.from_folder(folder)
    return MegatronModel(spec, grid, overrides=config.megatron, **given)


def make_trainable(
    model: TrainingModel, config: TrainedConfig, optimizer: dict[str, Any], total_updates: int
) -> TrainableModel:
    """A model with its optimizer.

    Args:
        total_updates: how many optimizer steps the run will take.

    Raises:
        ConfigError: what the engine's optimizer refuses.
    """
    given: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": config.scheduler,
        "total_updates": total_updates,
        "gradient_accumulation": config.gradient_accumulation,
        "offload": config.offload,
    }
    if isinstance(model, FSDPModel):
        return FSDPTrainable(model, **given)
    assert isinstance(model, MegatronModel)
    return MegatronTrainable(model, ddp=config.ddp, **given)
