"""What the ranks do in tests/distributed/test_flight_recorder.py."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.job_context import default_group_context


def stall_in_a_collective() -> str | None:
    """Rank 0 is in an all-reduce that rank 1 does not come to before there is a failure reason, which is returned."""
    rank, group = dist.get_rank(), dist.new_group([0, 1], group_desc="tensor-parallel")
    watch = RankWatch(stalled_after=1.0, interval=0.1, lost_after=20.0, grace=30.0)
    context = default_group_context(["actor", "coordinator"], timedelta(seconds=60))
    connection = ControllerConnection(context, CallTimeouts(), watch=watch)
    dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()
    connection.status("actor_update", 3)
    while rank == 1 and connection.reason is None:
        time.sleep(0.02)
    dist.all_reduce(torch.ones(3, 4, dtype=torch.bfloat16), group=group)
    connection.leave()
    return connection.reason
