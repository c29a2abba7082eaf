"""Offline losses on preferences between whole responses: DPO and its relatives, and Bradley-Terry for reward models.

Shapes in all of them: `[pairs]` float, one number per response (`[samples]` in KTO).
`preference_variants` has more relatives of DPO.
    chosen_log_probs, rejected_log_probs: sum of the policy's log-probs over a response's tokens (see
        `response_log_probs`). Get the gradient. ref_...: the same of the frozen reference.
    chosen_lengths, rejected_lengths: number of those tokens.
    weights: one over the number of pairs in the whole mini-batch, so that losses of micro-batches add up; 0 for
        padding, where the other inputs may be anything.

Metrics of pairwise losses: `preference_accuracy` (the chosen response has the higher
reward), `margin` (of the rewards), `chosen_reward`, `rejected_reward`. A reward is what
the method's paper calls the implicit reward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaverl.algorithms.loss import (
    LossOutput,
    MetricSums,
    loss_problem,
    moments,
    nan_if_infinite,
)
from megaverl.algorithms.registry import Registry

preference_losses: Registry[LossOutput] = Registry("preference loss", loss_problem)


def response_log_probs(
    log_probs: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums and lengths, both `[batch]`, of log-probs `[batch, response]` under a bool mask of the same shape."""
    return torch.where(response_mask, log_probs, 0.0).sum(dim=1), response_mask.sum(
        dim=1
    )


@preference_losses.register("dpo")
def dpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Compute direct preference optimization, arXiv 2305.18290, eq. 7.

    loss = - log sigmoid(r_w - r_l), with r = beta log(pi / pi_ref).

    Args:
        beta: strength of the KL constraint.
        label_smoothing: probability that a label is wrong, from 0 to a half ("conservative DPO", Mitchell 2023): - (1 -
            s) log sigmoid(m) - s log sigmoid(-m).
        For the others see the module.
    """
    active = weights != 0
    chosen = beta * _difference(chosen_log_probs, ref_chosen_log_probs, active)
    rejected = beta * _difference(rejected_log_probs, ref_rejected_log_probs, active)
    margin = chosen - rejected
    # `logsigmoid` does not overflow, unlike the logarithm of a sigmoid.
    losses = -(1.0 - label_smoothing) * logsigmoid(
        margin
    ) - label_smoothing * logsigmoid(-margin)
    return LossOutput((weights * losses).sum(), pair_metrics(chosen, rejected, active))


@preference_losses.register("ipo")
def ipo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    average_log_prob: bool = True,
) -> LossOutput:
    """Compute identity preference optimization, arXiv 2310.12036, eq. 17: (h - 1 / (2 beta))^2.

    h is the difference of the two log(pi / pi_ref), and beta the paper's tau.

    Args:
        average_log_prob: use log(pi / pi_ref) per token, so that beta means the same for short and long responses. TRL
            does so by default, because the authors said that their results have this form
            (huggingface.co/blog/pref-tuning). False: of whole responses, as in eq. 17.
        For the others see the module.

    Metrics: the metrics of the module, with rewards beta log(pi / pi_ref), averaged likewise.
    """
    active = weights != 0
    chosen = _difference(chosen_log_probs, ref_chosen_log_probs, active)
    rejected = _difference(rejected_log_probs, ref_rejected_log_probs, active)
    if average_log_prob:
        chosen = mean_log_probs(chosen, chosen_lengths, active)
        rejected = mean_log_probs(rejected, rejected_lengths, active)
    # A square has a minimum: the margin is not driven to infinity, unlike in DPO.
    losses = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    return LossOutput(
        (weights * losses).sum(), pair_metrics(beta * chosen, beta * rejected, active)
    )


@preference_losses.register("simpo")
def simpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    weights: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> LossOutput:
    """Compute SimPO, arXiv 2405.14734, eq. 6: - log sigmoid(r_w - r_l - gamma), r = beta / length log pi. No reference.

    Args:
        gamma: margin by which the chosen response should win.
        For the others see the module.
    """
    active = weights != 0
    chosen = beta * mean_log_probs(chosen_log_probs, chosen_lengths, active)
    rejected = beta * mean_log_probs(rejected_log_probs, rejected_lengths, active)
    losses = -logsigmoid(chosen - rejected - gamma)
    return LossOutput((weights * losses).sum(), pair_metrics(chosen, rejected, active))


@preference_losses.register("orpo")
def orpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    weights: Tensor,
    *,
    lam: float = 0.1,
) -> LossOutput:
    """Compute ORPO, arXiv 2403.07691, eq. 6 and 7.

    loss = SFT on the chosen response + lam x (- log sigmoid(log odds ratio)). With P =
    exp(log pi / length), odds = P / (1 - P), and the SFT term is - log P of the chosen
    response. No reference.

    Args:
        lam: the paper's lambda.
        For the others see the module.

    Metrics: the metrics of the module, with rewards lam log P, and `log_odds_ratio`,
    `sft_loss`.
    """
    active = weights != 0
    chosen = mean_log_probs(chosen_log_probs, chosen_lengths, active)
    rejected = mean_log_probs(rejected_log_probs, rejected_lengths, active)
    log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
    # The first term is SFT: a mean over the tokens, not their sum.
    losses = -chosen - lam * logsigmoid(log_odds_ratio)
    metrics = pair_metrics(lam * chosen, lam * rejected, active)
    metrics |= {
        "log_odds_ratio": moments(log_odds_ratio, active),
        "sft_loss": moments(-chosen, active),
    }
    return LossOutput((weights * losses).sum(), metrics)


@preference_losses.register("kto")
def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    reference_kl: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutput:
    """Compute Kahneman-Tversky optimization, arXiv 2402.01306, eq. 8: single responses, each desirable or not.

    loss = sum_i weight_i lambda_i (1 - sigmoid(+- beta (r_i - z))), + for desirable
    ones, r = log(pi / pi_ref); z = max(0, mean of log(pi / pi_ref) over mismatched
    prompts and responses of the mini-batch), without gradient.

    Args:
        log_probs, ref_log_probs: `[samples]`, sums over a response's tokens.
        desirable: `[samples]` bool.
        reference_kl: scalar, the mean in z (`kto_reference_kl`), equal for all micro-batches.
        weights: see the module.
        desirable_weight, undesirable_weight: lambda_D and lambda_U.

    Metrics: `desirable_reward`, `undesirable_reward` (beta r), `reference_kl` (z).
    """
    active = weights != 0
    rewards = beta * _difference(log_probs, ref_log_probs, active)
    # An estimated KL may be negative, and the true one cannot.
    z = nan_if_infinite(reference_kl.detach()).clamp(min=0.0)
    # [samples]
    sign = torch.where(desirable, 1.0, -1.0).to(rewards.dtype)
    scale = torch.full_like(rewards, undesirable_weight).masked_fill(
        desirable, desirable_weight
    )
    # 1 - sigmoid(x) = sigmoid(-x).
    losses = scale * torch.sigmoid(-sign * (rewards - beta * z))
    metrics = {
        "desirable_reward": moments(rewards, active & desirable),
        "undesirable_reward": moments(rewards, active & ~desirable),
        "reference_kl": moments(z.expand_as(rewards), active),
    }
    return LossOutput((weights * losses).sum(), metrics)


def kto_reference_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the reference point of KTO, arXiv 2402.01306, section 4.1.

    It is the mean of log(pi / pi_ref) over pairs of a prompt and ANOTHER prompt's
    response.

    Args:
        log_probs, ref_log_probs: `[samples]` float, sums over tokens of the mismatched responses of the WHOLE
            mini-batch.

    Returns:
        A scalar; 0 for no samples.
    """
    return (log_probs - ref_log_probs).detach().sum() / max(log_probs.numel(), 1)


def finite_where(active: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `active`, else 0. Infinities become NaN, because a sigmoid would hide them."""
    return nan_if_infinite(torch.where(active, values, 0.0))


def _difference(log_probs: Tensor, ref_log_probs: Tensor, active: Tensor) -> Tensor:
    """Return the log-ratio to the reference where `active`, else 0."""
    return finite_where(active, log_probs - ref_log_probs)


def mean_log_probs(log_probs: Tensor, lengths: Tensor, active: Tensor) -> Tensor:
    """Return the log-prob per token, `[pairs]`; 0 for an empty response and where not `active`."""
    return finite_where(active, log_probs) / lengths.clamp(min=1)


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)). A probability of 1 is lowered by one bit, so that its odds are finite."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


def pair_metrics(chosen: Tensor, rejected: Tensor, active: Tensor) -> MetricSums:
    """Return the module's metrics for these rewards `[pairs]`, where `active`."""
    return {
        "preference_accuracy": moments(chosen > rejected, active),
        "margin": moments(chosen - rejected, active),
        "chosen_reward": moments(chosen, active),
        "rejected_reward": moments(rejected, active),
    }


reward_model_losses: Registry[LossOutput] = Registry("reward-model loss", loss_problem)


@reward_model_losses.register("bradley_terry")
def bradley_terry(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    weights: Tensor,
    margins: Tensor | None = None,
    *,
    center_coef: float = 0.0,
) -> LossOutput:
    """Compute the Bradley-Terry loss: - log sigmoid(r_w - r_l), arXiv 2203.02155, section 3.5, eq. 1.

    With margins it is - log sigmoid(r_w - r_l - m), arXiv 2307.09288, eq. 2: the
    clearer the preference, the larger the difference should be. The model determines
    rewards only up to a constant. `center_coef` x (r_w + r_l)^2 keeps them near 0
    (arXiv 2312.09244, eq. 2).

    Args:
        chosen_rewards, rejected_rewards: `[pairs]` float. Get the gradient.
        weights: `[pairs]` float, one over the number of pairs in the whole mini-batch; 0 for padding, where the other
            inputs may be anything.
        margins: `[pairs]` float, at least 0. None: no margins.

    Metrics: `preference_accuracy`, `margin`, `chosen_reward`, `rejected_reward`.
    """
    active = weights != 0
    chosen = finite_where(active, chosen_rewards)
    rejected = finite_where(active, rejected_rewards)
    # Padding may have NaN as its margin.
    wanted = 0.0 if margins is None else torch.where(active, margins, 0.0)
    losses = (
        -logsigmoid(chosen - rejected - wanted)
        + center_coef * (chosen + rejected).square()
    )
    return LossOutput((weights * losses).sum(), pair_metrics(chosen, rejected, active))
