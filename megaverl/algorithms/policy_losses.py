"""Policy losses: per-token surrogates, weighted and summed: PPO's clip, plain policy gradients, ratios of whole
responses (GSPO, GMPO, VESPO), bounds by divergence (DPPO), a square (DRO).

Every loss gets the same inputs, all `[batch, response]`:
    log_probs: float, of the policy being trained; the gradient flows here.
    old_log_probs: float, of the policy at the start of the update.
    advantages: float.
    weights: float, from an aggregation (`loss`); where 0 the other inputs may be anything, NaN included.
A row is a whole response, so that losses over whole responses do not see how the batch was split either.

All are linear in the size of the advantages, penalties aside (`dro`, `kl_cov`). A correction for stale samples
(`rollout_correction`) and `algorithm.top_entropy` therefore work on the advantages of a loss that looks at each token
alone. A loss over whole responses must tell a token without an advantage from a token that is left out, so it may
declare these optional inputs, all `[batch, response]`, and then gets the advantages as the estimator made them:
    correction_factors: float, to multiply the advantages by. A token with a factor of 0 is rejected, and counts in no
        mean or sum over its response.
    importance_weights: float, the factors of the corrections that weigh single tokens (`token_truncate`,
        `token_mask`); `correction_factors` then holds the product of the others.
    trained_tokens: bool, the tokens that `top_entropy` selects. The others count in means and sums over their
        response; their log-probs come without a gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, MetricSums, bounded, loss_problem, moments
from megaverl.algorithms.registry import Registry

policy_losses: Registry[LossOutput] = Registry("policy loss", loss_problem)


class Tokens(NamedTuple):
    """What most surrogates are made of, `[batch, response]`, 0 where there is no token to train."""

    log_ratio: Tensor  # log_prob - old_log_prob, of any size: `bounded` before exp()
    advantages: Tensor
    active: Tensor  # bool


def tokens_of(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor) -> Tokens:
    """The log-ratio and the advantages of the tokens that train; what stands elsewhere is 0, NaN included."""
    active = weights != 0
    log_ratio = torch.where(active, log_probs - old_log_probs, 0.0)
    return Tokens(log_ratio, torch.where(active, advantages, 0.0), active)


def without_rejected(tokens: Tokens, correction_factors: Tensor | None) -> tuple[Tokens, Tensor]:
    """Apply a correction to the tokens of a loss over whole responses.

    Returns: the tokens with corrected advantages; and `[batch, response]` bool, the tokens that count in a mean or sum
        over a response: those that the correction does not reject, or all of a response that it rejects as a whole.
    """
    if correction_factors is None:
        return tokens, tokens.active
    factors = torch.where(tokens.active, correction_factors, 0.0)
    kept = tokens.active & (factors != 0)
    counted = torch.where(kept.any(dim=1, keepdim=True), kept, tokens.active)
    return tokens._replace(advantages=tokens.advantages * factors), counted


def ratio_metrics(log_ratio: Tensor, active: Tensor, clipped: Tensor) -> MetricSums:
    """`clip_fraction` (tokens whose gradient was taken away), `approx_kl` (k3 of old against new), `ratio`."""
    log_ratio = bounded(log_ratio.detach())
    return {
        "clip_fraction": moments(clipped, active),
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
    """PPO's clipped surrogate, arXiv 1707.06347, eq. 7, negated.

    loss = - sum_t weight_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with
    r_t = exp(log_prob - old_log_prob). GRPO (arXiv 2402.03300, eq. 3) uses the same; with clip_high above clip_low
    it is DAPO's decoupled clip (arXiv 2503.14476, eq. 10, "clip-higher"). Beyond a log-ratio of +-20 a token has no
    gradient (`bounded`), so that nothing overflows.

    Args: see the module. clip_low, clip_high: how far the ratio may fall below, and rise above, 1.

    Metrics: `clip_fraction`, `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
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
    """PPO's clip with a floor for negative advantages, arXiv 1912.09729, eq. 5 (dual-clip PPO), negated.

    Where A_t < 0 the surrogate is max(min(r_t A_t, clip(r_t) A_t), clip_dual A_t): a ratio far above 1 can no longer
    make the loss grow without bound. Where A_t >= 0 it is PPO's.

    Args: as `ppo_clip`. clip_dual: c of the paper, above 1 + clip_high.

    Metrics: those of `ppo_clip`, and `dual_clip_fraction`, the tokens on the floor.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate, floor = torch.minimum(unclipped, clipped), clip_dual * advantages
    on_floor = (advantages < 0) & (surrogate < floor)
    loss = -(weights * torch.where(on_floor, floor, surrogate)).sum()
    metrics = ratio_metrics(log_ratio, active, (clipped < unclipped) | on_floor)
    return LossOutput(loss, metrics | {"dual_clip_fraction": moments(on_floor, active)})


@policy_losses.register("gpg")
@policy_losses.register("policy_gradient")
def policy_gradient(log_probs: Tensor, advantages: Tensor, weights: Tensor) -> LossOutput:
    """REINFORCE: loss = - sum_t weight_t A_t log_prob_t (Williams 1992; Sutton et al. 1999, theorem 1).

    GPG (arXiv 2504.02546) uses the same, with its own advantages. Right for samples of the very policy that is
    trained: one update per batch.

    Args: see `policy_losses`.

    Metrics: `log_prob`, the token mean.
    """
    active = weights != 0
    log_probs = torch.where(active, log_probs, 0.0)
    loss = -(weights * log_probs * torch.where(active, advantages, 0.0)).sum()
    return LossOutput(loss, {"log_prob": moments(log_probs, active)})


@policy_losses.register("importance_sampling")
def importance_sampling(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor) -> LossOutput:
    """The unclipped surrogate: loss = - sum_t weight_t r_t A_t, arXiv 1707.06347, eq. 6 ("CPI").

    Args: see `policy_losses`.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
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
    """Clipped importance weights on the policy gradient, arXiv 2506.13585, eq. 4 and 5.

    loss = - sum_t weight_t stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log_prob_t: the weight is
    limited, and no token loses its gradient. The paper tunes only the upper limit and leaves the lower one out, as
    clip_low=1 does.

    Args: see `policy_losses`. clip_low, clip_high: how far the weight may fall below, and rise above, 1.

    Metrics: `clip_fraction` (weights that were limited), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
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
    """Soft adaptive policy optimization, arXiv 2511.20347, eq. 5 and 6: a sigmoid gate in place of the clip.

    loss = - sum_t weight_t f(r_t) A_t with f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_positive where A_t > 0, else
    tau_negative. The slope of f is 1 at r = 1 and falls off to both sides, faster for a larger tau.

    Args: see `policy_losses`. tau_positive, tau_negative: temperatures, above 0.

    Metrics: `clip_fraction` (tokens whose slope is below a half), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (bounded(log_ratio).exp() - 1.0))
    loss = -(weights * 4.0 / tau * gate * advantages).sum()
    slope = 4.0 * gate.detach() * (1.0 - gate.detach())
    return LossOutput(loss, ratio_metrics(log_ratio, active, slope < 0.5))


def mean_over_tokens(values: Tensor, active: Tensor) -> Tensor:
    """`[batch, 1]`: the mean of each row of `values` under `active`; 0 for an empty row."""
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

    s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|), loss = - sum_t weight_t min(s_i A_t, clip(s_i) A_t); with respect to the
    policy, s_i counts as stop_gradient(s_i) pi_t / stop_gradient(pi_t). With the same advantage at every token of a
    response, and weights of `seq_mean_token_mean`, value and gradient are those of eq. 5. Tokens that a correction
    rejects do not count in s_i. All others do, also those with an advantage of 0.

    Args: see the module. clip_low, clip_high: how far s_i may fall below, and rise above, 1; the defaults are
        section 5.1's.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of responses, weighed by their tokens).
    """
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(tokens, correction_factors)
    mean = mean_over_tokens(log_ratio.detach(), counted)
    ratio = bounded(mean + (log_ratio - log_ratio.detach())).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutput(loss, ratio_metrics(mean.expand_as(active), active, clipped < unclipped))


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
    """Compute geometric-mean policy optimization, arXiv 2507.20673, section 3, eq. 4: the geometric mean of token-wise
    clipped ratios.

    With l_t = log r_t, c_t = min(l_t, clip_high) where A_t > 0, max(l_t, -clip_low) where A_t < 0, and
    g_i = exp(mean_t c_t): loss = - sum_i weight_i g_i A_i, weight_i the sum of the tokens' weights and A_i the mean of
    their advantages. So a token's ratio may go to e^-clip_low and e^clip_high. The paper's mean over responses is the
    aggregation `seq_mean_token_mean`.

    Tokens that a correction rejects leave all means over t: a response is what remains of it, with its whole weight.

    Args: see the module; the paper has one advantage per response. clip_low, clip_high: of the log-ratio.
        trained_tokens: only these get a gradient. Without it every token gets one.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of tokens, unclipped).
    """
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(tokens, correction_factors)
    if trained_tokens is not None:
        log_ratio = torch.where(trained_tokens, log_ratio, log_ratio.detach())
    limited = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio)
    limited = torch.where(advantages < 0, limited.clamp(min=-clip_low), limited)
    ratio, gains = bounded(mean_over_tokens(limited, counted)).exp(), mean_over_tokens(advantages, counted)
    loss = -(weights.sum(dim=1, keepdim=True) * ratio * gains).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, limited.detach() != log_ratio.detach()))


# The authors' program and TRL take no smaller weight of a token into the ratio of its response.
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
    """Compute variational sequence-level soft policy optimization, arXiv 2602.10693 (equation number not checked): a
    policy gradient with a smooth kernel of the whole response's ratio W, not normalised by length.

    loss = - sum_t weight_t stop_gradient(phi(W)) A_t log_prob_t, phi(W) = W^power exp(decay (1 - W)), which is 1 at
    W = 1, and falls off to 0 to both sides.

    W is the ratio to the policy that sampled the response. Without a correction that is pi(y) / pi_old(y). A correction
    that weighs tokens by pi_old / pi_rollout completes it: W = pi(y) / pi_old(y) x the product of these weights, each
    at least 1e-8, as in the authors' program and TRL. Tokens that another correction rejects do not count in W.

    Args: see the module. power, decay: c_1 and c_2 of the paper, of tokens with A_t >= 0 and A_t < 0. The defaults
        are TRL's. correction_in: "ratio" as above; "advantages" multiplies A_t by the weights instead, as other losses
        do, and leaves W as it is without a correction.

    Metrics: `clip_fraction` (tokens whose kernel is below a half), `approx_kl`, `ratio` (of tokens), `kernel`.
    """
    if importance_weights is not None and correction_in == "advantages":
        others = 1.0 if correction_factors is None else correction_factors
        correction_factors, importance_weights = importance_weights * others, None
    tokens = tokens_of(log_probs, old_log_probs, advantages, weights)
    (log_ratio, advantages, active), counted = without_rejected(tokens, correction_factors)
    log_terms = log_ratio.detach()
    if importance_weights is not None:
        log_terms = log_terms + importance_weights.clamp(min=SMALLEST_WEIGHT).log()
    log_w = bounded(torch.where(counted, log_terms, 0.0).sum(dim=1, keepdim=True)).expand_as(log_ratio)
    positive = advantages >= 0
    power = torch.full_like(log_ratio, power_negative).masked_fill(positive, power_positive)
    decay = torch.full_like(log_ratio, decay_negative).masked_fill(positive, decay_positive)
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
    """Compute direct reward optimisation, arXiv 2405.19107, as arXiv 2501.12599 (section 2.3.2) has it for groups
    (equation numbers not checked): for samples of any policy, without a ratio.

    loss = - sum_i weight_i (A_i log pi(y_i) - beta / 2 (log pi(y_i) / pi_old(y_i))^2), weight_i that of a token: up to
    a constant the square of A_i - beta log pi(y_i) / pi_old(y_i), over 2 beta. With `seq_mean_token_sum` it is the mean
    over responses. The paper's A_i is a reward less a value: use `dr_grpo`'s.

    Args: see the module. beta: tau of the paper. over: "response" as above. "token" squares each token's log-ratio
        instead of their sum over the response, as verl does.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`, `square_penalty` (of responses, weighed by their tokens;
        of tokens with over="token").
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    gains = (weights * advantages * torch.where(active, log_probs, 0.0)).sum()
    if over == "token":
        penalty = 0.5 * beta * log_ratio.square()
        loss = (weights * penalty).sum() - gains
    else:
        penalty = 0.5 * beta * log_ratio.sum(dim=1, keepdim=True).square()
        loss = (mean_over_tokens(weights, active) * penalty).sum() - gains
    metrics = ratio_metrics(log_ratio, active, torch.zeros_like(active))
    return LossOutput(loss, {**metrics, "square_penalty": moments(penalty.expand_as(log_ratio), active)})


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
    """Compute divergence PPO with the binary total variation, arXiv 2602.04879, eq. 12, with the binary approximation.

    loss = - sum_t weight_t M_t r_t A_t with r_t = pi_t / mu_t, mu the policy that sampled. M_t is 0 where the update
    would lead on outwards from a token that is already far, (A_t > 0 and r_t > 1 or A_t < 0 and r_t < 1) and
    D_t > threshold, else 1. Here D_t = |pi_t - mu_t|, the total variation of "this token or another".

    The ratio already is to the engine's policy: no `correction` beside it.

    Args: see the module. rollout_log_probs: of mu, as the engine reported them. threshold: delta. ratio_max: truncate
        the ratio. The loss is then - sum_t weight_t M_t stop_gradient(min(r_t, ratio_max)) A_t log_prob_t, as in verl:
        below the limit it has the same gradient. None: no limit, as in the paper's equation.

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
    """Compute divergence PPO with the binary KL, arXiv 2602.04879, eq. 12, with the binary KL of its eq. 14.

    As `dppo_tv`, with D_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t)).
    """
    tokens = tokens_of(log_probs, rollout_log_probs, advantages, weights)
    far = binary_kl(*_detached(tokens.active, log_probs, rollout_log_probs)) > threshold
    return _held_back(tokens, log_probs, weights, far, ratio_max)


def binary_tv(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """|pi - mu| of the sampled token. Shapes: any, both the same; log-probs at most 0."""
    return (log_probs.exp() - sampled_log_probs.exp()).abs()


def binary_kl(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """KL(mu || pi) of "the sampled token, or another", in nats. Shapes: any, both the same; log-probs at most 0."""
    mu = sampled_log_probs.exp()
    # 1 - p without loss for a p near 0; where p is 1 to the last bit, the other tokens still have some probability.
    smallest = torch.finfo(mu.dtype).tiny
    others_mu, others_pi = -torch.expm1(sampled_log_probs), (-torch.expm1(log_probs)).clamp(min=smallest)
    return mu * (sampled_log_probs - log_probs) + torch.special.xlogy(others_mu, others_mu / others_pi)


def _detached(active: Tensor, *log_probs: Tensor) -> list[Tensor]:
    """Log-probs without gradient where a token trains, else log 1; at most 0."""
    return [torch.where(active, each.detach(), 0.0).clamp(max=0.0) for each in log_probs]


def _held_back(tokens: Tokens, log_probs: Tensor, weights: Tensor, far: Tensor, ratio_max: float | None) -> LossOutput:
    """Compute the surrogate without the tokens that are `far` and would move further."""
    log_ratio, advantages, active = tokens
    outwards = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    blocked = outwards & far
    surrogate = bounded(log_ratio).exp() * advantages
    if ratio_max is not None:
        limited = bounded(log_ratio.detach()).exp().clamp(max=ratio_max)
        surrogate = limited * advantages * torch.where(active, log_probs, 0.0)
    # A product and no torch.where: what is not finite at a blocked token must reach the loss.
    loss = -(weights * (surrogate * ~blocked)).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, blocked))
