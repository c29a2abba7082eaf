"""Contracts of what stands between rewards and gradients: losses, advantages, filters of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms import advantage_estimators
from megaverl.algorithms.advantages import Advantages
from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.policy_losses import policy_losses
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.contracts import Broken, Promise
from megaverl.workers.reward import Scores, kept_by

GROUPS, PER_GROUP, LENGTH = 3, 4, 7
SAMPLES = GROUPS * PER_GROUP


def make_batch(seed: int = 0) -> RolloutBatch:
    """12 responses to 3 prompts, of unequal lengths, with everything that a batch may hold."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=draw)
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)

    def floats() -> Tensor:
        return torch.randn(SAMPLES, LENGTH, generator=draw)

    log_probs = -floats().abs()
    return RolloutBatch(
        {
            "input_ids": torch.randint(1, 50, (SAMPLES, 3), generator=draw),
            "prompt_lengths": torch.full((SAMPLES,), 3),
            "generated_ids": torch.randint(1, 50, (SAMPLES, LENGTH), generator=draw),
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs + 0.1 * floats(),
            "ref_log_probs": log_probs + 0.3 * floats(),
            "values": floats(),
            "token_rewards": floats() * mask,
            "rewards": torch.randn(SAMPLES, generator=draw),
            "group_ids": torch.arange(GROUPS).repeat_interleave(PER_GROUP),
        },
        {"finish_reason": ["stop"] * SAMPLES},
    )


def loss_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Of a policy loss (`algorithm.policy_loss`)."""
    batch = make_batch()
    weights = batch.response_mask / batch.response_mask.sum()
    draw = torch.Generator().manual_seed(1)
    advantages = torch.randn(SAMPLES, LENGTH, generator=draw)
    start = batch.old_log_probs + 0.2 * torch.randn(SAMPLES, LENGTH, generator=draw)

    def call(rows: slice = slice(None), poison: bool = False) -> tuple[LossOutput, Tensor]:
        log_probs = start[rows].clone().requires_grad_()
        inputs = {
            "log_probs": log_probs,
            "old_log_probs": batch.old_log_probs[rows],
            "advantages": advantages[rows],
            "weights": weights[rows],
        }
        if poison:
            outside = ~batch.response_mask[rows]
            inputs |= {k: v.masked_fill(outside, torch.nan) for k, v in inputs.items() if k != "weights"}
        found = policy_losses.get(name)(inputs, **options)
        if not isinstance(found, LossOutput):
            raise Broken(
                f"it returned {type(found).__name__}; return megaverl.algorithms.loss.LossOutput(loss, metrics)."
            )
        if found.loss.shape != ():
            raise Broken(f"the loss has the shape {list(found.loss.shape)}; it is the sum over all tokens, one number.")
        (gradient,) = torch.autograd.grad(found.loss, log_probs, allow_unused=True)
        if gradient is None:
            raise Broken("the loss does not depend on log_probs: nothing would be trained.")
        return found._replace(loss=found.loss.detach()), gradient

    def finite() -> None:
        found, gradient = call()
        if not torch.isfinite(found.loss) or not torch.isfinite(gradient).all():
            raise Broken(f"loss {float(found.loss)}, gradient finite: {bool(torch.isfinite(gradient).all())}.")
        if not gradient[batch.response_mask].any():
            raise Broken("the gradient is 0 for every token.")

    def masked() -> None:
        _, gradient = call()
        if gradient[~batch.response_mask].any():
            raise Broken("tokens of weight 0 have a gradient: multiply by `weights`.")

    def unpoisoned() -> None:
        clean, poisoned = call()[0].loss, call(poison=True)[0].loss
        if not torch.allclose(clean, poisoned):
            raise Broken(
                f"NaN where the weight is 0 changes the loss from {float(clean):.6g} to {float(poisoned):.6g}: select "
                "with torch.where(weights != 0, ..., 0.0) before any arithmetic (policy_losses.tokens_of does)."
            )

    def additive() -> None:
        whole = call()[0].loss
        parts = sum(call(slice(i, i + PER_GROUP))[0].loss for i in range(0, SAMPLES, PER_GROUP))
        if not torch.allclose(whole, torch.as_tensor(parts), rtol=1e-4, atol=1e-6):
            raise Broken(
                f"the parts of a batch sum to {float(parts):.6g}, the whole is {float(whole):.6g}: sum weight x loss, "
                "and divide by nothing; the weights hold the global denominator."
            )

    yield "a finite loss with a gradient", finite
    yield "no gradient for a token of weight 0", masked
    yield "NaN outside the mask changes nothing", unpoisoned
    yield "the losses of micro-batches add up to that of the whole batch", additive
    yield "the same twice", lambda: _same(call()[0].loss, call()[0].loss)


def advantage_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Of an advantage estimator (`algorithm.advantage`)."""
    batch = make_batch()
    draw = torch.Generator().manual_seed(2)
    extra = {
        "greedy_rewards": torch.randn(SAMPLES, generator=draw),
        "score_norms": torch.rand(SAMPLES, LENGTH, generator=draw),
        "component_rewards": torch.randn(SAMPLES, 2, generator=draw),
        "component_weights": torch.ones(2),
    }

    def call(order: Tensor | None = None, poison: bool = False) -> Advantages:
        inputs = {**batch.tensors, **extra}
        if poison:
            outside = ~batch.response_mask
            inputs = {
                key: value.masked_fill(outside, torch.nan)
                if value.is_floating_point() and value.shape == outside.shape
                else value
                for key, value in inputs.items()
            }
        if order is not None:
            inputs = {key: value[order] if len(value) == SAMPLES else value for key, value in inputs.items()}
        found = advantage_estimators.get(name)(inputs, **options)
        if not isinstance(found, Advantages):
            raise Broken(f"it returned {type(found).__name__}; return megaverl.algorithms.advantages.Advantages.")
        return found

    def shaped() -> None:
        for what, tensor in zip(("advantages", "returns"), call(), strict=True):
            if tensor is not None and tensor.shape != (SAMPLES, LENGTH):
                raise Broken(f"{what} has the shape {list(tensor.shape)}; expected [batch, response].")

    def finite() -> None:
        found = call().advantages
        if not torch.isfinite(found).all():
            raise Broken("some are NaN or infinite.")
        if found[~batch.response_mask].any():
            raise Broken("tokens outside response_mask have one: multiply by response_mask.")

    def unpoisoned() -> None:
        if not torch.allclose(call().advantages, call(poison=True).advantages):
            raise Broken(
                "NaN outside response_mask changes them: select with torch.where(response_mask, ..., 0.0) first."
            )

    def unordered() -> None:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))
        if not torch.allclose(call().advantages[order], call(order).advantages, atol=1e-5):
            raise Broken("they depend on the order of the samples: use group_ids to see which belong together.")

    yield "advantages, and returns if any, of shape [batch, response]", shaped
    yield "finite, and 0 outside the mask", finite
    yield "NaN outside the mask changes nothing", unpoisoned
    yield "the order of the samples changes nothing", unordered
    yield "the same twice", lambda: _same(call().advantages, call().advantages)


def filter_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Of a filter of rollouts (`algorithm.rollout_filter`)."""
    batch = make_batch()
    scores = Scores(batch.rewards, {"reward": batch.rewards}, batch.rewards > 0)
    before = {key: value.clone() for key, value in batch.tensors.items()}

    def unchanged() -> None:
        kept_by(name, batch, scores)
        if changed := [key for key, value in before.items() if not torch.equal(value, batch.tensors[key])]:
            raise Broken(f"it changed {', '.join(changed)}; return what to keep, and change nothing.")

    yield "true or false for every sample, and not false for all", lambda: (kept_by(name, batch, scores), None)[1]
    yield "the batch stays as it is", unchanged
    yield "the same twice", lambda: _same(kept_by(name, batch, scores), kept_by(name, batch, scores))


def _same(first: Tensor, second: Tensor) -> None:
    if not torch.equal(first, second):
        raise Broken("two calls gave different results: draw nothing at random, or from a seed of the batch.")
