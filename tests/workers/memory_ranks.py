"""What the ranks of a test world do to see that saving memory changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megaverl.checkpoint.store import CheckpointStore
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import LoraConfig, OffloadConfig
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.distributed.grid import GridShape
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.mix import answers_update
from megaverl.weights.torch_dist_index import read_index
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import plan_for
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.offload import storages_of
from megaverl.workers.optimizers import MegatronTrainable, optimizer_tensors
from megaverl.workers.pairs import (
    ImplicitRewardModel,
    PreferenceUpdates,
    RewardModelUpdates,
)
from megaverl.workers.policy import Actor, Policy
from tests.models.ranks import manager
from tests.workers.ranks import experience

ADAM = {"lr": 0.01, "weight_decay": 0.0, "clip_grad": 1.0}


def actor(
    folder: str,
    shape: dict[str, int],
    *,
    lora: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    dtype: str = "float32",
    micro_batch_tokens: int = 64,
    gradient_accumulation: int = 1,
    checkpointing: str = "none",
    overrides: dict[str, Any] | None = None,
    value_head: int = 0,
) -> Actor:
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shape)),
        ModelOptions(
            dtype=getattr(torch, dtype),
            seed=0,
            lora=None if lora is None else LoraConfig(**lora),
            activation_checkpointing=checkpointing,
            value_head=value_head,
        ),
        overrides=overrides,
    )
    model.load(folder)
    trainable = MegatronTrainable(
        model,
        optimizer=ADAM,
        scheduler={},
        ddp={},
        total_updates=10,
        gradient_accumulation=gradient_accumulation,
        offload=OffloadConfig(**(offload or {})),
    )
    config = AlgorithmConfig(num_mini_batches=2)
    return Actor(
        trainable,
        config,
        temperature=0.8,
        micro_batch_tokens=micro_batch_tokens,
        seed=0,
    )


def two_steps(
    folder: str, shape: dict[str, int], variants: list[dict[str, Any]]
) -> list[list[bool]]:
    """Of each variant: whether log-probs, metrics and every trained weight after two
    steps are the first one's, bit for bit.
    """
    found: list[list[Any]] = []
    for variant in variants:
        made = actor(folder, shape, **variant)
        metrics = [made.update(experience(), step=step) for step in range(2)]
        log_probs = made.log_probs(experience())
        with made.trainable.present():
            weights = [parameter.detach().clone() for parameter in made.model.held]
        found.append([metrics, log_probs, weights])
    first = found[0]
    return [
        [
            metrics == first[0],
            torch.equal(log_probs, first[1]),
            all(torch.equal(a, b) for a, b in zip(weights, first[2], strict=True)),
        ]
        for metrics, log_probs, weights in found
    ]


def every_kind_of_update(
    folder: str, shape: dict[str, int], offload: dict[str, Any]
) -> dict[str, bool]:
    """Of each kind of update on pairs or answers: whether its metrics and weights after
    two of them are the same with `offload` as without, bit for bit.
    """
    pairs = experience().with_(group_ids=torch.arange(6) // 2)
    found: dict[str, list[Any]] = {}
    for away in ({}, offload):
        for kind in ("preference", "reward_model", "implicit", "answers"):
            made = actor(folder, shape, offload=away, value_head=kind == "reward_model")
            trainable, cap = made.trainable, made.micro_batch_tokens
            update = {
                "preference": lambda own=trainable, cap=cap: PreferenceUpdates(
                    own, "simpo", {}, micro_batch_tokens=cap
                ).update(pairs),
                "reward_model": lambda own=trainable, cap=cap: RewardModelUpdates(
                    own, "bradley_terry", {}, micro_batch_tokens=cap
                ).update(pairs),
                "implicit": lambda own=trainable, cap=cap: ImplicitRewardModel(
                    own, temperature=0.8, micro_batch_tokens=cap, beta=0.5
                ).update(pairs, pairs.ref_log_probs, torch.arange(6) % 2 == 0),
                "answers": lambda made=made: answers_update(made, pairs),
            }[kind]
            metrics = [update() for _ in range(2)]
            with trainable.present():
                weights = [parameter.detach().clone() for parameter in made.model.held]
            found.setdefault(kind, []).append([metrics, weights])
    return {
        kind: here[0] == away[0]
        and all(torch.equal(a, b) for a, b in zip(here[1], away[1], strict=True))
        for kind, (here, away) in found.items()
    }


def bytes_here(folder: str, shape: dict[str, int], **variant: Any) -> dict[str, int]:
    """Bytes of what a role holds between stages: weights, gradients, the optimizer's
    state, and of that state before the first update.
    """
    made = actor(folder, shape, **variant)
    trainable = made.trainable

    def gradients() -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in trainable._buffers]

    def total(tensors: list[torch.Tensor]) -> int:
        return sum(storage.nbytes() for storage in storages_of(tensors))

    def of_optimizer() -> int:
        tensors = optimizer_tensors(trainable.optimizer)
        state = storages_of(tensors, without=[*made.model.held, *gradients()])
        return sum(storage.nbytes() for storage in state)

    at_first = of_optimizer()
    made.update(experience(), step=0)
    made.log_probs(experience())
    return {
        "weights": total(made.model.held),
        "gradients": total(gradients()),
        "optimizer": of_optimizer(),
        "optimizer at first": at_first,
    }


def reference_and_resume(
    folder: str,
    shapes: list[dict[str, int]],
    checkpoints: str,
    other_folder: str,
    **variant: Any,
) -> dict[str, Any]:
    """An actor with adapters: its reference against one of its own, and a run resumed on each grid."""
    lora = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
    made = actor(folder, shapes[0], lora=lora, **variant)
    made.update(experience(), step=0)
    store = CheckpointStore(Path(checkpoints))
    path = store.save(1, {"actor": made.trainable}, {"next": 1})
    metrics = made.update(experience(), step=1)
    shared = Policy(
        made.model, temperature=0.8, micro_batch_tokens=64, with_adapters=False
    ).log_probs(experience())
    plain = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shapes[0])),
        ModelOptions(dtype=torch.float32, seed=0),
    )
    plain.load(folder)
    own = Policy(plain, temperature=0.8, micro_batch_tokens=64).log_probs(experience())
    assert made.model.adapters is not None
    expected = {
        name: factor.detach().clone()
        for name, factor in made.model.adapters.parameters.items()
    }
    resumed = []
    for shape in shapes:
        again = actor(folder, shape, lora=lora, **variant)
        store.load(path, {"actor": again.trainable})
        same = again.update(experience(), step=1) == metrics
        assert again.model.adapters is not None
        factors = again.model.adapters.parameters
        equal = shape != shapes[0] or all(
            torch.equal(expected[name], factors[name]) for name in expected
        )
        resumed.append([same, equal])
    try:
        store.load(path, {"actor": actor(other_folder, shapes[0], lora=lora).trainable})
        refused = ""
    except Exception as error:  # the test wants to know which
        refused = f"{type(error).__name__}: {error}"
    stored = sorted(read_index(path).arrays)
    return {
        "reference": torch.equal(shared, own),
        "resumed": resumed,
        "refused": refused,
        "stored": stored,
    }


def adapters_of_parts(folder: str, lora: dict[str, Any]) -> dict[str, Any]:
    """On two context-parallel ranks: what an adapter drops of its input, what the
    generators draw after it, and an update beside the one of ranks that have whole
    rows.
    """
    made = actor(folder, {"cp": 2}, lora={**lora, "dropout": 0.5})
    named = [
        (name, m)
        for chunk in made.model.chunks
        for name, m in chunk.named_modules()
        if hasattr(m, "_dropped")
    ]
    dropped = {}
    # Their inputs are whole on every tensor-parallel rank, and cut.
    for layer in ("linear_qkv", "linear_proj"):
        adapter = next(module.train() for name, module in named if layer in name)
        dropped[layer] = adapter._dropped(torch.ones(8, 1, 16)).flatten().tolist()
    updates = [
        actor(folder, shape, lora=lora).update(experience(), step=0)
        for shape in ({"dp": 2}, {"cp": 2})
    ]
    return {"dropped": dropped, "next": float(torch.rand(())), "updates": updates}


def micro_batch_counts(folder: str, least: list[int]) -> list[int]:
    """Micro-batches of six samples that would all fit into one, for each lower bound."""
    model = actor(folder, {"tp": 2}).model
    outline = sequence_lengths(experience())
    return [len(plan_for(model, outline, 1000, least=each)[0]) for each in least]
