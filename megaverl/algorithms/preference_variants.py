"""DPO's relatives, each a formula of its own over the same two numbers of a pair.

Shapes, in all of them: `[pairs]` float (`[samples]` in `bco`).
    chosen_log_ratios, rejected_log_ratios: h = log(pi / pi_ref) of whole responses; the gradient flows here.
    weights and metrics: as in `preference_losses`. A reward is beta h, where a function says nothing else.

"From memory": an equation from memory of the paper, which was not read again, sections as others name them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaverl.algorithms.loss import LossOutput, MetricSums, bounded, moments
from megaverl.algorithms.preference_losses import finite_where, mean_log_probs, pair_metrics, preference_losses
from megaverl.errors import DataError


def _output(losses: Tensor, chosen: Tensor, rejected: Tensor, weights: Tensor) -> LossOutput:
    """The weighted sum, with the metrics of these rewards."""
    return LossOutput((weights * losses).sum(), pair_metrics(chosen, rejected, weights != 0))


def _rewards(beta: float, weights: Tensor, *log_ratios: Tensor) -> list[Tensor]:
    """Return beta h of each; 0 where there is no pair."""
    return [beta * finite_where(weights != 0, each) for each in log_ratios]


@preference_losses.register("hinge")
def hinge(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor, *, beta: float = 0.1) -> LossOutput:
    """SLiC's hinge (arXiv 2305.10425, section 2, from memory) on DPO's rewards, as in RSO
    (arXiv 2309.06657, from memory): max(0, 1 - (r_w - r_l)).
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output((1.0 - (chosen - rejected)).clamp(min=0.0), chosen, rejected, weights)


@preference_losses.register("robust")
def robust(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> LossOutput:
    """Robust DPO, arXiv 2403.00409, section 3.1 (from memory): with e the share of labels that are the wrong way round,
    (- (1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e), m = r_w - r_l.

    On labels flipped with that chance its mean is DPO's loss on the true ones; it has no lower bound.

    Args: see the module. label_smoothing: e, from 0 to a half.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    right, wrong = logsigmoid(chosen - rejected), logsigmoid(rejected - chosen)
    losses = (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (1.0 - 2.0 * label_smoothing)
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
    """EXO on preferences, arXiv 2402.00856, section 3.2 (from memory): KL(p || q) of p = (sigmoid(m), sigmoid(-m)),
    m = r_w - r_l, and the labels q = (1 - epsilon, epsilon). DPO is the other way round, KL(q || p).

    Args: see the module. epsilon: of the labels' smoothing, above 0: without it the KL is infinite.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    losses = torch.zeros_like(chosen)
    for margin, label in ((chosen - rejected, 1.0 - epsilon), (rejected - chosen, epsilon)):
        log_p = logsigmoid(margin)
        losses = losses + log_p.exp() * (log_p - torch.log(torch.as_tensor(label, dtype=log_p.dtype)))
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("nca")
def nca(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor, *, beta: float = 0.01) -> LossOutput:
    """Noise contrastive alignment of pairs, arXiv 2402.05369, section 4.1 (from memory):
    - log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log sigmoid(-r_l): it holds the chosen likelihood up, too.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    losses = -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    return _output(losses, chosen, rejected, weights)


@preference_losses.register("sppo")
def sppo(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor, *, beta: float = 1e-3) -> LossOutput:
    """Self-play preference optimization with hard labels, arXiv 2405.00675, section 3 (from memory):
    (h_w - eta (P - 1/2))^2 + (h_l - eta (1 - P - 1/2))^2 with P = 1 and eta = 1 / beta.
    """
    chosen, rejected = _rewards(1.0, weights, chosen_log_ratios, rejected_log_ratios)
    losses = (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    return _output(losses, beta * chosen, beta * rejected, weights)


@preference_losses.register("apo_zero")
def apo_zero(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """Anchored preference optimization, arXiv 2408.06266, section 4 (from memory): - sigmoid(r_w) + sigmoid(r_l).

    The chosen one becomes likelier and the rejected one less likely: for chosen responses better than the policy's own.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(torch.sigmoid(rejected) - torch.sigmoid(chosen), chosen, rejected, weights)


@preference_losses.register("apo_down")
def apo_down(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """Anchored preference optimization, arXiv 2408.06266, section 4 (from memory): sigmoid(r_w) - sigmoid(r_w - r_l).

    Both become less likely, the rejected one more so: for chosen responses worse than the policy's own.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    return _output(torch.sigmoid(chosen) - torch.sigmoid(chosen - rejected), chosen, rejected, weights)


@preference_losses.register("discopop")
def discopop(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
    tau: float = 0.05,
) -> LossOutput:
    """DiscoPOP, the log-ratio modulated loss of arXiv 2406.08414, section 3
    (from memory, and as in its authors' model card):
    (1 - s) x - log sigmoid(m) + s exp(-m), m = r_w - r_l, s = sigmoid(m / tau).

    Args: see the module. tau: temperature of the blend of the two. The exponential is held within e^+-20.
    """
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    margin = chosen - rejected
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
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"] = "forward_kl",
    alpha: float = 0.5,
) -> LossOutput:
    """f-DPO, arXiv 2309.16240 (from memory): DPO under another divergence from the reference, - log sigmoid(r_w - r_l),
    r = beta f'(u), u = pi / pi_ref.

    f'(u) is log u for reverse_kl (DPO itself), -1 / u for forward_kl, log(2 u / (1 + u)) for jensen_shannon and
    (1 - u^-alpha) / alpha for alpha, each up to a constant, which falls out.

    Args: see the module. alpha: of the divergence of that name, above 0 and below 1. Log-ratios are held within +-20
        where they go into exp(); beyond, they have no gradient.
    """

    def slope(h: Tensor) -> Tensor:
        if divergence == "forward_kl":
            return -torch.exp(bounded(-h))
        if divergence == "jensen_shannon":
            return logsigmoid(h)
        return -torch.expm1(bounded(-alpha * h)) / alpha if divergence == "alpha" else h

    chosen, rejected = (beta * slope(h) for h in _rewards(1.0, weights, chosen_log_ratios, rejected_log_ratios))
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
    """Compute weighted preference optimization, arXiv 2406.11827 (from memory), with its sampled alignment: DPO's loss,
    times w(y_w) w(y_l), without gradient. So pairs that the policy would not write itself count less.

    log w(y) = mean over tokens of log pi(y_t) - log sum_v pi(v)^2: how likely a token is, next to what a token that is
    drawn from the policy has on average.

    Args: see the module. chosen_alignment, rejected_alignment: log w, of the policy at the start of the update.
        max_weight: upper limit of w(y_w) w(y_l), 1 in the authors' program. None: no limit, as in TRL's
            `use_weighting`.

    Metrics: those of the module, and `pair_weight`.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    log_weight = finite_where(active, chosen_alignment + rejected_alignment).detach()
    factor = (log_weight if max_weight is None else log_weight.clamp(max=math.log(max_weight))).exp()
    result = _output(-factor * logsigmoid(chosen - rejected), chosen, rejected, weights)
    return LossOutput(result.loss, {**result.metrics, "pair_weight": moments(factor, active)})


@preference_losses.register("aot")
def aot(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    margin_shifts: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """Alignment by optimal transport, paired, arXiv 2406.05882, section 3 (from memory): over the mini-batch the k-th
    largest of the policy's log pi(y_w) / pi(y_l) should be above the k-th largest of the reference's.

    loss = mean over k of - log sigmoid(beta (policy's k-th - reference's k-th)).

    Args: see the module. margin_shifts: what makes of h_w - h_l the difference of those two: the reference's
        log pi(y_w) / pi(y_l) of this pair, less the one of the pair that has the rank among the reference's which this
        one has among the policy's, at the start of the update.
    """
    active = weights != 0
    margins = finite_where(active, chosen_log_ratios - rejected_log_ratios + margin_shifts.detach())
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
    """Alignment by optimal transport, unpaired, arXiv 2406.05882, section 3 (from memory): the k-th largest reward
    of the mini-batch's chosen responses should be above the k-th largest of its rejected ones, of whichever prompts.

    loss = mean over k of - log sigmoid(k-th chosen r - k-th rejected r).

    Args: see the module. chosen_matched: for each chosen response the rejected one's log-ratio of the same rank at the
        start of the update; rejected_matched: for each rejected one the chosen one's. Each response has the gradient of
        the match that it is in, and each match counts once.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_ratios, rejected_log_ratios)
    above = beta * finite_where(active, rejected_matched).detach()
    below = beta * finite_where(active, chosen_matched).detach()
    both = -logsigmoid(chosen - below) - logsigmoid(above - rejected)  # its gradient, and twice its value
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
    """Compute contrastive preference optimization, arXiv 2401.08417, section 3 (from memory):
    - log sigmoid(beta log pi(y_w) - beta log pi(y_l)) - lam log pi(y_w). No reference.

    Args: log-probs as in `preference_losses`, of whole responses. lam: of the second term, in the paper 1. Rewards in
        the metrics: beta log pi.
        mean_chosen_length: scalar, tokens of a chosen response in the mean over the mini-batch; for sft_over="token".
        sft_over: what the second term is a mean over. "response": the sum over a response's tokens, as in the paper.
            "token": all tokens of the mini-batch's chosen responses, as in TRL, whose `cpo_alpha` is lam. This term is
            smaller by the factor `mean_chosen_length`.

    Metrics: those of the module, and `sft_loss`, as `sft_over` says.
    """
    active = weights != 0
    chosen, rejected = _rewards(beta, weights, chosen_log_probs, rejected_log_probs)
    likelihood = finite_where(active, chosen_log_probs)
    if sft_over == "token":
        if mean_chosen_length is None:
            raise DataError("cpo with sft_over='token' reads mean_chosen_length, which was not given.")
        likelihood = likelihood / mean_chosen_length.clamp(min=1)
    result = _output(-logsigmoid(chosen - rejected) - lam * likelihood, chosen, rejected, weights)
    return LossOutput(result.loss, {**result.metrics, "sft_loss": moments(-likelihood, active)})


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
    """AlphaPO, arXiv 2501.03884 (from memory): - log sigmoid(r_w - r_l - gamma), r = beta (1 - p^-alpha) / alpha,
    p = pi^(1 / length). No reference.

    Args: as `simpo`, which it is at alpha 0. alpha: shape of the reward, of either sign.
    """
    active = weights != 0
    chosen, rejected = (
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
    """Binary classifier optimization, arXiv 2404.04656, section 4 (from memory): single responses, each desirable
    or not.

    loss = sum_i weight_i x - log sigmoid(+- (r_i - delta)), + where desirable, delta the reward shift: the mean of the
    desirable and the undesirable ones' mean reward. The paper averages delta over steps too, and reweighs prompts that
    only one of the two has; here it is of the mini-batch.

    Args (`[samples]`): as `kto`. reward_shift: scalar, delta / beta (`mean_log_ratio`), the same for all micro-batches.

    Metrics: `desirable_reward`, `undesirable_reward` (r), `reward_shift` (delta).
    """
    active = weights != 0
    (rewards,) = _rewards(beta, weights, log_probs - ref_log_probs)
    delta = beta * reward_shift.detach()
    losses = -logsigmoid(torch.where(desirable, rewards - delta, delta - rewards))
    metrics: MetricSums = {
        "desirable_reward": moments(rewards, active & desirable),
        "undesirable_reward": moments(rewards, active & ~desirable),
        "reward_shift": moments(delta.expand_as(rewards), active),
    }
    return LossOutput((weights * losses).sum(), metrics)


def mean_log_ratio(log_ratios: Tensor, desirable: Tensor) -> Tensor:
    """The mean of the desirable and the undesirable responses' mean log(pi / pi_ref), without gradient; of the one kind
    alone where there is no other.

    Args (`[samples]`, of the WHOLE mini-batch): log_ratios: float. desirable: bool.

    Returns: scalar; 0 for no samples.
    """
    kept = log_ratios.detach()
    kinds = [kept[each].mean() for each in (desirable, ~desirable) if bool(each.any())]
    return torch.stack(kinds).mean() if kinds else kept.new_zeros(())


def matched(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` the one of `others` with the same rank; of equal ones the first has the lower rank.

    Args: `[pairs]` float, of the WHOLE mini-batch.
    """
    ranks = values.argsort(stable=True).argsort(stable=True)
    return others.sort(stable=True).values[ranks]
