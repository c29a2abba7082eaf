"""What the ranks of a test world compute over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.models.vocab_parallel import vocab_parallel_log_probs


def log_probs(
    logits: list[list[float]],
    targets: list[int],
    vocab_size: int,
    weights: list[list[float]],
    **options: Any,
) -> dict[str, list[Any]]:
    """Values, and the gradient of their weighted sum in this rank's shard of the padded `logits`."""
    shard = (
        torch.tensor(logits)
        .chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        .clone()
        .requires_grad_()
    )
    options = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    values = vocab_parallel_log_probs(
        shard,
        torch.tensor(targets),
        vocab_size=vocab_size,
        group=dist.group.WORLD,
        **options,
    )
    total = sum(
        (value * torch.tensor(weight)).sum()
        for value, weight in zip(values, weights, strict=True)
    )
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert shard.grad is not None
    return {"values": [value.tolist() for value in values], "grad": shard.grad.tolist()}


def log_probs_of_all(
    cases: list[dict[str, Any]], **options: Any
) -> list[dict[str, list[Any]]]:
    """`log_probs` of one case after the other."""
    return [log_probs(**case, **options) for case in cases]
