"""Policy losses in float64, token by token, straight from the papers' equations; gradients by autograd.

`old` is what the ratio is taken to: the log-probs at the start of the update, or the
engine's (DPPO).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.algorithms.strategies import Case


class Inputs(NamedTuple):
    new: Tensor  # [B, R]; the gradient flows here
    old: Tensor
    advantages: Tensor
    selected: Tensor  # bool
    mask: Tensor  # bool

    def tokens(self, i: int) -> list[int]:
        return [t for t in range(self.mask.shape[1]) if self.mask[i, t]]

    def ratio(self, i: int, t: int) -> Tensor:
        return torch.exp(self.new[i, t] - self.old[i, t])


Objective = Callable[[Inputs, int, int], Tensor]  # what is maximised at one token


def inputs_of(case: Case, *, per_response: bool = False) -> Inputs:
    """Random inputs; `per_response`: one advantage for all tokens of a response."""
    new = (case.normal(scale=0.7) - 2.0).clamp(max=-0.05)
    old = (new + case.normal(scale=0.4)).clamp(max=-0.05)
    advantages = (
        case.normal(len(case.mask), 1).expand_as(new) if per_response else case.normal()
    )
    return Inputs(new.requires_grad_(), old, advantages, case.normal() > 0.5, case.mask)


def policy_gradient(x: Inputs, i: int, t: int) -> Tensor:
    return x.advantages[i, t] * x.new[i, t]


def importance_sampling(x: Inputs, i: int, t: int) -> Tensor:
    return x.ratio(i, t) * x.advantages[i, t]


def clip(x: Inputs, i: int, t: int, low: float = 0.2, high: float = 0.2) -> Tensor:
    a, r = x.advantages[i, t], x.ratio(i, t)
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def dual_clip(x: Inputs, i: int, t: int) -> Tensor:
    a = x.advantages[i, t]
    return torch.maximum(clip(x, i, t), 1.5 * a) if a < 0 else clip(x, i, t)


def cispo(x: Inputs, i: int, t: int) -> Tensor:
    return x.ratio(i, t).detach().clamp(0.7, 1.2) * x.advantages[i, t] * x.new[i, t]


def sapo(x: Inputs, i: int, t: int) -> Tensor:
    tau = 1.0 if x.advantages[i, t] > 0 else 1.05
    return 4 / tau / (1 + torch.exp(-tau * (x.ratio(i, t) - 1))) * x.advantages[i, t]


def gspo_token(x: Inputs, i: int, t: int) -> Tensor:
    """Eq. 13 and 14: the stop-gradient of the sequence ratio times pi_t over itself."""
    s = torch.exp(
        sum(x.new[i, k] - x.old[i, k] for k in x.tokens(i)) / len(x.tokens(i))
    ).detach()
    s = s * torch.exp(x.new[i, t]) / torch.exp(x.new[i, t]).detach()
    a = x.advantages[i, t]
    return torch.minimum(s * a, s.clamp(0.9, 1.1) * a)


def gspo(x: Inputs, i: int, t: int) -> Tensor:
    """Eq. 5 to 7, spread over the tokens of the response."""
    s = torch.exp(
        sum(x.new[i, k] - x.old[i, k] for k in x.tokens(i)) / len(x.tokens(i))
    )
    a = x.advantages[i, t]
    return torch.minimum(s * a, s.clamp(0.9, 1.1) * a)


def gmpo(x: Inputs, i: int, t: int) -> Tensor:
    """The |o|-th root of the product of min(r^sgn, clip(r, e^-0.3, e^0.2)^sgn)^sgn, times the advantage."""
    product = torch.ones((), dtype=torch.float64)
    for k in x.tokens(i):
        sign = float(torch.sign(x.advantages[i, k]))
        r = x.ratio(i, k)
        limited = r.clamp(torch.e**-0.3, torch.e**0.2)
        product = product * torch.minimum(r**sign, limited**sign) ** sign
    return product ** (1 / len(x.tokens(i))) * x.advantages[i, t]


def vespo(x: Inputs, i: int, t: int) -> Tensor:
    """phi(W) = W^c1 e^(c2 (1 - W)) of the whole response, as a number."""
    w = 1.0
    for k in x.tokens(i):
        w *= float(x.ratio(i, k))
    c1, c2 = (1.5, 2.5) if x.advantages[i, t] >= 0 else (2.0, 1.0)
    return w**c1 * math.exp(c2 * (1 - w)) * x.advantages[i, t] * x.new[i, t]


def dro(x: Inputs, i: int, t: int) -> Tensor:
    """A log pi(y) - beta / 2 (log of the ratio of y)^2, the second spread over the tokens of the response."""
    h = sum((x.new[i, k] - x.old[i, k] for k in x.tokens(i)), torch.zeros(()).double())
    return x.advantages[i, t] * x.new[i, t] - 0.3 / 2 * h**2 / len(x.tokens(i))


def dppo(
    x: Inputs,
    i: int,
    t: int,
    divergence: Callable[[float, float], float],
    threshold: float,
) -> Tensor:
    pi, mu = float(torch.exp(x.new[i, t])), float(torch.exp(x.old[i, t]))
    a, r = x.advantages[i, t], x.ratio(i, t)
    outwards = (a > 0 and r > 1) or (a < 0 and r < 1)
    return r * a * (0.0 if outwards and divergence(pi, mu) > threshold else 1.0)


def dppo_tv(x: Inputs, i: int, t: int) -> Tensor:
    return dppo(x, i, t, lambda pi, mu: abs(pi - mu), 0.05)


def dppo_kl(x: Inputs, i: int, t: int) -> Tensor:
    def binary_kl(pi: float, mu: float) -> float:
        pair = torch.tensor([[pi, 1 - pi], [mu, 1 - mu]], dtype=torch.float64)
        return float((pair[1] * (pair[1] / pair[0]).log()).sum())

    return dppo(x, i, t, binary_kl, 0.01)


def clip_cov(x: Inputs, i: int, t: int) -> Tensor:
    return 0.0 * x.new[i, t] if x.selected[i, t] else clip(x, i, t, 1.0, 1.0)


def kl_cov(x: Inputs, i: int, t: int) -> Tensor:
    penalty = 0.6 * (x.old[i, t] - x.new[i, t]).abs() if x.selected[i, t] else 0.0
    return x.ratio(i, t) * x.advantages[i, t] - penalty


# registered name -> (objective, the options that it is written for, one advantage per
# response)
REFERENCES: dict[str, tuple[Objective, dict[str, float], bool]] = {
    "policy_gradient": (policy_gradient, {}, False),
    "gpg": (policy_gradient, {}, False),
    "importance_sampling": (importance_sampling, {}, False),
    "ppo_clip": (
        lambda x, i, t: clip(x, i, t, 0.2, 0.3),
        {"clip_low": 0.2, "clip_high": 0.3},
        False,
    ),
    "dual_clip": (dual_clip, {"clip_dual": 1.5}, False),
    "cispo": (cispo, {"clip_low": 0.3, "clip_high": 0.2}, False),
    "sapo": (sapo, {}, False),
    "gspo": (gspo_token, {"clip_low": 0.1, "clip_high": 0.1}, False),
    "gmpo": (gmpo, {"clip_low": 0.3, "clip_high": 0.2}, True),
    "vespo": (
        vespo,
        {
            "power_positive": 1.5,
            "decay_positive": 2.5,
            "power_negative": 2.0,
            "decay_negative": 1.0,
        },
        True,
    ),
    "dro": (dro, {"beta": 0.3}, True),
    "dppo_tv": (dppo_tv, {"threshold": 0.05}, False),
    "dppo_kl": (dppo_kl, {"threshold": 0.01}, False),
    "clip_cov": (clip_cov, {}, False),
    "kl_cov": (kl_cov, {"penalty": 0.6}, False),
}
