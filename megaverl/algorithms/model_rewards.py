"""Rewards of tokens from another model's log-probs: of one trained on outcomes alone (PRIME, arXiv 2502.01456), or of a
teacher (on-policy distillation: the student writes, the teacher judges every token).

Distillation has two forms. As an advantage the teacher's log-prob of the sampled token is enough. As a loss, whole
distributions are compared, by one of `divergences`: functions of `[..., vocabulary]` log-probs of student and
teacher, each normalised over the whole vocabulary; they return `[...]`, a sum over the vocabulary of terms of one
entry each. So a tensor-parallel rank's part of the vocabulary gives its part of the divergence. -inf counts as e^-87.
No gradient goes to the teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators, group_totals, rewards_to_go
from megaverl.algorithms.group_advantages import rloo
from megaverl.algorithms.loss import LossOutput, moments, nan_if_infinite
from megaverl.algorithms.registry import Registry, tensor_problem


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float = 0.05) -> Tensor:
    """r_t = beta (log pi_phi(y_t) - log pi_ref(y_t)), arXiv 2502.01456, eq. 3 (the implicit process reward).

    Args: `[batch, response]` float; log_probs: of the reward model phi. beta: scale, above 0.
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
    """PRIME, arXiv 2502.01456, eq. 5: rewards-to-go of leave-one-out token rewards, plus leave-one-out outcomes.

    A_t = sum_{s >= t} gamma^(s - t) (r_s - mean over the group's other responses j of r(y_j)) + RLOO of the outcomes,
    where r(y_j) is the mean of that response's token rewards. Nothing is subtracted in a group of one.

    Args:
        implicit_rewards: `[batch, response]` float, read under the mask only. rewards: `[batch]` float, outcomes.
        group_ids: `[batch]` int64. response_mask: `[batch, response]` bool.

    Returns: advantages `[batch, response]` in the dtype of `rewards`, 0 outside the mask; no returns.

    Raises:
        DataError: an outcome that is not finite.
    """
    process = torch.where(response_mask, implicit_rewards.double(), 0.0)
    means = process.sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)
    others = group_totals(torch.ones_like(means), group_ids) - 1
    baseline = (group_totals(means, group_ids) - means) / others.clamp(min=1)
    gains = rewards_to_go(process - baseline.unsqueeze(1), response_mask, gamma)
    outcome = rloo(rewards, group_ids, response_mask).advantages
    return Advantages(torch.where(response_mask, gains + outcome, 0.0).to(rewards.dtype), None)


def outcome_cross_entropy(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    correct: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
) -> LossOutput:
    """The loss of the implicit reward model, arXiv 2502.01456, algorithm 1, line 8 (unnumbered): cross-entropy
    of sigmoid(r(y)) on the outcome.

    loss = - sum_i weight_i (o_i log sigmoid(r_i) + (1 - o_i) log sigmoid(-r_i)), r_i = sum_t r_t (`implicit_rewards`).

    Args:
        log_probs: `[batch, response]` float, of the reward model; the gradient flows here. ref_log_probs: the same
            shape. Both are read under the mask only.
        correct: `[batch]`, o_i: bool, or a float from 0 to 1. response_mask: `[batch, response]` bool.
        weights: `[batch]` float, one over the number of responses in the mini-batch, or 0.

    Metrics: `implicit_accuracy` (is the sign of r_i right), `implicit_reward`.
    """
    per_token = implicit_rewards(
        torch.where(response_mask, log_probs, 0.0), torch.where(response_mask, ref_log_probs, 0.0), beta=beta
    )
    scores, outcome = per_token.sum(dim=1), correct.to(log_probs.dtype)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, outcome, reduction="none")
    active = weights != 0
    metrics = {
        "implicit_accuracy": moments((scores > 0) == (outcome > 0.5), active),
        "implicit_reward": moments(scores, active),
    }
    return LossOutput((weights * losses).sum(), metrics)


divergences: Registry[Tensor] = Registry(
    "divergence", lambda result, inputs: tensor_problem(result, inputs["student_log_probs"].shape[:-1])
)

LOWEST = math.log(torch.finfo(torch.float32).tiny)  # e^-87: an impossible token, with a finite log-prob


@advantage_estimators.register("distillation")
def distillation(
    rollout_log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, limit: float = 20.0
) -> Advantages:
    """The policy gradient of KL(student || teacher), token by token: A_t = log teacher(y_t) - log student(y_t).

    Source: MiniLLM, arXiv 2306.08543, section 2.2, its single-step part; on-policy as in arXiv 2306.13649, section 3.

    Args (`[batch, response]`): rollout_log_probs: float, of the student that sampled. ref_log_probs: float, of the
        teacher. response_mask: bool; both are read under it only. limit: of the size of an advantage.

    Returns: advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    gap = nan_if_infinite(torch.where(response_mask, ref_log_probs - rollout_log_probs, 0.0))
    return Advantages(gap.clamp(-limit, limit), None)


@advantage_estimators.register("none")
def none(response_mask: Tensor) -> Advantages:
    """No reward trains: all advantages are 0, and the policy learns from its other losses alone, such as a teacher's.

    Args: response_mask: `[batch, response]` bool.

    Returns: advantages `[batch, response]` float32; no returns.
    """
    return Advantages(torch.zeros(response_mask.shape, device=response_mask.device), None)


@divergences.register("forward_kl")
def forward_kl(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(teacher || student) = sum_v p_T (log p_T - log p_S): arXiv 2306.13649, section 2. See the module."""
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    return _kl(teacher, student)


@divergences.register("reverse_kl")
def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(student || teacher) = sum_v p_S (log p_S - log p_T): arXiv 2306.08543, section 2. See the module."""
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    return _kl(student, teacher)


@divergences.register("jensen_shannon")
def jensen_shannon(student_log_probs: Tensor, teacher_log_probs: Tensor, *, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence, arXiv 2306.13649, eq. 1.

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. See the module.

    Args: beta: strictly between 0 and 1.
    """
    student, teacher = _bounded(student_log_probs, teacher_log_probs)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def distillation_loss(per_token: Tensor, weights: Tensor) -> LossOutput:
    """sum_t weight_t D_t, for divergences and weights `[batch, response]`; where a weight is 0, D may be anything.

    Metrics: `distillation_divergence`, the token mean of the divergence, whichever it is.
    """
    active = weights != 0
    per_token = torch.where(active, per_token, 0.0)
    return LossOutput((weights * per_token).sum(), {"distillation_divergence": moments(per_token, active)})


def _bounded(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    return student.clamp(min=LOWEST), teacher.detach().clamp(min=LOWEST)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_v p (log p - log q) over the last dimension."""
    return (p.exp() * (p - q)).sum(dim=-1)
