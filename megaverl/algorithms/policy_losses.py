"""Policy losses: per-token surrogates, weighted and summed.

They are PPO's clip, plain policy gradients, ratios of whole responses (GSPO, GMPO,
VESPO), bounds by divergence (DPPO), and a square (DRO). Every loss gets the same
inputs, all `[batch, response]`:
    log_probs: float, of the policy being trained. Get the gradient.
    old_log_probs: float, of the policy at the start of the update.
    advantages: float.
    weights: float, from an aggregation (`loss`). Where 0, the other inputs may be anything, NaN included.
A row is a whole response, so losses over whole responses do not depend on how the batch
was split either.

All are linear in the size of the advantages, except for penalties (`dro`, `kl_cov`). A
correction for stale samples (`rollout_correction`) and `algorithm.top_entropy`
therefore change the advantages of a loss that treats tokens separately. A loss over
whole responses must distinguish a token without an advantage from one that is left out.
It may declare these optional inputs, all `[batch, response]`, and then gets the
estimator's advantages unchanged:
    correction_factors: float, to multiply the advantages by. A token with a factor of 0 is rejected, and counts in no
        mean or sum over its response.
    importance_weights: float, factors of the corrections that weight single tokens (`token_truncate`, `token_mask`).
        `correction_factors` is then the product of the others.
    trained_tokens: bool, the tokens that `top_entropy` selects. The others count in means and sums over their response,
        but their log-probs have no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import (
    LossOutput,
    MetricSums,
    bounded,
    loss_problem,
    moments,
)
from megaverl.algorithms.registry import Registry

policy_losses: Registry[LossOutput] = Registry("policy loss", loss_problem)


class Tokens(NamedTuple):
    """Inputs of most surrogates, `[batch, response]`, 0 for tokens that do not train.

    Attributes:
        log_ratio: log_prob - old_log_prob, unlimited; apply `bounded` before exp().
        advantages: advantages.
        active: bool, tokens that train.
    """

    # log_prob - old_log_prob. It may be large: apply `bounded` before exp().
    log_ratio: Tensor
    advantages: Tensor
    active: Tensor  # bool


def tokens_of(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> Tokens:
    """Return log-ratio and advantages of the tokens that train, and 0 elsewhere, even for NaN."""
    active = weights != 0
    log_ratio = torch.where(active, log_probs - old_log_probs, 0.0)
    return Tokens(log_ratio, torch.where(active, advantages, 0.0), active)


def without_rejected(
    tokens: Tokens, correction_factors: Tensor | None
) -> tuple[Tokens, Tensor]:
    """Apply a correction to the tokens of a loss over whole responses.

    Returns:
        The tokens with corrected advantages. And `[batch, response]` bool, the tokens that count in a mean or sum over
            a response: those that the correction does not reject, or all tokens of a response that is rejected as a
            whole.
    """
    if correction_factors is None:
        return tokens, tokens.active
    # Factors of padding may be anything.
    factors = torch.where(tokens.active, correction_factors, 0.0)
    kept = tokens.active & (factors != 0)
    # A response that is rejected as a whole has advantages of 0; its mean must still
    # exist.
    counted = torch.where(kept.any(dim=1, keepdim=True), kept, tokens.active)
    return tokens._replace(advantages=tokens.advantages * factors), counted


def ratio_metrics(log_ratio: Tensor, active: Tensor, clipped: Tensor) -> MetricSums:
    """Return `clip_fraction` (tokens that lost their gradient), `approx_kl` (k3 of old against new) and `ratio`."""
    log_ratio = bounded(log_ratio.detach())
    return {
        "clip_fraction": moments(clipped, active),
        # k3 = r - 1 - log r is never negative. `expm1` keeps it exact for ratios near
        # 1.
        "approx_kl": moments(torch.expm1(log_ratio) - log_ratio, active),
        "ratio": moments(log_ratio.exp(), active),
    }


@policy_losses.register("ppo_clip")
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    """Compute PPO's clipped surrogate, arXiv 1707.06347, eq. 7, negated.

    loss = - sum_t weight_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),
    with r_t = exp(log_prob - old_log_prob). GRPO (arXiv 2402.03300, eq. 3) uses the
    same. With clip_high above clip_low it is DAPO's decoupled clip (arXiv 2503.14476,
    eq. 10, "clip-higher"). Beyond a log-ratio of +-20 a token has no gradient
    (`bounded`), so nothing overflows.

    Args:
        clip_low, clip_high: how far the ratio may fall below, and rise above, 1.
        For the others see the module.

    Metrics: `clip_fraction`, `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    # The minimum is the pessimistic bound: clipping may only take gain away, it never
    # hides a loss.
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, clipped < unclipped))


@policy_losses.register("dual_clip")
def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float = 3.0,
) -> LossOutput:
    """Compute PPO's clip with a floor for negative advantages, arXiv 1912.09729, eq. 5 (dual-clip PPO), negated.

    If A_t < 0 the surrogate is max(min(r_t A_t, clip(r_t) A_t), clip_dual A_t), so a
    ratio far above 1 no longer makes the loss grow without bound. If A_t >= 0 it is
    PPO's.

    Args:
        clip_dual: c of the paper, above 1 + clip_high.
        For the others see `ppo_clip`.

    Metrics: the metrics of `ppo_clip`, and `dual_clip_fraction`, the share of tokens on the
    floor.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    floor = clip_dual * advantages
    # Without the floor, a large ratio with a negative advantage has an unbounded loss.
    on_floor = (advantages < 0) & (surrogate < floor)
    loss = -(weights * torch.where(on_floor, floor, surrogate)).sum()
    metrics = ratio_metrics(log_ratio, active, (clipped < unclipped) | on_floor)
    return LossOutput(loss, metrics | {"dual_clip_fraction": moments(on_floor, active)})


@policy_losses.register("gpg")
@policy_losses.register("policy_gradient")
def policy_gradient(
    log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> LossOutput:
    """Compute REINFORCE: loss = - sum_t weight_t A_t log_prob_t (Williams 1992; Sutton et al. 1999, theorem 1).

    GPG (arXiv 2504.02546) uses the same with its own advantages. It is correct only for
    samples of the very policy being trained, that is, one update per batch.

    For arguments, see the module's docstring.

    Metrics: `log_prob`, the token mean.
    """
    active = weights != 0
    log_probs = torch.where(active, log_probs, 0.0)
    loss = -(weights * log_probs * torch.where(active, advantages, 0.0)).sum()
    return LossOutput(loss, {"log_prob": moments(log_probs, active)})


@policy_losses.register("importance_sampling")
def importance_sampling(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> LossOutput:
    """Compute the unclipped surrogate: loss = - sum_t weight_t r_t A_t, arXiv 1707.06347, eq. 6 ("CPI").

    For arguments, see the module's docstring.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    loss = -(weights * bounded(log_ratio).exp() * advantages).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, torch.zeros_like(active)))


@policy_losses.register("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossOutput:
    """Compute the policy gradient with clipped importance weights, arXiv 2506.13585, eq. 4 and 5.

    loss = - sum_t weight_t stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t
    log_prob_t. The weight is limited, and no token loses its gradient. The paper tunes
    only the upper limit and has no lower one, as with clip_low=1.

    Args:
        clip_low, clip_high: how far the weight may fall below, and rise above, 1.
        For the others see the module.

    Metrics: `clip_fraction` (weights that were limited), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    # The ratio is only a weight here, so clipping it never cuts off a token's gradient,
    # unlike in PPO.
    ratio = bounded(log_ratio.detach()).exp()
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    log_probs = torch.where(active, log_probs, 0.0)
    loss = -(weights * limited * advantages * log_probs).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, limited != ratio))


@policy_losses.register("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossOutput:
    """Compute soft adaptive policy optimization, arXiv 2511.20347, eq. 5 and 6: a sigmoid gate instead of the clip.

    loss = - sum_t weight_t f(r_t) A_t with f(r) = 4 / tau sigmoid(tau (r - 1)), and tau
    = tau_positive if A_t > 0, else tau_negative. The slope of f is 1 at r = 1 and
    decreases on both sides, faster for a larger tau.

    Args:
        tau_positive, tau_negative: temperatures, above 0.
        For the others see the module.

    Metrics: `clip_fraction` (tokens whose slope is below a half), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(
        advantages > 0, tau_positive
    )
    # The sigmoid's slope is 1/4 at ratio 1. The factor 4 / tau below makes the gradient
    # there that of the plain ratio.
    gate = torch.sigmoid(tau * (bounded(log_ratio).exp() - 1.0))
    loss = -(weights * 4.0 / tau * gate * advantages).sum()
    slope = 4.0 * gate.detach() * (1.0 - gate.detach())
    return LossOutput(loss, ratio_metrics(log_ratio, active, slope < 0.5))


def mean_over_tokens(values: Tensor, active: Tensor) -> Tensor:
    """Return the mean of each row of `values` under `active`, `[batch, 1]`; 0 for an empty row."""
    total = torch.where(active, values, 0.0).sum(dim=1, keepdim=True)
    return total / active.sum(dim=1, keepdim=True).clamp(min=1)


@policy_losses.register("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    correction_factors: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOutput:
    """Compute group sequence policy optimization, arXiv 2507.18071, eq. 5 to 7, in the per-token form of eq. 13 and 14.

    s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|), loss = - sum_t weight_t min(s_i A_t, clip(s_i) A_t). For the gradient,
    s_i counts as stop_gradient(s_i) pi_t / stop_gradient(pi_t). With equal advantages within a response and weights of
    `seq_mean_token_mean`, value and gradient are those of eq. 5. Tokens that a correction rejects do not count in s_i.
    All others do, including those with an advantage of 0.

    Args:
        clip_low, clip_high: how far s_i may fall below, and rise above, 1. The defaults are from section 5.1.
        For the others see the module.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of responses, weighted by their
    tokens).
    """
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(
        tokens, correction_factors
    )
    mean = mean_over_tokens(log_ratio.detach(), counted)
    # The value is that of the response's mean, and the gradient is that of the token:
    # the second part is 0.
    ratio = bounded(mean + (log_ratio - log_ratio.detach())).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutput(
        loss, ratio_metrics(mean.expand_as(active), active, clipped < unclipped)
    )


@policy_losses.register("gmpo")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    correction_factors: Tensor | None = None,
    trained_tokens: Tensor | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossOutput:
    """Compute geometric-mean policy optimization, arXiv 2507.20673, section 3, eq. 4.

    Let l_t = log r_t, c_t = min(l_t, clip_high) if A_t > 0, max(l_t, -clip_low) if A_t
    < 0, and g_i = exp(mean_t c_t), the geometric mean of token-wise clipped ratios.
    loss = - sum_i weight_i g_i A_i, where weight_i is the sum of the tokens' weights
    and A_i the mean of their advantages. So a token's ratio may reach e^-clip_low and
    e^clip_high. The paper's mean over responses is the aggregation
    `seq_mean_token_mean`.

    Tokens that a correction rejects are left out of all means over t. The response
    consists of the rest, with its whole weight.

    Args:
        advantages: the paper has one per response.
        clip_low, clip_high: limits of the log-ratio.
        trained_tokens: only these get a gradient. None: all.
        For the others see the module.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of tokens, unclipped).
    """
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(
        tokens, correction_factors
    )
    if trained_tokens is not None:
        # Tokens that were not selected still count in the mean, but get no gradient.
        log_ratio = torch.where(trained_tokens, log_ratio, log_ratio.detach())
    # Clip only in the direction in which the update would go further, as in PPO.
    limited = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio)
    limited = torch.where(advantages < 0, limited.clamp(min=-clip_low), limited)
    ratio = bounded(mean_over_tokens(limited, counted)).exp()
    # One number per response, as in the paper, even if tokens have different
    # advantages.
    gains = mean_over_tokens(advantages, counted)
    loss = -(weights.sum(dim=1, keepdim=True) * ratio * gains).sum()
    return LossOutput(
        loss, ratio_metrics(log_ratio, active, limited.detach() != log_ratio.detach())
    )


# Lower limit of a token's weight in the ratio of its response, as in the authors'
# program and TRL.
SMALLEST_WEIGHT = 1e-8


@policy_losses.register("vespo")
def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    correction_factors: Tensor | None = None,
    importance_weights: Tensor | None = None,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
    correction_in: Literal["ratio", "advantages"] = "ratio",
) -> LossOutput:
    """Compute variational sequence-level soft policy optimization, arXiv 2602.10693 (equation number not checked).

    It is a policy gradient with a smooth kernel of the whole response's ratio W, not
    normalized by length: loss = - sum_t weight_t stop_gradient(phi(W)) A_t log_prob_t,
    phi(W) = W^power exp(decay (1 - W)), which is 1 at W = 1 and decreases to 0 on both
    sides.

    W is the ratio to the policy that sampled the response. Without a correction that is
    pi(y) / pi_old(y). A correction that weights tokens by pi_old / pi_rollout completes
    it: W = pi(y) / pi_old(y) x the product of these weights, each at least 1e-8, as in
    the authors' program and TRL. Tokens that another correction rejects do not count in
    W.

    Args:
        power_positive, decay_positive: c_1 and c_2 of the paper, for tokens with A_t >= 0. Defaults are TRL's.
        power_negative, decay_negative: the same for tokens with A_t < 0.
        correction_in: "ratio" as above. "advantages" multiplies A_t by the weights instead, like other losses, and W is
            that without a correction.
        For the others see the module.

    Metrics: `clip_fraction` (tokens whose kernel is below a half), `approx_kl`, `ratio`
    (of tokens), `kernel`.
    """
    if importance_weights is not None and correction_in == "advantages":
        further_factors = 1.0 if correction_factors is None else correction_factors
        correction_factors = importance_weights * further_factors
        # The correction then multiplies the advantages, like any other loss's, and no
        # longer enters the kernel.
        importance_weights = None
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(
        tokens, correction_factors
    )
    # The kernel is a weight without gradient, which flows through log_prob alone.
    log_terms = log_ratio.detach()
    if importance_weights is not None:
        log_terms = log_terms + importance_weights.clamp(min=SMALLEST_WEIGHT).log()
    log_w = bounded(
        torch.where(counted, log_terms, 0.0).sum(dim=1, keepdim=True)
    ).expand_as(log_ratio)
    positive = advantages >= 0
    power = torch.full_like(log_ratio, power_negative).masked_fill(
        positive, power_positive
    )
    decay = torch.full_like(log_ratio, decay_negative).masked_fill(
        positive, decay_positive
    )
    # w^power exp(-decay (w - 1)), computed from log w so that a large w does not
    # overflow.
    kernel = torch.exp(power * log_w - decay * torch.expm1(log_w))
    loss = -(weights * kernel * advantages * torch.where(active, log_probs, 0.0)).sum()
    metrics = ratio_metrics(log_ratio, active, kernel < 0.5)
    return LossOutput(loss, {**metrics, "kernel": moments(kernel, active)})


@policy_losses.register("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
    over: Literal["response", "token"] = "response",
) -> LossOutput:
    """Compute direct reward optimization, arXiv 2405.19107, in the form for groups of arXiv 2501.12599 (section 2.3.2).

    Equation numbers not checked. It works on samples of any policy, without a ratio:
    loss = - sum_i weight_i (A_i log pi(y_i) - beta / 2 (log pi(y_i) / pi_old(y_i))^2),
    with weight_i that of a token. Up to a constant, this is the square of A_i - beta log
    pi(y_i) / pi_old(y_i), divided by 2 beta. With `seq_mean_token_sum` it is the mean
    over responses. The paper's A_i is a reward minus a value: use `dr_grpo`'s.

    Args:
        beta: tau of the paper.
        over: "response" as above. "token" squares each token's log-ratio instead of their sum over the response, as
            verl does.
        For the others see the module.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`, `square_penalty` (of
    responses, weighted by their tokens; of tokens with over="token").
    """
    log_ratio, advantages, active = tokens_of(
        log_probs, old_log_probs, advantages, weights
    )
    gains = (weights * advantages * torch.where(active, log_probs, 0.0)).sum()
    if over == "token":
        penalty = 0.5 * beta * log_ratio.square()
        loss = (weights * penalty).sum() - gains
    else:
        penalty = 0.5 * beta * log_ratio.sum(dim=1, keepdim=True).square()
        loss = (mean_over_tokens(weights, active) * penalty).sum() - gains
    metrics = ratio_metrics(log_ratio, active, torch.zeros_like(active))
    return LossOutput(
        loss,
        {**metrics, "square_penalty": moments(penalty.expand_as(log_ratio), active)},
    )


@policy_losses.register("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    threshold: float = 0.15,
    ratio_max: float | None = None,
) -> LossOutput:
    """Compute divergence PPO, arXiv 2602.04879, eq. 12, with the binary approximation of total variation.

    loss = - sum_t weight_t M_t r_t A_t with r_t = pi_t / mu_t, where mu is the policy that sampled. M_t is 0 if the
    update would move a token further that is already far away: (A_t > 0 and r_t > 1 or A_t < 0 and r_t < 1) and D_t >
    threshold. Else it is 1. Here D_t = |pi_t - mu_t|, the total variation of "this token or another".

    The ratio is to the engine's policy already, so no `correction` is needed.

    Args:
        rollout_log_probs: of mu, as the engine reported them.
        threshold: delta of the paper.
        ratio_max: limit of the ratio. The loss is then - sum_t weight_t M_t stop_gradient(min(r_t, ratio_max)) A_t
            log_prob_t, as in verl, which has the same gradient below the limit. None: no limit, as in the paper's
            equation.
        For the others see the module.

    Metrics: `clip_fraction` (tokens with M_t = 0), `approx_kl`, `ratio`.
    """
    tokens = tokens_of(log_probs, rollout_log_probs, advantages, weights)
    far = binary_tv(*_detached(tokens.active, log_probs, rollout_log_probs)) > threshold
    return _held_back(tokens, log_probs, weights, far, ratio_max)


@policy_losses.register("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    threshold: float = 0.05,
    ratio_max: float | None = None,
) -> LossOutput:
    """Compute divergence PPO, arXiv 2602.04879, eq. 12, with the binary KL of its eq. 14.

    As `dppo_tv`, with D_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 -
    pi_t)).
    """
    tokens = tokens_of(log_probs, rollout_log_probs, advantages, weights)
    far = binary_kl(*_detached(tokens.active, log_probs, rollout_log_probs)) > threshold
    return _held_back(tokens, log_probs, weights, far, ratio_max)


def binary_tv(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """Return |pi - mu| of the sampled token. Any shape; log-probs are at most 0."""
    return (log_probs.exp() - sampled_log_probs.exp()).abs()


def binary_kl(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """Return KL(mu || pi) of the event "the sampled token", in nats. Any shape; log-probs are at most 0."""
    mu = sampled_log_probs.exp()
    # expm1 computes 1 - p accurately for small p. If p is 1 up to rounding, the other
    # tokens still have some probability.
    smallest = torch.finfo(mu.dtype).tiny
    others_mu = -torch.expm1(sampled_log_probs)
    others_pi = (-torch.expm1(log_probs)).clamp(min=smallest)
    of_others: Tensor = torch.special.xlogy(others_mu, others_mu / others_pi)
    return mu * (sampled_log_probs - log_probs) + of_others


def _detached(active: Tensor, *log_probs: Tensor) -> list[Tensor]:
    """Return log-probs without gradient for tokens that train, else 0; at most 0."""
    return [
        torch.where(active, values.detach(), 0.0).clamp(max=0.0) for values in log_probs
    ]


def _held_back(
    tokens: Tokens,
    log_probs: Tensor,
    weights: Tensor,
    far: Tensor,
    ratio_max: float | None,
) -> LossOutput:
    """Compute the surrogate without tokens that are `far` and would move further."""
    log_ratio, advantages, active = tokens
    # Only updates that move away from the sampling policy are blocked; those that come
    # back are welcome.
    outwards = ((advantages > 0) & (log_ratio > 0)) | (
        (advantages < 0) & (log_ratio < 0)
    )
    blocked = outwards & far
    surrogate = bounded(log_ratio).exp() * advantages
    if ratio_max is not None:
        limited = bounded(log_ratio.detach()).exp().clamp(max=ratio_max)
        surrogate = limited * advantages * torch.where(active, log_probs, 0.0)
    # A product instead of torch.where: a value that is not finite at a blocked token
    # must reach the loss.
    loss = -(weights * (surrogate * ~blocked)).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, blocked))
