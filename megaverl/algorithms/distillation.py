"""On-policy distillation: the student writes, the teacher judges every token.

Two forms. As an advantage the teacher's log-prob of the sampled token is enough, and the teacher can be a reference
role. As a loss over whole distributions, both need their log-probs of all of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators
from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry

distillation_losses: Registry[LossOutput] = Registry("distillation loss")


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


@distillation_losses.register("forward_kl")
def forward_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, weights: Tensor) -> LossOutput:
    """sum_t weight_t KL(teacher || student) at token t: arXiv 2306.13649, section 2.

    Args:
        student_log_probs: `[batch, response, vocabulary]` float, normalised; the gradient flows here.
        teacher_log_probs: the same shape, no gradient. -inf is allowed where a token is impossible, in either.
        weights: `[batch, response]` float, from `aggregation`; where 0 the rest may be anything.

    Metrics: `distillation_kl`, the token mean.
    """
    student, teacher, active = _distributions(student_log_probs, teacher_log_probs, weights)
    return _output(_kl(teacher, student), weights, active)


@distillation_losses.register("reverse_kl")
def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, weights: Tensor) -> LossOutput:
    """sum_t weight_t KL(student || teacher) at token t: arXiv 2306.08543, section 2. Arguments as `forward_kl`."""
    student, teacher, active = _distributions(student_log_probs, teacher_log_probs, weights)
    return _output(_kl(student, teacher), weights, active)


@distillation_losses.register("jensen_shannon")
def jensen_shannon(
    student_log_probs: Tensor, teacher_log_probs: Tensor, weights: Tensor, *, beta: float = 0.5
) -> LossOutput:
    """Generalised Jensen-Shannon divergence, arXiv 2306.13649, eq. 1.

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. Arguments as
    `forward_kl`; beta strictly between 0 and 1.
    """
    student, teacher, active = _distributions(student_log_probs, teacher_log_probs, weights)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return _output(beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture), weights, active)


def _distributions(student: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    active = weights != 0
    lowest = math.log(torch.finfo(torch.float32).tiny)  # e^-87: an impossible token, with a finite log-prob
    there = active.unsqueeze(-1)
    student = torch.where(there, student, 0.0).clamp(min=lowest)
    return student, torch.where(there, teacher.detach(), 0.0).clamp(min=lowest), active


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_v p (log p - log q) over the last dimension."""
    return (p.exp() * (p - q)).sum(dim=-1)


def _output(per_token: Tensor, weights: Tensor, active: Tensor) -> LossOutput:
    return LossOutput((weights * per_token).sum(), {"distillation_kl": moments(per_token, active)})
