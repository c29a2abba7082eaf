"""What every loss returns, how several are put together into one, and how per-token losses become one number.

Each aggregation returns weights `[batch, response]`: the mask, times what the mode gives a token, over the
denominators of the WHOLE mini-batch. Then `sum(weights * per_token_loss)`, added over any split into
micro-batches and ranks, is the loss of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.metrics import MetricSums, add_metrics, moments
from megaverl.algorithms.registry import Registry, tensor_problem

# exp() of a log-ratio stays finite in float32, and so do sums and squares of it: e^20 is about 4.9e8.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio held within +-20, as exp() takes it; beyond, it has no gradient. NaN stays. Shapes: any.

    Only what goes into exp() is held: the log-ratio of a response is the sum or mean of its tokens' unbounded ones.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class LossOutput(NamedTuple):
    """A loss of one micro-batch.

    loss: scalar, the SUM over this micro-batch's tokens of weight x per-token loss. The weights (see
        `aggregation`) hold the mask and one over the global denominator, so these sums added over all
        micro-batches and data-parallel ranks are the loss of the whole mini-batch.
    metrics: see `metrics`: sums that add up in the same way.
    """

    loss: Tensor
    metrics: MetricSums


def loss_problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    """What is wrong with what a loss of the user's own returned (see `registry.Problem`)."""
    if not isinstance(result, LossOutput):
        return f"{type(result).__name__}; expected LossOutput(loss, metrics)"
    if wrong := tensor_problem(result.loss, (), "as loss "):
        return wrong
    trains = [name for name, value in inputs.items() if getattr(value, "requires_grad", False)]
    if trains and not result.loss.requires_grad:
        return f"a loss that has no gradient; compute it from {trains[0]}, which has one"
    return None


def combine(*terms: tuple[float, LossOutput]) -> LossOutput:
    """The weighted sum of several losses: `combine((1, policy), (kl_coef, kl), (-entropy_coef, entropy))`.

    A term with coefficient 0 gives its metrics and no gradient.

    Raises:
        ValueError: no terms.
    """
    if not terms:
        raise ValueError("combine() needs at least one loss")
    loss, metrics = None, MetricSums()
    for coefficient, term in terms:
        share = coefficient * term.loss if coefficient else term.loss.detach() * 0.0
        loss = share if loss is None else loss + share
        metrics = add_metrics(metrics, term.metrics)
    assert loss is not None  # terms is not empty
    return LossOutput(loss, metrics)


aggregations: Registry[Tensor] = Registry(
    "loss aggregation", lambda result, inputs: tensor_problem(result, inputs["response_mask"].shape)
)


class Denominators(NamedTuple):
    """Counts over a whole mini-batch, all ranks and micro-batches together."""

    num_tokens: int  # tokens under the mask
    num_sequences: int  # responses with at least one such token: empty ones and padding rows do not count


def count_denominators(response_mask: Tensor) -> Denominators:
    """Count tokens and non-empty responses in the mask `[mini-batch, response]` of the WHOLE mini-batch."""
    return of_counts(response_mask.sum(dim=1))


def of_counts(num_tokens: Tensor) -> Denominators:
    """The same from the tokens of each response, `[mini-batch]`."""
    return Denominators(int(num_tokens.sum()), int((num_tokens > 0).sum()))


@aggregations.register("token_mean")
def token_mean(response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every token weighs the same: 1 / (tokens in the mini-batch).

    Source: DAPO, arXiv 2503.14476, eq. 12 ("token-level loss"); PPO's own mean over time steps.

    Args:
        response_mask: bool `[batch, response]`.
        denominators: of the whole mini-batch.

    Returns: weights `[batch, response]`, all 0 where the mini-batch holds no token at all.
    """
    return response_mask.to(dtype) / max(denominators.num_tokens, 1)


@aggregations.register("seq_mean_token_mean")
def seq_mean_token_mean(
    response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every response weighs the same, its tokens share it: 1 / (responses x tokens in this response).

    Source: GRPO, arXiv 2402.03300, eq. 3 (1/G sum over outputs of 1/|o_i| sum over tokens).
    Arguments and result as in `token_mean`.
    """
    mask = response_mask.to(dtype)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)  # an empty response has no token to weigh
    return mask / lengths / max(denominators.num_sequences, 1)


@aggregations.register("seq_mean_token_sum")
def seq_mean_token_sum(
    response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean over responses of the sum over tokens: 1 / (responses).

    Source: the policy gradient of a whole trajectory, mean over trajectories (Sutton et al. 1999);
    Dr. GRPO, arXiv 2503.20783, section 3.2, up to its constant. Arguments and result as in `token_mean`.
    """
    return response_mask.to(dtype) / max(denominators.num_sequences, 1)


@aggregations.register("token_sum")
def token_sum(response_mask: Tensor, denominators: Denominators, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every token weighs 1: the sum, whose size grows with the batch. Arguments and result as in `token_mean`."""
    return response_mask.to(dtype)


@aggregations.register("fixed_length")
def fixed_length(
    response_mask: Tensor, denominators: Denominators, *, max_tokens: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Every token weighs 1 / (responses x max_tokens), however long its response is.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2 and its listing 1 (the sum over tokens over a constant, the largest
    number of generated tokens). Arguments and result as in `token_mean`; max_tokens: that constant.
    """
    return response_mask.to(dtype) / (max(denominators.num_sequences, 1) * max_tokens)


def entropy_sum(entropies: Tensor, weights: Tensor) -> LossOutput:
    """sum_t weight_t H_t: subtract it, times a coefficient, from the policy loss (arXiv 1707.06347, eq. 9).

    Args (both `[batch, response]`):
        entropies: float, in nats, of the policy's distribution over the vocabulary at each token.
        weights: float, from `aggregation`; where 0 the entropy may be anything, NaN included.

    Metrics: `entropy`, the token mean.
    """
    active = weights != 0
    entropies = torch.where(active, entropies, 0.0)
    return LossOutput((weights * entropies).sum(), {"entropy": moments(entropies, active)})


def likelihood_sum(log_probs: Tensor, weights: Tensor) -> LossOutput:
    """- sum_t weight_t log_prob_t over the tokens of right responses: VAPO's positive-example loss, arXiv 2504.05118
    (equation number not checked), where a weight is one over the number of such tokens in the mini-batch.

    Args (both `[batch, response]`): log_probs: float; the gradient flows here. weights: float; where 0 the log-prob may
        be anything, NaN included.

    Metrics: `positive_loss`, the token mean.
    """
    active = weights != 0
    log_probs = torch.where(active, log_probs, 0.0)
    return LossOutput(-(weights * log_probs).sum(), {"positive_loss": moments(-log_probs, active)})


_EPSILON = 1e-6


def clip_factor(norm: float, max_norm: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most `max_norm`; 1 where it is.

    As megatron-core's `clip_grads.clip_grad_by_total_norm_fp32` has it, so that the numbers are the same.

    Args:
        max_norm: 0 or less: nothing is clipped.
    """
    return min(1.0, max_norm / (norm + _EPSILON)) if max_norm > 0 else 1.0
