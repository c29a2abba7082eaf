"""Two islands of two data-parallel ranks and a coordinator, run by test_islands.py: `island_program.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import (
    CoordinatorConfig,
    LoraConfig,
    OffloadConfig,
    ReshardConfig,
)
from megaverl.distributed.job_context import JobContext, join
from megaverl.distributed.placement import Node, parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.store import job_store
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.global_model import GlobalModel, GlobalModelLink, ReplicaIsland
from megaverl.trainer.islands import Island, serve_join, serve_update
from megaverl.workers.decisions import Rules
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.gradient_replica import GradientReplica
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable, local
from megaverl.workers.policy import Actor
from tests.models.ranks import grid, manager
from tests.workers.ranks import experience

EVERY = 2
GLOBAL_DTYPES = ("float32", "bfloat16")
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "replicated": {"ddp": {"use_distributed_optimizer": False}},
    "lora": {"lora": LoraConfig(rank=2)},
    "offloaded": {"offloaded": True},
    "fsdp": {"fsdp": FsdpConfig()},
}


def main(folder: Path) -> int:
    deadline = timedelta(seconds=60)
    store, rank, size = job_store(deadline)
    wanted = {
        "actor": parse_wanted("0-3"),
        "rollout": parse_wanted(4),
        "coordinator": parse_wanted(4),
    }
    grids: dict[str, Any] = {"actor": None, "rollout": None, "reward": None}
    context = join(
        resolve(wanted, size, grids, [Node("here", size)], islands=2),
        store,
        rank,
        deadline,
    )
    for name, variant in VARIANTS.items():
        if context.has("coordinator"):
            serve_join(context)
        else:
            save_file(
                steps_of(context, folder, **variant),
                folder / f"{name}_{rank}.safetensors",
            )
    for dtype in GLOBAL_DTYPES:
        for aggregates in ("statistics", "gradients"):
            weights = joined_updates(context, folder, getattr(torch, dtype), aggregates)
            save_file(weights, folder / f"{dtype}_{aggregates}_{rank}.safetensors")
    return 0


def joined_updates(
    context: JobContext, folder: Path, dtype: torch.dtype, aggregates: str
) -> dict[str, torch.Tensor]:
    """This rank's weights after three updates with the other island, the second of
    which is skipped: with optimizers on the islands, or on the coordinator's rank.
    """
    model = MegatronModel(
        ModelSpec.from_folder(folder / "model"),
        grid(),
        ModelOptions(dtype=dtype, seed=0),
    )
    model.load(folder / "model")
    is_coordinator = context.has("coordinator")
    away = OffloadConfig(
        parameters=True, optimizer=True, gradients=True, folder=str(folder)
    )
    trainable: MegatronTrainable | GradientReplica
    if aggregates == "statistics" or is_coordinator:
        trainable = MegatronTrainable(
            model,
            optimizer={"lr": 1e-3, "clip_grad": 1e-3},
            scheduler={},
            ddp={},
            total_updates=3,
            offload=away,
        )
    else:
        trainable = GradientReplica(model, ddp={}, offload=away)
    serve: Callable[[], None] = partial(serve_update, context)
    if aggregates == "statistics" and not is_coordinator:
        trainable.islands = Island(context, trainable, CoordinatorConfig(), 0)
    elif aggregates == "gradients":
        with trainable.present():
            name, limit = f"actor in {dtype}", context.timeout
            link = GlobalModelLink(context, name, trainable, ReshardConfig(), limit)
            with torch.no_grad():
                for weight in model.held if not is_coordinator else ():
                    weight.zero_()
            link.send_weights()
        if isinstance(trainable, GradientReplica):
            trainable.islands = ReplicaIsland(context, trainable, link)
        else:
            serve = GlobalModel(context, trainable, link).serve_update
    actor = Actor(
        trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=64, seed=0
    )
    for step in range(3):
        limits = {"actor": 1e-9} if step == 1 else {}
        trainable.rules = Rules(skip_above=limits)
        if is_coordinator:
            serve()
        else:
            actor.update(experience(seed=step), step=step)
    assert trainable.counts.version == (2 if takes_updates(context, aggregates) else 0)
    with trainable.present():
        return {
            name: parameter.detach().clone()
            for name, parameter in model.held_parameters.items()
        }


def takes_updates(context: JobContext, aggregates: str) -> bool:
    """Return whether this rank's model took the updates."""
    return aggregates == "gradients" or not context.has("coordinator")


def steps_of(
    context: JobContext,
    folder: Path,
    *,
    ddp: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    offloaded: bool = False,
    fsdp: FsdpConfig | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors that the optimizer steps on: at the start, after two updates alone,
    and with the other island; what the model's weights say of the latter, and those
    weights.
    """
    found: dict[str, torch.Tensor] = {}
    for name in ("alone", "joined"):
        given: dict[str, Any] = {
            "dtype": torch.bfloat16,
            "seed": 0,
            "lora": lora,
            "initialize": False,
        }
        optimizer = {"lr": 1e-5, "weight_decay": 0.0}
        more: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": {},
            "total_updates": EVERY,
        }
        more["offload"] = OffloadConfig(
            parameters=offloaded,
            optimizer=offloaded,
            folder=str(folder) if offloaded else None,
        )
        model: MegatronModel | FSDPModel
        trainable: MegatronTrainable | FSDPTrainable
        if fsdp is None:
            model = MegatronModel(
                ModelSpec.from_folder(folder / "model"), grid(), ModelOptions(**given)
            )
            model.load(folder / "model")
            trainable = MegatronTrainable(model, ddp=ddp or {}, **more)
        else:
            model = FSDPModel(
                folder / "model", grid(), manager(), ModelOptions(**given), fsdp=fsdp
            )
            model.load(folder / "model")
            trainable = FSDPTrainable(model, **more)
        actor = Actor(
            trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=64, seed=0
        )
        if name == "joined":
            trainable.islands = island = Island(
                context, trainable, CoordinatorConfig(islands_every=EVERY), 0
            )
            island.part = (0, 1)  # this test's islands have batches of their own
        found |= masters_of(trainable, "start")
        for step in range(EVERY):
            actor.update(
                experience(
                    seed=10 * context.placement.islands[0].count(context.rank) + step
                ),
                step=step,
            )
        found |= masters_of(trainable, name)
    with trainable.present():
        if isinstance(trainable, MegatronTrainable):
            trainable.optimizer.reload_model_params()
        found |= {
            f"weights.{name}": parameter.detach().clone()
            for name, parameter in model.held_parameters.items()
        }
    return found | masters_of(trainable, "read")


def masters_of(
    trainable: MegatronTrainable | FSDPTrainable, prefix: str
) -> dict[str, torch.Tensor]:
    if isinstance(trainable, FSDPTrainable):
        return {
            f"{prefix}.{number}": local(each).detach().clone()
            for number, each in enumerate(trainable.parameters)
        }
    singles = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])
    tensors = [
        p
        for single in singles
        for group in single.optimizer.param_groups
        for p in group["params"]
    ]
    with trainable.present():
        return {
            f"{prefix}.{number}": tensor.detach().clone()
            for number, tensor in enumerate(tensors)
        }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
