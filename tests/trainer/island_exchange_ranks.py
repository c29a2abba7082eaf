"""What the ranks do in test_island_exchange.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.job_context import join
from megaverl.distributed.placement import Node, parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.store import job_store
from megaverl.errors import TrainingStopped
from megaverl.trainer.islands import IslandMember, serve_join


def islands_join() -> dict[str, Any]:
    """Three islands of one rank each, and on rank 3 the coordinator, whose node has no GPU where the others' have."""
    deadline = timedelta(seconds=30)
    store, rank, size = job_store(deadline)
    wanted = {"actor": parse_wanted("0-2"), "coordinator": parse_wanted(3)}
    grids: dict[str, Any] = {"actor": None, "rollout": None, "reward": None}
    nodes = [Node("strong", 3, memory=1e9), Node("small", 1)]
    context = join(
        resolve(wanted, size, grids, nodes, islands=3), store, rank, deadline
    )
    assert (context.group is context.control) == (rank == 3) and dist.get_world_size(
        context.control
    ) == 4
    if rank == 3:
        serve_join(context)
        serve_join(context)
        try:
            serve_join(context)
        except TrainingStopped as error:
            return {"joins": 3, "refused": str(error)}
    gradients = [make_gradients(island) for island in range(3)]
    sums = {name: sum(one[name].double() for one in gradients) for name in gradients[0]}
    errors, digest = [], 0.0
    for compress in (False, True):
        member = IslandMember(context, compress=compress, bucket=64)
        mine = {name: tensor.clone() for name, tensor in gradients[rank].items()}
        member.join(mine, mean=compress)
        expected = {
            name: (total / 3 if compress else total).float()
            for name, total in sums.items()
        }
        errors.append(
            max(float((mine[name] - expected[name]).abs().max()) for name in mine)
        )
        digest = float(sum(tensor.double().sum() for tensor in mine.values()))
    try:
        IslandMember(context, bucket=64).join({"w": torch.zeros(4 + (rank == 2))})
        refused = ""
    except TrainingStopped as error:
        refused = "islands differ" if "islands differ" in str(error) else str(error)
    return {
        "error": errors[0],
        "compressed": errors[1],
        "digest": digest,
        "refused": refused,
    }


def make_gradients(island: int) -> dict[str, torch.Tensor]:
    """The same shapes for all, more than a bucket holds."""
    generator = torch.Generator().manual_seed(island)
    return {
        "w": torch.randn(9, 11, generator=generator),
        "b": torch.randn(70, generator=generator),
        "s": torch.ones(1),
    }
