"""What the ranks do in the tests of deltas: trainers on the first ranks, engines on the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding import fan_out as fan_out_module
from megaverl.sharding.boxes import whole
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import Transfer, make_plans
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import FinalParts, Resharder
from megaverl.weights.transports import TransportOptions, messages
from megaverl.weights.transports.deltas import DeltaMessages, MessageSizes
from megaverl.weights.transports.sent_weights import SentWeights
from tests.sharding.specs import element_ids, make_spec
from tests.weights.fan_out_ranks import on_device, placed

# How each version differs from the one before it.
VERSIONS = (
    "first",
    "nothing",
    "few",
    "undo",
    "rows",
    "bits",
    "some",
    "most",
    "few",
    "lost",
)
SPEC = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 64}


def deltas(
    nodes: list[int],
    grid: dict[str, int],
    engine_tp: int,
    delta: str = "on",
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    bucket_bytes: int = 4096,
    fan_out: bool = False,
    background: bool = False,
    folder: str | None = None,
    in_views: bool = False,
) -> dict[str, Any]:
    """Move versions as changes, and compare the engines' bits with those of whole reshards.

    Returns:
        `wrong`: versions whose bits differ from those of a whole reshard. `versions`: what each version took. `copies`:
        bytes of the copies that this rank keeps; `held`: bytes of its shard in the dtype that is sent.
    """
    rank, world, shape = dist.get_rank(), dist.get_world_size(), GridShape(**grid)
    model = make_spec(**SPEC)
    weights = weights_of(model)
    source_of = placed(
        megatron_layouts(weights, model, shape, padded_vocab_size=64),
        0,
        shape.world_size,
    )
    dest_of = placed(vllm_layouts(weights, model, engine_tp), shape.world_size, world)
    ids = {name: array % 251 + 1 for name, array in element_ids(weights).items()}
    source_dtype, dest_dtype = (getattr(torch, dtype) for dtype in dtypes)
    with mock.patch.object(fan_out_module, "LEAST_UNIT", 8):
        plan = make_plans(
            source_of, dest_of, world, nodes.__getitem__, fan_out=fan_out
        )[rank]
    source = on_device(source_of(rank), ids, source_dtype)
    zeros = {name: array * 0 for name, array in ids.items()}
    sides = [on_device(dest_of(rank), zeros, dest_dtype) for _ in range(2)]
    options = [
        TransportOptions(
            bucket_bytes,
            node_of=nodes.__getitem__,
            delta=mode,  # type: ignore[arg-type]
            folder=None if folder is None else Path(folder),
        )
        for mode in (delta, "off")
    ]
    group = dist.new_group() if background else None
    in_order = [{name} for name in source] if background else ()
    delta_side, whole_side = (
        Resharder(
            plan,
            source,
            dest,
            None,
            of_side,
            background=group if of_side is options[0] else None,
            in_order=in_order,
        )
        for dest, of_side in zip(sides, options, strict=True)
    )
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Any] = {"wrong": [], "versions": []}
    before: dict[str, torch.Tensor] = {}
    for number, kind in enumerate(VERSIONS):
        if kind == "undo":
            # Copies that are not renewed would not see this change.
            for name, tensor in source.items():
                tensor.data.copy_(before[name])
        before = {name: tensor.data.clone() for name, tensor in source.items()}
        change(source, kind, generator)
        if kind == "lost":
            for tensor in sides[0].values():
                tensor.data.zero_()
            delta_side.destination_lost()
        whole = whole_side.run()
        if background and number:
            final = FinalParts(delta_side.num_parts, len(in_order))
            delta_side.start(final)
            final.after(None)
            stats = delta_side.finish()
        else:
            stats = delta_side.run()
        if any(
            not torch.equal(bits(tensor), bits(sides[1][name]))
            for name, tensor in sides[0].items()
        ):
            found["wrong"].append(f"{number} {kind}")
        ReshardCheck(source_of, dest_of, source, sides[0]).compare()
        found["versions"].append(
            {
                "kind": kind,
                "sent": stats.bytes_sent,
                "received": stats.bytes_received,
                "whole": whole.bytes_received,
                "changed": stats.changed_fraction,
                "busiest": [stats.busiest_sent, stats.busiest_whole],
            }
        )
    sent = delta_side._sent_weights
    assert isinstance(sent, SentWeights) or delta == "off"
    itemsize = min(source_dtype.itemsize, dest_dtype.itemsize)
    found["copies"] = 0 if sent is None else sent.nbytes
    found["held"] = sum(tensor.numel() * itemsize for tensor in source.values())
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def change(
    source: dict[str, torch.nn.Parameter], kind: str, generator: torch.Generator
) -> None:
    """Change the source as `kind` says. Ranks that hold the same make the same changes."""
    shares = {"few": 0.01, "some": 0.2, "most": 0.9, "lost": 0.01}
    for name, tensor in source.items():
        flat = tensor.data.view(-1)
        # Vectors are equal on all ranks of a tensor-parallel group.
        if kind in shares:
            places = torch.rand(flat.numel(), generator=generator) < shares[kind]
            flat[places] = -flat[places] * 1.5
        elif kind == "rows" and tensor.dim() > 1:
            tensor.data[::7] *= 2
        elif kind == "bits" and not name.endswith("bias"):
            flat[0], flat[-1] = 0.0, -0.0
            if flat.dtype is torch.bfloat16 and flat.numel() > 2:
                # A NaN with a payload.
                flat.view(torch.int16)[1] = 0x7FA5


def mixed_versions() -> str:
    """Return the error of a rank whose sender is at another version."""
    box = whole((8,))
    [message] = messages(
        [Transfer("w", box, 0, "s", box, 1, "d", box)], lambda _: torch.float32, 64
    )
    sent = SentWeights("on", {}, torch.device("cpu"))

    def nothing(transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        return []

    receiver = DeltaMessages(
        sent,
        (nothing, nothing, nothing),
        lambda _: torch.float32,
        [],
        [message],
        64,
    )
    receiver.begin(3)
    try:
        receiver.expect(MessageSizes((message,)), [2, 0, 0, 32])
    except ReshardError as error:
        return str(error)
    return "no error"
