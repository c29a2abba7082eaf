"""What the ranks of a test world do in whole updates: rewards to advantages, mini-batches, epochs, losses, Adam."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.mix import answers_update
from megaverl.trainer.supervised import AnswerUpdates
from megaverl.workers.advantage_computer import AdvantageComputer
from megaverl.workers.critic import ActorCritic, Critic
from megaverl.workers.pairs import (
    ImplicitRewardModel,
    PreferenceUpdates,
    RewardModelUpdates,
)
from megaverl.workers.policy import Actor, Policy
from tests.workers.ranks import experience, trainable_of, with_own_tokens

GROUPS = (1, 2, 4)  # samples of each prompt
KL = 0.1
TEMPERATURE = 0.8
MICRO_BATCH_TOKENS = 30  # two or three samples
PAIR_STEPS = 2


def ragged() -> RolloutBatch:
    """A batch of groups of unequal size, with rewards. One response trains no token, and one has a hole.

    The log-probs of the update's start are near the model's: most ratios lie within a
    clip, some do not.
    """
    batch = experience(sum(GROUPS), seed=5)
    first = [
        sum(GROUPS[:group]) for group, size in enumerate(GROUPS) for _ in range(size)
    ]
    mask = batch.response_mask.clone()
    mask[3] = False
    mask[0, 4] = False
    generator = torch.Generator().manual_seed(11)
    return batch.with_(
        input_ids=batch.input_ids[first],
        prompt_lengths=batch.prompt_lengths[first],
        response_lengths=batch.response_mask.sum(dim=1),
        response_mask=mask,
        group_ids=torch.tensor(first),
        rewards=torch.randn(len(first), generator=generator),
    )


def pairs() -> RolloutBatch:
    """Three pairs of `ragged`, better and worse responses in turn; none without a token."""
    batch = experience(6, seed=7)
    return batch.with_(
        group_ids=torch.arange(6) // 2, desirable=torch.arange(6) % 2 == 0
    )


def whole_updates(
    folder: str, shape: dict[str, int], cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Metrics of a step of each algorithm, and what the model says of the samples after it.

    Args:
        cases: `algorithm`, and `role`: actor, critic or shared.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        role, config = case.get("role", "actor"), AlgorithmConfig(**case["algorithm"])
        trainable = trainable_of(
            folder,
            shape,
            fsdp=None,
            value_head=role != "actor",
            beside_logits=role == "shared",
            role="critic" if role == "critic" else "actor",
        )
        batch, _ = AdvantageComputer(config).assign_each(ragged(), kl_coef=KL, extra={})
        given: dict[str, Any] = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "seed": 0}
        if role == "critic":
            critic = Critic(trainable, config, **given)
            metrics = critic.update(with_own_tokens(critic, batch), step=0)
            after = critic.values(batch)[0]
        else:
            actor = (ActorCritic if role == "shared" else Actor)(
                trainable, config, temperature=TEMPERATURE, **given
            )
            # to select tokens by entropy, a rank needs the tokens of all samples, as in
            # a run
            own = (
                batch
                if config.top_entropy is not None
                else with_own_tokens(actor, batch)
            )
            metrics = actor.update(own, step=0, kl_coef=KL)
            after = actor.log_probs(batch)
        found[name] = {
            "metrics": metrics,
            "after": torch.where(batch.response_mask, after, 0.0).tolist(),
        }
    return found


def judged_updates(
    folder: str, other: str, shape: dict[str, int], losses: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Two steps on pairs with each preference loss, of a reward model, on answers and
    of PRIME's model; the metrics of each step, and what the model says after them.

    Args:
        other: folder of the reference.
    """
    batch, found = pairs(), {}
    cap = {"micro_batch_tokens": MICRO_BATCH_TOKENS}

    def trained(**options: Any) -> Any:
        return trainable_of(folder, shape, fsdp=None, role="actor", **options)

    def record(name: str, steps: list[dict[str, float]], after: torch.Tensor) -> None:
        found[name] = {"steps": steps, "after": after.tolist()}

    def said(trainable: Any) -> torch.Tensor:
        plain = Policy(trainable.model, temperature=1.0, **cap)
        return torch.where(batch.response_mask, plain.log_probs(batch), 0.0)

    frozen = trainable_of(other, shape, fsdp=None, role="reference").model
    reference = Policy(frozen, temperature=TEMPERATURE, **cap)
    for name, case in losses.items():
        trainable = trained()
        updates = PreferenceUpdates(
            trainable, case["loss"], case.get("options", {}), reference, **cap
        )
        record(
            name, [updates.update(batch) for _ in range(PAIR_STEPS)], said(trainable)
        )
    trainable = trained(value_head=1)
    ranking = RewardModelUpdates(
        trainable, "bradley_terry", {"center_coef": 0.01}, **cap
    )
    margins = batch.with_(margins=torch.arange(6).float() // 2 / 10)
    record(
        "reward_model",
        [ranking.update(margins) for _ in range(3)],
        ranking.reward_model.scores(batch),
    )
    trainable = trained()
    writer = Actor(trainable, AlgorithmConfig(), temperature=TEMPERATURE, seed=0, **cap)
    record(
        "answers",
        [answers_update(writer, ragged(), weight=0.5) for _ in range(PAIR_STEPS)],
        said(trainable),
    )
    trainable = trained()
    phi = ImplicitRewardModel(trainable, temperature=TEMPERATURE, beta=0.5, **cap)
    ref_log_probs = reference.log_probs(batch)
    record(
        "prime",
        [phi.update(batch, ref_log_probs, batch.desirable) for _ in range(PAIR_STEPS)],
        said(trainable),
    )
    trainable = trained()
    record(
        "sft",
        [sft_step(trainable, step) for step in range(PAIR_STEPS)],
        said(trainable),
    )
    return found


def sft_step(trainable: Any, step: int) -> dict[str, float]:
    """Take one step of `megaverl sft` on the responses of `ragged`, as answers of rows."""
    batch = ragged()
    # Its constructor builds a model from a run's configuration.
    updates = AnswerUpdates.__new__(AnswerUpdates)
    updates.algorithm, updates.seed, updates.micro_batch_tokens = (
        AlgorithmConfig(),
        0,
        MICRO_BATCH_TOKENS,
    )
    updates.model, updates.trainable = trainable.model, trainable
    limits: Any = SimpleNamespace(sft=SimpleNamespace(max_answer_tokens=99))
    encoder: Any = SimpleNamespace(
        encode_answer=lambda text: [int(token) for token in text.split()]
    )
    updates.config, updates.encoder = limits, encoder
    records: list[Any] = []
    for row in range(len(batch)):
        prompt = batch.input_ids[row, : int(batch.prompt_lengths[row])].tolist()
        answer = batch.generated_ids[row, : int(batch.response_lengths[row])].tolist()
        text = " ".join(map(str, answer))
        record = {
            "token_ids": prompt,
            "prompt": "",
            "messages": None,
            "text": "",
            "reference": text,
            "extra": {},
            "images": None,
        }
        records.append(SimpleNamespace(**record, where=f"row {row}"))
    return updates.update(records, step)
