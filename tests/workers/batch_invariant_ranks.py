"""What the ranks of a test world do with an actor and an engine that are invariant to the batch."""

from __future__ import annotations

from typing import Any

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.platform import batch_invariant
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.weight import shapes_of
from megaverl.workers.model import TrainingModel
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.workers.ranks import trainable_of

TEMPERATURE = 0.8
SAMPLING = SamplingOptions(24, temperature=TEMPERATURE, ignore_eos=True)
# Prompts shorter and longer than a block of keys, and responses that cross one.
LENGTHS = (3, 90, 50, 5, 64, 43)
MICRO_BATCHES = (200, 4096)
STEPS = 2
FEW = 3  # tokens


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


def train_and_compare(
    folder: str,
    shape: dict[str, int],
    tp: int,
    dtype: str,
    *,
    fsdp: dict[str, Any] | None = None,
    fp32_lm_head: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train for some steps with an engine's own responses, reshard, and compare both sides' log-probs.

    Returns:
        `kl`: `mismatch_kl` of each update. `changed`: whether training changed the weights. `differences`: tokens
        whose log-probs differ between engine and actor, for each number of tokens in a micro-batch. `short`: the same
        for the first tokens of short samples, each by itself. `alone`, `others`: whether a response and its log-probs
        are the same by themselves, and among others in another order.
    """
    given = getattr(torch, dtype)
    trainable = trainable_of(
        folder,
        shape,
        fsdp=fsdp,
        dtype=given,
        batch_invariant=True,
        fp32_lm_head=fp32_lm_head,
        **options,
    )
    model = trainable.model
    engine = VLLMEngine(
        folder,
        RolloutConfig(tp=tp, batch_invariant=True),
        VLLMOptions(
            seed=0,
            dtype=given,
            max_model_len=192,
            load_weights=False,
            num_sequences=len(LENGTHS),
            fp32_lm_head=fp32_lm_head,
        ),
    )
    sync = WeightSync(
        ActorWeights.of(model),
        engine.layouts(shapes_of(model.weights)),
        engine,
        model.grid.world,
    )
    rollout = Rollout(engine, model.grid.world, sync)
    # A correction reports the mismatch.
    algorithm = AlgorithmConfig(correction={"kind": "token_truncate"})  # type: ignore[arg-type]  # pydantic builds it
    actor = Actor(
        trainable,
        algorithm,
        temperature=TEMPERATURE,
        micro_batch_tokens=MICRO_BATCHES[0],
        seed=0,
    )
    prompts = prompts_of(model.vocab_size)
    seeds = list(range(len(prompts)))
    before = [parameter.detach().clone() for parameter in model.parameters.values()]
    kl = []
    for step in range(STEPS):
        sync.source_changes()
        sync.reshard()
        batch = RolloutBatch.from_generations(
            prompts, rollout.generate(prompts, SAMPLING, seeds)
        )
        batch = batch.with_(
            old_log_probs=actor.log_probs(batch),
            advantages=torch.ones_like(batch.rollout_log_probs)
            * torch.tensor([1.0, -1.0] * 3)[:, None],
        )
        kl.append(actor.update(batch, step=step)["mismatch_kl"])
    sync.source_changes()
    sync.reshard()
    responses = rollout.generate(prompts, SAMPLING, seeds)
    batch = RolloutBatch.from_generations(prompts, responses)
    differences = []
    for tokens in MICRO_BATCHES:
        policy = Policy(model, temperature=TEMPERATURE, micro_batch_tokens=tokens)
        differ = policy.log_probs(batch).cpu() != batch.rollout_log_probs
        differences.append(int(differ[batch.response_mask].sum()))
    short = [actor_differs(model, prompts[i], responses[i]) for i in (0, 3)]
    alone = [rollout.generate([prompts[i]], SAMPLING, [seeds[i]])[0] for i in (1, 3, 5)]
    order = [4, 1, 0, 3]
    others = rollout.generate(
        [prompts[i] for i in order], SAMPLING, [seeds[i] for i in order]
    )
    engine.close()
    return {
        "kl": kl,
        "changed": any(
            not torch.equal(old, new)
            for old, new in zip(before, model.parameters.values(), strict=True)
        ),
        "differences": differences,
        "short": short,
        "alone": [
            same(responses[i], found) for i, found in zip((1, 3, 5), alone, strict=True)
        ],
        "others": [
            same(responses[i], found) for i, found in zip(order, others, strict=True)
        ],
        "still_on": batch_invariant.is_batch_invariant(),
    }


def actor_differs(model: TrainingModel, prompt: list[int], response: Generation) -> int:
    """In how many of a response's first tokens the actor differs from the engine, if it scores nothing else.

    Matrix libraries take another kernel for so few rows.
    """
    log_probs = list(response.log_probs)[:FEW]
    start = Generation(list(response.token_ids)[:FEW], log_probs, "length")
    batch = RolloutBatch.from_generations([prompt], [start])
    policy = Policy(model, temperature=TEMPERATURE, micro_batch_tokens=MICRO_BATCHES[0])
    differ = policy.log_probs(batch).cpu() != batch.rollout_log_probs
    return int(differ[batch.response_mask].sum())


def same(a: Generation, b: Generation) -> bool:
    """Whether tokens and log-probs are equal to the bit."""
    return list(a.token_ids) == list(b.token_ids) and list(a.log_probs) == list(
        b.log_probs
    )
