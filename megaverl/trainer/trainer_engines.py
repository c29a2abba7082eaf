"""Training engines of a role: Megatron-core, or a Hugging Face model under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaverl.config import Config
from megaverl.config.roles import ActorConfig, GridConfig, TrainedConfig
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.folder import read_model
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.gradient_replica import GradientReplica
from megaverl.workers.head_model import HeadModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable
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
    """Create the model of a folder's config.json on a grid. Collective over all ranks of the grid.

    The weights are random, or left for the caller to load (`model.init: weights`).

    Args:
        config: section of the role.
        value_head, beside_logits: see `ModelOptions`.

    Raises:
        ConfigError, ModelError, GridError: the engine does not support the model or the settings.
    """
    trained = config if isinstance(config, TrainedConfig) else None
    freeze = trained.freeze if trained else ()
    options = ModelOptions(
        dtype=dtype,
        seed=run.run.seed,
        role=role,
        trained=trained is not None,
        value_head=value_head,
        beside_logits=beside_logits,
        lora=trained.lora if trained else None,
        activation_checkpointing=trained.activation_checkpointing
        if trained
        else "none",
        chunked_logits=config.chunked_logits,
        fp32_lm_head=run.model.fp32_lm_head,
        fake_quantization=config.fake_quantization
        if isinstance(config, ActorConfig)
        else None,
        initialize=run.model.init != "weights",
        pack_samples=config.pack_samples,
        batch_invariant=run.rollout.batch_invariant,
    )
    if role == "draft" and run.trains_head:
        return HeadModel(
            folder,
            grid,
            groups,
            options,
            num_steps=int(run.speculation["num_speculative_tokens"]),
            fsdp=config.fsdp,
            freeze=freeze,
        )
    if config.engine == "fsdp":
        return FSDPModel(
            folder,
            grid,
            groups,
            options,
            fsdp=config.fsdp,
            trust_remote_code=run.model.trust_remote_code,
            freeze=freeze,
        )
    spec = (
        read_model(folder)[1]
        if value_head and not beside_logits
        else ModelSpec.from_folder(folder)
    )
    return MegatronModel(
        spec,
        grid,
        options,
        config.megatron,
        freeze=freeze,
    )


def make_trainable(
    model: TrainingModel,
    config: TrainedConfig,
    optimizer: dict[str, Any],
    total_updates: int,
    *,
    is_replica: bool = False,
) -> TrainableModel:
    """Create the optimizer of a model and return both as one object.

    Args:
        total_updates: number of optimizer steps of the whole run.
        is_replica: the optimizer is on the coordinator's ranks, and this model only computes gradients.

    Raises:
        ConfigError: the engine's optimizer does not support the settings.
    """
    if is_replica:
        assert isinstance(model, MegatronModel), "the configuration refuses others"
        return GradientReplica(
            model,
            ddp=config.ddp,
            gradient_accumulation=config.gradient_accumulation,
            offload=config.offload,
        )
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
