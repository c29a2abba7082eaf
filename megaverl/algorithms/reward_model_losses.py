"""Losses that train a reward model on pairs of responses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaverl.algorithms.loss import LossOutput, loss_problem
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry

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
    chosen, rejected = torch.where(active, chosen_rewards, 0.0), torch.where(active, rejected_rewards, 0.0)
    wanted = 0.0 if margins is None else torch.where(active, margins, 0.0)
    losses = -logsigmoid(chosen - rejected - wanted) + center_coef * (chosen + rejected).square()
    metrics = {
        "preference_accuracy": moments(chosen > rejected, active),
        "margin": moments(chosen - rejected, active),
        "chosen_reward": moments(chosen, active),
        "rejected_reward": moments(rejected, active),
    }
    return LossOutput((weights * losses).sum(), metrics)
