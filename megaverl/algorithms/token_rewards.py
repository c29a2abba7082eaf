"""From one score per response to a reward per token, with the KL penalty in the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.errors import DataError


def token_rewards(rewards: Tensor, response_mask: Tensor, kl: Tensor | None = None, *, kl_coef: float = 0.0) -> Tensor:
    """The score at the response's last token, minus `kl_coef` x KL at every token.

    Source: arXiv 2203.02155, section 3.5: the term of its eq. 2 (without the one of pretraining), there added token by
    token; R = r - beta log(pi / rho) is of arXiv 1909.08593, section 2 (equation number not checked). The score of an
    empty response has no token to stand on and is left out.

    Args:
        rewards: `[batch]` float, one score per response.
        response_mask: `[batch, response]` bool.
        kl: `[batch, response]` float, per-token estimates (see `kl`), read under the mask only.

    Returns: `[batch, response]` in the dtype of `rewards`, 0 outside the mask.

    Raises:
        DataError: a score that is not finite.
    """
    check_finite("rewards", rewards)
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, columns, -1).amax(dim=1, keepdim=True) if len(columns) else columns
    result = torch.where(response_mask & (columns == last), rewards.unsqueeze(1), 0.0)
    if kl is not None and kl_coef:
        result = result - kl_coef * torch.where(response_mask, kl.to(rewards.dtype), 0.0)
    return result


def check_finite(name: str, per_sample: Tensor) -> None:
    """Raise a DataError that names the first sample whose number is NaN or infinite."""
    wrong = (~torch.isfinite(per_sample)).nonzero()
    if len(wrong):
        sample = int(wrong[0, 0])
        raise DataError(
            f"{name} of sample {sample} is {per_sample[sample].item()} ({len(wrong)} of {len(per_sample)} "
            "samples are not finite); look at the reward function"
        )
