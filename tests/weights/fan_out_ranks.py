"""What the ranks do in the tests of relayed reshards: trainers on the first ranks, engines on the others or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.platform import platform
from megaverl.sharding import fan_out as fan_out_module
from megaverl.sharding.layout import EMPTY, Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import Plan, Plans, make_plans
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions
from megaverl.weights.transports.point_to_point import PointToPoint
from tests.sharding.specs import element_ids, fill, make_experts, make_spec
from tests.weights.ranks import as_parameters

Layouts = Callable[[int], Layout]


def placed(layouts: Layouts, first: int, stop: int) -> Layouts:
    """The layouts on the ranks `first` to `stop` (exclusive), and nothing elsewhere."""
    return lambda rank: layouts(rank - first) if first <= rank < stop else EMPTY


def relayed(
    grid: dict[str, int],
    engine_tp: int,
    nodes: list[int],
    spec: dict[str, Any],
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    bucket_bytes: int = 512,
    first_engine: int | None = None,
    num_experts: int = 0,
    expert_parallel: bool = False,
    ipc: bool = False,
    alias: bool = False,
    background: bool = False,
) -> dict[str, Any]:
    """Move two versions with fan-out and without, and compare the engines' tensors and the bytes.

    Args:
        nodes: node of each rank.
        first_engine: first rank with an engine; None: the first one without a trainer.
    """
    rank, world, shape = dist.get_rank(), dist.get_world_size(), GridShape(**grid)
    if num_experts:
        spec = spec | {"moe": make_experts(spec["architecture"], num_experts)}
    model = make_spec(**spec)
    weights = weights_of(model)
    padded = -(-model.vocab_size // shape.tp) * shape.tp
    source_of = placed(
        megatron_layouts(weights, model, shape, padded_vocab_size=padded),
        0,
        shape.world_size,
    )
    first = shape.world_size if first_engine is None else first_engine
    dest_of = placed(
        vllm_layouts(weights, model, engine_tp, expert_parallel=expert_parallel),
        first,
        world,
    )
    ids = {name: array % 251 + 1 for name, array in element_ids(weights).items()}
    source_dtype, dest_dtype = (getattr(torch, dtype) for dtype in dtypes)
    itemsize = min(source_dtype.itemsize, dest_dtype.itemsize)
    options = TransportOptions(
        bucket_bytes, alias=alias, node_of=nodes.__getitem__, ipc=ipc
    )
    found: dict[str, Any] = {"wrong": [], "differs": []}
    engines: dict[bool, dict[str, torch.Tensor]] = {}
    for fans_out in (False, True):
        # Small boxes would be one unit, which nobody would share.
        with mock.patch.object(fan_out_module, "LEAST_UNIT", 8):
            plans = make_plans(
                source_of, dest_of, world, nodes.__getitem__, fan_out=fans_out
            )
            plan = plans[rank]
        source = on_device(source_of(rank), ids, source_dtype)
        dest = on_device(
            dest_of(rank), {name: array * 0 for name, array in ids.items()}, dest_dtype
        )
        group = dist.new_group() if background else None
        in_order = [{name} for name in source] if background else ()
        with counted_buckets() as buckets:
            resharder = Resharder(
                plan, source, dest, None, options, background=group, in_order=in_order
            )
            for version in (1, 2):
                stats = resharder.run()
                expected = on_device(dest_of(rank), ids, dest_dtype)
                found["wrong"] += [
                    name
                    for name in dest
                    if not torch.equal(dest[name], expected[name] * version)
                ]
                ReshardCheck(source_of, dest_of, source, dest).compare()
                if version == 1:
                    resharder.source_changes()
                    for tensor in source.values():
                        tensor.data.mul_(2)
        engines[fans_out] = dest
        way = "relayed" if fans_out else "direct"
        volume = plans.volume(rank)
        found[way] = {
            "sent": stats.bytes_sent,
            "received": stats.bytes_received,
            "busiest": stats.busiest_sent,
            "planned": [
                sum(volume.sent.values()) * itemsize,
                sum(volume.received.values()) * itemsize,
            ],
            "far": far(plans, rank, nodes, itemsize),
            "buckets": max(buckets, default=0),
        }
        found["forwards"] = num_forwarded(plan)
    found["differs"] = [
        name
        for name, tensor in engines[False].items()
        if not torch.equal(
            tensor.data.view(torch.uint8), engines[True][name].data.view(torch.uint8)
        )
    ]
    return found


def on_device(
    layout: Layout, ids: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    """The tensors of a layout, where a run would have them."""
    made = as_parameters(fill(layout, ids), dtype)
    return {
        name: torch.nn.Parameter(tensor.data.to(platform.device))
        for name, tensor in made.items()
    }


def num_forwarded(plan: Plan) -> int:
    """Boxes that a rank sends on after it has received them."""
    return sum(
        len(boxes)
        for hop in plan.relays
        if hop.after is not None
        for boxes in hop.sends.values()
    )


def far(plans: Plans, rank: int, nodes: Sequence[int], itemsize: int) -> list[int]:
    """Bytes that a rank (sends, receives) between nodes, as the plans say."""
    volume = plans.volume(rank)
    return [
        sum(numel for peer, numel in by_peer.items() if nodes[peer] != nodes[rank])
        * itemsize
        for by_peer in (volume.sent, volume.received)
    ]


class counted_buckets:
    """The bytes of every bucket that a transport makes inside."""

    def __enter__(self) -> list[int]:
        sizes: list[int] = []
        make_buckets = PointToPoint._make_buckets

        def counting(transport: PointToPoint) -> dict[str, list[torch.Tensor]]:
            made = make_buckets(transport)
            sizes.extend(sum(map(torch.numel, slots)) for slots in made.values())
            return made

        self._patch = mock.patch.object(PointToPoint, "_make_buckets", counting)
        self._patch.start()
        return sizes

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
