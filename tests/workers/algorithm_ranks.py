"""What the ranks of a test world do with every policy loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config import load_config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.yaml_source import recipe
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.tokenizers import load_tokenizer
from megaverl.distributed.grid import GridShape
from megaverl.rollout.engine import Generation
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.mix import Mix, answers_update
from megaverl.workers.critic import Critic
from megaverl.workers.log_prob_check import LogProbDifference
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import MegatronTrainable
from megaverl.workers.pairs import (
    ImplicitRewardModel,
    PreferenceUpdates,
    RewardModelUpdates,
)
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.reward import Scores
from megaverl.workers.teacher import Teacher
from megaverl.workers.text_teacher import TextTeacher
from tests.models.ranks import manager
from tests.workers.ranks import experience


def updates(
    folder: str,
    teacher: str,
    shape: dict[str, int],
    algorithms: dict[str, dict[str, Any]],
    micro_batch_tokens: int,
) -> dict[str, Any]:
    """Metrics of an update with each of `algorithms` on a grid that fills the world, and the squared score norms.

    Args:
        teacher: folder of another model, for those with a divergence. algorithms: with `chunked` logits are never
            whole.
    """
    grid = manager().grid(GridShape(**shape))

    def model(folder: str, role: str, *, chunked: bool) -> MegatronModel:
        spec = ModelSpec.from_folder(folder)
        made = MegatronModel(
            spec,
            grid,
            ModelOptions(
                dtype=torch.float32, seed=0, role=role, chunked_logits=chunked
            ),
        )
        made.load(folder)
        return made

    found: dict[str, Any] = {}
    for name, given in algorithms.items():
        algorithm = {key: value for key, value in given.items() if key != "chunked"}
        optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
        student = model(folder, "actor", chunked=given.get("chunked", False))
        trainable = MegatronTrainable(
            student, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10
        )
        config = AlgorithmConfig(**algorithm)
        actor = Actor(
            trainable,
            config,
            temperature=0.8,
            micro_batch_tokens=micro_batch_tokens,
            seed=0,
        )
        if config.divergence_name is not None:
            frozen = model(teacher, "reference", chunked=True)
            taught = config.distillation
            actor.teacher = Teacher(
                frozen,
                config.divergence_name,
                taught.options,
                temperature=0.8,
                top_k=taught.top_k,
            )
        if "score_norms" not in found:
            found["score_norms"] = actor.score_norms(experience()).tolist()
        found[name] = actor.update(experience(), step=0, kl_coef=0.1)
    return found


def pair_updates(
    folder: str,
    shape: dict[str, int],
    losses: dict[str, dict[str, Any]],
    micro_batch_tokens: int,
) -> dict[str, Any]:
    """Metrics of two updates with each preference loss and of a reward model, and what both say of pairs after them."""
    grid, pairs = manager().grid(GridShape(**shape)), experience()
    pairs = pairs.select(list(range(len(pairs) // 2 * 2)))
    holes = pairs.response_mask & (
        (torch.arange(9) != 1) | (pairs.response_lengths < 3).unsqueeze(1)
    )
    every_other = torch.arange(len(pairs)) % 2 == 0
    pairs = pairs.with_(  # a token of somebody else's in the middle
        response_mask=holes,
        desirable=every_other,
        group_ids=torch.arange(len(pairs)) // 2,
    )
    optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}

    def model(value_head: int = 0, seed: int = 0) -> MegatronModel:
        made = MegatronModel(
            ModelSpec.from_folder(folder),
            grid,
            ModelOptions(
                dtype=torch.float32, seed=seed, role="actor", value_head=value_head
            ),
        )
        made.load(folder)
        return made

    def trainable(made: MegatronModel) -> MegatronTrainable:
        return MegatronTrainable(
            made, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10
        )

    # as in a run that samples at this temperature: pairs are compared at 1
    reference = Policy(model(), temperature=0.7, micro_batch_tokens=micro_batch_tokens)
    found: dict[str, Any] = {}
    for name, options in losses.items():
        updates = PreferenceUpdates(
            trainable(model()),
            name,
            options,
            reference,
            micro_batch_tokens=micro_batch_tokens,
        )
        found[name] = [updates.update(pairs) for _ in range(2)] + [
            updates.evaluate(pairs)
        ]
    single = pairs.select([0, 3, 4, 5, 1]).with_(
        group_ids=torch.arange(5)
    )  # two desirable ones, and three that are not
    updates = PreferenceUpdates(
        trainable(model()), "kto", {}, reference, micro_batch_tokens=micro_batch_tokens
    )
    found["single"] = [updates.update(single) for _ in range(2)] + [
        updates.evaluate(single)
    ]
    margins = torch.arange(len(pairs)).float() // 2 / 10
    ranking = RewardModelUpdates(
        trainable(model(value_head=1)),
        "bradley_terry",
        {"center_coef": 0.01},
        micro_batch_tokens=micro_batch_tokens,
    )
    found["reward_model"] = [
        ranking.update(pairs.with_(margins=margins)) for _ in range(3)
    ]
    found["scores"] = ranking.reward_model.scores(pairs).tolist()
    phi = ImplicitRewardModel(
        trainable(model()),
        temperature=0.8,
        micro_batch_tokens=micro_batch_tokens,
        beta=0.5,
    )
    frozen, correct = phi.log_probs(pairs), every_other
    found["implicit"] = [phi.update(pairs, frozen, correct) for _ in range(2)]
    writer = Actor(
        trainable(model()),
        AlgorithmConfig(),
        temperature=0.7,
        micro_batch_tokens=micro_batch_tokens,
        seed=0,
    )
    found["answers"] = [answers_update(writer, pairs, weight=0.5) for _ in range(2)]
    agents = pairs.with_(agent_ids=torch.arange(len(pairs)) % 2)
    critic = Critic(
        trainable(model(value_head=2)),
        AlgorithmConfig(name="ppo"),
        micro_batch_tokens=micro_batch_tokens,
        seed=0,
    )
    found["two_heads"] = [critic.update(agents, step=step) for step in range(2)]
    found["values"] = critic.values(agents)[0].tolist()
    return found


def preference_losses_at_rest(
    folder: str,
    other: str,
    shape: dict[str, int],
    losses: dict[str, dict[str, Any]],
    micro_batch_tokens: int,
) -> dict[str, Any]:
    """Metrics of an update with each loss that moves nothing, of one model, next to
    another as its reference, of online DPO's recipe on two groups of three, and
    `answers`: both models' log-probs of the responses.
    """
    grid, pairs = manager().grid(GridShape(**shape)), experience()
    pairs = pairs.with_(
        desirable=torch.arange(len(pairs)) % 2 == 0,
        group_ids=torch.arange(len(pairs)) // 2,
    )
    models = []
    for path in (folder, other):
        made = MegatronModel(
            ModelSpec.from_folder(path),
            grid,
            ModelOptions(dtype=torch.float32, seed=0, role="actor"),
        )
        made.load(path)
        models.append(made)
    still = {"lr": 0.0, "weight_decay": 0.0, "clip_grad": 1.0}
    trainable = MegatronTrainable(
        models[0], optimizer=still, scheduler={}, ddp={}, total_updates=10
    )
    reference = Policy(
        models[1], temperature=0.7, micro_batch_tokens=micro_batch_tokens
    )
    found = {}
    for name, options in losses.items():
        updates = PreferenceUpdates(
            trainable, name, options, reference, micro_batch_tokens=micro_batch_tokens
        )
        found[name] = updates.update(pairs) | updates.evaluate(pairs)
    judged = torch.tensor([0.2, 1.0, 0.5, 0.7, 0.1, 0.4])
    answers = pairs.with_(group_ids=torch.arange(len(pairs)) // 3)
    roles: Any = SimpleNamespace(
        actor=SimpleNamespace(
            trainable=trainable, micro_batch_tokens=micro_batch_tokens
        ),
        reference=reference,
    )
    config = load_config(
        recipe("gsm8k_smollm2/online_dpo"), check_paths=False, world_size=2
    )
    mix = Mix(config, roles, lambda name, metrics: found.update(online_dpo=metrics))
    mix.update(0, answers, Scores(judged, {"reward": judged}, judged > 0.5), 0)
    said = [
        Policy(each, temperature=1.0, micro_batch_tokens=micro_batch_tokens).log_probs(
            answers
        )
        for each in models
    ]
    found["answers"] = [
        torch.where(pairs.response_mask, each, 0.0).double().sum(dim=1).tolist()
        for each in said
    ]
    return found


def log_prob_difference(own: list[list[float]]) -> list[float]:
    """Mean, percentile and largest of what all ranks have, each `own` of its number."""
    difference, mine = LogProbDifference(), torch.tensor([own[dist.get_rank()]])
    difference.add(mine, torch.ones_like(mine).bool())
    return list(difference.over_ranks(dist.group.WORLD).stats())


def text_teacher(
    folder: str,
    student: str,
    own: str,
    shape: dict[str, int],
    prompts: list[str],
    answers: list[list[int]],
    log_probs: list[list[float]],
    most: int,
    chat: bool,
) -> tuple[list[list[float]], dict[str, float]]:
    """What a teacher with another tokenizer says of answers, in their order to each prompt in turn, and its report.

    Args: most: tokens that it can read.
    """
    spec = replace(ModelSpec.from_folder(folder), max_positions=most)
    model = MegatronModel(
        spec,
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.float32, seed=0, role="reference"),
    )
    model.load(folder)
    tokenizers = [load_tokenizer(path) for path in (student, own)]
    teacher = TextTeacher(
        model, *tokenizers, temperature=1.0, micro_batch_tokens=128, chat=chat
    )
    texts = [prompts[row % len(prompts)] for row in range(len(answers))]
    generations = [
        Generation(ids, log_probs[row], "stop") for row, ids in enumerate(answers)
    ]
    columns = {
        "prompt": texts,
        "messages": [[{"role": "user", "content": text}] for text in texts],
    }
    batch = RolloutBatch.from_generations(
        [[5, 6]] * len(answers), generations, columns=columns
    )
    assert all(
        list(rows) == list(range(len(answers)))
        for rows in teacher.rows(sequence_lengths(batch))
    )
    return teacher.log_probs(batch).tolist(), teacher.report()
