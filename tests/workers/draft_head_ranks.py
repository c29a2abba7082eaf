"""What the ranks of a test world do with a draft head and the actor that it reads."""

from __future__ import annotations

from typing import Any

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.fsdp import FsdpConfig
from megaverl.distributed.grid import GridShape
from megaverl.workers.draft import HeadTrainer
from megaverl.workers.head_model import HeadModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import FSDPTrainable
from megaverl.workers.policy import Actor
from tests.models.ranks import manager
from tests.workers.ranks import experience, trainable_of, with_own_tokens


def update_head(
    folder: str,
    head: str,
    output: str,
    shape: dict[str, int],
    *,
    fsdp: dict[str, Any] | None,
    num_steps: int,
    num_epochs: int,
    micro_batch_tokens: int,
    megatron: dict[str, Any] | None = None,
    activation_checkpointing: str = "none",
) -> dict[str, float]:
    """Update a head on the states of an actor on the same grid; its weights go to `output`.

    Args:
        fsdp: how the actor is cut under FSDP2; None: under Megatron-core.
    """
    overrides = {} if megatron is None else {"overrides": megatron}
    of_actor = trainable_of(folder, shape, fsdp=fsdp, role="actor", **overrides)
    model = HeadModel(
        head,
        manager().grid(GridShape(**shape)),
        manager(),
        ModelOptions(
            dtype=torch.float32,
            seed=0,
            role="draft",
            trained=True,
            initialize=False,
            activation_checkpointing=activation_checkpointing,
        ),
        num_steps=num_steps,
        fsdp=FsdpConfig(),
    )
    model.load(head)
    optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
    algorithm = AlgorithmConfig(name="grpo", num_epochs=num_epochs)
    options: dict[str, Any] = {
        "temperature": 0.8,
        "micro_batch_tokens": micro_batch_tokens,
        "seed": 0,
    }
    # The trainer reads the actor's weights of the moment of an update, not of its start.
    with torch.no_grad():
        for parameter in of_actor.model.parameters.values():
            parameter.zero_()
    trainer = HeadTrainer(
        FSDPTrainable(model, optimizer=optimizer, scheduler={}, total_updates=10),
        algorithm,
        actor=of_actor.model,
        **options,
    )
    of_actor.model.load(folder)
    actor = Actor(of_actor, algorithm, **options)
    batch = experience()
    before = actor.log_probs(batch)
    metrics = trainer.update(with_own_tokens(trainer, batch), step=0)
    # The actor computes the same bits, and no gradient has reached it.
    assert torch.equal(actor.log_probs(batch), before)
    assert not any(gradient.any() for gradient in of_actor.gradients.values())
    model.export(output, source_folder=head, overwrite=True)
    return metrics
