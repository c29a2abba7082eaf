"""What the ranks of a test world do with several sets of adapters."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megaverl.errors import ModelError
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.adapter_slots import AdamStep, AdapterSlots
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import cross_entropy, micro_batches_for
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import MegatronTrainable
from tests.models.ranks import manager
from tests.workers.ranks import experience

STEP = AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)


def side_by_side(
    folder: str, shape: dict[str, int], dtype: str, ddp: dict[str, Any]
) -> dict[str, Any]:
    """Train two sets alone and side by side.

    Returns:
        Whether the sets have the same bits both ways, whether the two differ, and whether a set that was never created
        is refused.
    """
    from megaverl.config.roles import LoraConfig
    from megaverl.distributed.grid import GridShape

    grid = manager().grid(GridShape(**shape))
    options = ModelOptions(
        dtype=getattr(torch, dtype), seed=0, lora=LoraConfig(rank=4, alpha=8.0)
    )
    model = MegatronModel(ModelSpec.from_folder(folder), grid, options)
    model.load(folder)
    trained = MegatronTrainable(
        model, optimizer={"lr": 1.0}, scheduler={}, ddp=ddp, total_updates=1
    )
    slots = AdapterSlots(trained)

    def gradient(name: str, seed: int) -> None:
        slots.activate(name)
        batch = experience(seed=seed)
        weights = batch.response_mask.float()
        micro = micro_batches_for(model, batch, 64, {"weights": weights})
        with trained.updating():
            trained.compute_gradients(micro, cross_entropy(model))
        slots.add_gradients()

    def step(name: str) -> float:
        slots.activate(name)
        return slots.step(STEP)

    def bits(name: str) -> dict[str, torch.Tensor]:
        slots.activate(name)
        assert model.adapters is not None
        return {key: value.clone() for key, value in model.adapters.parameters.items()}

    def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    alone = {}
    for name, seed in (("a", 1), ("b", 2)):
        slots.create(name, seed)
        for number in range(3):
            gradient(name, 10 * seed + number)
            gradient(name, 10 * seed + number + 5)
            step(name)
        alone[name] = bits(name)
        slots.drop(name)
    slots.create("a", 1)
    slots.create("b", 2)
    for number in range(3):
        # Gradients and steps of both, in each other's way.
        for offset, (name, seed) in itertools.product((0, 5), (("a", 1), ("b", 2))):
            gradient(name, 10 * seed + number + offset)
        norms = [step("b"), step("a")]
    beside = {name: bits(name) for name in ("a", "b")}
    try:
        slots.activate("c")
    except ModelError as error:
        refused = str(error)
    return {
        "equal": all(equal(alone[name], beside[name]) for name in alone),
        "differ": not equal(beside["a"], beside["b"]),
        "refused": refused,
        "norms": norms,
        "steps": slots["a"].num_steps,
    }
