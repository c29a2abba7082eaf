"""What the ranks of a test world do with actors and critics."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.fsdp import FsdpConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.routed_experts import experts_column
from megaverl.distributed.grid import GridShape
from megaverl.rollout.engine import Generation
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.export import ShardedModel, save_folder
from megaverl.workers.critic import ActorCritic, Critic
from megaverl.workers.decisions import Decision, GradientReport, UpdateCounts, Verdict
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import (
    Updated,
    micro_batches_for,
    micro_batches_of,
    plan_updates,
    rows_of_updates,
)
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable
from megaverl.workers.policy import Actor
from megaverl.workers.trainable import TrainableModel
from tests.models.ranks import manager


def experience(
    num_samples: int = 6,
    seed: int = 3,
    *,
    same_prompts: int = 1,
    branches: bool = False,
) -> RolloutBatch:
    """A batch with everything that an update needs, responses of 1 to 9 tokens; so many neighbours have one prompt.

    Args:
        branches: these neighbours are conversations, of which every second one goes on from the middle of the one
            before, and the next one begins like that.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(num_samples, 9, generator=generator) * scale

    prompts = torch.randint(3, 6, (num_samples,), generator=generator)
    lengths = torch.randint(1, 10, (num_samples,), generator=generator)
    lengths[0] = 9
    first = torch.arange(num_samples) // same_prompts * same_prompts
    prompts = prompts[first]
    batch = RolloutBatch(
        {
            "input_ids": torch.randint(0, 100, (num_samples, 5), generator=generator)[
                first
            ],
            "prompt_lengths": prompts,
            "generated_ids": torch.randint(
                0, 100, (num_samples, 9), generator=generator
            ),
            "response_mask": torch.arange(9) < lengths[:, None],
            "rollout_log_probs": normal(0.1) - 4.6,
            "old_log_probs": normal(0.1) - 4.6,
            "ref_log_probs": normal(0.1) - 4.6,
            "advantages": normal(1.0),
            "values": normal(1.0),
            "returns": normal(1.0),
            "desirable": torch.arange(num_samples) % 3 == 0,
        }
    )
    return as_branches(batch, first) if branches else batch


def as_branches(batch: RolloutBatch, groups: Tensor) -> RolloutBatch:
    """The batch with conversations, whose prompts are that of the one before, every second with more tokens.

    These are up to two of its response and another one.
    """
    histories: list[list[int]] = []
    for row, group in enumerate(groups.tolist()):
        prompt = batch.input_ids[row, : batch.prompt_lengths[row]].tolist()
        if row > group:
            prompt = histories[-1]
        if (row - group) % 2 == 1:
            answer = batch.generated_ids[row - 1, : batch.response_lengths[row - 1]]
            prompt = [*prompt, *answer[:2].tolist(), 50 + row]
        histories.append(prompt)
    longest = max(map(len, histories))
    rows = [history + [0] * (longest - len(history)) for history in histories]
    return batch.with_(
        input_ids=torch.tensor(rows),
        prompt_lengths=torch.tensor([len(history) for history in histories]),
        episode_ids=groups,
        group_ids=groups,
    )


def told_expert(token: int, layer: int, num_experts: int) -> list[int]:
    """Two experts that a token takes wherever it stands."""
    first = (7 * token + layer) % num_experts
    return [first, (first + 1 + token % (num_experts - 1)) % num_experts]


def told_experts(batch: RolloutBatch, spec: ModelSpec) -> dict[str, Any]:
    """`told_expert` of every token but the last, as the column of a batch."""
    assert spec.moe is not None and spec.moe.experts_per_token == 2
    joined, lengths = batch.joined().tolist(), batch.sequence_lengths.tolist()
    layers, count = range(spec.num_layers), spec.moe.num_experts
    told = [
        torch.tensor(
            [
                [told_expert(token, layer, count) for layer in layers]
                for token in row[: length - 1]
            ]
        )
        for row, length in zip(joined, lengths, strict=True)
    ]
    return experts_column(
        [Generation([], [], "stop", each.to(torch.uint8)) for each in told]
    )


def update(
    folder: str,
    shape: dict[str, int],
    output: str,
    *,
    critic: bool = False,
    shared: bool = False,
    micro_batch_tokens: int = 64,
    megatron: dict[str, Any] | None = None,
    chunked_logits: bool = False,
    pack_samples: bool = True,
    activation_checkpointing: str = "none",
    same_prompts: int = 1,
    branches: bool = False,
    gradient_accumulation: int = 1,
    fsdp: dict[str, Any] | None = None,
    router_replay: str = "off",
    **algorithm: Any,
) -> dict[str, float]:
    """Update a model of `folder` on a grid that fills the world; its weights go to `output`.

    Args:
        router_replay: what an actor does with the experts of `told_experts`.
        shared: an actor that is its own critic.
        fsdp: under FSDP2, cut so; None: under Megatron-core.
    """
    trainable = trainable_of(
        folder,
        shape,
        fsdp=fsdp,
        value_head=critic or shared,
        beside_logits=shared,
        role="critic" if critic else "actor",
        chunked_logits=chunked_logits,
        pack_samples=pack_samples,
        activation_checkpointing=activation_checkpointing,
        **({"overrides": megatron} if fsdp is None else {}),
    )
    trainable.gradient_accumulation = gradient_accumulation
    model = trainable.model
    config = AlgorithmConfig(**algorithm)
    batch = experience(same_prompts=same_prompts, branches=branches)
    if critic:
        role = Critic(trainable, config, micro_batch_tokens=micro_batch_tokens, seed=0)
        metrics = role.update(with_own_tokens(role, batch), step=0)
    else:
        kind = ActorCritic if shared else Actor
        given: dict[str, Any] = {
            "micro_batch_tokens": micro_batch_tokens,
            "router_replay": router_replay,
        }
        actor = kind(trainable, config, temperature=0.8, seed=0, **given)
        if router_replay != "off":
            batch = batch.with_columns(**told_experts(batch, model.spec))
        metrics = actor.update(with_own_tokens(actor, batch), step=0, kl_coef=0.1)
    save_folder(
        ShardedModel(model.held_weights, model.held_layout_of, model.held_parameters),
        output,
        sources=[folder],
        group=model.grid.world,
    )
    return metrics


def under_both_engines(folders: list[str], **algorithm: Any) -> list[dict[str, Any]]:
    """Of each model, by engine: log-probs before an update, its loss and its gradient's norm, on data-parallel ranks.

    Megatron-core is asked where it has a table of the architecture.
    """
    found: list[dict[str, Any]] = []
    for folder in folders:
        engines: dict[str, dict[str, Any] | None] = {"fsdp": {}}
        if ModelSpec.outline(folder).is_tabled:
            engines["megatron"] = None
        found.append({})
        for name, fsdp in engines.items():
            trainable = trainable_of(folder, {"dp": dist.get_world_size()}, fsdp=fsdp)
            actor = Actor(
                trainable,
                AlgorithmConfig(**algorithm),
                temperature=0.8,
                micro_batch_tokens=64,
                seed=0,
            )
            batch = experience(same_prompts=3)
            log_probs = actor.log_probs(batch).tolist()
            metrics = actor.update(with_own_tokens(actor, batch), step=0, kl_coef=0.1)
            found[-1][name] = {
                "log_probs": log_probs,
                **{key: metrics[key] for key in ("loss", "grad_norm")},
            }
    return found


def trainable_of(
    folder: str, shape: dict[str, int], *, fsdp: dict[str, Any] | None, **options: Any
) -> TrainableModel:
    """A model of `folder` with an optimizer; `fsdp` as `update` has it, `options` as both engines' models have them."""
    grid = manager().grid(GridShape(**shape))
    # as in a run: what is drawn is cut, and marked so, in another way than what is read
    given: dict[str, Any] = {
        "dtype": torch.float32,
        "seed": 0,
        "initialize": False,
        **options,
    }
    # with so large an epsilon Adam steps in proportion to the gradient: no rounding is
    # blown up to a full step
    optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
    overrides = given.pop("overrides", None)
    model_options = ModelOptions(**given)
    if fsdp is not None:
        cut = FSDPModel(folder, grid, manager(), model_options, fsdp=FsdpConfig(**fsdp))
        cut.load(folder)
        return FSDPTrainable(cut, optimizer=optimizer, scheduler={}, total_updates=10)
    model = MegatronModel(ModelSpec.from_folder(folder), grid, model_options, overrides)
    model.load(folder)
    return MegatronTrainable(
        model, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10
    )


def with_own_tokens(role: Updated, batch: RolloutBatch) -> RolloutBatch:
    """The batch as it comes from elsewhere: of samples that this rank does not train on, the tokens are not there.

    Episodes come whole, so that every rank sees what their conversations share.
    """
    if "episode_ids" in batch:
        return batch
    outline = sequence_lengths(batch)
    own = sorted(rows_of_updates(role, outline, 0, 0)[dist.get_rank()])
    # Each sample is one replica's.
    if role.trainable.model.grid.shape.dp > 1 and role.algorithm.num_epochs == 1:
        assert len(own) < len(batch)
    tokens = {
        name: torch.zeros_like(batch[name]) for name in ("input_ids", "generated_ids")
    }
    for name, tensor in tokens.items():
        tensor[own] = batch[name][own]
    return batch.with_(**tokens, prompt_numbers=torch.tensor(outline.prompts))


def last_values(
    folder: str, shape: dict[str, int], *, pack_samples: bool
) -> dict[str, list[float]]:
    """Of cut-off responses without their last tokens: the values after them, and those before the tokens left out.

    Every other sample is an agent's of its own, with a value head of its own; the fifth
    has ended.
    """
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shape)),
        ModelOptions(
            dtype=torch.float32,
            seed=0,
            value_head=2,
            role="critic",
            pack_samples=pack_samples,
        ),
    )
    model.load(folder)
    for name, parameter in model.held_parameters.items():
        if name.endswith("output_layer.weight"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    trainable = MegatronTrainable(
        model, optimizer={"lr": 0.1}, scheduler={}, ddp={}, total_updates=10
    )
    whole = experience(same_prompts=3).with_(agent_ids=torch.arange(6) % 2)
    places = torch.arange(9)
    whole = whole.with_(response_lengths=whole.response_lengths.clamp(min=2))
    lengths = whole.response_lengths - 1
    cut = RolloutBatch(
        {
            **{
                name: whole[name]
                for name in (
                    "input_ids",
                    "prompt_lengths",
                    "generated_ids",
                    "agent_ids",
                )
            },
            "response_mask": places < lengths[:, None],
        },
        {"finish_reason": ["length", "length", "length", "length", "stop", "length"]},
    )
    found = {}
    for bootstraps in (True, False):
        algorithm = AlgorithmConfig(name="ppo", bootstrap_truncated=bootstraps)
        critic = Critic(trainable, algorithm, micro_batch_tokens=24, seed=0)
        before, last = critic.values(cut)
        found[f"last {bootstraps}"] = last.tolist()
    known, ended = critic.values(whole)
    assert torch.allclose(
        before, known.masked_fill(places >= lengths[:, None], 0.0), atol=1e-5
    )
    assert not ended.any(), "why they ended is not known"
    found["left out"] = known.gather(1, lengths[:, None])[:, 0].tolist()
    return found


def tokens_of_updates(folder: str) -> list[list[int]]:
    """Of each update of a step on three samples of each of four prompts: its tokens packed, and with a prompt each."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape()),
        ModelOptions(dtype=torch.float32, seed=0),
    )
    trainable = MegatronTrainable(
        model, optimizer={"lr": 0.1}, scheduler={}, ddp={}, total_updates=10
    )
    batch, found = experience(12, same_prompts=3), []
    outline = sequence_lengths(batch)
    algorithm = AlgorithmConfig(num_mini_batches=2, num_epochs=2)
    critic = Critic(trainable, algorithm, micro_batch_tokens=64, seed=0)
    for planned in plan_updates(critic, outline, 0):
        micro = micro_batches_of(model, batch, outline, planned.micro_batches)
        each = sum(outline.lengths[sample] for sample in planned.samples)
        found.append(
            [sum(part.tokens.numel() for part in micro), each, len(planned.samples)]
        )
    return found


def update_that_is_not_finite(folder: str) -> list[bool]:
    """Per parameter: whether it stayed as it was through an update with an infinite loss."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape.fit(dist.get_world_size(), tp=2)),
        ModelOptions(dtype=torch.float32, seed=0),
    )
    model.load(folder)
    trainable = MegatronTrainable(
        model, optimizer={"lr": 0.1}, scheduler={}, ddp={}, total_updates=10
    )
    before = {
        name: parameter.detach().clone() for name, parameter in model.parameters.items()
    }
    batch = experience()
    batch = batch.with_(advantages=torch.full_like(batch.advantages, torch.inf))
    actor = Actor(
        trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=64, seed=0
    )
    try:
        actor.update(batch, step=0)
    except Exception as error:  # the test wants to know which
        assert type(error).__name__ == "TrainingStopped", error
        assert "actor.optimizer.lr" in str(error)
        return [
            torch.equal(before[name], parameter)
            for name, parameter in model.parameters.items()
        ]
    return [False]


def one_pass(folder: str) -> dict[str, Any]:
    """Of an actor that is its own critic: both results of one forward pass, and of a pass for each."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape.fit(dist.get_world_size(), pp=2)),
        ModelOptions(dtype=torch.float32, seed=0, value_head=2, beside_logits=True),
    )
    model.load(folder)
    for name, parameter in model.held_parameters.items():
        if name == "value_head.weight":
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    trainable = MegatronTrainable(
        model, optimizer={"lr": 0.1}, scheduler={}, ddp={}, total_updates=10
    )
    algorithm = AlgorithmConfig(bootstrap_truncated=True)
    actor = ActorCritic(
        trainable, algorithm, temperature=0.8, micro_batch_tokens=64, seed=0
    )
    batch = (
        experience()
        .with_(agent_ids=torch.tensor([0, 1, 0, 1, 1, 0]))
        .with_columns(finish_reason=["length"] * 6)
    )
    passes = []
    model.chunks[-1].register_forward_hook(lambda *seen: passes.append(1))
    both = actor.log_probs_and_values(batch)
    number = len(passes)
    of_others, _ = actor.values(batch.with_(agent_ids=1 - batch.agent_ids))
    values, last_values = actor.values(batch)
    return {
        "passes": [number, len(micro_batches_for(model, batch, 64))],
        "same": [
            torch.equal(both[0], actor.log_probs(batch)),
            torch.equal(both[1], values),
        ],
        "last": torch.equal(both[2], last_values) and bool(last_values.all()),
        "heads": bool((both[1] != of_others).any(dim=1).all()),
    }


def as_decided(folder: str) -> dict[str, Any]:
    """Updates of the same weights on the same samples, under several decisions: how far the weights go, and how."""
    found: dict[str, Any] = {}
    moved: dict[str, torch.Tensor] = {}
    reports: list[GradientReport] = []

    def answer(decision: Decision, report: GradientReport) -> Decision:
        reports.append(report)
        return decision

    decisions = {
        "own": None,
        "applied": Decision(Verdict.APPLY),
        "later": None,
        "skipped": Decision(Verdict.SKIP),
    }
    for name, decision in decisions.items():
        model = MegatronModel(
            ModelSpec.from_folder(folder),
            manager().grid(GridShape.fit(dist.get_world_size(), tp=1)),
            ModelOptions(dtype=torch.float32, seed=0),
        )
        model.load(folder)
        before = torch.cat(
            [
                parameter.detach().flatten().clone()
                for parameter in model.parameters.values()
            ]
        )
        optimizer = {
            "lr": 0.1,
            "adam_eps": 1.0,
            "weight_decay": 0.0,
            "clip_grad": 1e-3,
        }  # in proportion to the gradient
        decays = {"lr_decay_style": "linear", "lr_decay_steps": 10}
        trainable = MegatronTrainable(
            model, optimizer=optimizer, scheduler=decays, ddp={}, total_updates=10
        )
        trainable.counts = UpdateCounts(steps=3, version=2, skips=1)
        if name in ("later", "skipped"):
            trainable.move_schedule(4)
        if decision is not None:
            trainable.ask = partial(answer, decision)
        metrics = Actor(
            trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=64, seed=0
        ).update(experience(), step=0)
        after = torch.cat(
            [parameter.detach().flatten() for parameter in model.parameters.values()]
        )
        moved[name] = after - before
        counts = trainable.counts
        found[name] = [
            metrics["lr"], trainable.scheduler.num_steps, metrics["skipped"], counts.steps, counts.version, counts.skips
        ]  # fmt: skip
    far = {name: float(each.norm()) for name, each in moved.items()}
    reported = [
        [each.role, each.island, each.counts.steps, each.tokens > 0, each.norm > 0]
        for each in reports
    ]
    return {
        "found": found,
        "far": far,
        "same": torch.equal(moved["own"], moved["applied"]),
        "reported": reported,
    }
