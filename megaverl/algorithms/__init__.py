"""Algorithms as pure functions of tensors, each registered under a name and documented with its paper.

A function's positional parameters are inputs, taken from the batch by name. Parameters
after the `*` are options, set from the configuration. To add an algorithm, write one
function and decorate it:

    @policy_losses.register("mine")
    def mine(log_probs, old_log_probs, advantages, weights, *, strength: float = 1.0) -> LossOutput: ...

or name it `module:function` in the configuration.

Each function names its paper and the place in it. "eq. 7" is a number that was read in
the paper or in a copy of it (for dual clip and GPG's alpha: a number that other code
cites). "unnumbered" means that the equation has no number. "equation number not
checked" means that the paper was not at hand, only quotations of it. "from memory"
means that neither was read again. docs/algorithms.md has the table.
"""

from megaverl.algorithms.advantages import (
    Advantages,
    AllReduce,
    KeptSamples,
    advantage_estimators,
    check_finite,
    check_finite_tokens,
    gae,
    keep_groups,
    non_finite_token,
    on_one_rank,
    optimal_token_baseline,
    policy_filtration,
    reinforce_plus_plus,
    remax,
    rewards_to_go,
    score_norms,
    token_rewards,
    whiten,
)
from megaverl.algorithms.covariance_losses import (
    covariances,
    highest_entropies,
    token_selectors,
)
from megaverl.algorithms.group_advantages import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    raft,
    rloo,
    turn_gae,
    turn_grpo,
)
from megaverl.algorithms.kl import (
    AdaptiveEntropy,
    AdaptiveKL,
    FixedKL,
    KLController,
    kl_estimators,
    kl_loss,
)
from megaverl.algorithms.loss import (
    Denominators,
    LossOutput,
    MetricSums,
    add_metrics,
    aggregations,
    combine,
    count_denominators,
    entropy_sum,
    episode_shares,
    finalize,
    likelihood_sum,
    make_denominators,
    masked_mean,
    masked_std,
    mean,
    mean_pass_at_k,
    moments,
    pass_at_k,
    value_losses,
)
from megaverl.algorithms.model_rewards import (
    distillation,
    distillation_loss,
    divergences,
    implicit_rewards,
    outcome_cross_entropy,
    prime,
)
from megaverl.algorithms.policy_losses import (
    binary_kl,
    binary_tv,
    gmpo,
    gspo,
    policy_gradient,
    policy_losses,
    ppo_clip,
)
from megaverl.algorithms.preference_losses import (
    bradley_terry,
    kto_reference_kl,
    preference_losses,
    response_log_probs,
    reward_model_losses,
)
from megaverl.algorithms.preference_variants import matched, mean_log_ratio
from megaverl.algorithms.registry import Entry, Registry
from megaverl.algorithms.rollout_correction import Correction, combined, corrections

__all__ = [
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Advantages",
    "AllReduce",
    "Correction",
    "Denominators",
    "Entry",
    "FixedKL",
    "KLController",
    "KeptSamples",
    "LossOutput",
    "MetricSums",
    "Registry",
    "add_metrics",
    "advantage_estimators",
    "aggregations",
    "binary_kl",
    "binary_tv",
    "bradley_terry",
    "check_finite",
    "check_finite_tokens",
    "combine",
    "combined",
    "corrections",
    "count_denominators",
    "covariances",
    "distillation",
    "distillation_loss",
    "divergences",
    "dr_grpo",
    "entropy_sum",
    "episode_shares",
    "finalize",
    "gae",
    "gdpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "highest_entropies",
    "implicit_rewards",
    "keep_groups",
    "kl_estimators",
    "kl_loss",
    "kto_reference_kl",
    "likelihood_sum",
    "masked_mean",
    "masked_std",
    "matched",
    "mean",
    "mean_log_ratio",
    "mean_pass_at_k",
    "moments",
    "non_finite_token",
    "make_denominators",
    "on_one_rank",
    "opo",
    "optimal_token_baseline",
    "outcome_cross_entropy",
    "pass_at_k",
    "policy_filtration",
    "policy_gradient",
    "policy_losses",
    "ppo_clip",
    "preference_losses",
    "prime",
    "raft",
    "reinforce_plus_plus",
    "remax",
    "response_log_probs",
    "reward_model_losses",
    "rewards_to_go",
    "rloo",
    "score_norms",
    "token_rewards",
    "token_selectors",
    "turn_gae",
    "turn_grpo",
    "value_losses",
    "whiten",
]
