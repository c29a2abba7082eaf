"""Token rewards from another model's log-probs: an implicit reward model (PRIME, arXiv 2502.01456) or a teacher.

With a teacher (on-policy distillation) the student writes, and the teacher scores every
token. As an advantage, the teacher's log-prob of the sampled token is enough. As a
loss, whole distributions are compared by one of `divergences`. These are functions of
`[..., vocabulary]` log-probs of student and teacher, each normalized over the whole
vocabulary. They return `[...]`, a sum over the vocabulary of terms that depend on one
entry each, so a tensor-parallel rank's part of the vocabulary gives its part of the
divergence. -inf counts as e^-87. The teacher gets no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.advantages import (
    Advantages,
    advantage_estimators,
    group_totals,
    rewards_to_go,
)
from megaverl.algorithms.group_advantages import rloo
from megaverl.algorithms.loss import LossOutput, moments, nan_if_infinite
from megaverl.algorithms.registry import Registry, tensor_problem


def implicit_rewards(
    log_probs: Tensor, ref_log_probs: Tensor, *, beta: float = 0.05
) -> Tensor:
    """Return r_t = beta (log pi_phi(y_t) - log pi_ref(y_t)), arXiv 2502.01456, eq. 3 (the implicit process reward).

    Args:
        log_probs: `[batch, response]` float, of the reward model phi.
        ref_log_probs: `[batch, response]` float, of the reference.
        beta: scale, above 0.
    """
    return beta * (log_probs - ref_log_probs)


@advantage_estimators.register("prime")
def prime(
    implicit_rewards: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Advantages:
    """Compute PRIME, arXiv 2502.01456, eq. 5.

    Rewards-to-go of leave-one-out token rewards, plus leave-one-out outcomes:

    A_t = sum_{s >= t} gamma^(s - t) (r_s - mean over the group's other responses j of
    r(y_j)) + RLOO of the outcomes, where r(y_j) is the mean of that response's token
    rewards. Nothing is subtracted in a group of one.

    Args:
        implicit_rewards: `[batch, response]` float. Only values under the mask are read.
        rewards: `[batch]` float, outcomes.
        group_ids: `[batch]` int64.
        response_mask: `[batch, response]` bool.

    Returns:
        Advantages `[batch, response]` in the dtype of `rewards`, 0 outside the mask; no returns.

    Raises:
        DataError: an outcome is not finite.
    """
    # [batch, response] in float64; values outside the mask may be NaN.
    process = torch.where(response_mask, implicit_rewards.double(), 0.0)
    means = process.sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)
    # [batch]: number of other responses in the group, and the mean of their token
    # rewards.
    num_others = group_totals(torch.ones_like(means), group_ids) - 1
    baseline = (group_totals(means, group_ids) - means) / num_others.clamp(min=1)
    gains = rewards_to_go(process - baseline.unsqueeze(1), response_mask, gamma)
    outcome = rloo(rewards, group_ids, response_mask).advantages
    return Advantages(
        torch.where(response_mask, gains + outcome, 0.0).to(rewards.dtype), None
    )


def outcome_cross_entropy(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    correct: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
) -> LossOutput:
    """Compute the loss of the implicit reward model, arXiv 2502.01456, algorithm 1, line 8 (unnumbered).

    It is the cross-entropy of sigmoid(r(y)) on the outcome: loss = - sum_i weight_i
    (o_i log sigmoid(r_i) + (1 - o_i) log sigmoid(-r_i)), r_i = sum_t r_t
    (`implicit_rewards`).

    Args:
        log_probs: `[batch, response]` float, of the reward model. Gets the gradient.
        ref_log_probs: `[batch, response]` float. Only values under the mask are read.
        correct: `[batch]`, o_i: bool, or a float from 0 to 1.
        response_mask: `[batch, response]` bool.
        weights: `[batch]` float, one over the number of responses in the mini-batch, or 0.

    Metrics: `implicit_accuracy` (the sign of r_i is correct), `implicit_reward`.
    """
    per_token = implicit_rewards(
        torch.where(response_mask, log_probs, 0.0),
        torch.where(response_mask, ref_log_probs, 0.0),
        beta=beta,
    )
    # [batch]. The logits of the cross-entropy are sums over tokens, without
    # normalization by length.
    scores = per_token.sum(dim=1)
    outcome = correct.to(log_probs.dtype)
    # From logits, because a sigmoid close to 0 or 1 would lose the gradient.
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        scores, outcome, reduction="none"
    )
    active = weights != 0
    metrics = {
        "implicit_accuracy": moments((scores > 0) == (outcome > 0.5), active),
        "implicit_reward": moments(scores, active),
    }
    return LossOutput((weights * losses).sum(), metrics)


divergences: Registry[Tensor] = Registry(
    "divergence",
    lambda result, inputs: tensor_problem(
        result, inputs["student_log_probs"].shape[:-1]
    ),
)

# e^-87 is the smallest normal float32: an impossible token with a finite log-prob.
LOWEST = math.log(torch.finfo(torch.float32).tiny)


@advantage_estimators.register("distillation")
def distillation(
    rollout_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    limit: float = 20.0,
) -> Advantages:
    """Return advantages for the gradient of KL(student || teacher), token by token.

    A_t = log teacher(y_t) - log student(y_t), limited to +-`limit`.

    Source: MiniLLM, arXiv 2306.08543, section 2.2, its single-step part; on-policy as
    in arXiv 2306.13649, section 3.

    Args:
        rollout_log_probs: `[batch, response]` float, of the student that sampled.
        ref_log_probs: `[batch, response]` float, of the teacher.
        response_mask: `[batch, response]` bool. Only values under it are read.
        limit: largest absolute advantage.

    Returns:
        Advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    gap = nan_if_infinite(
        torch.where(response_mask, ref_log_probs - rollout_log_probs, 0.0)
    )
    return Advantages(gap.clamp(-limit, limit), None)


@advantage_estimators.register("none")
def none(response_mask: Tensor) -> Advantages:
    """Return zero advantages: no reward trains, and the policy learns only from its other losses, such as a teacher's.

    Args:
        response_mask: `[batch, response]` bool.

    Returns:
        Advantages `[batch, response]` float32; no returns.
    """
    return Advantages(
        torch.zeros(response_mask.shape, device=response_mask.device), None
    )


@divergences.register("forward_kl")
def forward_kl(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Compute KL(teacher || student) = sum_v p_T (log p_T - log p_S), arXiv 2306.13649, section 2.

    Shapes as in the module.
    """
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    return _kl(teacher, student)


@divergences.register("reverse_kl")
def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Compute KL(student || teacher) = sum_v p_S (log p_S - log p_T), arXiv 2306.08543, section 2.

    Shapes as in the module.
    """
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    return _kl(student, teacher)


@divergences.register("jensen_shannon")
def jensen_shannon(
    student_log_probs: Tensor, teacher_log_probs: Tensor, *, beta: float = 0.5
) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence, arXiv 2306.13649, eq. 1. Shapes as in the module.

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.

    Args:
        beta: strictly between 0 and 1.
    """
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    # log m, without leaving the logarithm: small probabilities do not underflow.
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def distillation_loss(per_token: Tensor, weights: Tensor) -> LossOutput:
    """Return sum_t weight_t D_t, for divergences and weights `[batch, response]`.

    Where a weight is 0, D may be anything.

    Metrics: `distillation_divergence`, the token mean of the divergence.
    """
    active = weights != 0
    # A product with the weight 0 would keep NaN.
    per_token = torch.where(active, per_token, 0.0)
    return LossOutput(
        (weights * per_token).sum(),
        {"distillation_divergence": moments(per_token, active)},
    )


def _bounded(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return both log-probs with -inf replaced by a finite number, the teacher's without gradient."""
    return student.clamp(min=LOWEST), teacher.detach().clamp(min=LOWEST)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v p (log p - log q) over the last dimension, given log p and log q."""
    # Over this rank's part of the vocabulary only. The caller adds up the ranks.
    return (p.exp() * (p - q)).sum(dim=-1)
