"""What the ranks of a test world compute with an output layer in float32 and other layers in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.models.vocab_parallel import vocab_parallel_log_probs
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.hf_engine import HFEngine
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.weight import shapes_of
from megaverl.workers.model import TrainingModel
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.workers.ranks import trainable_of, with_own_tokens

TEMPERATURE = 0.8
PROMPTS = [[5, 9, 31], [7, 2], [40, 41, 42, 43, 44], [1, 3, 3, 8]]


def compare(folder: str) -> dict[str, Any]:
    """Compare all models and engines with float64 products of the hidden states and the weight that they have.

    Returns:
        `engine`, `hf`, `log_probs`: largest differences of log-probs. `gradients`: share of elements that equal the
        reference's, rounded once. `aliased`: whether the engine's output layer is the actor's storage. `norms`:
        gradient norms of an update by both training engines. `unchanged`: whether the option changes no bit in float32.
    """
    models = {
        f"{name}, {'chunked' if chunked else 'whole'}": trainable_of(
            folder,
            shape,
            fsdp=fsdp,
            dtype=torch.bfloat16,
            fp32_lm_head=True,
            chunked_logits=chunked,
        )
        for name, (shape, fsdp) in {
            "tp2": ({"tp": 2}, None),
            "tp1": ({"dp": 2}, None),
            "fsdp": ({"dp": 2}, {}),
        }.items()
        for chunked in (False, True)
    }
    whole = load_file(Path(folder) / "model.safetensors")["lm_head.weight"].double()
    actor = models["tp2, whole"].model
    engine = VLLMEngine(
        folder,
        RolloutConfig(tp=2),
        VLLMOptions(
            seed=0,
            dtype=torch.bfloat16,
            max_model_len=32,
            load_weights=False,
            num_sequences=len(PROMPTS),
            fp32_lm_head=True,
        ),
    )
    WeightSync(
        ActorWeights.of(actor),
        engine.layouts(shapes_of(actor.weights)),
        engine,
        actor.grid.world,
    ).reshard()
    hidden: list[torch.Tensor] = []
    engine.model.logits_processor.register_forward_pre_hook(  # type: ignore[operator]  # a module
        lambda _, args: hidden.append(args[1].clone())
    )
    # One token each, so that all hidden states are those of one step.
    first = engine.generate(
        PROMPTS, SamplingOptions(1, temperature=TEMPERATURE), [0, 1, 2, 3]
    )
    of_engine = _difference(first, torch.cat(hidden)[-len(PROMPTS) :], whole)
    in_engine = engine.model.lm_head.weight  # type: ignore[union-attr]  # a parameter
    aliased = (
        in_engine.data_ptr()  # type: ignore[operator]  # of a tensor
        == actor.held_parameters["output_layer.weight"].data_ptr()
    )
    engine.close()
    batch = RolloutBatch.from_generations(
        PROMPTS,
        [Generation([9, 8, 7, 6], [-1.0] * 4, "length") for _ in PROMPTS],
    ).with_(
        old_log_probs=-torch.ones(4, 4),
        advantages=torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None] * torch.ones(4, 4),
    )
    found: dict[str, Any] = {"log_probs": {}, "gradients": {}, "norms": {}}
    for name, trainable in models.items():
        role = Actor(
            trainable,
            AlgorithmConfig(),
            temperature=TEMPERATURE,
            micro_batch_tokens=64,
            seed=0,
        )
        found["log_probs"][name] = _of_actor(role, batch, whole)
        if "fsdp" not in name:
            found["gradients"][name] = _of_output_layer(trainable.model, whole)
        found["norms"][name] = role.update(with_own_tokens(role, batch), step=0)[
            "grad_norm"
        ]
    plain, wide = (
        trainable_of(folder, {"tp": 2}, fsdp=None, fp32_lm_head=is_wide).model
        for is_wide in (False, True)
    )
    return {
        "engine": of_engine,
        "hf": _of_hf(folder, whole),
        "aliased": aliased,
        "unchanged": _scores(plain, batch) == _scores(wide, batch),
        **found,
    }


def _difference(
    generations: list[Generation], hidden: torch.Tensor, weight: torch.Tensor
) -> float:
    """Return the largest difference of first log-probs from those of hidden states [prompts, hidden] in float64."""
    assert hidden.dtype == torch.bfloat16
    exact = (hidden.double() @ weight.t() / TEMPERATURE).log_softmax(-1)
    differences = [
        abs(generation.log_probs[0] - float(row[generation.token_ids[0]]))
        for generation, row in zip(generations, exact, strict=True)
    ]
    return max(differences)


def _of_hf(folder: str, weight: torch.Tensor) -> float:
    engine = HFEngine(folder, dtype=torch.bfloat16, max_model_len=32, fp32_lm_head=True)
    hidden: list[torch.Tensor] = []
    engine.model.lm_head.register_forward_pre_hook(
        lambda _, args: hidden.append(args[0])
    )
    first = engine.generate(
        PROMPTS, SamplingOptions(1, temperature=TEMPERATURE), [0, 1, 2, 3]
    )
    return _difference(first, hidden[0][:, -1], weight)


def _of_actor(role: Actor, batch: RolloutBatch, weight: torch.Tensor) -> float:
    """Return the largest difference of an actor's log-probs from those of its hidden states in float64."""
    model: Any = role.model
    hidden: list[torch.Tensor] = []
    module = getattr(model, "module", None)
    layer = model.chunks[-1].output_layer if module is None else module.model.lm_head
    hook = layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))

    def score(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        values, _ = model.log_probs(output, micro, temperature=TEMPERATURE)
        states = output
        if model._head is None:
            assert output.dtype == torch.float32
            # [s, b, hidden] in megatron-core.
            states = hidden[-1] if module is not None else hidden[-1].transpose(0, 1)
        _, row, position = micro.predicting
        exact = states[row, position].double() @ weight.t() / TEMPERATURE
        picked = exact.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
        return (values.double() - model.joined(picked, micro)).abs().float()

    differences = role.score(batch, score, batch.response_shape)
    hook.remove()
    return float(differences.max())


def _of_output_layer(model: Any, weight: torch.Tensor) -> list[float]:
    """Return the share of elements of the gradients of hidden states and weight that are float64's, rounded once."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 2, weight.shape[1], generator=generator).bfloat16()
    targets = torch.randint(0, len(weight), (12,), generator=generator)
    exact = [t.double().clone().requires_grad_() for t in (hidden, weight)]
    logits = (exact[0] @ exact[1].t()).flatten(0, 1)
    logits.log_softmax(-1).gather(1, targets[:, None]).sin().sum().backward()
    hidden.requires_grad_()
    layer = model.chunks[-1].output_layer
    output, _ = layer(hidden)
    log_probs, _ = vocab_parallel_log_probs(
        output,
        targets,
        weight=None if model._head is None else model._head.weight,
        vocab_size=model.vocab_size,
        group=model.vocab_group,
    )
    log_probs.sin().sum().backward()
    coords, size = model.grid.coords, model.grid.shape.tp
    hidden_grad, of_hidden, of_weight = hidden.grad, exact[0].grad, exact[1].grad
    assert hidden_grad is not None and of_hidden is not None and of_weight is not None
    # Megatron's DDP has moved the weight's gradient there.
    by_weight = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    shard = of_weight.chunk(size)[coords.tp]
    return [
        float((found == reference.bfloat16()).double().mean())
        for found, reference in (
            (hidden_grad, of_hidden),
            (by_weight[: len(shard)], shard),
        )
    ]


def _scores(model: TrainingModel, batch: RolloutBatch) -> list[Any]:
    policy = Policy(model, temperature=TEMPERATURE, micro_batch_tokens=64)
    values: list[Any] = policy.log_probs(batch).tolist()
    return values
