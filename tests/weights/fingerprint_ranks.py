"""What the ranks do in the tests of comparisons."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder
from tests.sharding.specs import make_spec


def compare_after_faults(
    grid: dict[str, int],
    vllm_tp: int,
    dtypes: tuple[str, str],
    faults: list[dict[str, Any] | None],
) -> list[str]:
    """Reshard random weights; for each fault, put it in, compare, and take it out. Returns what was raised."""
    rank, shape, model = dist.get_rank(), GridShape(**grid), make_spec()
    weights = weights_of(model)
    source_layouts = megatron_layouts(weights, model, shape, padded_vocab_size=64)
    dest_layouts = vllm_layouts(weights, model, vllm_tp)
    generator = torch.Generator().manual_seed(0)
    arrays = {
        weight.name: torch.randn(weight.shape, generator=generator).numpy()
        for weight in weights
    }
    # what is in the padding must not count: it differs on every rank
    source = tensors(
        source_layouts(rank), arrays, getattr(torch, dtypes[0]), padding=rank + 1.0
    )
    dest = tensors(
        dest_layouts(rank),
        {k: v * 0 for k, v in arrays.items()},
        getattr(torch, dtypes[1]),
        padding=-rank,
    )
    Resharder(
        make_plan(source_layouts, dest_layouts, shape.world_size, rank), source, dest
    ).run()
    check = ReshardCheck(source_layouts, dest_layouts, source, dest)
    found = []
    for fault in faults:
        side = dest if fault is None or fault["side"] == "dest" else source
        kept = {name: tensor.clone() for name, tensor in side.items()}
        if fault is not None and rank == fault["rank"]:
            spoil(side[fault["local"]], fault["kind"])
        try:
            check.compare()
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        for name, tensor in side.items():
            tensor.copy_(kept[name])
    check.compare()
    return found


def spoil(tensor: torch.Tensor, kind: str) -> None:
    if kind == "flipped bit":
        bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        bits[-1] ^= 1
    elif kind == "swapped elements":
        tensor[0, 0], tensor[0, 1] = tensor[0, 1].clone(), tensor[0, 0].clone()
    elif kind == "swapped rows":
        tensor[:2] = tensor[:2].flip(0).clone()
    elif kind == "stale":
        tensor.mul_(1.01)
    else:
        raise AssertionError(kind)


def tensors(
    layout: Layout, arrays: dict[str, Any], dtype: torch.dtype, padding: float
) -> dict[str, torch.Tensor]:
    out = {
        name: torch.full(shape, padding, dtype=dtype)
        for name, shape in layout.local_shapes.items()
    }
    for piece in layout.pieces:
        box = torch.from_numpy(arrays[piece.tensor][piece.box.slices])
        out[piece.local][piece.local_box.slices] = box.reshape(
            piece.local_box.shape
        ).to(dtype)
    return out
