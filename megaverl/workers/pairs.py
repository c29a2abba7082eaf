"""Updates on judged responses: a policy by a preference loss, a reward model by a ranking loss or by outcomes.

A batch alternates better and worse responses; for KTO its rows are independent
responses, `desirable` or not. A pair is never split over micro-batches, so that one
forward pass yields both sides of its loss. Weights are normalised over the pairs (for
KTO the responses) of the whole batch, so that the result depends neither on the split
nor on the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import (
    LossOutput,
    Registry,
    finalize,
    implicit_rewards,
    kto_reference_kl,
    matched,
    mean_log_ratio,
    outcome_cross_entropy,
    preference_losses,
    response_log_probs,
    reward_model_losses,
)
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import gather_samples
from megaverl.models.packing import MicroBatch
from megaverl.workers.micro_batches import ModelWorker, micro_batches_for, share
from megaverl.workers.model import Loss, TrainingModel
from megaverl.workers.policy import Policy
from megaverl.workers.trainable import TrainableModel, UpdateReport


def column(micro: MicroBatch, name: str) -> torch.Tensor:
    """Return a field [b, 1] as [b]; zeros in a micro-batch that is only padding."""
    values = micro.fields[name]
    return values[:, 0] if values.shape[1] else values.new_zeros(len(values))


class PairUpdates(ModelWorker):
    """Base of updates on pairs: it holds the loss, builds micro-batches of whole pairs, and reports metrics.

    Args:
        trainable: the model to train. For a policy, log-probs of the policy and the reference are at temperature 1.
        name: name of the loss in `losses`.
        options: options of the loss.
        weight: factor on the loss.

    Raises:
        ConfigError: no loss has this name, or the loss does not have these options.
    """

    losses: Registry[LossOutput]

    def __init__(
        self,
        trainable: TrainableModel,
        name: str,
        options: Mapping[str, Any],
        *,
        micro_batch_tokens: int,
        weight: float = 1.0,
    ) -> None:
        super().__init__(trainable.model, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.entry = trainable, self.losses.get(name)
        self.options, self.weight = dict(options), weight
        self.entry.check_options(self.options)

    def share_of_loss(
        self, inputs: Mapping[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of these inputs, multiplied by the weight, and its metrics."""
        result = self.entry(inputs, **self.options)
        loss = self.weight * result.loss
        return loss, {**result.metrics, "loss": share(loss)}

    def run(
        self,
        batch: RolloutBatch,
        fields: Mapping[str, torch.Tensor],
        loss: Loss,
        *,
        unit: int = 2,
    ) -> dict[str, float]:
        """Take one optimizer step on the pairs (or responses) of `batch`. Collective over the role's ranks.

        Args:
            fields: one value per response, [2 x pairs].
            unit: number of responses per term of the loss.
        """
        # [2 x pairs]: equal weights that sum to one over all terms of the batch.
        weights = torch.full((len(batch),), 1.0 / max(len(batch) // unit, 1))
        pair_fields = {
            name: values.unsqueeze(1).float()
            for name, values in {**fields, "weights": weights}.items()
        }
        # Only tokens under the batch's mask count. A micro-batch's own mask has all
        # tokens of a response.
        pair_fields["own"] = batch.response_mask
        micro = micro_batches_for(
            self.model, batch, self.micro_batch_tokens, pair_fields, unit=unit
        )
        return as_metrics(self.trainable.update(micro, loss))


def as_metrics(report: UpdateReport) -> dict[str, float]:
    """Return the means of a loss's metrics, with `loss`, `grad_norm` and `lr`."""
    # The loss is a sum of shares. All other entries are means.
    sums = dict(report.sums)
    total = sums.pop("loss")
    return {
        **finalize(type(report.sums)(sums)),
        "loss": float(total[1]),
        "grad_norm": report.grad_norm,
        "lr": report.learning_rate,
    }


class PreferenceUpdates(PairUpdates):
    """Updates of a policy by a preference loss, such as DPO or KTO.

    Args:
        reference: policy whose log-probs the loss compares with. None: the loss needs no reference.
    """

    losses = preference_losses

    def __init__(
        self,
        policy: TrainableModel,
        name: str,
        options: Mapping[str, Any],
        reference: Policy | None = None,
        *,
        micro_batch_tokens: int,
        weight: float = 1.0,
    ) -> None:
        super().__init__(
            policy, name, options, micro_batch_tokens=micro_batch_tokens, weight=weight
        )
        self._single = reads_single_responses(name)
        self._plain = Policy(
            self.model, temperature=1.0, micro_batch_tokens=micro_batch_tokens
        )
        self._reference = None if reference is None else reference.untempered()

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Take one optimizer step, and return the loss's metrics."""
        fields: dict[str, torch.Tensor] = {}
        if self._reference is not None:
            # The reference scores before the update. It may share the policy's weights,
            # without adapters.
            fields["ref"] = _sum_log_probs(self._reference, batch)[0]
        fields |= self._mini_batch_fields(batch, fields.get("ref"))
        if not self._single:
            return self.run(batch, fields, self._loss)
        return self.run(
            batch, {**fields, "desirable": batch.desirable}, self._loss, unit=1
        )

    def _mini_batch_fields(
        self, batch: RolloutBatch, ref: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Compute loss inputs that depend on all rows, from the policy before the update; each [B]."""
        # Loss functions declare what they read, and only that is computed.
        wanted, fields = {*self.entry.inputs, *self.entry.optional_inputs}, {}
        if "reference_kl" in wanted:
            assert self._reference is not None
            fields["reference_kl"] = self._mismatched_kl(batch, self._reference).expand(
                len(batch)
            )
        if "chosen_alignment" in wanted:
            fields["alignment"] = alignment(self._plain, batch)
        if "mean_chosen_length" in wanted:
            mean_length = batch.response_mask[0::2].sum() / max(len(batch) // 2, 1)
            fields["mean_chosen_length"] = mean_length.expand(len(batch))
        # Better and worse responses alternate: rows 0, 2, ... are the better ones.
        if wanted & {"reward_shift", "margin_shifts", "chosen_matched"}:
            assert ref is not None
            log_ratios = _sum_log_probs(self._plain, batch)[0] - ref
            if "reward_shift" in wanted:
                fields["reward_shift"] = mean_log_ratio(
                    log_ratios, batch.desirable
                ).expand(len(batch))
            chosen, rejected, margins = (
                log_ratios[0::2],
                log_ratios[1::2],
                ref[0::2] - ref[1::2],
            )
            if "margin_shifts" in wanted:
                shifts = margins - matched(chosen - rejected + margins, margins)
                fields["margin_shifts"] = shifts.repeat_interleave(2)
            if "chosen_matched" in wanted:
                fields["matched"] = torch.stack(
                    [matched(chosen, rejected), matched(rejected, chosen)], dim=1
                ).flatten()
        return fields

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """Return `accuracy`, the fraction of pairs or responses that the policy ranks correctly.

        A pair counts if the better response is the likelier one, relative to the
        reference if there is one. An independent response counts if its log-ratio is
        above the loss's reference point (KTO, BCO) exactly when it is desirable.
        """
        reference = self._reference
        sums, lengths = _sum_log_probs(self._plain, batch)
        # Without a reference, responses of different lengths are compared by their mean
        # log-prob.
        sums = (
            sums / lengths.clamp(min=1)
            if reference is None
            else sums - _sum_log_probs(reference, batch)[0]
        )
        if self._single:
            bar: torch.Tensor | float = 0.0
            if "reward_shift" in self.entry.inputs:
                bar = mean_log_ratio(sums, batch.desirable)
            elif reference is not None:
                bar = self._mismatched_kl(batch, reference).clamp(min=0.0)
            return {"accuracy": float(((sums > bar) == batch.desirable).float().mean())}
        return {"accuracy": float((sums[0::2] > sums[1::2]).float().mean())}

    def _mismatched_kl(self, batch: RolloutBatch, reference: Policy) -> torch.Tensor:
        """Return KTO's reference point, which pairs each prompt with a response to the next prompt."""
        shifted = batch.select(rows_of_next_group(batch.group_ids.tolist()))
        # Prompt of one group with the response of another: a sample of mismatched
        # pairs.
        crossed = RolloutBatch(
            {
                "input_ids": batch.input_ids,
                "prompt_lengths": batch.prompt_lengths,
                "generated_ids": shifted.generated_ids,
                "response_lengths": shifted.response_lengths,
                "response_mask": shifted.response_mask,
            }
        )
        policy_log_probs, frozen = (
            _sum_log_probs(policy, crossed)[0] for policy in (self._plain, reference)
        )
        return kto_reference_kl(policy_log_probs, frozen)

    def _loss(
        self, logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro)
        sums, lengths = response_log_probs(log_probs, micro.fields["own"])
        weights = column(micro, "weights")
        inputs: dict[str, torch.Tensor] = {}
        if self._single:
            inputs = {
                "log_probs": sums,
                "desirable": column(micro, "desirable") > 0,
                "weights": weights,
            }
            scalars = [
                name
                for name in ("reference_kl", "reward_shift")
                if name in micro.fields
            ]
            # Scalars travel as one equal value per row. A micro-batch of padding alone
            # has no row.
            inputs |= {name: column(micro, name)[:1].sum() for name in scalars}
            if "ref" in micro.fields:
                inputs["ref_log_probs"] = column(micro, "ref")
        else:
            for place, side in enumerate(("chosen", "rejected")):
                inputs[f"{side}_log_probs"], inputs[f"{side}_lengths"] = (
                    sums[place::2],
                    lengths[place::2],
                )
                if "ref" in micro.fields:
                    inputs[f"ref_{side}_log_probs"] = column(micro, "ref")[place::2]
                    inputs[f"{side}_log_ratios"] = (
                        sums[place::2] - inputs[f"ref_{side}_log_probs"]
                    )
                for name in {"alignment", "matched"} & set(micro.fields):
                    inputs[f"{side}_{name}"] = column(micro, name)[place::2]
            if "margin_shifts" in micro.fields:
                inputs["margin_shifts"] = column(micro, "margin_shifts")[0::2]
            if "mean_chosen_length" in micro.fields:
                inputs["mean_chosen_length"] = column(micro, "mean_chosen_length")[
                    :1
                ].sum()
            # Both rows of a pair have the weight of the pair.
            inputs["weights"] = weights[0::2]
        return self.share_of_loss(inputs)


def _sum_log_probs(
    policy: Policy, batch: RolloutBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probs, lengths) of whole responses, both [B], in host memory."""
    return response_log_probs(policy.log_probs(batch).cpu(), batch.response_mask)


def alignment(policy: Policy, batch: RolloutBatch) -> torch.Tensor:
    """Return WPO's weights, [B] float32: the mean over a response's tokens of log p(y_t) - log sum_v p(v)^2.

    An empty response has weight 0.
    """

    def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        log_probs, squares = policy.model.squared_probs(
            logits, micro, temperature=policy.temperature
        )
        return torch.where(micro.response_mask, log_probs - squares.log(), 0.0)

    policy_log_probs = policy.score(batch, score, batch.response_shape).cpu()
    sums, lengths = response_log_probs(policy_log_probs, batch.response_mask)
    return sums / lengths.clamp(min=1)


def reads_single_responses(name: str) -> bool:
    """Return whether a preference loss reads independent responses, desirable or not (KTO), instead of pairs."""
    return "desirable" in preference_losses.get(name).inputs


def rows_of_next_group(group_ids: Sequence[int]) -> list[int]:
    """Return for every row a row of the next group; the last group is followed by the first.

    The row has the same index in its group, or the last one if the next group is
    smaller.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    order = list(groups)
    following = {
        group: groups[order[(i + 1) % len(order)]] for i, group in enumerate(order)
    }
    # Position of each row in its group.
    places = [groups[group].index(row) for row, group in enumerate(group_ids)]
    return [
        following[group][min(place, len(following[group]) - 1)]
        for group, place in zip(group_ids, places, strict=True)
    ]


class RewardModel(ModelWorker):
    """Sequence classifier with one label, which scores a response by its value at the last token.

    Args:
        model: has a value head.
    """

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the scores of all samples, [B] float32 in host memory, identical on every rank."""
        return gather_samples(
            batch,
            self.score(batch, partial(at_the_end, self.model), (len(batch), 1))[
                :, 0
            ].cpu(),
        )


class RewardModelUpdates(PairUpdates):
    """Updates of a reward model on pairs."""

    losses = reward_model_losses

    @property
    def reward_model(self) -> RewardModel:
        """Scorer that shares the weights being trained."""
        return RewardModel(self.model, micro_batch_tokens=self.micro_batch_tokens)

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Take one optimizer step; `margins` of the batch are used if present."""
        fields = {"margins": batch.margins} if "margins" in batch else {}
        return self.run(batch, fields, self._loss)

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """Return `accuracy`, how often the better response scores higher, and `margin`, the mean score difference."""
        scores = self.reward_model.scores(batch)
        better, worse = scores[0::2], scores[1::2]
        return {
            "accuracy": float((better > worse).float().mean()),
            "margin": float((better - worse).mean()),
        }

    def _loss(
        self, output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        scores = at_the_end(self.model, output, micro)[:, 0]
        return self.share_of_loss(
            {
                "chosen_rewards": scores[0::2],
                "rejected_rewards": scores[1::2],
                "weights": column(micro, "weights")[0::2],
                "margins": column(micro, "margins")[0::2]
                if "margins" in micro.fields
                else None,
            }
        )


def at_the_end(
    model: TrainingModel, output: torch.Tensor, micro: MicroBatch
) -> torch.Tensor:
    """Return the value at each sequence's last token: [b, s, 1] -> [b, 1] float32, 0 for padding rows."""
    values = model.at_the_end(output, micro)
    # Zero padding rows.
    return values.masked_fill((micro.response_lengths == 0).unsqueeze(1), 0.0)


class ImplicitRewardModel(Policy):
    """PRIME (arXiv 2502.01456): a language model phi, initialised from the policy, whose log-probs give token rewards.

    r_t = beta log(phi(y_t) / reference(y_t)). phi is trained online by the
    cross-entropy of sigmoid(sum r_t) with the correctness of the response.

    Args:
        beta: scale of the rewards.
    """

    def __init__(
        self,
        trainable: TrainableModel,
        *,
        temperature: float,
        micro_batch_tokens: int,
        beta: float,
    ) -> None:
        super().__init__(
            trainable.model,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
        )
        self.trainable, self.beta = trainable, beta

    def rewards(self, batch: RolloutBatch, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """Return the reward of every response token, [B, R] float32, identical on every rank."""
        log_probs = self.log_probs(batch)
        return implicit_rewards(
            log_probs, ref_log_probs.to(log_probs.device), beta=self.beta
        )

    def update(
        self, batch: RolloutBatch, ref_log_probs: torch.Tensor, correct: torch.Tensor
    ) -> dict[str, float]:
        """Take one optimizer step on all responses. Collective over the role's ranks.

        Args:
            ref_log_probs: [B, R].
            correct: [B] bool.
        """
        weights = torch.full((len(batch), 1), 1.0 / max(len(batch), 1))
        fields = {
            "ref_log_probs": ref_log_probs,
            "own": batch.response_mask,
            "correct": correct.float().unsqueeze(1),
            "weights": weights,
        }
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, fields)
        return as_metrics(self.trainable.update(micro, self._loss))

    def _loss(
        self, logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
        result = outcome_cross_entropy(
            log_probs,
            micro.fields["ref_log_probs"],
            column(micro, "correct"),
            micro.fields["own"],
            column(micro, "weights"),
            beta=self.beta,
        )
        return result.loss, {**result.metrics, "loss": share(result.loss)}
