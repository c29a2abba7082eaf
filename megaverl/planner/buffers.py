"""Sizes of Megatron-core's parameter and gradient buffers, and of each rank's share of the optimizer, to the byte.

A plan must not import torch or Megatron-core, so their rules are repeated here; tests
compare the results with the real buffers.

Source: megatron-core 0.16, `distributed/param_and_grad_buffer.py`
(`_ParamAndGradBuffer`), `distributed/distributed_data_parallel.py` and
`optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from megaverl.config.megatron_defaults import ddp_defaults
from megaverl.models.lora import ADAPTER, LowRank, trained_factors
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "uint8": 1,
}
PARAM_ALIGNMENT = 64  # elements, so that parameters start at 128 bytes
BUCKET_ALIGNMENT = 128  # elements, so that buckets start at 256 bytes
BUSBW_ALIGNMENT = 2**16


@dataclass(frozen=True)
class Parameter:
    """A trained local tensor: its number of elements, and the properties that decide its place in the buffers."""

    name: str
    numel: int
    is_expert: bool = False
    is_shared_embedding: bool = False
    is_matrix: bool = False  # Muon updates it


_LINEAR = re.compile(r"(?:^|\.)layers\.(\d+)\..*linear_\w+\.weight\d*$")
_SCALES = {"blockwise": 4 / 128**2, "mxfp8": 1 / 32}  # bytes of scales for an element


def eight_bit_copies(
    chunks: Sequence[Sequence[Parameter]],
    fields: Mapping[str, Any],
    *,
    backward: bool,
    first: bool,
    last: bool,
) -> int:
    """Return the bytes of 8-bit weight copies that Transformer Engine keeps for linear layers under `megatron.fp8`.

    The first micro-batch makes these copies. They stay until the next update replaces
    them, also during generation. There is one copy by rows and, on Hopper, one by
    columns where gradients flow back (Transformer Engine 2.9 to 2.20,
    pytorch/module/linear.py and base.py, `_fp8_workspaces`; megatron-core 0.16,
    extensions/transformer_engine.py).

    Args:
        fields: the role's `megatron` section.
        backward: whether the model is trained, in full or through adapters.
        first, last: whether this is the first or the last pipeline stage.
    """
    if not fields.get("fp8") or fields.get("disable_parameter_transpose_cache"):
        return 0
    num_first = 0
    num_last = 0
    if fields.get("first_last_layers_bf16"):
        if first:
            num_first = int(fields.get("num_layers_at_start_in_bf16", 1))
        if last:
            num_last = int(fields.get("num_layers_at_end_in_bf16", 1))
    numel = 0
    # Layers that stay in bf16 at the model's ends have no 8-bit copy. With virtual
    # stages, the first layers are in the first chunk and the last layers in the last
    # one.
    for number, chunk in enumerate(chunks):
        linear_sizes = []
        for parameter in chunk:
            if match := _LINEAR.search(parameter.name):
                linear_sizes.append((int(match[1]), parameter.numel))
        num_layers = 1 + max((layer for layer, _ in linear_sizes), default=0)
        begin = num_first if number == 0 else 0
        end = num_layers - (num_last if number == len(chunks) - 1 else 0)
        numel += sum(size for layer, size in linear_sizes if begin <= layer < end)
    scales = _SCALES.get(str(fields.get("fp8_recipe")), 0.0)
    return math.ceil(numel * (1 + backward) * (1 + scales))


def linear_elements(chunks: Sequence[Sequence[Parameter]]) -> int:
    """Return the number of elements of the decoder's linear layers."""
    return sum(
        parameter.numel
        for chunk in chunks
        for parameter in chunk
        if _LINEAR.search(parameter.name)
    )


@dataclass(frozen=True)
class Buffer:
    """One contiguous buffer of parameters or gradients.

    Attributes:
        ranges: [start, end) of each parameter, in elements.
        bucket_ends: end of each bucket, padding included. Every bucket is split evenly over the replicas.
    """

    ranges: tuple[tuple[int, int], ...]
    bucket_ends: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.bucket_ends[-1] if self.bucket_ends else 0

    def owned(
        self,
        replica: int,
        num_replicas: int,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> int:
        """Count the parameter elements (without padding) that one replica's optimizer keeps.

        Args:
            ranges: count only elements in these ranges; None: in all ranges.
        """
        total, ranges = 0, self.ranges if ranges is None else ranges
        begins = [begin for begin, _ in ranges]  # ascending
        for low, high in pairwise((0, *self.bucket_ends)):
            part = (high - low) // num_replicas
            start, end = low + replica * part, low + (replica + 1) * part
            # Buffers hold thousands of parameters, so find the few that this replica's
            # part overlaps by bisection.
            met = ranges[
                max(bisect_right(begins, start) - 1, 0) : bisect_left(begins, end)
            ]
            total += sum(max(0, min(end, b) - max(start, a)) for a, b in met)
        return total


@dataclass(frozen=True)
class BufferOptions:
    """The fields of DistributedDataParallelConfig and OptimizerConfig that decide buffer sizes."""

    distributed: bool
    grads_in_fp32: bool
    bucket_size: int | None
    high_busbw: bool
    precision_aware: bool
    exp_avg_itemsize: int
    exp_avg_sq_itemsize: int
    main_itemsize: int
    num_moments: int
    offload: float
    muon: bool = False

    @classmethod
    def read(
        cls,
        ddp: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        num_replicas: int,
        *,
        on_gpus: bool = True,
    ) -> BufferOptions:
        """Return a role's options, with the defaults that megaverl and megatron-core fill in.

        Args:
            num_replicas: data-parallel ranks times context-parallel ranks.
            on_gpus: `Machine.on_gpus`.
        """
        ddp = ddp_defaults(ddp, replicas=num_replicas, on_gpus=on_gpus)
        aware = bool(optimizer.get("use_precision_aware_optimizer", False))

        def itemsize(field: str) -> int:
            return (
                ITEMSIZE[str(optimizer.get(field, "float32")).removeprefix("torch.")]
                if aware
                else 4
            )

        # megatron-core's default: large enough to use the network well, and larger with
        # more replicas.
        bucket = ddp.get("bucket_size") or max(40_000_000, 1_000_000 * num_replicas)
        sgd = optimizer.get("optimizer", "adam") == "sgd"
        offload = 0.0
        if optimizer.get("optimizer_cpu_offload", False):
            offload = float(optimizer.get("optimizer_offload_fraction", 0.0))
        return cls(
            distributed=bool(ddp["use_distributed_optimizer"]),
            grads_in_fp32=bool(ddp["grad_reduce_in_fp32"]),
            bucket_size=bucket if ddp["overlap_grad_reduce"] else None,
            high_busbw=bool(ddp.get("pad_buckets_for_high_nccl_busbw", False)),
            precision_aware=aware,
            exp_avg_itemsize=itemsize("exp_avg_dtype"),
            exp_avg_sq_itemsize=itemsize("exp_avg_sq_dtype"),
            main_itemsize=itemsize("main_params_dtype"),
            num_moments=1 if sgd else 2,
            offload=offload,
            muon=optimizer.get("optimizer", "adam") == "muon",
        )


@dataclass(frozen=True)
class TrainedBytes:
    """Bytes that one rank holds of a trained role, on its device and in a checkpoint.

    Attributes:
        weights: the parameters, with the padding of their buffer under the distributed optimizer.
        gradients: the gradient buffers.
        optimizer: float32 master weights and Adam's two moments of this replica's share.
        step: bytes that live during the optimizer's step only: the float32 copy of 16-bit gradients of that share, and
            under Muon the copies of the largest matrix.
        saved_weights, saved_optimizer: bytes that the rank writes to a checkpoint (`megaverl.checkpoint.rank_shards`):
            one replica's share of the weights, and its optimizer state in float32. Norms count for every
            tensor-parallel rank, though only one of them writes them.
        loaded: bytes that the rank reads when a run resumes: every replica reads its weights, and each rank its share
            of the optimizer state.
    """

    weights: int
    gradients: int
    optimizer: int
    step: int
    saved_weights: int
    saved_optimizer: int
    loaded: int = 0


_NOT_ORTHOGONALISED = ("embedding.word_embeddings.weight", "output_layer.weight")
# Float32 and bfloat16 copies of a matrix and its product while it is orthogonalised:
# momentum, whole, normalised and result in float32, and two in bfloat16
# (emerging-optimizers 0.3, orthogonalized_optimizers/muon_utils.py).
_MUON_COPIES_BYTES = 4 * 4 + 2 * 2


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: megatron-core leaves embeddings, heads, norms and biases to Adam."""
    return len(shape) == 2 and not name.endswith(_NOT_ORTHOGONALISED)


_ROUTER_BIAS = "router.expert_bias"


def router_bias_bytes(layout: Layout) -> int:
    """Return the bytes of the routers' biases, which are in float32 and frozen (`models/layers.py`, `BiasedRouter`)."""
    return 4 * sum(
        whole(shape).numel
        for name, shape in layout.local_shapes.items()
        if name.endswith(_ROUTER_BIAS)
    )


@lru_cache(maxsize=4096)
def parameters_of(
    layout: Layout, *, expert_parallel: bool, tied: bool
) -> tuple[tuple[Parameter, ...], ...]:
    """Return the trained tensors of each model chunk, in the order in which GPTModel registers them.

    Args:
        expert_parallel: ep > 1, so experts have separate buffers over the expert-data ranks.
        tied: the first and the last of several stages share one embedding table, which gets a separate bucket.
    """
    chunks: dict[str, list[Parameter]] = {}
    for name, shape in layout.local_shapes.items():
        if name.endswith(_ROUTER_BIAS):
            # It is frozen, so it is in no gradient buffer.
            continue
        chunk, _, rest = (
            name.partition(".") if name.startswith("chunk") else ("", "", name)
        )
        shared = tied and rest in (
            "embedding.word_embeddings.weight",
            "output_layer.weight",
        )
        expert = expert_parallel and ".mlp.experts." in rest
        chunks.setdefault(chunk, []).append(
            Parameter(rest, whole(shape).numel, expert, shared, _is_matrix(rest, shape))
        )
    return tuple(tuple(_registered(parameters)) for parameters in chunks.values())


def adapters_of(
    layout: Layout, adapters: Mapping[str, LowRank], trained: Collection[str] = ()
) -> tuple[tuple[Parameter, ...], ...]:
    """Return the tensors that LoRA trains in each model chunk, in the order in which GPTModel registers them.

    Args:
        layout: layout of the base weights on the rank.
        trained: names of base weights that are trained in full beside the adapters.
    """
    factors = trained_factors(layout, adapters).local_shapes
    whole_ones = {
        piece.local: layout.local_shapes[piece.local]
        for piece in layout.pieces
        if piece.tensor in trained
    }
    chunks: dict[str, dict[str, list[Parameter]]] = {}
    for name, shape in (factors | whole_ones).items():
        chunk, _, rest = (
            name.partition(".") if name.startswith("chunk") else ("", "", name)
        )
        layer = rest.partition(f".{ADAPTER}.")[0]
        chunks.setdefault(chunk, {}).setdefault(layer, []).append(
            Parameter(rest, whole(shape).numel, is_matrix=_is_matrix(rest, shape))
        )
    return tuple(
        tuple(
            parameter
            for layer in _registered(
                [Parameter(f"{layer}.weight", 0) for layer in layers]
            )
            for parameter in sorted(
                layers[layer.name.removesuffix(".weight")],
                key=lambda p: ".lora_B." in p.name,
            )
        )
        for layers in chunks.values()
    )


def _registered(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Reorder parameters as megatron-core registers them: an attention's output projection before QKV."""
    ordered: list[Parameter] = []
    for parameter in parameters:
        if parameter.name.endswith("self_attention.linear_proj.weight"):
            prefix = parameter.name.removesuffix("linear_proj.weight")
            inner = [
                p.name
                for p in ordered
                if p.name.startswith(prefix) and "layer_norm" not in p.name
            ]
            place = next(
                (i for i, p in enumerate(ordered) if inner and p.name == inner[0]),
                len(ordered),
            )
            ordered.insert(place, parameter)
        else:
            ordered.append(parameter)
    return ordered


def make_buffer(
    parameters: Sequence[Parameter],
    num_replicas: int,
    bucket_size: int | None,
    options: BufferOptions,
) -> Buffer:
    """Lay out parameters as `_ParamAndGradBuffer` does: in reverse order, padded under the distributed optimizer."""
    align = PARAM_ALIGNMENT if options.distributed else 1
    end_align = math.lcm(
        num_replicas, BUCKET_ALIGNMENT, BUSBW_ALIGNMENT if options.high_busbw else 1
    )
    end_align = end_align if options.distributed else 1
    ranges: list[tuple[int, int]] = []
    ends: list[int] = []
    place = bucket_start = 0
    is_open = False

    def close(end: int) -> int:
        nonlocal bucket_start, is_open
        ends.append(_up(end, end_align))
        bucket_start, is_open = ends[-1], False
        return ends[-1]

    for parameter in reversed(parameters):
        place = _up(place, align)
        # megatron-core gives a shared embedding a bucket of its own, so that its
        # gradients can be summed across stages.
        has_own_bucket = parameter.is_shared_embedding and options.distributed
        if has_own_bucket and is_open:
            place = close(place)
        ranges.append((place, place + parameter.numel))
        place += parameter.numel
        is_open = True
        if has_own_bucket or (
            bucket_size is not None and place - bucket_start >= bucket_size
        ):
            place = close(place)
    if is_open:
        close(place)
    return Buffer(tuple(ranges), tuple(ends))


def make_whole_buffer(
    parameters: Sequence[Parameter],
    num_replicas: int,
    bucket_size: int | None,
    options: BufferOptions,
) -> Buffer:
    """Lay out matrices as Muon's optimizer needs them: each lies in one replica's part of its bucket.

    Source: megatron-core 0.19, `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`.
    """
    busbw = BUSBW_ALIGNMENT if options.high_busbw else 1
    end_align = math.lcm(num_replicas, BUCKET_ALIGNMENT, busbw)
    shard_align = math.lcm(PARAM_ALIGNMENT, end_align // num_replicas)
    ranges: list[tuple[int, int]] = []
    ends: list[int] = []
    place = 0
    pending: list[Parameter] = []

    def close() -> None:
        nonlocal place
        # Largest first, each to the part with the fewest elements.
        cursors = [0] * num_replicas
        starts: list[tuple[int, int, int]] = []
        for parameter in sorted(pending, key=lambda p: -p.numel):
            part = cursors.index(min(cursors))
            start = _up(cursors[part], PARAM_ALIGNMENT)
            cursors[part] = start + parameter.numel
            starts.append((part, start, parameter.numel))
        size = _up(max(cursors), shard_align)
        for part, start, numel in starts:
            begin = place + part * size + start
            ranges.append((begin, begin + numel))
        place += num_replicas * size
        ends.append(place)
        pending.clear()

    for parameter in reversed(parameters):
        pending.append(parameter)
        if bucket_size is None:
            continue
        # A bucket is at least as large as its largest matrix in every replica's part.
        largest = max(p.numel for p in pending)
        least = max(bucket_size, int(num_replicas * largest * 0.9))
        if sum(p.numel for p in pending) >= least:
            close()
    if pending:
        close()
    return Buffer(tuple(sorted(ranges)), tuple(ends))


def _buffers_of(
    chunk: Sequence[Parameter], options: BufferOptions
) -> Iterator[tuple[bool, bool, list[Parameter]]]:
    """Yield (of experts, updated by Muon, parameters) for each buffer of a model chunk."""
    for is_expert in (False, True):
        members = [p for p in chunk if p.is_expert is is_expert]
        matrices = [p for p in members if options.muon and p.is_matrix]
        others = [p for p in members if not (options.muon and p.is_matrix)]
        if others:
            yield is_expert, False, others
        if matrices:
            yield is_expert, True, matrices


def trained_bytes(
    chunks: Sequence[Sequence[Parameter]],
    options: BufferOptions,
    *,
    itemsize: int,
    dense: tuple[int, int],
    expert: tuple[int, int],
    first_stage: bool,
    tensor_parallel: int = 1,
) -> TrainedBytes:
    """Return the bytes that DistributedDataParallel and the optimizer hold on one rank.

    Args:
        itemsize: bytes of a weight.
        dense, expert: (index, count) of this rank among the replicas of dense weights (dp x cp) and of experts.
        first_stage: whether this is the first pipeline stage. Only its first chunk is cut into buckets.
        tensor_parallel: tensor-parallel ranks, whose parts Muon gathers to orthogonalise a matrix.
    """
    grad_itemsize = 4 if options.grads_in_fp32 else itemsize
    weights = gradients = optimizer = step = saved_weights = saved_optimizer = (
        loaded
    ) = copies = 0
    for index, chunk in enumerate(chunks):
        bucket_size = options.bucket_size if first_stage and index == 0 else None
        for is_expert, by_muon, members in _buffers_of(chunk, options):
            replica, count = expert if is_expert else dense
            whole_ones = by_muon and options.distributed
            make = make_whole_buffer if whole_ones else make_buffer
            buffer = make(members, count, bucket_size, options)
            num_moments = 1 if by_muon else options.num_moments
            # megatron-core saves float32 weights once, with the model, but for
            # those of its distributed optimizer.
            saved_states = num_moments + (
                (options.distributed and not by_muon) or itemsize < 4
            )
            plain = sum(p.numel for p in members)
            weights += itemsize * (buffer.numel if options.distributed else plain)
            gradients += grad_itemsize * buffer.numel
            owned = buffer.owned(replica, count) if options.distributed else plain
            optimizer += owned * state_bytes(options, itemsize, num_moments)
            if itemsize < 4 and grad_itemsize < 4 and not options.precision_aware:
                step += 4 * owned
            if by_muon:
                largest = max(p.numel for p in members)
                copies = max(copies, _MUON_COPIES_BYTES * tensor_parallel * largest)
            # Only the first stage writes the embedding table that it shares with
            # the last stage.
            saved = [
                p.numel if first_stage or not p.is_shared_embedding else 0
                for p in members
            ]
            ranges = buffer.ranges
            if not by_muon:
                ranges = tuple(
                    span
                    for span, numel in zip(ranges, reversed(saved), strict=True)
                    if numel
                )
            saved_weights += itemsize * sum(saved) // count
            saved_owned = (
                buffer.owned(replica, count, ranges)
                if options.distributed
                else sum(saved) // count
            )
            saved_optimizer += 4 * saved_states * saved_owned
            loaded += itemsize * plain + 4 * saved_states * owned
    step += copies
    held = round(optimizer * (1 - options.offload))
    return TrainedBytes(
        weights, gradients, held, step, saved_weights, saved_optimizer, loaded
    )


def state_bytes(
    options: BufferOptions, itemsize: int, num_moments: int | None = None
) -> int:
    """Return the optimizer's bytes per element: its moments, and a master weight unless the weights are float32."""
    num_moments = options.num_moments if num_moments is None else num_moments
    moments = options.exp_avg_itemsize + (
        options.exp_avg_sq_itemsize if num_moments == 2 else 0
    )
    return moments + (options.main_itemsize if itemsize < 4 else 0)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
