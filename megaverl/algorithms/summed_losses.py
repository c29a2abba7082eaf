"""Losses of a service that trains on given tokens: sums over tokens, without any normalisation.

They are those of Tinker's API, written from memory of its documentation. The client
chooses weights or advantages so that their sum is what it wants to minimise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Arguments: log-probs of the targets [B, R], inputs [B, R] by name, options by name.
# Returns the loss of each token, [B, R].
TokenLoss = Callable[
    [torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, float]], torch.Tensor
]


@dataclass(frozen=True)
class SummedLoss:
    """A loss that is the sum of its tokens' losses.

    Attributes:
        inputs: names of the tensors that it reads, each with one value per token.
        options: its options with their defaults.
        token_loss: computes the loss of each token.
    """

    inputs: tuple[str, ...]
    options: Mapping[str, float]
    token_loss: TokenLoss

    def __call__(
        self,
        log_probs: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        options: Mapping[str, float],
    ) -> torch.Tensor:
        """Return the loss of each token, [B, R].

        Args:
            log_probs: natural log-probs of the targets, [B, R].
            inputs: tensors [B, R] by name. Values in the padding must be zero.
            options: options that differ from their defaults.
        """
        return self.token_loss(log_probs, inputs, {**self.options, **options})


def _cross_entropy(
    log_probs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
) -> torch.Tensor:
    return -inputs["weights"] * log_probs


def _importance_sampling(
    log_probs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
) -> torch.Tensor:
    ratio = torch.exp(log_probs - inputs["logprobs"])
    return -ratio * inputs["advantages"]


def _ppo(
    log_probs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
) -> torch.Tensor:
    """Compute the clipped surrogate of PPO (arXiv 1707.06347, eq. 7)."""
    ratio = torch.exp(log_probs - inputs["logprobs"])
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(
    log_probs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
) -> torch.Tensor:
    """Compute the loss of CISPO (arXiv 2506.13585; from memory): the clipped ratio is a constant weight."""
    ratio = torch.exp(log_probs - inputs["logprobs"])
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped.detach() * inputs["advantages"] * log_probs


def _dro(
    log_probs: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, float],
) -> torch.Tensor:
    """Compute the loss of direct reward optimisation (arXiv 2405.19107; from memory), with a quadratic penalty."""
    penalty = (log_probs - inputs["logprobs"]).square()
    return -(log_probs * inputs["advantages"] - 0.5 * options["beta"] * penalty)


_OF_POLICY = ("logprobs", "advantages")
_CLIPPING = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

SUMMED_LOSSES: Mapping[str, SummedLoss] = {
    "cross_entropy": SummedLoss(("weights",), {}, _cross_entropy),
    "importance_sampling": SummedLoss(_OF_POLICY, {}, _importance_sampling),
    "ppo": SummedLoss(_OF_POLICY, _CLIPPING, _ppo),
    "cispo": SummedLoss(_OF_POLICY, _CLIPPING, _cispo),
    "dro": SummedLoss(_OF_POLICY, {"beta": 0.05}, _dro),
}
