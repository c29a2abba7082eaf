"""What the ranks do in tests/platform/test_direct_exchange.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.platform import megatron_cpu, platform


def drawn(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank has: for each rank a row of five."""
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchanged(dtype: str, in_place: bool) -> dict[str, Any]:
    """How far sums are from those made here of what all ranks have, and whether a second time is the same."""
    rank, size, kind = dist.get_rank(), dist.get_world_size(), getattr(torch, dtype)
    everyone = [drawn(other, size, kind) for other in range(size)]
    sums = []
    for _ in range(2):
        whole = everyone[rank].clone()
        mine = whole[rank] if in_place else torch.full((5,), 7.0, dtype=kind)
        megatron_cpu.reduce_scatter(mine, whole, dist.group.WORLD)
        sums.append(mine.clone())
    exact = torch.stack([each[rank].double() for each in everyone]).sum(0)
    gathered = torch.full((size, 5), 7.0, dtype=kind)
    given = (
        gathered[rank].copy_(everyone[rank][0])
        if in_place
        else everyone[rank][0].clone()
    )
    megatron_cpu.all_gather(gathered, given, dist.group.WORLD)
    return {
        "sum": float((sums[0].double() - exact).abs().max()),
        "same": torch.equal(*sums),
        "whole": torch.equal(gathered, torch.stack([each[0] for each in everyone])),
    }


def by_megatron_core() -> dict[str, Any]:
    """What megatron-core's buffers call, as they call it; and what is left to PyTorch."""
    platform.adapt_megatron()
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from torch.distributed.distributed_c10d import _coalescing_manager

    seen: list[str] = []
    direct = megatron_cpu._exchange

    def noted(*arguments: Any) -> None:
        seen.append("directly")
        direct(*arguments)

    megatron_cpu._exchange = noted
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for async_op in (False, True):
        seen.clear()
        whole = drawn(rank, size, torch.float32).flatten()
        mine = whole.view(size, -1)[rank]
        with _coalescing_manager(dist.group.WORLD, async_ops=async_op) as manager:
            options = {
                "op": dist.ReduceOp.SUM,
                "group": dist.group.WORLD,
                "async_op": async_op,
            }
            buffers.dist_reduce_scatter_func(mine, whole, **options)
        if async_op:
            manager.wait()
        with _coalescing_manager(dist.group.WORLD, async_ops=async_op) as manager:
            buffers.dist_all_gather_func(
                whole, mine, group=dist.group.WORLD, async_op=async_op
            )
        if async_op:
            manager.wait()
        found["in the background" if async_op else "at once"] = {
            "directly": len(seen),
            "whole": whole.tolist(),
        }
    megatron_cpu._exchange = direct
    return found
