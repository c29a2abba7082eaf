"""What the ranks do in the tests of resharding into quantised engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout
from megaverl.sharding.load_balance import RankLayouts
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import MLASpec, ModelSpec
from megaverl.sharding.plan import make_plan
from megaverl.sharding.quantization import FORMATS, BlockFormat
from megaverl.sharding.vllm import (
    QuantisedWeight,
    landing_parts,
    vllm_layouts,
)
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import DeltaMode, TransportOptions
from megaverl.weights.transports.quantised import (
    Landed,
    QuantisedDestination,
    dequantise,
)
from tests.sharding.specs import fill, make_experts, make_spec
from tests.weights.fan_out_ranks import num_forwarded, placed

# no rank's part of anything is whole blocks of 128, and borders of fused matrices lie
# inside of blocks
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "ffn_hidden_size": 320,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 40,
    "vocab_size": 64,
    "num_layers": 2,
}

# Above a few elements of a second version, whose mean is 6 and deviation 2.
LARGE = 12.0


def spec_of(architecture: str) -> ModelSpec:
    sizes = dict(SIZES)
    if architecture == "DeepseekV3ForCausalLM":
        sizes |= {
            "mla": MLASpec(100, 60, 24, 16, 40),
            "num_kv_heads": 4,
            "moe": make_experts(architecture, 4, 80),
        }
    elif architecture in ("Qwen3MoeForCausalLM", "GraniteMoeForCausalLM"):
        sizes["moe"] = make_experts(architecture, 4, 80)
    return make_spec(architecture, **sizes)


def reference(
    matrix: torch.Tensor, block: int | None, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and scales of a whole matrix, block by block."""
    rows, columns = matrix.shape
    high, wide = (rows, columns) if block is None else (block, block)
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            one = matrix[place].float()
            scale = one.abs().max().clamp(1e-4) / 448
            scales[i, j] = (
                torch.exp2(torch.ceil(torch.log2(scale))) if powers_of_two else scale
            )
            numbers[place] = (one * (1 / scales[i, j])).to(torch.float8_e4m3fn)
    return numbers, scales.reshape(BlockFormat(block).scale_shape(rows, columns))


class Case:
    """A model's weights in Megatron's layout, and room for them in a quantised engine's."""

    def __init__(
        self,
        architecture: str,
        grid: dict[str, int],
        tp: int,
        quantization: str,
        dtype: str = "bfloat16",
        bucket: int = 2**16,
        *,
        expert_parallel: bool = False,
        ipc: bool = False,
        nodes: Sequence[int] | None = None,
        delta: DeltaMode = "off",
        landed: Landed = lambda tensors, view_of: None,
    ) -> None:
        self.rank, world, spec = (
            dist.get_rank(),
            dist.get_world_size(),
            spec_of(architecture),
        )
        weights, shape = weights_of(spec), GridShape(**grid)
        self.source_layouts = megatron_layouts(
            weights, spec, shape, padded_vocab_size=64
        )
        self.dest_layouts = vllm_layouts(
            weights,
            spec,
            tp,
            expert_parallel=expert_parallel,
            quantization=quantization,
        )
        # Engines on the ranks behind the grid's, over links that a fan-out relieves.
        if nodes is not None:
            self.source_layouts = placed(self.source_layouts, 0, shape.world_size)
            self.dest_layouts = placed(self.dest_layouts, shape.world_size, world)
        node_of = None if nodes is None else nodes.__getitem__
        plan = make_plan(
            self.source_layouts,
            self.dest_layouts,
            world,
            self.rank,
            node_of,
            fan_out=nodes is not None,
        )
        self.num_forwarded = num_forwarded(plan)
        generator = np.random.default_rng(0)
        self.arrays = {w.name: generator.normal(size=w.shape) + 3 for w in weights}
        self.layout = self.dest_layouts(self.rank)
        self.source = as_tensors(
            self.source_layouts(self.rank), self.arrays, getattr(torch, dtype)
        )
        engine = as_tensors(self.layout, self.arrays, torch.bfloat16)
        self.expected = {name: engine.pop(name) for name in self.layout.quantised}
        self.rest = {name: torch.zeros_like(tensor) for name, tensor in engine.items()}
        self.engine = engine
        self.weights = {
            name: room(shape, FORMATS[self.layout.quantised[name]].block)
            for name, shape in self.quantised_shapes()
        }
        self.parts = landing_parts(
            RankLayouts(self.dest_layouts, world).layouts, bucket // 2
        )
        standing = {
            n: torch.empty(s, dtype=torch.bfloat16, device="meta")
            for n, s in self.quantised_shapes()
        }
        self.dest = self.rest | standing
        self.resharder = Resharder(
            plan,
            self.source,
            self.dest,
            options=TransportOptions(
                bucket_bytes=2**14,
                alias=True,
                node_of=node_of,
                ipc=ipc,
                delta=delta,
            ),
            quantised=QuantisedDestination(self.parts, self.weights, landed),
        )

    def quantised_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (name, self.layout.local_shapes[name]) for name in self.layout.quantised
        ]

    def wrong(self) -> list[str]:
        """Tensors of the engine that are not what a naive quantisation of the whole weights gives."""
        found = [
            name
            for name, tensor in self.rest.items()
            if not torch.equal(tensor, self.engine[name])
        ]
        for name, weight in self.weights.items():
            for expert, matrix in enumerate(
                self.expected[name].cpu().reshape(-1, *weight.numbers.shape[-2:])
            ):
                numbers, scales = reference(matrix, weight.block)
                several = weight.numbers.dim() > 2
                landed = (weight.numbers[expert] if several else weight.numbers).cpu()
                if not torch.equal(landed.view(torch.uint8), numbers.view(torch.uint8)):
                    found.append(f"{name}[{expert}]")
                landed = (weight.scales[expert] if several else weight.scales).cpu()
                if not torch.equal(landed.reshape(scales.shape), scales):
                    found.append(f"{name}[{expert}]: scales")
        return found

    def product_error(self) -> float:
        """Of a product with the quantised weights, relative to its norm: the largest of all matrices."""
        worst = 0.0
        for name, weight in self.weights.items():
            for expert, matrix in enumerate(
                self.expected[name].cpu().reshape(-1, *weight.numbers.shape[-2:])
            ):
                x = torch.randn(
                    16, matrix.shape[1], generator=torch.Generator().manual_seed(0)
                )
                right = x @ matrix.float().t()
                product = x @ dequantise(weight, expert).cpu().t()
                worst = max(worst, float((product - right).norm() / right.norm()))
        return worst


def as_tensors(
    layout: Layout, arrays: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The arrays in their places, on the device; rounded to bfloat16 first, so that both
    sides start from the same numbers.
    """
    places = fill(
        layout,
        {
            name: np.arange(1, array.size + 1).reshape(array.shape)
            for name, array in arrays.items()
        },
    )
    tensors = {}
    for name, place in places.items():
        tensors[name] = torch.zeros(place.shape, dtype=dtype)
    for piece in layout.pieces:
        box = (
            torch.from_numpy(arrays[piece.tensor][piece.box.slices])
            .bfloat16()
            .to(dtype)
        )
        tensors[piece.local][piece.local_box.slices] = box.reshape(
            tensors[piece.local][piece.local_box.slices].shape
        )
    return {name: tensor.to(platform.device) for name, tensor in tensors.items()}


def room(shape: tuple[int, ...], block: int | None) -> QuantisedWeight:
    on_device: dict[str, Any] = {"device": platform.device}
    numbers = torch.zeros(shape, dtype=torch.float8_e4m3fn, **on_device)
    one = BlockFormat(block).scale_shape(shape[-2], shape[-1])
    scales = torch.zeros(
        *shape[:-2],
        *(() if len(shape) > 2 and block is None else one),
        **on_device,
    )
    if block is None and len(shape) == 2:  # as vLLM keeps it, transposed
        numbers = torch.zeros(shape[::-1], dtype=torch.float8_e4m3fn, **on_device).t()
    return QuantisedWeight(numbers, scales, block)


def land(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move each case's weights in three versions, of which the last changes a few elements.

    Returns what is wrong, and what travelled for the second version and (`few`) for the last one.
    """
    found = []
    for arguments in cases:
        case = Case(**arguments)
        for weight in case.weights.values():
            weight.scales.fill_(7)
        case.resharder.run()
        wrong = case.wrong()
        with torch.no_grad():  # the second run brings the second version
            for tensor in case.source.values():
                tensor.mul_(2)
            for tensor in (*case.engine.values(), *case.expected.values()):
                tensor.mul_(2)
        stats = case.resharder.run()
        wrong += case.wrong()
        for tensor in (
            *case.source.values(),
            *case.engine.values(),
            *case.expected.values(),
        ):
            tensor[tensor > LARGE] *= 2
        few = case.resharder.run()
        found.append(
            {
                "wrong": wrong + case.wrong(),
                "few": few.bytes_received,
                "changed": few.changed_fraction,
                "received": stats.bytes_received,
                "elements": case.resharder._plan.num_received,
                "parts": len(case.parts),
                "forwarded": case.num_forwarded,
                "error": case.product_error(),
            }
        )
    return found


def land_otherwise(architecture: str, tp: int, local: str) -> str:
    """What the check says of a part that has landed with one element changed on rank 1."""
    check: list[ReshardCheck] = []

    def landed(tensors: frozenset[str], view_of: Any) -> None:
        if dist.get_rank() == 1 and any(
            piece.local == local for t in tensors for piece in held.get(t, ())
        ):
            view_of(local, Box((3, 5), (4, 6))).add_(1)
        check[0].compare(tensors, view_of)

    case = Case(architecture, {"tp": 2}, tp, "fp8_per_block", landed=landed)
    held = case.layout.by_tensor
    check.append(
        ReshardCheck(case.source_layouts, case.dest_layouts, case.source, case.dest)
    )
    try:
        case.resharder.run()
    except ReshardError as error:
        return str(error)
    return ""
