"""Common parts of all losses: their result, aggregation over tokens, metrics as sums, and the critic's losses.

An aggregation returns weights `[batch, response]`: the mask times the mode's weight of
a token, divided by the denominators of the WHOLE mini-batch. Then `sum(weights *
per_token_loss)`, added over any split into micro-batches and ranks, is the loss of the
mini-batch.

A metric is a tensor of three float64 numbers `[count, sum, sum of squares]`. Two of
them are combined by addition, so a metric never depends on how the batch was split,
unlike a mean of means. pass@k is here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.registry import Registry, tensor_problem

# Metric name -> [3]: count, sum and sum of squares, so that sums over ranks give means
# and variances.
MetricSums = dict[str, Tensor]


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return `[count, sum, sum of squares]` of the values under the mask, float64 without gradient.

    Args:
        values: any shape. Values outside the mask may be anything, NaN included.
        mask: bool, the same shape.
    """
    kept = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def add_metrics(total: MetricSums, more: Mapping[str, Tensor]) -> MetricSums:
    """Return the sum of two sets of metrics, name by name, as a new dictionary."""
    joined = dict(total)
    for name, sums in more.items():
        joined[name] = joined[name] + sums if name in joined else sums
    return joined


def mean(sums: Tensor) -> float:
    """Return sum over count, or 0.0 if nothing was counted."""
    count, total, _ = sums.tolist()
    return total / count if count else 0.0


def variance(sums: Tensor) -> float:
    """Return the population variance, or 0.0 if nothing was counted."""
    count, total, squares = sums.tolist()
    return max(squares / count - (total / count) ** 2, 0.0) if count else 0.0


def explained_variance(returns: Tensor, value_error: Tensor) -> float:
    """Return 1 - Var[return - value] / Var[return]: 1 for a perfect critic, 0 for a constant, less for a worse one.

    Args:
        returns: moments of the returns.
        value_error: moments of return - value.

    Returns:
        The explained variance, or 0.0 if the returns do not vary.
    """
    spread = variance(returns)
    centre = mean(returns)
    # Rounding leaves this much of a constant.
    if spread <= 1e-12 * max(1.0, centre * centre):
        return 0.0
    return 1.0 - variance(value_error) / spread


# Metrics that need more than one mean: name -> (sums that it reads, function).
_DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "explained_variance": (("returns", "value_error"), explained_variance),
}


def finalize(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of every metric, and the metrics derived from several means.

    A metric with a `role/` prefix is combined only with others of that role.
    """
    result = {name: mean(value) for name, value in sums.items()}
    for role in {name[: name.rfind("/") + 1] for name in sums}:
        for name, (needs, function) in _DERIVED.items():
            if all(role + need in sums for need in needs):
                result[role + name] = function(*(sums[role + need] for need in needs))
    return result


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean of the values under the mask, computed in float64; 0.0 for an empty mask."""
    return mean(moments(values, mask))


def masked_std(values: Tensor, mask: Tensor) -> float:
    """Return the population standard deviation under the mask, computed in float64; 0.0 for an empty mask."""
    return math.sqrt(variance(moments(values, mask)))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias how often k samples contain a correct one, arXiv 2107.03374, eq. 1.

    For n samples, c of them correct: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: not 0 <= num_correct <= num_samples, or not 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} right out of {num_samples} samples is not defined"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Tensor, group_ids: Tensor, k: int) -> float:
    """Return the mean of `pass_at_k` over prompts; 0.0 for an empty batch.

    Args:
        correct: `[batch]` bool.
        group_ids: `[batch]` int64, equal for the samples of one prompt.

    Raises:
        ValueError: a prompt has fewer than k samples.
    """
    ids, index = torch.unique(group_ids, return_inverse=True)
    sizes = torch.bincount(index, minlength=len(ids)).tolist()
    rights = torch.bincount(index[correct], minlength=len(ids)).tolist()
    scores = [
        pass_at_k(size, right, k) for size, right in zip(sizes, rights, strict=True)
    ]
    return sum(scores) / len(scores) if scores else 0.0


# exp() of a log-ratio must stay finite in float32, including sums and squares of it.
# e^20 is about 4.9e8.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to +-20 before exp(). Beyond that it has no gradient. NaN stays NaN. Any shape.

    Only arguments of exp() are clamped. The log-ratio of a response is the sum or mean
    of its tokens' unclamped ones.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def nan_if_infinite(values: Tensor) -> Tensor:
    """Return `values` with infinities replaced by NaN, because a later clamp or sigmoid would hide them."""
    return values + 0.0 * values.detach()


class LossOutput(NamedTuple):
    """Loss of one micro-batch.

    Attributes:
        loss: scalar, the SUM over this micro-batch's tokens of weight x per-token loss. The weights (see the module)
            contain the mask and one over the global denominator, so the sums of all micro-batches and data-parallel
            ranks add up to the loss of the whole mini-batch.
        metrics: sums that add up in the same way.
    """

    loss: Tensor
    metrics: MetricSums


def loss_problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the result of a user's loss, or None (see `registry.Problem`)."""
    if not isinstance(result, LossOutput):
        return f"{type(result).__name__}; expected LossOutput(loss, metrics)"
    if wrong := tensor_problem(result.loss, (), "as loss "):
        return wrong
    trains = [
        name for name, value in inputs.items() if getattr(value, "requires_grad", False)
    ]
    if trains and not result.loss.requires_grad:
        return (
            f"a loss that has no gradient; compute it from {trains[0]}, which has one"
        )
    return None


def combine(*terms: tuple[float, LossOutput]) -> LossOutput:
    """Return the weighted sum of several losses: `combine((1, policy), (kl_coef, kl), (-entropy_coef, entropy))`.

    A term with coefficient 0 contributes its metrics and no gradient.

    Raises:
        ValueError: there are no terms.
    """
    if not terms:
        raise ValueError("combine() needs at least one loss")
    loss = None
    metrics = MetricSums()
    for coefficient, term in terms:
        share = coefficient * term.loss if coefficient else term.loss.detach() * 0.0
        loss = share if loss is None else loss + share
        metrics = add_metrics(metrics, term.metrics)
    assert loss is not None  # terms is not empty
    return LossOutput(loss, metrics)


aggregations: Registry[Tensor] = Registry(
    "loss aggregation",
    lambda result, inputs: tensor_problem(result, inputs["response_mask"].shape),
)


class Denominators(NamedTuple):
    """Counts over a whole mini-batch, over all ranks and micro-batches.

    Attributes:
        num_tokens: tokens under the mask.
        num_sequences: responses with at least one such token. Empty ones and padding rows do not count.
        num_episodes: the same, with all responses of an episode counted as one.
    """

    num_tokens: int
    num_sequences: int
    num_episodes: float = 0.0


def count_denominators(response_mask: Tensor) -> Denominators:
    """Count tokens and non-empty responses in the mask `[mini-batch, response]` of the WHOLE mini-batch."""
    return make_denominators(response_mask.sum(dim=1))


def make_denominators(
    num_tokens: Tensor, episode_shares: Tensor | None = None
) -> Denominators:
    """Count the denominators of a mini-batch.

    Args:
        num_tokens: `[mini-batch]`, trained tokens of each response.
        episode_shares: `[mini-batch]`, as `episode_shares` returns them. None: each response is an episode.
    """
    num_sequences = int((num_tokens > 0).sum())
    num_episodes = (
        num_sequences if episode_shares is None else float(episode_shares.sum())
    )
    return Denominators(int(num_tokens.sum()), num_sequences, num_episodes)


def episode_shares(num_tokens: Tensor, episodes: Tensor) -> Tensor:
    """Return each response's share of its episode: one over the number of its non-empty responses.

    Args:
        num_tokens: `[batch]`, tokens of each response of the WHOLE batch, since an episode may be in several
            mini-batches.
        episodes: `[batch]`, equal for responses of one episode.

    Returns:
        `[batch]` float64; 0 for empty responses.
    """
    counted = (num_tokens > 0).double()
    _, number = episodes.unique(return_inverse=True)
    return counted / torch.bincount(number, counted)[number].clamp(min=1)


@aggregations.register("token_mean")
def token_mean(
    response_mask: Tensor,
    denominators: Denominators,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight every token equally: 1 / (tokens in the mini-batch).

    Source: DAPO, arXiv 2503.14476, eq. 12 ("token-level loss"); PPO's own mean over
    time steps.

    Args:
        response_mask: `[batch, response]` bool.
        denominators: of the whole mini-batch.

    Returns:
        Weights `[batch, response]`, all 0 if the mini-batch has no token at all.
    """
    return response_mask.to(dtype) / max(denominators.num_tokens, 1)


@aggregations.register("seq_mean_token_mean")
def seq_mean_token_mean(
    response_mask: Tensor,
    denominators: Denominators,
    episode_shares: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight every response equally, shared by its tokens: 1 / (responses x tokens in this response).

    Source: GRPO, arXiv 2402.03300, eq. 3 (1/G sum over outputs of 1/|o_i| sum over tokens).

    Args:
        episode_shares: `[batch]`, share of a response in its episode, which weighs as much as one response in total.
            None: each response is an episode.
        For the others and the result see `token_mean`.
    """
    mask = response_mask.to(dtype)
    # An empty response has no token to weight, and must not divide by 0.
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask / lengths / _episodes(denominators, episode_shares, dtype)


def _episodes(
    denominators: Denominators, shares: Tensor | None, dtype: torch.dtype
) -> float | Tensor:
    """Return the mini-batch's size in units of each response: a number, or `[batch, 1]`."""
    if shares is None:
        return max(denominators.num_sequences, 1)
    return (denominators.num_episodes or 1.0) / shares.unsqueeze(1).to(dtype)


@aggregations.register("seq_mean_token_sum")
def seq_mean_token_sum(
    response_mask: Tensor,
    denominators: Denominators,
    episode_shares: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight every token by 1 / (responses), which gives the mean over responses of the sum over tokens.

    Source: the policy gradient of a whole trajectory, mean over trajectories (Sutton et
    al. 1999); Dr. GRPO, arXiv 2503.20783, section 3.2, up to its constant. Arguments
    and result as in `seq_mean_token_mean`.
    """
    return response_mask.to(dtype) / _episodes(denominators, episode_shares, dtype)


@aggregations.register("token_sum")
def token_sum(
    response_mask: Tensor,
    denominators: Denominators,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight every token by 1. The loss grows with the batch. Arguments and result as in `token_mean`."""
    return response_mask.to(dtype)


@aggregations.register("fixed_length")
def fixed_length(
    response_mask: Tensor,
    denominators: Denominators,
    episode_shares: Tensor | None = None,
    *,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight every token by 1 / (responses x max_tokens), whatever the length of its response.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2 and its listing 1 (the sum over
    tokens divided by a constant, the largest number of generated tokens).

    Args:
        max_tokens: that constant.
        For the others and the result see `seq_mean_token_mean`.
    """
    return response_mask.to(dtype) / (
        _episodes(denominators, episode_shares, dtype) * max_tokens
    )


def entropy_sum(entropies: Tensor, weights: Tensor) -> LossOutput:
    """Return sum_t weight_t H_t, to be subtracted from the policy loss with a coefficient (arXiv 1707.06347, eq. 9).

    Args:
        entropies: `[batch, response]` float, in nats, of the policy's distribution at each token.
        weights: `[batch, response]` float, from an aggregation. Where 0, the entropy may be anything, NaN included.

    Metrics: `entropy`, the token mean.
    """
    active = weights != 0
    entropies = torch.where(active, entropies, 0.0)
    return LossOutput(
        (weights * entropies).sum(), {"entropy": moments(entropies, active)}
    )


def likelihood_sum(log_probs: Tensor, weights: Tensor) -> LossOutput:
    """Compute VAPO's positive-example loss, arXiv 2504.05118 (equation number not checked).

    loss = - sum_t weight_t log_prob_t. The sum is over tokens of correct responses, and
    a weight is one over the number of such tokens in the mini-batch.

    Args:
        log_probs: `[batch, response]` float. Gets the gradient.
        weights: `[batch, response]` float. Where 0, the log-prob may be anything, NaN included.

    Metrics: `positive_loss`, the token mean.
    """
    active = weights != 0
    log_probs = torch.where(active, log_probs, 0.0)
    return LossOutput(
        -(weights * log_probs).sum(), {"positive_loss": moments(-log_probs, active)}
    )


_EPSILON = 1e-6


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that limits a gradient of this norm to `max_norm`; 1 if it is within the limit.

    The formula is that of megatron-core's `clip_grads.clip_grad_by_total_norm_fp32`, so
    that numbers agree.

    Args:
        max_norm: 0 or less disables clipping.
    """
    return min(1.0, max_norm / (norm + _EPSILON)) if max_norm > 0 else 1.0


value_losses: Registry[LossOutput] = Registry("value loss", loss_problem)


@value_losses.register("clipped")
def clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    clip_range: float | None = 0.2,
) -> LossOutput:
    """Compute the squared error with the value kept near its old one, arXiv 2005.12729, section 3 ("value clipping").

    loss = sum_t weight_t 1/2 max((V - R)^2, (V_clip - R)^2), V_clip = V_old + clip(V -
    V_old, +-clip_range). The maximum removes the gradient of a value that has already
    moved by `clip_range` towards its target.

    Args:
        values: `[batch, response]` float, of the critic being trained. Gets the gradient.
        old_values: `[batch, response]` float, of the critic at the start of the update.
        returns: `[batch, response]` float, the targets.
        weights: `[batch, response]` float, from an aggregation. Where 0, the other inputs may be anything, NaN
            included.
        clip_range: in units of the value. None: the plain squared error.

    Metrics: `value_clip_fraction`, `values`, `returns`, `value_error`; the last two
    also give `explained_variance`.
    """
    active = weights != 0
    values = torch.where(active, values, 0.0)
    old_values = torch.where(active, old_values, 0.0)
    returns = torch.where(active, returns, 0.0)
    error = (values - returns).square()
    limited = error
    if clip_range is not None:
        moved = values - old_values
        clipped_error = (
            old_values + moved.clamp(-clip_range, clip_range) - returns
        ).square()
        # Within the limit both are equal up to rounding. An old value of NaN is not
        # within it.
        limited = torch.where(moved.abs() <= clip_range, error, clipped_error)
    loss = 0.5 * (weights * torch.maximum(error, limited)).sum()
    metrics = {
        "value_clip_fraction": moments(limited > error, active),
        "values": moments(values, active),
        "returns": moments(returns, active),
        "value_error": moments(returns - values, active),
    }
    return LossOutput(loss, metrics)
