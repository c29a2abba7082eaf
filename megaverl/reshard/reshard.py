"""Resharding: a plan, the tensors on both sides, and the movers that carry it out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaverl.errors import ReshardError
from megaverl.parallel.collectives import gather_json, together
from megaverl.platform import platform
from megaverl.reshard.check import check_plan
from megaverl.reshard.movers import BUCKET_BYTES, PointToPoint, copy_local
from megaverl.reshard.plan import Plan
from megaverl.reshard.views import check_tensors


@dataclass(frozen=True)
class ReshardStats:
    """What one run moved on this rank: bytes copied within it, sent and received, messages and seconds."""

    bytes_local: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    num_messages: int


class Resharder:
    """Moves one set of weights into another's layout, in place, as often as asked.

    Making one is collective over `group`: the ranks agree on the dtype that travels, the smaller of the two
    sides', so that float32 masters reach a bfloat16 engine at half the bytes. Running it is collective too.

    Args:
        plan: this rank's plan; checked here.
        source_tensors: local name -> tensor, as in `plan.source_layout`; looked up anew at every run, so
            that offloading may move them in between.
        dest_tensors: the same for the destination.
        group: the ranks of the plan, in order; None: all.
        bucket_bytes: the largest message, and so the extra memory for each of sending and receiving.

    Raises:
        ReshardError: a plan that is not exact, parameters that do not fit their layout, mixed dtypes.
    """

    def __init__(
        self,
        plan: Plan,
        source_tensors: Mapping[str, torch.Tensor],
        dest_tensors: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        with together(group) if plan.world > 1 else nullcontext():
            check_plan(plan)
            check_tensors(plan.source_layout, source_tensors, "the source", ReshardError)
            check_tensors(plan.dest_layout, dest_tensors, "the destination", ReshardError)
        self._plan = plan
        self._source = {name: source_tensors[name] for name in plan.source_layout.local_shapes}
        self._dest = {name: dest_tensors[name] for name in plan.dest_layout.local_shapes}
        if plan.world > 1:
            wire_dtype = agree_on_dtype(self._source, self._dest, group)
            self._mover = PointToPoint(group, wire_dtype, platform.device, bucket_bytes)
            self._rounds = self._mover.rounds(plan)

    def run(self) -> ReshardStats:
        """Bring the destination up to date. Every rank of the group takes part."""
        start = time.perf_counter()
        sent = received = num_messages = 0
        with torch.no_grad():
            local = copy_local(self._plan.copies, self._source, self._dest)
            if self._plan.world > 1:
                sent, received = self._mover.run(self._rounds, self._source, self._dest)
                num_messages = sum((r.outgoing is not None) + (r.incoming is not None) for r in self._rounds)
        if platform.is_cuda:
            torch.cuda.current_stream().synchronize()
        return ReshardStats(local, sent, received, time.perf_counter() - start, num_messages)


def agree_on_dtype(
    source: Mapping[str, torch.Tensor], dest: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> torch.dtype:
    """The smaller of the dtypes of the two sides over all ranks (the destination's when they are as large).

    All ranks of the group take part; this is also the collective that NCCL wants before the first
    point-to-point batch.

    Raises:
        ReshardError: on every rank, when a side's parameters are not all of one dtype.
    """
    sides = [sorted({str(tensor.dtype) for tensor in side.values()}) for side in (source, dest)]
    gathered = gather_json(sides, group)
    agreed = []
    for name, column in (("destination", 1), ("source", 0)):
        dtypes = {dtype for found in gathered for dtype in found[column]}
        if len(dtypes) > 1:
            by_rank = {rank: ", ".join(found[column]) for rank, found in enumerate(gathered)}
            raise ReshardError(f"the {name}'s parameters must all have one dtype; found, by rank: {by_rank}.")
        agreed += [getattr(torch, dtype.removeprefix("torch.")) for dtype in dtypes]
    return min(agreed, key=lambda dtype: dtype.itemsize)
