"""What the ranks do in tests/data/test_row_transfer.py."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from megaverl.controller.messages import RowTransfer
from megaverl.controller.serving import run_blocking
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import move_batch
from megaverl.data.row_transfer import Moving, _send_from_host, as_ragged
from megaverl.dataflow.value_mover import ValueMover
from megaverl.distributed import job_context
from megaverl.distributed.channels import Channel
from megaverl.distributed.collectives import barrier, gather_json
from megaverl.distributed.job_context import JobContext, join
from megaverl.distributed.placement import parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.rendezvous import NodeInfo, introduce
from megaverl.distributed.store import job_store
from megaverl.errors import DataError
from megaverl.sharding.rows import Rows


def start(said: dict[str, Any]) -> JobContext:
    """Join the job with roles as `said`; grids of one rank each, so that any placement fits."""
    deadline = timedelta(seconds=30)
    store, rank, size = job_store(deadline)
    nodes = introduce(store, rank, size, NodeInfo(node="here"), deadline)
    wanted = {role: parse_wanted(value) for role, value in said.items()}
    grids: dict[str, Any] = dict.fromkeys([*said, "actor", "rollout", "reward"])
    return join(resolve(wanted, size, grids, nodes), store, rank, deadline)


def sockets_of_roles_apart() -> int:
    """That joining a job connects where devices speak by something else than gloo; then each hears from all others."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (the backend "fake")

    with patch.object(job_context, "platform", SimpleNamespace(backend="fake")):
        context = start({"rollout": "2-3"})
    port = int(os.environ["MASTER_PORT"])
    ports = [
        (each.laddr[1], each.raddr[1])
        for each in psutil.Process().net_connections()
        if each.raddr
    ]
    barrier(context.control)  # until all have counted
    others = [rank for rank in range(4) if rank != context.rank]
    sent = Channel(context, "counted").send_to(others, b"")
    for other in others:
        Channel(context, "counted").receive_from(other)
    sent.wait()
    return sum(port not in both for both in ports)  # the store's apart


def full_batch(rng: random.Random, num_rows: int) -> RolloutBatch:
    """What no rank would have in a real job: all rows, of ragged lengths, an empty response among them."""
    prompts = [rng.randint(1, 7) for _ in range(num_rows)]
    responses = [rng.choice([0, 1, 5, 9]) for _ in range(num_rows)]
    wide_s, wide_r = max(prompts, default=0), max(responses, default=0)
    lengths = torch.tensor(responses, dtype=torch.int64)
    numbers = torch.tensor([rng.random() for _ in range(num_rows * wide_r)]).reshape(
        num_rows, wide_r
    )
    mask = torch.arange(wide_r) < lengths.unsqueeze(1)
    prompt_mask = torch.arange(wide_s) < torch.tensor(
        prompts, dtype=torch.int64
    ).unsqueeze(1)
    ids = torch.arange(num_rows * wide_s).reshape(num_rows, wide_s)
    return RolloutBatch(
        {
            "input_ids": ids * prompt_mask,
            "prompt_lengths": torch.tensor(prompts, dtype=torch.int64),
            "generated_ids": (numbers * 1000).long() * mask,
            "response_lengths": lengths,
            "response_mask": mask & (numbers > 0.3),
            "rollout_log_probs": -numbers * mask,
            "rewards": torch.tensor([rng.random() for _ in range(num_rows)]),
            "group_ids": torch.arange(num_rows),
        },
        {
            "answer": [f"é{i}" for i in range(num_rows)],
            "extra": [{"n": i, "none": None} for i in range(num_rows)],
        },
    )


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    """Equal to the bit, once both are cut to what they hold."""
    a, b = a.trim(), b.trim()
    tensors = a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(a[name], b[name]) for name in a
    )
    return tensors and a.columns == b.columns


def draw_rows(rng: random.Random, num_rows: int) -> tuple[Rows, Rows]:
    """Some layout on four ranks in which every row is somewhere, and another that wants some of them."""
    source = {
        rank: rng.sample(range(num_rows), rng.randint(0, num_rows))
        for rank in rng.sample(range(4), 3)
    }
    first = min(source)
    source[first] = rng.sample(range(num_rows), num_rows)
    return source, {
        rank: rng.sample(range(num_rows), rng.randint(0, num_rows))
        for rank in rng.sample(range(4), 3)
    }


def by_way_of(context: JobContext, through: str) -> tuple[JobContext, Counter[str]]:
    """Rows of batches go through "hosts" or "devices"; and the bytes that this rank sends through each from now on."""
    context = replace(context, rows=context.group if through == "devices" else None)
    sent, real = Counter[str](), dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        assert all(each.group is context.group for each in operations)
        sent["devices"] += sum(
            each.tensor.nbytes for each in operations if each.op is dist.isend
        )
        return real(operations)

    def counted_too(
        dest: int, name: str, parts: Sequence[torch.Tensor | bytes]
    ) -> Future[None]:
        sent["hosts"] += sum(map(len, parts))
        return send(dest, name, parts)

    dist.batch_isend_irecv = counted
    messages: Any = context.messages
    send, messages.send = messages.send, counted_too
    return context, sent


def batches_move(seeds: list[int], through: str) -> dict[str, Any]:
    """Many edges between all four ranks, each with another layout; what comes is compared with the whole."""
    context, sent = by_way_of(start({"rollout": "2-3"}), through)
    assert dist.get_world_size() == 2 and dist.get_rank() == context.rank % 2
    assert (
        dist.get_rank(context.group) == dist.get_rank(context.control) == context.rank
    )
    total = torch.tensor([context.rank])
    dist.all_reduce(total)  # in the world alone
    wrong, moved = [], 0
    for seed in seeds:
        rng = random.Random(seed)
        full = full_batch(rng, rng.randint(1, 9))
        source, dest = draw_rows(rng, len(full))
        moving = Moving.plan(context, f"edge {seed}", source, dest)
        mine = (
            full.select(source[context.rank]).trim() if context.rank in source else None
        )
        got = move_batch(context, moving, mine)
        moved += sum(
            len(move.rows) for move in moving.moves if move.dest == context.rank
        )
        wanted = dest.get(context.rank)
        if wanted is not None and (got is None or not same(got, full.select(wanted))):
            wrong.append(seed)
    reached = gather_json(context.rank, context.group)
    env = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
    said = {
        "wrong": wrong,
        "moved": moved,
        "world": int(total),
        "reached": reached,
        "env": env,
        "roles": context.roles,
    }
    return said | {"bytes": {"hosts": sent["hosts"], "devices": sent["devices"]}}


def sender_dies(how: str, after: str) -> str:
    """Rank 0 should send to 1 and 2, and does not; or it sends what is said of rows, and not those from its device."""
    context = start({"rollout": 0})
    context = replace(
        context,
        timeout=timedelta(seconds=1),
        rows=context.group if after == "headers" else None,
    )
    moving = Moving.plan(context, "rollouts", {0: [0, 1]}, {1: [0], 2: [1]})
    if context.rank == 0:
        if after == "headers":
            batch = full_batch(random.Random(3), 2)
            _send_from_host(
                context, moving, as_ragged(batch.tensors, batch, batch.columns)
            )[0].wait()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.sigwait({signal.SIGUSR1})  # until the test ends it
    try:
        move_batch(context, moving, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def weights_move() -> dict[str, Any]:
    """The actor's weights, TP 2 on ranks 0-1, into an engine's, TP 2 on ranks 2-3, by the reshard engine's own plan."""
    from megaverl.distributed.grid import GridShape
    from megaverl.models.architectures import weights_of
    from megaverl.sharding.layout import EMPTY, Layout
    from megaverl.sharding.megatron import megatron_layouts
    from megaverl.sharding.plan import make_plan
    from megaverl.sharding.vllm import vllm_layouts
    from megaverl.weights.reshard import Resharder
    from megaverl.weights.transports import TransportOptions
    from tests.sharding.specs import element_ids, fill, make_spec

    context = start({"rollout": "2-3"})
    model = make_spec()
    weights = weights_of(model)
    grid = megatron_layouts(weights, model, GridShape(tp=2), padded_vocab_size=64)
    engine = vllm_layouts(weights, model, 2)

    def source(rank: int) -> Layout:
        return grid(rank) if rank < 2 else EMPTY

    def dest(rank: int) -> Layout:
        return engine(rank - 2) if rank >= 2 else EMPTY

    ids = element_ids(weights)
    tensors = [
        {
            name: torch.nn.Parameter(torch.from_numpy(array).float())
            for name, array in fill(layout, of).items()
        }
        for layout, of in (
            (source(context.rank), ids),
            (dest(context.rank), {k: v * 0 for k, v in ids.items()}),
        )
    ]
    plan = make_plan(source, dest, 4, context.rank, context.placement.node_of)
    options = TransportOptions(timeout=context.timeout)
    stats = Resharder(plan, tensors[0], tensors[1], context.group, options).run()
    expected = fill(dest(context.rank), ids)
    wrong = [
        name
        for name, t in tensors[1].items()
        if not torch.equal(t, torch.from_numpy(expected[name]).float())
    ]
    return {
        "wrong": wrong,
        "received": stats.bytes_received,
        "sent": stats.bytes_sent,
        "tensors": len(tensors[1]),
    }


@dataclass(frozen=True)
class Marks:
    """A dataclass that may travel."""

    total: torch.Tensor
    by_name: dict[str, Any]


def values_travel(through: str) -> dict[str, Any]:
    """Rollouts on 2-3, an actor on 0-1: a batch, a tensor, a dataclass, nothing; and what cannot travel."""
    context, sent = by_way_of(start({"rollout": "2-3", "actor": "0-1"}), through)
    mover, full = ValueMover(context, known=[Marks]), full_batch(random.Random(5), 7)
    marks = Marks(
        torch.arange(7.0), {"a": [1, None, "x"], "b": (True, torch.tensor([[2]]))}
    )
    values: list[Any] = [full, full.rollout_log_probs * 2, marks, None]
    found: dict[str, Any] = {}
    source = context.rank if context.rank >= 2 else context.rank + 2
    moves = [RowTransfer(number, source, source - 2) for number in range(len(values))]
    if context.rank >= 2:
        for move, value in zip(moves, values, strict=True):
            run_blocking(mover.send(move, value))
    else:
        batch, tensor, scores, nothing = (
            run_blocking(mover.receive(move, None)) for move in moves
        )
        assert isinstance(batch, RolloutBatch) and isinstance(scores, Marks)
        found["batch"] = same(batch, full)
        found["tensor"] = torch.equal(tensor, full.rollout_log_probs * 2)  # type: ignore[arg-type]
        found["scores"] = torch.equal(scores.total, marks.total) and scores.by_name[
            "a"
        ] == [1, None, "x"]
        found["tuple"] = (
            scores.by_name["b"][0] is True and int(scores.by_name["b"][1]) == 2
        )
        found["nothing"] = nothing is None
    mover.settle()
    try:
        run_blocking(
            mover.send(RowTransfer(9, context.rank, (context.rank + 2) % 4), object())
        )
    except DataError as error:
        found["refused"] = "a object cannot go to other ranks" in str(error)
    if context.rank >= 2:
        found["through"] = (sent["devices"] > 0) == (through == "devices")
    # The store, in which ranks find each other, ends with the first rank.
    barrier(context.control)
    return found
