"""Whole updates in float64 by transformers' forward pass, the papers' equations and torch's own Adam.

Nothing here is megaverl's, except for the draw of which samples are in which mini-batch
(`mini_batches`, which `tests/data/test_batching.py` tests). Everything is written token
by token and response by response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import mini_batches
from tests.algorithms.references import REFERENCES, Inputs
from tests.workers.update_ranks import KL, TEMPERATURE

LOSS_LENGTH = 9


@dataclass
class Case:
    """A step of an algorithm, as the configuration names it and as the reference computes it.

    Attributes:
        advantage: function of `advantages`. loss: name in `tests.algorithms.references`. aggregation: how the losses of
            tokens become one number. options: further keys of `algorithm`. beside: what else the reference does.
    """

    advantage: str
    loss: str
    aggregation: str
    num_mini_batches: int = 3
    num_epochs: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> dict[str, Any]:
        """The section `algorithm` of the configuration."""
        return {
            "advantage": self.advantage,
            "policy_loss": self.loss,
            "policy_loss_options": REFERENCES[self.loss][1],
            "loss_aggregation": self.aggregation,
            "num_mini_batches": self.num_mini_batches,
            "num_epochs": self.num_epochs,
            **(
                {"loss_length": LOSS_LENGTH}
                if self.aggregation == "fixed_length"
                else {}
            ),
            **self.options,
        }


class Outcome(NamedTuple):
    """metrics: `loss` and `grad_norm`, means over the updates. after: of every response token, 0 elsewhere."""

    metrics: dict[str, float]
    after: Tensor


def tokens_under_mask(batch: RolloutBatch) -> list[list[int]]:
    return [
        [t for t, own in enumerate(row) if own] for row in batch.response_mask.tolist()
    ]


def gae(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Generalised advantages (lambda 0.95) of the reward at the last token, and returns; before normalisation."""
    advantages, returns = torch.zeros(
        2, *batch.response_mask.shape, dtype=torch.float64
    )
    for row, tokens in enumerate(tokens_under_mask(batch)):
        following, advantage = 0.0, 0.0
        for t in reversed(tokens):
            reward = float(batch.rewards[row]) if t == tokens[-1] else 0.0
            value = float(batch.values[row, t])
            advantage = reward + following - value + 0.95 * advantage
            advantages[row, t], returns[row, t], following = (
                advantage,
                advantage + value,
                value,
            )
    return advantages, returns


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    chosen = values[mask]
    return torch.where(
        mask, (values - chosen.mean()) / (chosen.var(unbiased=False) + 1e-8).sqrt(), 0.0
    )


def advantages_of(name: str, batch: RolloutBatch) -> Tensor:
    """[B, R], of the estimator of this name, from the batch's rewards."""
    rewards, mask = batch.rewards.double(), batch.response_mask
    if name == "gae":
        return whitened(gae(batch)[0], mask)
    # Rewards to go, with the penalty k1 at every token.
    if name == "reinforce_plus_plus":
        gains = torch.zeros(mask.shape, dtype=torch.float64)
        for row, tokens in enumerate(tokens_under_mask(batch)):
            total = float(rewards[row])
            for t in reversed(tokens):
                total -= KL * float(
                    batch.old_log_probs[row, t].double()
                    - batch.ref_log_probs[row, t].double()
                )
                gains[row, t] = total
        return whitened(gains, mask)
    per_sample = torch.zeros(len(batch), dtype=torch.float64)
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero()[:, 0].tolist()
        for row in rows:
            others = [float(rewards[each]) for each in rows if each != row]
            mean = sum(float(rewards[each]) for each in rows) / len(rows)
            if name == "rloo":
                per_sample[row] = (
                    float(rewards[row]) - sum(others) / len(others) if others else 0.0
                )
                continue
            per_sample[row] = float(rewards[row]) - mean
            if name == "grpo" and others:
                deviation = (
                    sum((float(rewards[each]) - mean) ** 2 for each in rows)
                    / (len(rows) - 1)
                ) ** 0.5
                per_sample[row] /= deviation + 1e-6
    return torch.where(mask, per_sample[:, None], 0.0)


def aggregated(per_token: Tensor, mask: Tensor, how: str) -> Tensor:
    """One number out of the losses of a mini-batch's tokens, both [samples, R]."""
    rows = [per_token[row][mask[row]] for row in range(len(mask)) if mask[row].any()]
    if how == "token_mean":
        return torch.cat(rows).mean()
    if how == "token_sum":
        return torch.cat(rows).sum()
    if how == "seq_mean_token_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    sums = torch.stack([row.sum() for row in rows]).mean()
    return sums if how == "seq_mean_token_sum" else sums / LOSS_LENGTH


class Said(NamedTuple):
    """What a model says of some samples' response tokens, [samples, R], 0 where there is none."""

    log_probs: Tensor
    entropies: Tensor
    values: Tensor


def said(
    model: torch.nn.Module,
    batch: RolloutBatch,
    samples: Sequence[int],
    temperature: float,
) -> Said:
    shape = (len(samples), batch.response_mask.shape[1])
    columns: dict[str, list[Tensor]] = {"log_probs": [], "entropies": [], "values": []}
    for row in samples:
        prompt, response = (
            int(batch.prompt_lengths[row]),
            int(batch.response_lengths[row]),
        )
        tokens = torch.cat(
            [batch.input_ids[row, :prompt], batch.generated_ids[row, :response]]
        )
        hidden = model.model(tokens[None]).last_hidden_state[0][prompt - 1 : -1]
        log_p = torch.log_softmax(model.lm_head(hidden) / temperature, dim=-1)
        found = {
            "log_probs": log_p.gather(1, tokens[prompt:, None])[:, 0],
            "entropies": -(log_p.exp() * log_p).sum(-1),
            "values": model.score(hidden)[:, 0]
            if hasattr(model, "score")
            else hidden.sum(1) * 0.0,
        }
        for name, values in found.items():
            columns[name].append(
                torch.nn.functional.pad(values, (0, shape[1] - response))
            )
    return Said(**{name: torch.stack(rows) for name, rows in columns.items()})


def with_model(
    folder: Path, *, value_head: bool
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model of a folder in float64, and an optimizer as the ranks have it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if value_head:
        model.score = torch.nn.Linear(
            model.config.hidden_size, 1, bias=False, dtype=torch.float64
        )
        torch.nn.init.zeros_(model.score.weight)
    return model, torch.optim.Adam(model.parameters(), lr=0.1, eps=1.0)


def step_on(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor
) -> float:
    """Take an optimizer step, and return the norm of the gradient before it is clipped to 1."""
    optimizer.zero_grad()
    loss.backward()
    norm = float(
        torch.nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if p.grad is not None], 1.0
        )
    )
    optimizer.step()
    return norm


def splits(case: Case, batch: RolloutBatch) -> Iterator[list[int]]:
    """The samples of every update."""
    for epoch in range(case.num_epochs):
        given = {
            "seed": 0,
            "step": 0,
            "epoch": epoch,
            "group_ids": batch.group_ids.tolist(),
        }
        yield from mini_batches(len(batch), case.num_mini_batches, **given)


def whole_update(
    folder: Path, batch: RolloutBatch, case: Case, role: str = "actor"
) -> Outcome:
    """All updates of one step. `role`: actor, critic, or shared."""
    model, optimizer = with_model(folder, value_head=role != "actor")
    advantages = advantages_of(case.advantage, batch)
    returns = gae(batch)[1]
    with torch.no_grad():
        before = said(model, batch, range(len(batch)), TEMPERATURE)
    losses: dict[str, list[float]] = {"loss": [], "critic/loss": [], "grad_norm": []}
    for samples in splits(case, batch):
        now = said(model, batch, samples, TEMPERATURE)
        policy = policy_loss(case, batch, samples, now, advantages, before.entropies)
        value = value_loss(batch, samples, now.values, returns)
        total = {"actor": policy, "critic": value, "shared": policy + value}[role]
        losses["loss"].append(
            float(value.detach() if role == "critic" else policy.detach())
        )
        losses["critic/loss"].append(float(value.detach()))
        losses["grad_norm"].append(step_on(model, optimizer, total))
    with torch.no_grad():
        after = said(model, batch, range(len(batch)), TEMPERATURE)
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in losses.items()}
    if role != "shared":
        del metrics["critic/loss"]
    chosen = after.values if role == "critic" else after.log_probs
    return Outcome(metrics, torch.where(batch.response_mask, chosen, 0.0))


def value_loss(
    batch: RolloutBatch, samples: Sequence[int], values: Tensor, returns: Tensor
) -> Tensor:
    """arXiv 2005.12729, section 3, with a clip of 0.2 and a coefficient of a half."""
    old, right = batch.values[samples].double(), returns[samples]
    held = old + (values - old).clamp(-0.2, 0.2)
    error = torch.maximum((values - right) ** 2, (held - right) ** 2)
    return 0.5 * 0.5 * aggregated(error, batch.response_mask[samples], "token_mean")


def policy_loss(
    case: Case,
    batch: RolloutBatch,
    samples: Sequence[int],
    now: Said,
    advantages: Tensor,
    entropies: Tensor,
) -> Tensor:
    """The loss of one mini-batch with everything that `case.beside` names."""
    mask, beside = batch.response_mask[samples], case.beside
    old, rollout, reference = (
        batch[name][samples].double()
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    )
    trained, selected = mask, torch.zeros_like(mask)
    if "top_entropy" in beside:
        trained = largest(entropies[samples], mask, beside["top_entropy"])
    credit = advantages[samples]
    if "covariance" in beside:
        chosen = mask.double() / mask.sum()
        apart = [values - (values * chosen).sum() for values in (old, credit)]
        selected = largest(apart[0] * apart[1], mask, beside["covariance"])
    sampled = rollout if case.loss.startswith("dppo") else old
    if "truncate" in beside:
        factors = torch.where(
            mask, (old - rollout).exp().clamp(max=beside["truncate"]), 1.0
        )
        if case.loss == "vespo":  # in the ratio of the response
            sampled = old - factors.log()
        else:
            credit = credit * factors
    x = Inputs(now.log_probs, sampled, credit, selected, mask)
    objective = REFERENCES[case.loss][0]
    rows = []
    for i in range(len(samples)):
        # a token that does not train keeps its part in ratios of the response
        held = x._replace(new=torch.where(trained, x.new, x.new.detach()))
        per_token = {t: -objective(held, i, t) for t in x.tokens(i)}
        zero = x.new.sum() * 0.0
        keep = [
            t in per_token and (bool(trained[i, t]) or case.loss == "gmpo")
            for t in range(mask.shape[1])
        ]
        rows.append(
            torch.stack([per_token[t] if kept else zero for t, kept in enumerate(keep)])
        )
    loss = aggregated(torch.stack(rows), mask, case.aggregation)
    if "entropy" in beside:
        loss = loss - beside["entropy"] * aggregated(
            now.entropies, mask, case.aggregation
        )
    if "kl" in beside:
        gap = reference - now.log_probs
        loss = loss + KL * aggregated(gap.exp() - gap - 1, mask, case.aggregation)
    if "positive" in beside:
        right = mask & batch.desirable[samples].unsqueeze(1)
        loss = loss - beside["positive"] * (
            now.log_probs[right].mean() if right.any() else 0.0
        )
    return loss


def largest(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens of a mini-batch with the largest values, so large a share of all, at least one."""
    places = sorted(
        mask.nonzero().tolist(), key=lambda place: -float(values[tuple(place)])
    )
    chosen = torch.zeros_like(mask)
    for place in places[: max(int(share * len(places)), 1)]:
        chosen[tuple(place)] = True
    return chosen


class Pairs(NamedTuple):
    """Numbers of whole responses, [pairs]: log-probs of policy (where the gradient flows) and reference, lengths."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.ref_chosen - self.rejected + self.ref_rejected


def cpo(p: Pairs, per_token: bool) -> Tensor:
    likelihood = (
        p.chosen.sum() / p.chosen_lengths.sum() if per_token else p.chosen.mean()
    )
    return -logsigmoid(0.3 * (p.chosen - p.rejected)).mean() - 0.5 * likelihood


# name -> (the loss as the configuration names it, its options, its equation)
JUDGED: dict[str, tuple[str, dict[str, Any], Callable[[Pairs], Tensor]]] = {
    "dpo": ("dpo", {"beta": 0.5}, lambda p: -logsigmoid(0.5 * p.margin).mean()),
    "ipo": (
        "ipo",
        {"beta": 0.5, "average_log_prob": False},
        lambda p: ((p.margin - 1.0) ** 2).mean(),
    ),
    "simpo": (
        "simpo",
        {"beta": 2.0, "gamma": 0.5},
        lambda p: (
            -logsigmoid(
                2 * (p.chosen / p.chosen_lengths - p.rejected / p.rejected_lengths)
                - 0.5
            ).mean()
        ),
    ),
    "cpo": ("cpo", {"beta": 0.3, "lam": 0.5}, lambda p: cpo(p, per_token=False)),
    "cpo by tokens": (
        "cpo",
        {"beta": 0.3, "lam": 0.5, "sft_over": "token"},
        lambda p: cpo(p, per_token=True),
    ),
}


def sums_of(
    model: torch.nn.Module, batch: RolloutBatch, temperature: float = 1.0
) -> Tensor:
    """[B], log-probs of whole responses."""
    log_probs = said(model, batch, range(len(batch)), temperature).log_probs
    return torch.where(batch.response_mask, log_probs, 0.0).sum(1)


def judged_update(
    folder: Path,
    loss_of: Callable[[torch.nn.Module], Tensor],
    steps: int,
    *,
    value_head: bool = False,
) -> tuple[list[dict[str, float]], torch.nn.Module]:
    """(loss and gradient norm of every step on the whole batch, the model after them)."""
    model, optimizer = with_model(folder, value_head=value_head)
    found = []
    for _ in range(steps):
        loss = loss_of(model)
        found.append(
            {"loss": float(loss.detach()), "grad_norm": step_on(model, optimizer, loss)}
        )
    return found, model


def score_of(model: torch.nn.Module, batch: RolloutBatch) -> Tensor:
    """[B], the value at each response's last token."""
    scores = []
    for row in range(len(batch)):
        prompt, response = (
            int(batch.prompt_lengths[row]),
            int(batch.response_lengths[row]),
        )
        tokens = torch.cat(
            [batch.input_ids[row, :prompt], batch.generated_ids[row, :response]]
        )
        scores.append(
            model.score(model.model(tokens[None]).last_hidden_state[0, -1])[0]
        )
    return torch.stack(scores)


def bradley_terry(scores: Tensor) -> Tensor:
    """With margins of 0, 0.1 and 0.2, and scores kept near zero by 0.01."""
    chosen, rejected = scores[0::2], scores[1::2]
    apart = chosen - rejected - torch.arange(len(chosen)) / 10
    return (-logsigmoid(apart) + 0.01 * (chosen + rejected) ** 2).mean()
