"""What every loss returns, and how several are put together into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megaverl.algorithms.metrics import MetricSums, add_metrics
from megaverl.algorithms.registry import tensor_problem

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
