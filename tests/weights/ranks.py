"""What the ranks do in the tests of transports, resharding and export."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.models.lora import follow
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import make_plan
from megaverl.sharding.strided import Strides
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.export import ShardedModel, save_folder
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.load import load_folder
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions
from tests.sharding.specs import element_ids, fill, make_spec


def reshard_ids(
    grid: dict[str, int],
    vllm_tp: int,
    dtypes: tuple[str, str],
    bucket_bytes: int,
    spec: dict[str, Any],
    ipc: bool = False,
    move_source: bool = False,
    in_views: bool = False,
) -> dict[str, Any]:
    """Move element ids from Megatron's layout to vLLM's, twice, and compare with filling vLLM's directly.

    Args:
        in_views: matrices lie transposed on both sides, in every second row of what holds them.
    """
    source_dtype, dest_dtype = (getattr(torch, dtype) for dtype in dtypes)
    rank, shape, model = dist.get_rank(), GridShape(**grid), make_spec(**spec)
    weights = weights_of(model)
    source_layouts = megatron_layouts(weights, model, shape, padded_vocab_size=64)
    dest_layouts = vllm_layouts(weights, model, vllm_tp)
    if in_views:
        source_layouts, dest_layouts = (
            follow(source_layouts, seen_otherwise),
            follow(dest_layouts, seen_otherwise),
        )
    plan = make_plan(source_layouts, dest_layouts, shape.world_size, rank)
    # ids that bfloat16 holds exactly, and that differ between neighbours
    ids = {name: array % 251 + 1 for name, array in element_ids(weights).items()}
    source = as_parameters(fill(source_layouts(rank), ids), source_dtype)
    dest = as_parameters(
        fill(dest_layouts(rank), {k: v * 0 for k, v in ids.items()}), dest_dtype
    )
    storages = {name: tensor.data_ptr() for name, tensor in dest.items()}
    resharder = Resharder(
        plan, source, dest, options=TransportOptions(bucket_bytes=bucket_bytes, ipc=ipc)
    )
    wrong = []
    for step in (1, 2):  # a second run brings the second version
        stats = resharder.run()
        expected = as_parameters(fill(dest_layouts(rank), ids), dest_dtype)
        wrong += [
            name for name in dest if not torch.equal(dest[name], expected[name] * step)
        ]
        ReshardCheck(source_layouts, dest_layouts, source, dest).compare()
        for tensor in source.values():
            tensor.data.mul_(2)
            if move_source:  # as offloading does
                tensor.data = tensor.data.clone()
    wrong += [
        name for name, tensor in dest.items() if tensor.data_ptr() != storages[name]
    ]
    return {
        "wrong": wrong,
        "received": stats.bytes_received,
        "sent": stats.bytes_sent,
        "local": stats.bytes_local,
        "messages": stats.num_messages,
        "elements": plan.num_received,
    }


def seen_otherwise(layout: Layout) -> Layout:
    """The same matrices, each transposed, in every second row from the second on of a tensor twice as high."""
    turned = Strides((1, 0), (0, 1), (1, 2))
    views = {
        f"{name}.turned": (name, turned)
        for name, shape in layout.local_shapes.items()
        if len(shape) == 2
    }
    shapes = {
        name: (2 * s[1], s[0]) if len(s) == 2 else s
        for name, s in layout.local_shapes.items()
    }
    pieces = tuple(
        piece._replace(
            local=f"{piece.local}.turned"
            if f"{piece.local}.turned" in views
            else piece.local
        )
        for piece in layout.pieces
    )
    return Layout(pieces, shapes, layout.global_shapes, views=views)


def as_parameters(
    arrays: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.from_numpy(array).to(dtype))
        for name, array in arrays.items()
    }


def reshard_with_a_fault(fault: str) -> str:
    """Rank 1's parameters are wrong; returns the error that this rank raised."""
    rank, model = dist.get_rank(), make_spec()
    weights = weights_of(model)
    layouts = megatron_layouts(
        weights, model, GridShape(tp=2, dp=2), padded_vocab_size=64
    )
    tensors = as_parameters(fill(layouts(rank), element_ids(weights)), torch.float32)
    name = "decoder.final_layernorm.weight"
    if rank == 1 and fault == "missing":
        del tensors[name]
    if rank == 1 and fault == "shape":
        tensors[name] = torch.nn.Parameter(torch.zeros(3))
    if rank == 1 and fault == "dtype":
        tensors[name] = torch.nn.Parameter(tensors[name].data.bfloat16())
    if rank == 1 and fault == "extra":
        tensors["decoder.weight_scale"] = torch.nn.Parameter(torch.zeros(3))
    if rank == 1 and fault == "quantised":
        tensors[name] = torch.nn.Parameter(
            tensors[name].data.to(torch.int8), requires_grad=False
        )
    plan = make_plan(layouts, layouts, 4, rank)
    try:
        Resharder(plan, tensors, tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_and_export(
    source: str,
    folder: str,
    grid: dict[str, int],
    dtype: str | None = None,
    fault: str = "",
    **options: Any,
) -> str:
    """Read a folder into a grid of Megatron shards and write it again. Returns the error raised, or ''."""
    spec = ModelSpec.from_folder(source)
    weights = weights_of(spec)
    shape = GridShape(**grid)
    layouts = megatron_layouts(weights, spec, shape, padded_vocab_size=128)
    tensors = empty_tensors(layouts(dist.get_rank()))
    load_folder(source, layouts(dist.get_rank()), tensors, weights=weights)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "disk full" and dist.get_rank() == 0:
        # a real failure of write(2), in the middle of the weights
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        save_folder(
            ShardedModel(weights, layouts, tensors),
            folder,
            sources=[source],
            dtype=None if dtype is None else getattr(torch, dtype),
            **options,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(folder, "config.json").is_file()
    return ""


def empty_tensors(
    layout: Layout, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in layout.local_shapes.items()
    }
