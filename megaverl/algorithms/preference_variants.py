"""Relatives of DPO, each a formula of the same two numbers of a pair.

Shapes in all of them: `[pairs]` float (`[samples]` in `bco`).
    chosen_log_ratios, rejected_log_ratios: h = log(pi / pi_ref) of whole responses. Get the gradient.
    weights and metrics: as in `preference_losses`. A reward is beta h, unless a function says otherwise.

"From memory" marks an equation that was not compared with the paper again; its section
is named as others cite it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaverl.algorithms.loss import LossOutput, MetricSums, bounded, moments
from megaverl.algorithms.preference_losses import (
    finite_where,
    mean_log_probs,
    pair_metrics,
    preference_losses,
)
from megaverl.errors import DataError


def _output(
    losses: Tensor, chosen: Tensor, rejected: Tensor, weights: Tensor
) -> LossOutput:
    """Return the weighted sum of losses with the metrics of these rewards."""
    return LossOutput(
        (weights * losses).sum(), pair_metrics(chosen, rejected, weights != 0)
    )


def _rewards(beta: float, weights: Tensor, *log_ratios: Tensor) -> list[Tensor]:
    """Return beta h for each log-ratio, 0 for padding."""
    return [beta * finite_where(weights != 0, ratios) for ratios in log_ratios]


@preference_losses.register("hinge")
def hinge(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute SLiC's hinge loss (arXiv 2305.10425, section 2, from memory) on DPO's rewards: max(0, 1 - (r_w - r_l)).

    RSO uses it in this form (arXiv 2309.06657, from memory).
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(
        (1.0 - (chosen - rejected)).clamp(min=0.0), chosen, rejected, weights
    )


@preference_losses.register("robust")
def robust(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> LossOutput:
    """Compute robust DPO, arXiv 2403.00409, section 3.1 (from memory).

    loss = (- (1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e), m = r_w - r_l,
    where e is the share of wrong labels. On labels flipped with that probability its
    mean is DPO's loss on the true ones. It has no lower bound.

    Args:
        label_smoothing: e, from 0 to a half.
        For the others see the module.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    right = logsigmoid(chosen - rejected)
    wrong = logsigmoid(rejected - chosen)
    # Divided by 1 - 2 e, so that the mean over flipped labels is the loss without
    # flips.
    losses = (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (
        1.0 - 2.0 * label_smoothing
    )
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("exo")
def exo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    epsilon: float = 1e-3,
) -> LossOutput:
    """Compute EXO on preferences, arXiv 2402.00856, section 3.2 (from memory).

    loss = KL(p || q) of p = (sigmoid(m), sigmoid(-m)), m = r_w - r_l, and the labels q = (1 - epsilon, epsilon). DPO is
    the reverse, KL(q || p).

    Args:
        epsilon: smoothing of the labels, above 0. Without it the KL is infinite.
        For the others see the module.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    # The KL of two outcomes, as a sum: the label is right, or it is wrong.
    losses = torch.zeros_like(chosen)
    for margin, label in (
        (chosen - rejected, 1.0 - epsilon),
        (rejected - chosen, epsilon),
    ):
        log_p = logsigmoid(margin)
        losses = losses + log_p.exp() * (
            log_p - torch.log(torch.as_tensor(label, dtype=log_p.dtype))
        )
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("nca")
def nca(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.01,
) -> LossOutput:
    """Compute noise contrastive alignment of pairs, arXiv 2402.05369, section 4.1 (from memory).

    loss = - log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log sigmoid(-r_l). It also
    keeps the chosen response likely.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    # Only the first term raises the chosen reward. The second one keeps it from growing
    # without limit.
    losses = (
        -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    )
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("sppo")
def sppo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 1e-3,
) -> LossOutput:
    """Compute self-play preference optimization with hard labels, arXiv 2405.00675, section 3 (from memory).

    loss = (h_w - eta (P - 1/2))^2 + (h_l - eta (1 - P - 1/2))^2 with P = 1 and eta = 1
    / beta.
    """
    chosen, rejected = _rewards(1.0, weights, chosen_log_ratios, rejected_log_ratios)
    # P - 1/2 is 1/2 for the chosen response and -1/2 for the rejected one.
    losses = (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    # The squares above need h itself, so the reported rewards are scaled only here.
    return _output(losses, beta * chosen, beta * rejected, weights)


@preference_losses.register("apo_zero")
def apo_zero(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute anchored preference optimization, APO-zero of arXiv 2408.06266, section 4 (from memory).

    loss = - sigmoid(r_w) + sigmoid(r_l). The chosen response becomes likelier and the
    rejected one less likely. Meant for chosen responses that are better than the
    policy's own.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(
        torch.sigmoid(rejected) - torch.sigmoid(chosen), chosen, rejected, weights
    )


@preference_losses.register("apo_down")
def apo_down(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute anchored preference optimization, APO-down of arXiv 2408.06266, section 4 (from memory).

    loss = sigmoid(r_w) - sigmoid(r_w - r_l). Both responses become less likely, the
    rejected one more so. Meant for chosen responses that are worse than the policy's
    own.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(
        torch.sigmoid(chosen) - torch.sigmoid(chosen - rejected),
        chosen,
        rejected,
        weights,
    )


@preference_losses.register("discopop")
def discopop(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
    tau: float = 0.05,
) -> LossOutput:
    """Compute DiscoPOP, the log-ratio modulated loss of arXiv 2406.08414, section 3.

    Written from memory and from the authors' model card.

    loss = (1 - s) x - log sigmoid(m) + s exp(-m), m = r_w - r_l, s = sigmoid(m / tau).

    Args:
        tau: temperature of the blend. The exponential is limited to e^+-20.
        For the others see the module.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    margin = chosen - rejected
    # 0 for a clearly wrong pair, which gets the logistic loss, and 1 for a clearly
    # right one.
    blend = torch.sigmoid(margin / tau)
    losses = -(1.0 - blend) * logsigmoid(margin) + blend * torch.exp(bounded(-margin))
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("f_dpo")
def f_dpo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    divergence: Literal[
        "reverse_kl", "forward_kl", "jensen_shannon", "alpha"
    ] = "forward_kl",
    alpha: float = 0.5,
) -> LossOutput:
    """Compute f-DPO, arXiv 2309.16240 (from memory): DPO under another divergence from the reference.

    loss = - log sigmoid(r_w - r_l), r = beta f'(u), u = pi / pi_ref. f'(u) is log u for
    reverse_kl (DPO itself), -1 / u for forward_kl, log(2 u / (1 + u)) for
    jensen_shannon and (1 - u^-alpha) / alpha for alpha, each up to a constant, which
    cancels.

    Args:
        alpha: parameter of the divergence of that name, above 0 and below 1. Log-ratios are limited to +-20 inside
            exp(); beyond, they have no gradient.
        For the others see the module.
    """

    def slope(h: Tensor) -> Tensor:
        # f'(u) as a function of h = log u, so that u itself cannot overflow.
        if divergence == "forward_kl":
            return -torch.exp(bounded(-h))
        if divergence == "jensen_shannon":
            # log(u / (1 + u)): the constant log 2 cancels in the margin.
            return logsigmoid(h)
        return -torch.expm1(bounded(-alpha * h)) / alpha if divergence == "alpha" else h

    chosen, rejected = (
        beta * slope(h)
        for h in _rewards(1.0, weights, chosen_log_ratios, rejected_log_ratios)
    )
    return _output(-logsigmoid(chosen - rejected), chosen, rejected, weights)


@preference_losses.register("wpo")
def wpo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_alignment: Tensor,
    rejected_alignment: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    max_weight: float | None = 1.0,
) -> LossOutput:
    """Compute weighted preference optimization, arXiv 2406.11827 (from memory), with its sampled alignment.

    It is DPO's loss times w(y_w) w(y_l), without gradient, so pairs that the policy
    would not write itself count less. log w(y) = mean over tokens of log pi(y_t) - log
    sum_v pi(v)^2: the likelihood of a token relative to the average of tokens drawn
    from the policy.

    Args:
        chosen_alignment, rejected_alignment: log w, of the policy at the start of the update.
        max_weight: upper limit of w(y_w) w(y_l), 1 in the authors' program. None: no limit, as in TRL's
            `use_weighting`.
        For the others see the module.

    Metrics: the metrics of the module, and `pair_weight`.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    # The weight is a constant of the update: no gradient may flow into what a pair
    # counts.
    log_weight = finite_where(active, chosen_alignment + rejected_alignment).detach()
    factor = (
        log_weight if max_weight is None else log_weight.clamp(max=math.log(max_weight))
    ).exp()
    result = _output(-factor * logsigmoid(chosen - rejected), chosen, rejected, weights)
    return LossOutput(
        result.loss, {**result.metrics, "pair_weight": moments(factor, active)}
    )


@preference_losses.register("aot")
def aot(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    margin_shifts: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute alignment by optimal transport, paired, arXiv 2406.05882, section 3 (from memory).

    Over the mini-batch the k-th largest of the policy's log pi(y_w) / pi(y_l) should
    exceed the k-th largest of the reference's: loss = mean over k of - log sigmoid(beta
    (policy's k-th - reference's k-th)).

    Args:
        margin_shifts: difference between that and h_w - h_l: the reference's log pi(y_w) / pi(y_l) of this pair, minus
            that of the pair whose rank in the reference equals this pair's rank in the policy, at the start of the
            update.
        For the others see the module.
    """
    active = weights != 0
    margins = finite_where(
        # h_w - h_l, with this pair's reference margin replaced by the reference margin
        # of equal rank.
        active,
        chosen_log_ratios - rejected_log_ratios + margin_shifts.detach(),
    )
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(-logsigmoid(beta * margins), chosen, rejected, weights)


@preference_losses.register("aot_unpaired")
def aot_unpaired(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_matched: Tensor,
    rejected_matched: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute alignment by optimal transport, unpaired, arXiv 2406.05882, section 3 (from memory).

    The k-th largest reward of the mini-batch's chosen responses should exceed the k-th
    largest of its rejected ones, whatever their prompts: loss = mean over k of - log
    sigmoid(k-th chosen r - k-th rejected r).

    Args:
        chosen_matched: for each chosen response the log-ratio of the rejected one with the same rank at the start of
            the update.
        rejected_matched: for each rejected response that of the chosen one.
        For the others see the module.

    Each response gets the gradient of its match, and each match counts once.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    above = beta * finite_where(active, rejected_matched).detach()
    below = beta * finite_where(active, chosen_matched).detach()
    # This has the right gradient and twice the value.
    both = -logsigmoid(chosen - below) - logsigmoid(above - rejected)
    # Half of the value is subtracted without gradient, so that the reported loss is
    # right too.
    return _output(both - 0.5 * both.detach(), chosen, rejected, weights)


@preference_losses.register("cpo")
def cpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    weights: Tensor,
    mean_chosen_length: Tensor | None = None,
    *,
    beta: float = 0.1,
    lam: float = 1.0,
    sft_over: Literal["response", "token"] = "response",
) -> LossOutput:
    """Compute contrastive preference optimization, arXiv 2401.08417, section 3 (from memory).

    loss = - log sigmoid(beta log pi(y_w) - beta log pi(y_l)) - lam log pi(y_w). No
    reference.

    Args:
        chosen_log_probs, rejected_log_probs: of whole responses, as in `preference_losses`.
        mean_chosen_length: scalar, mean tokens of a chosen response in the mini-batch, for sft_over="token".
        lam: factor on the second term, 1 in the paper.
        sft_over: averaging of the second term. "response": the sum over a response's tokens, as in the paper. "token":
            all tokens of the mini-batch's chosen responses, as in TRL, whose `cpo_alpha` is lam. That is smaller by the
            factor `mean_chosen_length`.

    Metrics: the metrics of the module, with rewards beta log pi, and `sft_loss`, averaged as
    `sft_over` says.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_probs, rejected_log_probs)
    likelihood = finite_where(active, chosen_log_probs)
    if sft_over == "token":
        if mean_chosen_length is None:
            raise DataError(
                "cpo with sft_over='token' reads mean_chosen_length, which was not given."
            )
        # `weights` contain one over the number of pairs; this adds one over the mean
        # length.
        likelihood = likelihood / mean_chosen_length.clamp(min=1)
    result = _output(
        -logsigmoid(chosen - rejected) - lam * likelihood, chosen, rejected, weights
    )
    return LossOutput(
        result.loss, {**result.metrics, "sft_loss": moments(-likelihood, active)}
    )


@preference_losses.register("alphapo")
def alphapo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    weights: Tensor,
    *,
    beta: float = 2.5,
    gamma: float = 0.25,
    alpha: float = 0.25,
) -> LossOutput:
    """Compute AlphaPO, arXiv 2501.03884 (from memory): - log sigmoid(r_w - r_l - gamma). No reference.

    r = beta (1 - p^-alpha) / alpha, p = pi^(1 / length).

    Args:
        alpha: shape of the reward, of either sign. At 0 this is SimPO's loss.
        For the others see `simpo`.
    """
    active = weights != 0
    chosen, rejected = (
        # `expm1` is exact for small alpha, where 1 - p^-alpha would cancel.
        beta * (-torch.expm1(bounded(-alpha * mean)) / alpha if alpha else mean)
        for mean in (
            mean_log_probs(chosen_log_probs, chosen_lengths, active),
            mean_log_probs(rejected_log_probs, rejected_lengths, active),
        )
    )
    return _output(-logsigmoid(chosen - rejected - gamma), chosen, rejected, weights)


@preference_losses.register("bco")
def bco(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    reward_shift: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Compute binary classifier optimization, arXiv 2404.04656, section 4 (from memory): single responses with a label.

    loss = sum_i weight_i x - log sigmoid(+- (r_i - delta)), + for desirable ones. delta
    is the reward shift: the mean of the desirable and the undesirable responses' mean
    reward. The paper averages delta over steps too, and reweights prompts that have
    only one kind; here it is that of the mini-batch.

    Args:
        reward_shift: scalar, delta / beta (`mean_log_ratio`), equal for all micro-batches.
        For the others see `kto`.

    Metrics: `desirable_reward`, `undesirable_reward` (r), `reward_shift` (delta).
    """
    active = weights != 0
    (rewards,) = _rewards(beta, weights, log_probs - ref_log_probs)
    # All micro-batches subtract the same number, that of the whole mini-batch.
    delta = beta * reward_shift.detach()
    # One sigmoid per response, with the sign of its label.
    losses = -logsigmoid(torch.where(desirable, rewards - delta, delta - rewards))
    metrics: MetricSums = {
        "desirable_reward": moments(rewards, active & desirable),
        "undesirable_reward": moments(rewards, active & ~desirable),
        "reward_shift": moments(delta.expand_as(rewards), active),
    }
    return LossOutput((weights * losses).sum(), metrics)


def mean_log_ratio(log_ratios: Tensor, desirable: Tensor) -> Tensor:
    """Return the mean of the desirable and the undesirable responses' mean log(pi / pi_ref), without gradient.

    If there is only one kind, its mean is returned.

    Args:
        log_ratios: `[samples]` float, of the WHOLE mini-batch.
        desirable: `[samples]` bool.

    Returns:
        A scalar; 0 for no samples.
    """
    kept = log_ratios.detach()
    # The mean of two means: the larger kind does not decide alone.
    means = [
        kept[is_kind].mean()
        for is_kind in (desirable, ~desirable)
        if bool(is_kind.any())
    ]
    return torch.stack(means).mean() if means else kept.new_zeros(())


def matched(values: Tensor, candidates: Tensor) -> Tensor:
    """Return for each of `values` the candidate with the same rank.

    Among equal values, the first has the lower rank.

    Args:
        values, candidates: `[pairs]` float, of the WHOLE mini-batch.
    """
    # Sorting twice gives ranks: the second sort inverts the permutation of the first.
    ranks = values.argsort(stable=True).argsort(stable=True)
    return candidates.sort(stable=True).values[ranks]
