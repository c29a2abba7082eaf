"""What the ranks do in tests/distributed/test_flight_recorder.py."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.liveness import Liveness


def stall_in_a_collective() -> str | None:
    """Rank 0 is in an all-reduce that rank 1 does not come to before there is a failure reason, which is returned."""
    rank, group = dist.get_rank(), dist.new_group([0, 1], group_desc="tensor-parallel")
    store = dist.PrefixStore("stalls", dist.distributed_c10d._get_default_store())
    watch = RankWatch(stalled_after=1.0, interval=0.1, lost_after=20.0, grace=30.0)
    liveness = Liveness(store, rank, 2, coordinator=0, watch=watch)
    dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()
    liveness.status("actor_update", 3)
    while rank == 1 and liveness.failure_reason is None:
        time.sleep(0.02)
    dist.all_reduce(torch.ones(3, 4, dtype=torch.bfloat16), group=group)
    liveness.leave()
    return liveness.failure_reason or liveness.settle(5.0, "none")
