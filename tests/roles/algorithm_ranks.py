"""What the ranks of a test world do with every policy loss."""

from __future__ import annotations

from typing import Any

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape
from megaverl.roles.megatron_model import MegatronModel
from megaverl.roles.policy import Actor
from megaverl.roles.trainable import TrainableModel
from tests.models.ranks import manager
from tests.roles.ranks import experience


def updates(
    folder: str, shape: dict[str, int], algorithms: dict[str, dict[str, Any]], micro_batch_tokens: int
) -> dict[str, Any]:
    """Metrics of an update with each of `algorithms` on a grid that fills the world, and the squared score norms."""
    grid = manager().grid(GridShape(**shape))
    found: dict[str, Any] = {}
    for name, algorithm in algorithms.items():
        model = MegatronModel(ModelSpec.from_folder(folder), grid, dtype=torch.float32, seed=0, role="actor")
        model.load(folder)
        optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
        trainable = TrainableModel(model, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10)
        config = AlgorithmConfig(**algorithm)
        actor = Actor(trainable, config, temperature=0.8, micro_batch_tokens=micro_batch_tokens, seed=0)
        found["score_norms"] = actor.score_norms(experience()).tolist()
        found[name] = actor.update(experience(), step=0, kl_coef=0.1)
    return found
