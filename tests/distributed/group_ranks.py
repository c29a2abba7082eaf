"""What the ranks of a test world do with groups and collectives."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megaverl import errors
from megaverl.distributed import job_context
from megaverl.distributed.channels import Channel
from megaverl.distributed.collectives import (
    barrier,
    broadcast_json,
    gather_host_rows,
    gather_json,
    gather_rows,
    on_first_rank,
    raise_together,
    reduce_json,
    together,
)
from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import DENSE_GROUPS, EXPERT_GROUPS, ProcessGroupManager
from megaverl.distributed.ragged import RaggedBatch
from megaverl.errors import MegaverlError

FIELDS = (*DENSE_GROUPS, *EXPERT_GROUPS, "embd", "pos_embd", "inter_dist_opt")


def group_ranks(sizes: dict[str, int]) -> dict[str, list[int] | None]:
    """Members of every group of this rank's ProcessGroupCollection, by field."""
    collection = ProcessGroupManager().grid(GridShape(**sizes)).pg_collection
    groups = {name: getattr(collection, name) for name in FIELDS}
    return {
        name: None if group is None else dist.get_process_group_ranks(group)
        for name, group in groups.items()
    }


def two_grids(first: dict[str, int], second: dict[str, int]) -> dict[str, Any]:
    """How many groups there are after each of two grids, and which of their fields are one and the same group."""
    manager = ProcessGroupManager()
    one = manager.grid(GridShape(**first))
    after_first = manager.num_groups
    other = manager.grid(GridShape(**second))
    groups = [
        {name: getattr(grid.pg_collection, name) for name in FIELDS}
        for grid in (one, other)
    ]
    members = [
        {
            name: None if g is None else tuple(dist.get_process_group_ranks(g))
            for name, g in found.items()
        }
        for found in groups
    ]
    distinct = {
        ranks for found in members for ranks in found.values() if ranks is not None
    }
    shared = {
        ranks: {
            id(found[name])
            for found, m in zip(groups, members, strict=True)
            for name in FIELDS
            if m[name] == ranks
        }
        for ranks in distinct
    }
    total = torch.ones(())
    dist.all_reduce(total, group=other.tp_group)
    return {
        "after_first": after_first,
        "after_both": manager.num_groups,
        "distinct": sorted(distinct),
        "every_group_is_one_object": all(
            len(objects) == 1 for objects in shared.values()
        ),
        "world_is_the_default_group": one.world is dist.group.WORLD
        and other.world is dist.group.WORLD,
        "sum_over_tp": int(total),
    }


def too_small_a_grid() -> str:
    try:
        ProcessGroupManager().grid(GridShape(tp=2))
    except errors.GridError as error:
        return str(error)
    return ""


def deep_pipeline_then(second: dict[str, int]) -> list[int]:
    """Ranks in the middle of a pipeline have no embedding group; the next grid must not trip over that."""
    manager = ProcessGroupManager()
    manager.grid(GridShape(pp=dist.get_world_size()))
    found = []
    grid = manager.grid(GridShape(**second))
    for group in (grid.tp_group, grid.pp_group, grid.pg_collection.dp):
        total = torch.tensor(2 ** dist.get_rank())
        dist.all_reduce(total, group=group)
        found.append(int(total))
    return found


def gather(value: Any) -> list[Any]:
    """The same value from every rank, with the rank beside it."""
    return gather_json([dist.get_rank(), value])


def gather_in_pairs() -> list[int]:
    """Over the pair that this rank belongs to."""
    rank = dist.get_rank()
    pair = ProcessGroupManager().grid(GridShape(tp=2, dp=2)).tp_group
    return gather_json(rank, pair)


def gather_uneven(rows_of: list[int], dtype: str) -> dict[str, Any]:
    """Rank r brings `rows_of[r]` rows, each row [r, number]."""
    rank = dist.get_rank()
    rows = torch.tensor(
        [[rank, number] for number in range(rows_of[rank])], dtype=getattr(torch, dtype)
    )
    found = gather_rows(rows.reshape(-1, 2))
    return {"rows": found.tolist(), "dtype": str(found.dtype)}


def gather_ragged(rows_of: list[int]) -> dict[str, Any]:
    """Row i of rank r has r + i tokens."""
    rank, count = dist.get_rank(), rows_of[dist.get_rank()]
    lengths = torch.arange(count) + rank
    tokens = torch.full((count, rank + count), rank, dtype=torch.int32)
    columns = {"row": [f"{rank}.{i}" for i in range(count)]}
    found = RaggedBatch(
        {"tokens": tokens, "score": torch.arange(count).double()},
        {"tokens": "R"},
        {"R": lengths},
        {"tokens": -1},
        columns,
    ).gather()
    return {
        "tokens": found.tensors["tokens"].tolist(),
        "score": found.tensors["score"].tolist(),
        "lengths": found.lengths["R"].tolist(),
        "rows": found.columns["row"],
    }


def fail(on: dict[str, list[str]], how: str) -> dict[str, Any]:
    """The ranks in `on` raise [class, text]; what each rank hears, and whether it can still talk afterwards."""
    own = on.get(str(dist.get_rank()))
    error: Exception | None = None
    if own is not None:
        error = getattr(errors, own[0], ValueError)(own[1])
    heard: dict[str, Any] = {"class": "", "text": "", "cause": False}
    try:
        if how == "raise_together":
            raise_together(error)
        else:
            with together():
                if error is not None:
                    raise error
    except MegaverlError as caught:
        heard = {
            "class": type(caught).__name__,
            "text": str(caught),
            "cause": caught.__cause__ is error is not None,
        }
    return heard | {"after": gather_json(dist.get_rank())}


def first_rank_only(fails: bool) -> dict[str, Any]:
    """The first rank of each pair makes a value; who called, and what each rank got."""
    pair = ProcessGroupManager().grid(GridShape(tp=2, dp=2)).tp_group
    called: list[int] = []

    def make() -> dict[str, int]:
        called.append(dist.get_rank())
        if fails:
            raise errors.DataError(f"nothing on rank {dist.get_rank()}")
        return {"from": dist.get_rank()}

    try:
        result = on_first_rank(make, pair)
    except MegaverlError as error:
        result = f"{type(error).__name__}: {error}"
    return {"called": called, "result": result}


def agree_without_a_device() -> dict[str, Any]:
    """Over a group whose backend carries nothing, as none but the hosts are to take
    part; and how many sockets that opened.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (the backend "fake")

    rank, size = dist.get_rank(), dist.get_world_size()
    silent = dist.new_group(list(range(size)), backend="fake")
    before = _num_sockets()
    barrier()  # until all have counted
    barrier(silent)
    return {
        "opened": _num_sockets() - before,
        "gathered": gather_json([rank, "x" * (700 * rank)], silent),
        "sum": reduce_json(rank, sum, silent),
        "from the last": broadcast_json({"rank": rank}, size - 1, silent),
        "rows": gather_host_rows(
            torch.full((rank, 2), rank, dtype=torch.float32), silent
        ).tolist(),
        "none": list(gather_host_rows(torch.empty(0, 3), silent).shape),
    }


def control_beside_a_device() -> dict[str, Any]:
    """Where the default group is not gloo: the sockets that agreements open; and each
    rank's message to the next, which none waits for before it sends its own.
    """
    with patch.object(job_context, "platform", SimpleNamespace(backend="nccl")):
        context = job_context.default_group_context(("actor",), timedelta(seconds=60))
    rank, size = context.rank, dist.get_world_size()
    before = _num_sockets()
    barrier()  # until all have counted
    barrier(context.control)
    agreed = gather_json(rank, context.control)
    opened = _num_sockets() - before
    barrier()  # until all have counted
    sent = Channel(context, "next").send_to([(rank + 1) % size], bytes([rank]))
    (heard,) = Channel(context, "next").receive_from((rank - 1) % size)
    sent.wait()
    return {
        "opened": opened,
        "agreed": agreed,
        "heard": int(heard),
        "own": context.control is not dist.group.WORLD,
    }


def _num_sockets() -> int:
    return sum(
        connection.raddr != () for connection in psutil.Process().net_connections()
    )


def reduce_that_fails() -> list[str]:
    """What every rank hears of an error in the function, which one rank calls; and that it can still talk."""
    try:
        reduce_json(dist.get_rank(), lambda values: values[99])
    except MegaverlError as error:
        return [str(error), str(error.__cause__), str(gather_json(dist.get_rank()))]
    return []


def agree_without(missing: int, seconds: float) -> str:
    """A rank stays away: what the others say."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    if dist.get_rank() == missing:
        return "away"
    try:
        barrier(group)
    except errors.TrainingStopped as error:
        return str(error)
    return "nothing"


def counted_collectives(sizes: dict[str, int]) -> dict[str, Any]:
    """Bytes that `traffic` counts for one collective of each kind in the tp group, and in one without a name."""
    from megaverl.distributed import traffic

    grid = ProcessGroupManager().grid(GridShape(**sizes))
    traffic.name_groups("actor", grid.dimensions)
    group, size, rank = grid.tp_group, grid.tp_group.size(), grid.tp_group.rank()
    # All ranks make all groups, whose names are then new in a world that earlier jobs
    # have used.
    shape = GridShape(**sizes)
    every = sorted(
        {shape.groups_of(number)["tp"] for number in range(dist.get_world_size())}
    )
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every}
    nameless = groups[shape.groups_of(dist.get_rank())["tp"]]

    def counted(collective: Any) -> float:
        before = traffic.by_dimension("actor", traffic.received_bytes()).get("tp", 0.0)
        collective()
        return (
            traffic.by_dimension("actor", traffic.received_bytes()).get("tp", 0.0)
            - before
        )

    small, whole = torch.ones(6), torch.ones(6 * size, dtype=torch.bfloat16)
    parts = [torch.ones(6) for _ in range(size)]
    # As megatron-core's token dispatcher gives them.
    sizes_out = np.array([1 + place for place in range(size)])
    uneven_in, uneven_out = (
        torch.ones(size * (rank + 1)),
        torch.ones(int(sizes_out.sum())),
    )

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, small, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(
                dist.irecv, torch.empty(6), group=group, group_peer=(rank - 1) % size
            ),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    collectives = {
        "all_reduce": lambda: dist.all_reduce(small, group=group),
        "all_gather": lambda: dist.all_gather(parts, small, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            whole, whole[:6].clone(), group=group
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            torch.ones(6), torch.ones(6 * size), group=group
        ),
        "broadcast": lambda: dist.broadcast(small, group_src=0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.ones(6 * size), torch.ones(6 * size), group=group
        ),
        "uneven": lambda: dist.all_to_all_single(
            uneven_out, uneven_in, sizes_out, np.array([rank + 1] * size), group=group
        ),
        "send_and_receive": exchange,
        "nameless": lambda: dist.all_reduce(small, group=nameless),
        "json": lambda: gather_json({"some": "value"}, group),
    }
    return {"rank": rank} | {
        name: counted(collective) for name, collective in collectives.items()
    }
