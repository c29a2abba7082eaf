"""What the processes do in test_server_link.py: an actor of two ranks, a server of two workers and one of one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.distributed.store import job_store, keep_store
from megaverl.errors import MegaverlError, RolloutError
from megaverl.models.architectures import weights_of
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of
from megaverl.weights.server_link import (
    LinkAddress,
    dealt,
    open_as_receiver,
    open_as_sender,
)
from megaverl.weights.transports import DeltaMode
from tests.sharding.specs import element_ids, fill, make_spec
from tests.weights.ranks import as_parameters

SENDERS = 2
# Ranks of the actor and of each server, every one with a default group of its own.
JOBS = ((0, 1), (2, 3), (4,))
SECONDS = timedelta(seconds=60)


def deliver(
    late: bool = False, fault: str = "", delta: DeltaMode = "off"
) -> dict[str, Any]:
    """Move element ids from Megatron's layout to vLLM's, twice, and compare with filling vLLM's directly.

    The second version has other signs, with `delta` on one element in 16.

    Args:
        late: from the copies that the actor's ranks share out.
        fault: of the last worker: "refuses" these weights, or "dies" between the versions.
    """
    store, rank, size = job_store(SECONDS)
    number, job = next((number, job) for number, job in enumerate(JOBS) if rank in job)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job {number}", store),
        rank=job.index(rank),
        world_size=len(job),
        timeout=SECONDS,
    )
    if rank == 0:
        links = keep_store("127.0.0.1", 0, SECONDS)
        store.set("port", str(links.port))
    address = LinkAddress(
        "127.0.0.1",
        int(store.get("port")),
        "tried",
        SENDERS,
        size,
        "gloo",
        60.0,
        delta,
    )
    start = time.monotonic()
    try:
        return _deliver(address, store, rank, late=late, fault=fault)
    except MegaverlError as error:
        return {"error": str(error), "soon": time.monotonic() - start < 40}
    finally:
        # The first rank hosts the links' store.
        store.add("ended", 1)
        while rank == 0 and store.add("ended", 0) < size - (fault == "dies"):
            time.sleep(0.02)


def _deliver(
    address: LinkAddress, store: dist.Store, rank: int, *, late: bool, fault: str
) -> dict[str, Any]:
    spec = make_spec(num_layers=2, num_kv_heads=2)
    weights = weights_of(spec)
    grid = GridShape(tp=1, dp=SENDERS) if late else GridShape(tp=SENDERS)
    actor = megatron_layouts(weights, spec, grid, padded_vocab_size=64)
    layout_of = dealt(actor, SENDERS) if late else actor
    # ids that bfloat16 holds exactly, and that differ between neighbours
    ids = {name: array % 251 + 1 for name, array in element_ids(weights).items()}
    if rank < SENDERS:
        source = as_parameters(fill(layout_of(rank), ids), torch.float32)
        link = open_as_sender(address, rank, layout_of, shapes_of(weights), source)
        sent = [link.run().bytes_sent]
        every = 1 if address.delta == "off" else 16
        for tensor in source.values():
            tensor.data[tensor.data % every == 0] *= -1
        sent.append(link.run().bytes_sent)
        link.close()
        return {"sent": sent, "planned": link.plan.num_sent * 2}
    of_job = next(job for job in JOBS if rank in job)
    engine: Layout = vllm_layouts(weights, spec, len(of_job))(of_job.index(rank))
    dest = as_parameters(
        fill(engine, {name: array * 0 for name, array in ids.items()}), torch.bfloat16
    )

    def lay_out(
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[Layout, dict[str, torch.Tensor]]:
        if fault == "refuses" and rank == address.size - 1:
            raise RolloutError("these weights do not fit")
        assert shapes == shapes_of(weights)
        return engine, dict(dest)

    link = open_as_receiver(address, rank, lay_out, f"worker {rank}")
    places = {name: tensor.data_ptr() for name, tensor in dest.items()}
    wrong, received = [], []
    for sign in (1, -1):
        received.append(link.run().bytes_received)
        if fault == "dies" and rank == address.size - 1:
            os._exit(7)
        every = 1 if sign > 0 or address.delta == "off" else 16
        expected = fill(
            engine,
            {
                name: np.where(array % every == 0, array * sign, array)
                for name, array in ids.items()
            },
        )
        for name, tensor in dest.items():
            same = torch.equal(tensor.float(), torch.as_tensor(expected[name]).float())
            if not same or tensor.data_ptr() != places[name]:
                wrong.append(name)
    link.close()
    return {
        "wrong": wrong,
        "received": received,
        "planned": link.plan.num_received * 2,
        "needed": engine.numel * 2,
    }
