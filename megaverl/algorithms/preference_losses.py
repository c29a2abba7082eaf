"""Losses that learn from preferences between whole responses, offline: DPO and its relatives, and Bradley-Terry for
reward models.

Shapes, in all of them: `[pairs]` float, one number per response (`[samples]` in KTO). More relatives of DPO are in
`preference_variants`.
    chosen_log_probs, rejected_log_probs: the sum over a response's tokens of the policy's log-probs (see
        `response_log_probs`); the gradient flows here. ref_...: the same of the frozen reference.
    chosen_lengths, rejected_lengths: the number of those tokens.
    weights: one over the number of pairs in the whole mini-batch, so that shares of micro-batches add up; 0 for
        padding, where the other inputs may be anything.
Metrics of the pairwise ones: `preference_accuracy` (is the chosen response's reward the higher one), `margin` (of the
rewards), `chosen_reward`, `rejected_reward`; a reward is what the method's own paper calls the implicit reward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaverl.algorithms.loss import LossOutput, MetricSums, loss_problem, moments, nan_if_infinite
from megaverl.algorithms.registry import Registry

preference_losses: Registry[LossOutput] = Registry("preference loss", loss_problem)


def response_log_probs(log_probs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sums, lengths), both `[batch]`, of per-token log-probs `[batch, response]` under a bool mask of that shape."""
    return torch.where(response_mask, log_probs, 0.0).sum(dim=1), response_mask.sum(dim=1)


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
    """Direct preference optimization, arXiv 2305.18290, eq. 7: - log sigmoid(r_w - r_l), r = beta log(pi / pi_ref).

    Args: see the module. beta: of the KL. label_smoothing: the chance that a label is the wrong way round, from 0 to a
        half (the "conservative DPO" of Mitchell 2023): - (1 - s) log sigmoid(m) - s log sigmoid(-m).
    """
    active = weights != 0
    chosen = beta * _difference(chosen_log_probs, ref_chosen_log_probs, active)
    rejected = beta * _difference(rejected_log_probs, ref_rejected_log_probs, active)
    margin = chosen - rejected
    losses = -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
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
    """Identity preference optimization, arXiv 2310.12036, eq. 17: (h - 1 / (2 beta))^2, h the difference of the two
    log(pi / pi_ref), beta the paper's tau.

    Args: see the module. average_log_prob: take log(pi / pi_ref) per token, divided by the response's length, so that
        beta means the same for short and long responses. So does TRL by default, on the authors' word that their
        results are of this form (huggingface.co/blog/pref-tuning). False: of whole responses, as eq. 17 stands.
        Rewards in the metrics: beta log(pi / pi_ref), averaged likewise.
    """
    active = weights != 0
    chosen = _difference(chosen_log_probs, ref_chosen_log_probs, active)
    rejected = _difference(rejected_log_probs, ref_rejected_log_probs, active)
    if average_log_prob:
        chosen, rejected = (
            mean_log_probs(chosen, chosen_lengths, active),
            mean_log_probs(rejected, rejected_lengths, active),
        )
    losses = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    return LossOutput((weights * losses).sum(), pair_metrics(beta * chosen, beta * rejected, active))


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
    """SimPO, arXiv 2405.14734, eq. 6: - log sigmoid(r_w - r_l - gamma), r = beta / length log pi. No reference.

    Args: see the module. gamma: the margin by which the chosen one should win.
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
    """ORPO, arXiv 2403.07691, eq. 6 and 7: SFT on the chosen response, plus lam x - log sigmoid(log odds ratio).

    With P = exp(log pi / length), odds = P / (1 - P), and the SFT term is - log P of the chosen response. No reference.

    Args: see the module. lam: the paper's lambda. Rewards in the metrics: lam log P.

    Metrics: those of the module, and `log_odds_ratio`, `sft_loss`.
    """
    active = weights != 0
    chosen = mean_log_probs(chosen_log_probs, chosen_lengths, active)
    rejected = mean_log_probs(rejected_log_probs, rejected_lengths, active)
    log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
    losses = -chosen - lam * logsigmoid(log_odds_ratio)
    metrics = pair_metrics(lam * chosen, lam * rejected, active)
    metrics |= {"log_odds_ratio": moments(log_odds_ratio, active), "sft_loss": moments(-chosen, active)}
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
    """Kahneman-Tversky optimization, arXiv 2402.01306, eq. 8: single responses, each desirable or not.

    loss = sum_i weight_i lambda_i (1 - sigmoid(+- beta (r_i - z))), + where desirable, r = log(pi / pi_ref);
    z = max(0, mean of log(pi / pi_ref) over mismatched prompts and responses of the mini-batch), without gradient.

    Args (`[samples]`):
        log_probs, ref_log_probs: sums over a response's tokens. desirable: bool.
        reference_kl: scalar, the mean that z is made of (`kto_reference_kl`); the same for all micro-batches.
        weights: see the module. desirable_weight, undesirable_weight: lambda_D and lambda_U.

    Metrics: `desirable_reward`, `undesirable_reward` (beta r), `reference_kl` (z).
    """
    active = weights != 0
    rewards = beta * _difference(log_probs, ref_log_probs, active)
    z = nan_if_infinite(reference_kl.detach()).clamp(min=0.0)
    sign = torch.where(desirable, 1.0, -1.0).to(rewards.dtype)
    scale = torch.full_like(rewards, undesirable_weight).masked_fill(desirable, desirable_weight)
    losses = scale * torch.sigmoid(-sign * (rewards - beta * z))
    metrics = {
        "desirable_reward": moments(rewards, active & desirable),
        "undesirable_reward": moments(rewards, active & ~desirable),
        "reference_kl": moments(z.expand_as(rewards), active),
    }
    return LossOutput((weights * losses).sum(), metrics)


def kto_reference_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The mean of log(pi / pi_ref) over pairs of a prompt and ANOTHER prompt's response, arXiv 2402.01306, section 4.1.

    Args: `[samples]` float, sums over the tokens of the mismatched responses, of the WHOLE mini-batch.

    Returns: scalar; 0 for no samples.
    """
    return (log_probs - ref_log_probs).detach().sum() / max(log_probs.numel(), 1)


def finite_where(active: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `active`, else 0. An infinite one becomes NaN: its sigmoid would hide it."""
    return nan_if_infinite(torch.where(active, values, 0.0))


def _difference(log_probs: Tensor, ref_log_probs: Tensor, active: Tensor) -> Tensor:
    return finite_where(active, log_probs - ref_log_probs)


def mean_log_probs(log_probs: Tensor, lengths: Tensor, active: Tensor) -> Tensor:
    """Return the log-prob per token, `[pairs]`: 0, as of a certainty, for an empty response and where not `active`."""
    return finite_where(active, log_probs) / lengths.clamp(min=1)


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)); a certainty counts as one to the last bit, so that its odds are finite."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


def pair_metrics(chosen: Tensor, rejected: Tensor, active: Tensor) -> MetricSums:
    """Those of the module, of these rewards `[pairs]`, where `active`."""
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
    """The Bradley-Terry model: - log sigmoid(r_w - r_l), arXiv 2203.02155, section 3.5, eq. 1.

    With margins, - log sigmoid(r_w - r_l - m), arXiv 2307.09288, eq. 2: the more a response was preferred, the further
    apart the two should be. The model fixes rewards up to a constant; `center_coef` x (r_w + r_l)^2 keeps them around 0
    (arXiv 2312.09244, eq. 2).

    Args (`[pairs]`):
        chosen_rewards, rejected_rewards: float; the gradient flows here.
        weights: float, one over the number of pairs in the whole mini-batch; 0 for padding, where the other inputs may
            be anything. margins: float, at least 0.

    Metrics: `preference_accuracy`, `margin`, `chosen_reward`, `rejected_reward`.
    """
    active = weights != 0
    chosen, rejected = finite_where(active, chosen_rewards), finite_where(active, rejected_rewards)
    wanted = 0.0 if margins is None else torch.where(active, margins, 0.0)
    losses = -logsigmoid(chosen - rejected - wanted) + center_coef * (chosen + rejected).square()
    return LossOutput((weights * losses).sum(), pair_metrics(chosen, rejected, active))
