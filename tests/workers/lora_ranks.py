"""What the ranks of a test world do with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig
from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.critic import Critic
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.trainable import TrainableModel
from tests.models.ranks import manager, whole_rows
from tests.workers.ranks import experience


def model_with_adapters(
    folder: str,
    shape: dict[str, Any],
    lora: dict[str, Any],
    adapter: str | None = None,
    **options: Any,
) -> TrainingModel:
    """A model of `folder` with adapters, those of the folder `adapter` if there is one;
    under FSDP2, and cut so, where `shape` says `fsdp`.
    """
    sizes = {name: size for name, size in shape.items() if name != "fsdp"}
    grid = manager().grid(GridShape(**sizes))
    options |= {"dtype": torch.float32, "seed": 0, "lora": LoraConfig(**lora)}
    overrides = options.pop("overrides", None)
    model: TrainingModel
    if "fsdp" in shape:
        cut = FsdpConfig(**shape["fsdp"])
        unread = ModelOptions(initialize=False, **options)
        model = FSDPModel(folder, grid, manager(), unread, fsdp=cut)
    else:
        spec = ModelSpec.from_folder(folder)
        model = MegatronModel(spec, grid, ModelOptions(**options), overrides)
    model.load(folder)
    if adapter is not None:
        model.load_adapters(adapter)
    return model


def trainable(model: TrainingModel) -> TrainableModel:
    optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
    if isinstance(model, FSDPModel):
        return FSDPTrainable(model, optimizer=optimizer, scheduler={}, total_updates=10)
    assert isinstance(model, MegatronModel)
    return MegatronTrainable(
        model, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10
    )


def random_adapter(
    folder: str,
    lora: dict[str, Any],
    output: str,
    shape: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """An adapter folder in which no factor is zero."""
    model = model_with_adapters(folder, shape or {}, lora, **options)
    assert model.adapters is not None
    generator = torch.Generator().manual_seed(1)
    for parameter in model.adapters.parameters.values():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    model.save_adapters(output, base=folder)


def update(
    folder: str,
    shapes: dict[str, dict[str, Any]],
    adapter: str,
    output: str,
    *,
    lora: dict[str, Any],
    critic: bool = False,
    megatron: dict[str, Any] | None = None,
    **algorithm: Any,
) -> dict[str, dict[str, float]]:
    """For each grid, by name: an update from `adapter`; the new one goes to `output/name`. Returns the metrics."""
    found = {}
    for name, shape in shapes.items():
        role = "critic" if critic else "actor"
        model = model_with_adapters(
            folder,
            shape,
            lora,
            adapter,
            value_head=critic,
            role=role,
            overrides=megatron,
        )
        base = {
            local: parameter.detach().clone()
            for local, parameter in frozen(model).items()
        }
        trained = trainable(model)
        config = AlgorithmConfig(**algorithm)
        if critic:
            found[name] = Critic(trained, config, micro_batch_tokens=64, seed=0).update(
                experience(), step=0
            )
        else:
            actor = Actor(
                trained, config, temperature=0.8, micro_batch_tokens=64, seed=0
            )
            found[name] = actor.update(experience(), step=0, kl_coef=0.1)
        assert all(
            torch.equal(base[local], parameter)
            for local, parameter in frozen(model).items()
        )
        assert all(parameter.grad is None for parameter in frozen(model).values())
        model.save_adapters(Path(output) / name, base=folder)
    return found


def frozen(model: TrainingModel) -> dict[str, torch.Tensor]:
    trained = model.adapters.parameters if model.adapters is not None else {}
    return {
        name: parameter
        for name, parameter in model.parameters.items()
        if name not in trained
    }


def through_megaverl(
    folder: str,
    shape: dict[str, int],
    lora: dict[str, Any],
    adapter: str,
    saved: str,
    merged: str,
    tokens: list[Any],
) -> list[list[float]]:
    """Load an adapter, save it again to `saved`, export the merged model; the log-probs of all tokens but the first."""
    model = model_with_adapters(folder, shape, lora, adapter)
    model.save_adapters(saved, base=folder)
    model.export(merged, source_folder=folder, bucket_bytes=4096)
    batch = whole_rows(tokens)
    return (
        Policy(model, temperature=1.0, micro_batch_tokens=64).log_probs(batch).tolist()
    )


def refusals(
    folder: str, lora: dict[str, Any], changes: list[dict[str, Any]], adapter: str
) -> list[str]:
    """What is said of an adapter folder by models with other adapters."""
    found = []
    for change in changes:
        try:
            model_with_adapters(folder, {"tp": 2}, lora | change, adapter)
            found.append("")
        except ModelError as error:
            found.append(str(error))
    return found
