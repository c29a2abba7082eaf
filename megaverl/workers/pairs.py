"""Updates on judged responses: the policy by a preference loss, a reward model by how it ranks them or by outcomes.

The rows of a batch are better and worse responses in turn; for KTO any responses, `desirable` or not. A pair is never
split over micro-batches, so that one forward pass gives both sides of its loss; weights are over the pairs (for KTO the
responses) of the whole batch, so that neither the split nor the grid shows in the result.
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
from megaverl.data.held_rows import of_all
from megaverl.models.packing import MicroBatch
from megaverl.workers.micro_batches import ModelWorker, micro_batches_for, share
from megaverl.workers.model import Loss, TrainingModel
from megaverl.workers.policy import Policy
from megaverl.workers.trainable import TrainableModel, UpdateReport


def column(micro: MicroBatch, name: str) -> torch.Tensor:
    """[b] out of a field [b, 1]; 0 in a micro-batch that only fills up."""
    values = micro.fields[name]
    return values[:, 0] if values.shape[1] else values.new_zeros(len(values))


class PairUpdates(ModelWorker):
    """What both kinds of update share: the loss, micro-batches of whole pairs, and the report as metrics.

    Args:
        trainable: what is trained; of a policy, its log-probs and a reference's are at temperature 1.
        name, options: of the loss, one of `losses`.
        weight: a factor on the loss.
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
        """The loss function's of these inputs, times the weight, and its metrics."""
        result = self.entry(inputs, **self.options)
        loss = self.weight * result.loss
        return loss, {**result.metrics, "loss": share(loss)}

    def run(
        self, batch: RolloutBatch, fields: Mapping[str, torch.Tensor], loss: Loss, *, unit: int = 2
    ) -> dict[str, float]:
        """One optimizer step on the pairs (or responses) of `batch`; every rank takes part.

        Args:
            fields: of each response, [2 x pairs]. unit: responses that make a term of the loss.
        """
        weights = torch.full((len(batch),), 1.0 / max(len(batch) // unit, 1))
        given = {name: values.unsqueeze(1).float() for name, values in {**fields, "weights": weights}.items()}
        given["own"] = batch.response_mask
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, given, unit=unit)
        return as_metrics(self.trainable.update(micro, loss))


def as_metrics(report: UpdateReport) -> dict[str, float]:
    """The means of a loss's metrics, `loss`, `grad_norm` and `lr`."""
    sums = dict(report.sums)
    total = sums.pop("loss")
    return {
        **finalize(type(report.sums)(sums)),
        "loss": float(total[1]),
        "grad_norm": report.grad_norm,
        "lr": report.learning_rate,
    }


class PreferenceUpdates(PairUpdates):
    """DPO and its relatives on a policy.

    Args:
        reference: whose log-probs the loss compares with; None where it has none.
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
        super().__init__(policy, name, options, micro_batch_tokens=micro_batch_tokens, weight=weight)
        self._single = of_single_responses(name)
        self._plain = Policy(self.model, temperature=1.0, micro_batch_tokens=micro_batch_tokens)
        self._reference = None if reference is None else reference.untempered()

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """One optimizer step. Returns the loss's metrics."""
        fields: dict[str, torch.Tensor] = {}
        if self._reference is not None:
            fields["ref"] = _of_responses(self._reference, batch)[0]
        fields |= self._of_the_mini_batch(batch, fields.get("ref"))
        if not self._single:
            return self.run(batch, fields, self._loss)
        return self.run(batch, {**fields, "desirable": batch.desirable}, self._loss, unit=1)

    def _of_the_mini_batch(self, batch: RolloutBatch, ref: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """[B] each: what the loss reads that depends on all rows, of the policy as it is before the update."""
        wanted, fields = {*self.entry.inputs, *self.entry.optional_inputs}, {}
        if "reference_kl" in wanted:
            assert self._reference is not None
            fields["reference_kl"] = self._mismatched_kl(batch, self._reference).expand(len(batch))
        if "chosen_alignment" in wanted:
            fields["alignment"] = alignment(self._plain, batch)
        if "mean_chosen_length" in wanted:
            mean_length = batch.response_mask[0::2].sum() / max(len(batch) // 2, 1)
            fields["mean_chosen_length"] = mean_length.expand(len(batch))
        if wanted & {"reward_shift", "margin_shifts", "chosen_matched"}:
            assert ref is not None
            log_ratios = _of_responses(self._plain, batch)[0] - ref
            if "reward_shift" in wanted:
                fields["reward_shift"] = mean_log_ratio(log_ratios, batch.desirable).expand(len(batch))
            chosen, rejected, margins = log_ratios[0::2], log_ratios[1::2], ref[0::2] - ref[1::2]
            if "margin_shifts" in wanted:
                shifts = margins - matched(chosen - rejected + margins, margins)
                fields["margin_shifts"] = shifts.repeat_interleave(2)
            if "chosen_matched" in wanted:
                fields["matched"] = torch.stack([matched(chosen, rejected), matched(rejected, chosen)], dim=1).flatten()
        return fields

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """`accuracy`: how often the better response is the likelier one, next to the reference if there is one.

        Of single responses: how often one is likelier than the reference finds it, if it is desirable, and less likely
        if it is not; next to what KTO, or BCO, compares with.
        """
        reference = self._reference
        sums, lengths = _of_responses(self._plain, batch)
        sums = sums / lengths.clamp(min=1) if reference is None else sums - _of_responses(reference, batch)[0]
        if self._single:
            bar: torch.Tensor | float = 0.0
            if "reward_shift" in self.entry.inputs:
                bar = mean_log_ratio(sums, batch.desirable)
            elif reference is not None:
                bar = self._mismatched_kl(batch, reference).clamp(min=0.0)
            return {"accuracy": float(((sums > bar) == batch.desirable).float().mean())}
        return {"accuracy": float((sums[0::2] > sums[1::2]).float().mean())}

    def _mismatched_kl(self, batch: RolloutBatch, reference: Policy) -> torch.Tensor:
        """KTO's reference point: each prompt with a response to the next one."""
        others = batch.select(of_the_next(batch.group_ids.tolist()))
        crossed = RolloutBatch(
            {
                "input_ids": batch.input_ids,
                "prompt_lengths": batch.prompt_lengths,
                "generated_ids": others.generated_ids,
                "response_lengths": others.response_lengths,
                "response_mask": others.response_mask,
            }
        )
        mine, frozen = (_of_responses(policy, crossed)[0] for policy in (self._plain, reference))
        return kto_reference_kl(mine, frozen)

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro)
        sums, lengths = response_log_probs(log_probs, micro.fields["own"])
        weights = column(micro, "weights")
        inputs: dict[str, torch.Tensor] = {}
        if self._single:
            inputs = {"log_probs": sums, "desirable": column(micro, "desirable") > 0, "weights": weights}
            scalars = [name for name in ("reference_kl", "reward_shift") if name in micro.fields]
            inputs |= {name: column(micro, name)[:1].sum() for name in scalars}
            if "ref" in micro.fields:
                inputs["ref_log_probs"] = column(micro, "ref")
        else:
            for place, side in enumerate(("chosen", "rejected")):
                inputs[f"{side}_log_probs"], inputs[f"{side}_lengths"] = sums[place::2], lengths[place::2]
                if "ref" in micro.fields:
                    inputs[f"ref_{side}_log_probs"] = column(micro, "ref")[place::2]
                    inputs[f"{side}_log_ratios"] = sums[place::2] - inputs[f"ref_{side}_log_probs"]
                for name in {"alignment", "matched"} & set(micro.fields):
                    inputs[f"{side}_{name}"] = column(micro, name)[place::2]
            if "margin_shifts" in micro.fields:
                inputs["margin_shifts"] = column(micro, "margin_shifts")[0::2]
            if "mean_chosen_length" in micro.fields:
                inputs["mean_chosen_length"] = column(micro, "mean_chosen_length")[:1].sum()
            inputs["weights"] = weights[0::2]
        return self.share_of_loss(inputs)


def _of_responses(policy: Policy, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, lengths) of whole responses, both [B], on the host."""
    return response_log_probs(policy.log_probs(batch).cpu(), batch.response_mask)


def alignment(policy: Policy, batch: RolloutBatch) -> torch.Tensor:
    """[B] float32, of WPO: the mean over a response's tokens of log p(y_t) - log sum_v p(v)^2; 0 for an empty one."""

    def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        log_probs, squares = policy.model.squared_probs(logits, micro, temperature=policy.temperature)
        return torch.where(micro.response_mask, log_probs - squares.log(), 0.0)

    found = policy.score(batch, score, batch.response_shape).cpu()
    sums, lengths = response_log_probs(found, batch.response_mask)
    return sums / lengths.clamp(min=1)


def of_single_responses(name: str) -> bool:
    """Whether every response counts by itself in a preference loss, as desirable or not (KTO)."""
    return "desirable" in preference_losses.get(name).inputs


def of_the_next(group_ids: Sequence[int]) -> list[int]:
    """For every row one of the next group, at the same place in it as far as it reaches; the last has the first."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    order = list(groups)
    following = {group: groups[order[(i + 1) % len(order)]] for i, group in enumerate(order)}
    places = [groups[group].index(row) for row, group in enumerate(group_ids)]
    return [
        following[group][min(place, len(following[group]) - 1)] for group, place in zip(group_ids, places, strict=True)
    ]


class RewardModel(ModelWorker):
    """A sequence classifier with one label: scores a response by its value at the last token.

    Args:
        model: with a value head.
    """

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """[B] float32, of all samples, the same on every rank; on the host, where rewards are added up."""
        return of_all(batch, self.score(batch, partial(at_the_end, self.model), (len(batch), 1))[:, 0].cpu())


class RewardModelUpdates(PairUpdates):
    """Trains a reward model on pairs."""

    losses = reward_model_losses

    @property
    def reward_model(self) -> RewardModel:
        """As it is at the moment."""
        return RewardModel(self.model, micro_batch_tokens=self.micro_batch_tokens)

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """One optimizer step; `margins` of the batch are used if it has them."""
        fields = {"margins": batch.margins} if "margins" in batch else {}
        return self.run(batch, fields, self._loss)

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """`accuracy`: how often the better response scores higher; `margin`: by how much, in the mean."""
        scores = self.reward_model.scores(batch)
        better, worse = scores[0::2], scores[1::2]
        return {"accuracy": float((better > worse).float().mean()), "margin": float((better - worse).mean())}

    def _loss(self, output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        scores = at_the_end(self.model, output, micro)[:, 0]
        return self.share_of_loss(
            {
                "chosen_rewards": scores[0::2],
                "rejected_rewards": scores[1::2],
                "weights": column(micro, "weights")[0::2],
                "margins": column(micro, "margins")[0::2] if "margins" in micro.fields else None,
            }
        )


def at_the_end(model: TrainingModel, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[b, s, 1] -> [b, 1] float32: the value at each sequence's last token."""
    values = model.at_the_end(output, micro)
    return values.masked_fill((micro.response_lengths == 0).unsqueeze(1), 0.0)  # a row that only fills up


class ImplicitRewardModel(Policy):
    """PRIME (arXiv 2502.01456): a language model phi that begins as the policy, whose log-probs are rewards of tokens.

    r_t = beta log(phi(y_t) / reference(y_t)), phi trained online by cross-entropy of sigmoid(sum r_t) on whether the
    response is right.

    Args:
        beta: of the rewards.
    """

    def __init__(self, trainable: TrainableModel, *, temperature: float, micro_batch_tokens: int, beta: float) -> None:
        super().__init__(trainable.model, temperature=temperature, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.beta = trainable, beta

    def rewards(self, batch: RolloutBatch, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """[B, R] float32: the reward of every response token, the same on every rank."""
        log_probs = self.log_probs(batch)
        return implicit_rewards(log_probs, ref_log_probs.to(log_probs.device), beta=self.beta)

    def update(self, batch: RolloutBatch, ref_log_probs: torch.Tensor, correct: torch.Tensor) -> dict[str, float]:
        """One optimizer step on all responses; every rank takes part.

        Args: ref_log_probs: [B, R]. correct: [B] bool.
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

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
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
