"""Algorithms: pure functions, tensors in and tensors out, each registered under a name, each with its paper.

A function's positional parameters are inputs, taken from the batch by name; what stands after the `*` are
options, set from the configuration. To add an algorithm, write one function and decorate it:

    @policy_losses.register("mine")
    def mine(log_probs, old_log_probs, advantages, weights, *, strength: float = 1.0) -> LossOutput: ...

or name it `module:function` in the configuration.
"""

from megaverl.algorithms.advantages import Advantages, advantage_estimators, gae, grpo, whiten
from megaverl.algorithms.aggregation import Denominators, aggregations, count_denominators
from megaverl.algorithms.entropy import entropy_sum
from megaverl.algorithms.kl import kl_estimators, kl_loss
from megaverl.algorithms.kl_controllers import AdaptiveKL, FixedKL, KLController
from megaverl.algorithms.loss import LossOutput, combine
from megaverl.algorithms.metrics import (
    MetricSums,
    add_metrics,
    finalize,
    masked_mean,
    masked_std,
    moments,
    pack_metrics,
    unpack_metrics,
)
from megaverl.algorithms.pass_at_k import mean_pass_at_k, pass_at_k
from megaverl.algorithms.policy_losses import policy_losses, ppo_clip
from megaverl.algorithms.registry import Entry, Registry
from megaverl.algorithms.token_rewards import token_rewards
from megaverl.algorithms.value_losses import value_losses

__all__ = [
    "AdaptiveKL",
    "Advantages",
    "Denominators",
    "Entry",
    "FixedKL",
    "KLController",
    "LossOutput",
    "MetricSums",
    "Registry",
    "add_metrics",
    "advantage_estimators",
    "aggregations",
    "combine",
    "count_denominators",
    "entropy_sum",
    "finalize",
    "gae",
    "grpo",
    "kl_estimators",
    "kl_loss",
    "masked_mean",
    "masked_std",
    "mean_pass_at_k",
    "moments",
    "pack_metrics",
    "pass_at_k",
    "policy_losses",
    "ppo_clip",
    "token_rewards",
    "unpack_metrics",
    "value_losses",
    "whiten",
]
