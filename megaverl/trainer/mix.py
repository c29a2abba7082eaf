"""Additional updates on the responses of a training step (`mix`).

Each entry of `mix` is an update of the actor or of a reward model, after the actor's
own update and before the engines receive the weights. An entry trains on the best
responses (rejection sampling), on pairs of the best and the worst response (preference
loss or learned reward), or on reference answers (supervised).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megaverl.algorithms import count_denominators
from megaverl.config import Config
from megaverl.config.run import MixConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.preferences import best_and_worst, best_of_each, pairs_of
from megaverl.errors import DataError
from megaverl.trainer.roles import Roles
from megaverl.workers import local
from megaverl.workers.micro_batches import Weighting, cross_entropy, micro_batches_for
from megaverl.workers.pairs import PreferenceUpdates, RewardModelUpdates, as_metrics
from megaverl.workers.policy import Actor
from megaverl.workers.reward import Scores

Metrics = dict[str, float]


def name_of_mix(config: Config, index: int) -> str:
    """Return the name of an entry of `mix`, for the timeline and as an operator."""
    return f"mix_{index}_{config.mix[index].update}"


class Mix:
    """Additional updates of a run (`mix`).

    Args:
        record: called with a name and the metrics of each update.
    """

    def __init__(
        self,
        config: Config,
        roles: Roles,
        record: Callable[[str, Metrics], None],
    ) -> None:
        self.config, self._roles, self.record = config, roles, record

    @property
    def actor(self) -> Actor:
        """Return the actor on this rank."""
        return local(self._roles.actor)

    def update(
        self, index: int, rollouts: RolloutBatch, scores: Scores, step: int
    ) -> None:
        """Run one entry's update if this step is one of its steps. The actor is not
        updated while only the critic warms up.
        """
        entry = self.config.mix[index]
        warms_up = (
            step < self.config.algorithm.critic_warmup_steps
            and entry.update != "reward_model"
        )
        if (step + 1) % entry.every or warms_up:
            return
        if entry.update == "rejection":
            take_step = self._rejection
        else:
            take_step = self._answers if entry.update == "sft" else self._pairs
        self.record(
            f"mix_{entry.update}",
            take_step(entry, rollouts, scores.metric(entry.judge)),
        )

    def _rejection(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train with cross-entropy on the best response of every group whose scores differ (RAFT, arXiv 2304.06767)."""
        # A group with equal scores has no best response.
        differing = set(best_and_worst(judged, rollouts.group_ids))
        best = [
            row for row in best_of_each(judged, rollouts.group_ids) if row in differing
        ]
        metrics = (
            answers_update(self.actor, rollouts.select(best), weight=entry.weight)
            if best
            else {}
        )
        return metrics | {"samples": float(len(best))}

    def _pairs(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train on the best and the worst response of every group, by `preference.loss` or to rank them."""
        pairs = best_and_worst(judged, rollouts.group_ids)
        metrics = (
            self._pair_updates(entry).update(rollouts.select(pairs)) if pairs else {}
        )
        return metrics | {"samples": float(len(pairs))}

    def _pair_updates(self, entry: MixConfig) -> PreferenceUpdates | RewardModelUpdates:
        config, roles = self.config, self._roles
        if entry.update == "reward_model":
            assert roles.learned is not None
            section = config.reward_model
            return RewardModelUpdates(
                roles.learned,
                section.loss,
                section.options,
                micro_batch_tokens=section.micro_batch_tokens,
                weight=entry.weight,
            )
        return PreferenceUpdates(
            self.actor.trainable,
            config.preference.loss,
            config.preference.options,
            local(roles.reference) if config.preference_needs_reference else None,
            micro_batch_tokens=self.actor.micro_batch_tokens,
            weight=entry.weight,
        )

    def _answers(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train with cross-entropy on the reference answer of every prompt.

        Raises:
            DataError: a reference answer is not text.
        """
        tokenizer = self._roles.reward.tokenizer
        firsts = [
            int((rollouts.group_ids == group).nonzero()[0, 0])
            for group in rollouts.group_ids.unique()
        ]
        prompts, answers = [], []
        for row in firsts:
            answer = rollouts.columns["reference"][row]
            if not isinstance(answer, str):
                raise DataError(
                    f"mix: the answer to {rollouts.columns['prompt'][row]!r:.60} is {type(answer).__name__}, and "
                    "update: sft needs text. Name the right column with data.answer_key."
                )
            prompts.append(
                rollouts.input_ids[row, : int(rollouts.prompt_lengths[row])].tolist()
            )
            answers.append([*tokenizer.encode(answer), tokenizer.eos_token_id])
        metrics = answers_update(
            self.actor, pairs_of(prompts, answers), weight=entry.weight
        )
        return metrics | {"samples": float(len(firsts))}


def answers_update(
    actor: Actor, batch: RolloutBatch, *, weight: float = 1.0
) -> Metrics:
    """Run one optimizer step of the actor on the mean cross-entropy of the masked tokens, times `weight`."""
    mask = batch.response_mask
    weights = Weighting("token_mean").weights(mask, count_denominators(mask)) * weight
    micro = micro_batches_for(
        actor.model, batch, actor.micro_batch_tokens, {"weights": weights}
    )
    return as_metrics(actor.trainable.update(micro, cross_entropy(actor.model)))
