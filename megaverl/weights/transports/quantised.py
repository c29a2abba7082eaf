"""Transport into quantised weights: receive parts in a buffer, then write them as
numbers of 4 or 8 bits and scales, as vLLM does.

A part consists of whole matrices (`sharding/vllm.py`), which other transports carry as
if the engine held them in floating point. So it has as many bytes as without
quantisation, and the buffer is the only extra memory. Quantising at the source would
halve the bytes. But blocks may lie on several ranks, which would need one more exchange
for their largest elements, and a layout for each way in which a source is split.

Rules for FP8 (vLLM 0.32): a block of 128 x 128 has the scale max|w| / 448 and the numbers w * (1 / scale), rounded to
float8_e4m3fn (`utils/deep_gemm.py`, `per_block_cast_to_fp8`; 448 is the largest such number). A whole matrix follows
the same rule (`layers/quantization/online/fp8.py`), where each rank scales its own part of the matrix: a product needs
no more, and the scales are closer to the weights than one scale for all ranks. `weights/low_precision.py` has the
rules for formats with a scale for adjacent columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Hop, Transfer
from megaverl.sharding.quantization import GROUP_FORMATS
from megaverl.sharding.vllm import (
    EngineWeight,
    PackedWeight,
    QuantisedWeight,
    slot_of,
)
from megaverl.weights.low_precision import packed_tensors, quantise_groups
from megaverl.weights.transports import Moved, TransferJob, Transport, view

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# Lower bounds of max|w| in a block (vLLM's value) and in a whole matrix, so that zeros
# have a positive scale.
LEAST, LEAST_WHOLE = 1e-4, 1e-30
CHUNK = 1 << 22  # elements that are converted to float32 at a time


@torch.no_grad()
def quantise(matrix: torch.Tensor, into: EngineWeight, expert: int = 0) -> None:
    """Write a matrix [rows, columns] of any floating-point dtype into its place.

    Collective over the engine's ranks if `into.largest` is.

    Args:
        into: a weight of the matrix's shape, or of several experts.
        expert: index of the expert.
    """
    if isinstance(into, PackedWeight):
        _quantise_packed(matrix, into)
        return
    several = into.numbers.dim() > 2
    numbers = into.numbers[expert] if several else into.numbers
    scales = into.scales[expert] if several else into.scales
    rows, columns = matrix.shape
    step = max(1, CHUNK // max(1, columns))
    if into.block is not None:
        step = -(-step // into.block) * into.block
        for top in range(0, rows, step):
            part = slice(top, min(top + step, rows))
            of_part = scales[top // into.block : -(-part.stop // into.block)]
            _quantise_blocks(
                matrix[part], numbers[part], of_part, into.block, into.powers_of_two
            )
        return
    low, high = torch.aminmax(matrix)
    scale = _scale(
        torch.maximum(low.abs(), high.abs()).float().clamp(LEAST_WHOLE),
        powers_of_two=False,
    )
    scales.copy_(scale.expand_as(scales))
    for top in range(0, rows, step):
        part = slice(top, min(top + step, rows))
        numbers[part].copy_(
            (matrix[part].float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST)
        )


def _quantise_packed(matrix: torch.Tensor, into: PackedWeight) -> None:
    form = GROUP_FORMATS[into.format]
    largest = None
    if form.kind == "nvfp4":
        low, high = torch.aminmax(matrix)
        largest = torch.maximum(-low, high).float()
        if into.largest is not None:
            largest = into.largest(largest)
    into.load(packed_matrix(matrix, into.format, into.scale_dtype, largest))


def packed_matrix(
    matrix: torch.Tensor,
    method: str,
    scale_dtype: torch.dtype,
    largest: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix in a format of `GROUP_FORMATS`, some rows quantised at a time.

    Args:
        matrix: [rows, columns].
        largest: see `quantise_groups`; must be given for nvfp4.
    """
    form = GROUP_FORMATS[method]
    rows, columns = matrix.shape
    # A multiple of 8: zero points of eight rows are in one element.
    step = max(8, CHUNK // max(1, columns) // 8 * 8)
    parts = []
    for top in range(0, rows, step):
        quantised = quantise_groups(
            matrix[top : top + step], form, scale_dtype=scale_dtype, largest=largest
        )
        parts.append(packed_tensors(quantised, form, scale_dtype))
    tensors = {
        name: torch.cat([part[name] for part in parts])
        for name in parts[0]
        if name not in ("weight_shape", "weight_global_scale")
    }
    if "weight_global_scale" in parts[0]:
        tensors["weight_global_scale"] = parts[0]["weight_global_scale"]
    if "weight_shape" in parts[0]:
        tensors["weight_shape"] = torch.tensor([rows, columns], device=matrix.device)
    return tensors


def _quantise_blocks(
    matrix: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    powers_of_two: bool,
) -> None:
    down, across = scales.shape
    padded = torch.zeros(
        down * block, across * block, dtype=torch.float32, device=matrix.device
    )
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.view(down, block, across, block)
    scale = _scale(blocks.abs().amax(dim=(1, 3)).clamp_(LEAST), powers_of_two)
    scales.copy_(scale)
    blocks.mul_((1.0 / scale)[:, None, :, None])
    numbers.copy_(padded[: matrix.shape[0], : matrix.shape[1]])


def _scale(largest: torch.Tensor, powers_of_two: bool) -> torch.Tensor:
    scale = largest / LARGEST
    return torch.exp2(torch.ceil(torch.log2(scale))) if powers_of_two else scale


def dequantise(weight: QuantisedWeight, expert: int = 0) -> torch.Tensor:
    """Return the matrix [rows, columns] in float32 that the numbers and scales of an FP8 weight represent."""
    several = weight.numbers.dim() > 2
    numbers = (weight.numbers[expert] if several else weight.numbers).float()
    scales = weight.scales[expert] if several else weight.scales
    if weight.block is None:
        return numbers * scales
    by_row = scales.repeat_interleave(weight.block, 0)[: numbers.shape[0]]
    return numbers * by_row.repeat_interleave(weight.block, 1)[:, : numbers.shape[1]]


# From a job to the transports that carry all of it.
Assign = Callable[[TransferJob], list[Transport]]
# Called with the weights of a received part, and a function from a local tensor's box
# to its place in the buffer.
Landed = Callable[[frozenset[str], Callable[[str, Box], torch.Tensor]], None]


class Matrix(NamedTuple):
    """One matrix of a local tensor: an expert's, or the only one (`slot` 0)."""

    local: str
    slot: int


@dataclass
class QuantisedDestination:
    """The destination of a reshard into quantised weights.

    Attributes:
        parts: the weights of each part, equal on every rank (`landing_parts`).
        weights: this rank's weights by local name; empty on ranks without an engine.
        landed: called with every part before it is quantised, on every rank.
    """

    parts: Sequence[frozenset[str]]
    weights: Mapping[str, EngineWeight] = field(default_factory=dict)
    landed: Landed = lambda tensors, view_of: None

    @property
    def tensors(self) -> frozenset[str]:
        """All weights in the parts."""
        return frozenset().union(*self.parts)

    def changing(self, tensors: Collection[str]) -> QuantisedDestination:
        """Keep the parts that contain any of these weights. A matrix is always brought
        whole, even if only some of it changes.
        """
        return replace(
            self, parts=[part for part in self.parts if not part.isdisjoint(tensors)]
        )


class QuantisedLanding:
    """Takes all transfers into quantised weights. It is asked before the other transports, and works after them."""

    def __init__(self, dest: QuantisedDestination, parts: Sequence[_Part]) -> None:
        self._dest, self._parts = dest, parts

    @classmethod
    def take(
        cls, job: TransferJob, dest: QuantisedDestination, assign: Assign
    ) -> QuantisedLanding:
        """Make the parts' transports. Collective over the group, including ranks without an engine."""
        parts = [_Part(job, tensors, assign) for tensors in dest.parts]
        job.leave_out(dest.tensors)
        return cls(dest, parts)

    def start(self, version: int) -> None:
        """Do nothing: the buffer holds one part at a time, so no part can start early."""
        self._version = version

    def finish(self) -> Moved:
        moved = Moved()
        nbytes = max((part.nbytes for part in self._parts), default=0)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=platform.device)
        for part in self._parts:
            moved = moved.plus(part.bring(buffer, self._version))
            self._dest.landed(part.tensors, part.view)
            for matrix, staged in part.landed():
                quantise(staged, self._dest.weights[matrix.local], matrix.slot)
            part.close()
        return moved


class _Part:
    """Some matrices, their transports, and their places in the buffer."""

    def __init__(
        self, job: TransferJob, tensors: frozenset[str], assign: Assign
    ) -> None:
        self.tensors = tensors
        layout = job.plan.dest_layout
        self._shapes: dict[Matrix, tuple[int, ...]] = {}
        for name in sorted(tensors & layout.global_shapes.keys()):
            for piece in layout.by_tensor.get(name, ()):
                shape = layout.local_shapes[piece.local]
                # An expert's matrix keeps the axis of experts, with length one.
                self._shapes[Matrix(piece.local, slot_of(piece))] = (1,) * (
                    len(shape) - 2
                ) + shape[-2:]
        self._dtypes = {matrix: job.dest[matrix.local].dtype for matrix in self._shapes}
        self.nbytes = sum(
            prod(shape) * self._dtypes[matrix].itemsize
            for matrix, shape in self._shapes.items()
        )
        self._staged: dict[str, torch.Tensor] = {}
        plan = job.plan.only(tensors.__contains__)
        plan = replace(
            plan,
            copies=tuple(map(_staged_transfer, plan.copies)),
            receives=_staged_lists(plan.receives),
            relays=tuple(map(_staged_hop, plan.relays)),
        )
        from_source = (hop.sends for hop in plan.hops if hop.after is None)
        sent = (
            transfer
            for sends in from_source
            for transfers in sends.values()
            for transfer in transfers
        )
        source = {transfer.source_local for transfer in (*plan.copies, *sent)}
        self._transports = assign(
            replace(
                job,
                plan=plan,
                source={
                    name: job.source[name] for name in job.source if name in source
                },
                dest=self._staged,
                options=replace(job.options, alias=False),
                # The buffer does not hold the last version.
                sent=None,
            )
        )

    def bring(self, buffer: torch.Tensor, version: int) -> Moved:
        """Receive the matrices in the buffer."""
        start = 0
        for matrix, shape in self._shapes.items():
            stop = start + prod(shape) * self._dtypes[matrix].itemsize
            self._staged[_name(matrix)] = (
                buffer[start:stop].view(self._dtypes[matrix]).view(shape)
            )
            start = stop
        moved = Moved()
        for transport in self._transports:
            transport.start(version)
        for transport in self._transports:
            moved = moved.plus(transport.finish())
        return moved

    def view(self, local: str, box: Box) -> torch.Tensor:
        """Return a box of a local tensor in the buffer."""
        matrix, box = _in_matrix(local, box)
        return view(self._staged[_name(matrix)], box)

    def landed(self) -> Collection[tuple[Matrix, torch.Tensor]]:
        """List the received matrices."""
        return [
            (matrix, self._staged[_name(matrix)].view(shape[-2:]))
            for matrix, shape in self._shapes.items()
        ]

    def close(self) -> None:
        """Drop the views of the buffer."""
        self._staged.clear()


def _staged_lists(
    receives: Mapping[int, tuple[Transfer, ...]],
) -> dict[int, tuple[Transfer, ...]]:
    return {
        peer: tuple(map(_staged_transfer, transfers))
        for peer, transfers in receives.items()
    }


def _staged_hop(hop: Hop) -> Hop:
    """Return the hop with everything that this rank receives, and then forwards, in the buffer."""
    receives = _staged_lists(hop.receives)
    if hop.after is None:
        return hop._replace(receives=receives)
    sends = {
        peer: tuple(map(_forwarded_transfer, transfers))
        for peer, transfers in hop.sends.items()
    }
    return Hop(sends, receives, hop.after)


def _forwarded_transfer(transfer: Transfer) -> Transfer:
    matrix, box = _in_matrix(transfer.source_local, transfer.source_box)
    return transfer._replace(source_local=_name(matrix), source_box=box)


def _staged_transfer(transfer: Transfer) -> Transfer:
    matrix, box = _in_matrix(transfer.dest_local, transfer.dest_box)
    return transfer._replace(dest_local=_name(matrix), dest_box=box)


def _in_matrix(local: str, box: Box) -> tuple[Matrix, Box]:
    """Return the matrix that a box of a local tensor lies in, and the box within it."""
    if len(box.start) < 3:
        return Matrix(local, 0), box
    return Matrix(local, box.start[0]), Box((0, *box.start[1:]), (1, *box.stop[1:]))


def _name(matrix: Matrix) -> str:
    return f"{matrix.local}[{matrix.slot}]"
