"""On-policy distillation: the student writes, the teacher judges every token.

Two forms. As an advantage the teacher's log-prob of the sampled token is enough. As a loss, whole distributions are
compared, by one of `divergences`: functions of `[..., vocabulary]` log-probs of student and teacher, each normalised
over the whole vocabulary; they return `[...]`, a sum over the vocabulary of terms of one entry each. So a
tensor-parallel rank's part of the vocabulary gives its part of the divergence. -inf counts as e^-87. No gradient goes
to the teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators
from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry, tensor_problem

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
    gap = torch.where(response_mask, ref_log_probs - rollout_log_probs, 0.0)
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
