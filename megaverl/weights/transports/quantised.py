"""What lands in quantised weights: part by part in a buffer, in the dtype that travels, then as 8-bit numbers.

A part is some whole matrices (`sharding/vllm.py`), carried by the other transports as if the engine held them in
floating point; so their bytes are what they would be there, and the buffer is all the memory that it takes. Quantising
where weights come from would halve the bytes and need the largest element of a block that lies on several ranks, one
more exchange and layout for each way in which a source is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from megaverl.platform import platform
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Transfer
from megaverl.sharding.vllm import QuantisedWeight, slot_of
from megaverl.weights.quantise import quantise
from megaverl.weights.transfer import Moved, TransferJob, Transport, view

# Given a job, the transports that carry all of it.
Assign = Callable[[TransferJob], list[Transport]]
# Called with the weights of a part that has landed, and where on this rank a box of a local tensor has.
Landed = Callable[[frozenset[str], Callable[[str, Box], torch.Tensor]], None]


class Matrix(NamedTuple):
    """One matrix of a local tensor: an expert's, or the only one (`slot` 0)."""

    local: str
    slot: int


@dataclass
class QuantisedDestination:
    """What a reshard into quantised weights needs to know of them.

    Attributes:
        parts: the weights that land there, in the parts of `landing_parts`: the same on every rank.
        weights: this rank's, by local name; none where it has no engine.
        landed: what else to do with every part before it is quantised, on every rank.
    """

    parts: Sequence[frozenset[str]]
    weights: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    landed: Landed = lambda tensors, view_of: None

    @property
    def tensors(self) -> frozenset[str]:
        """Weights that land in one of the parts."""
        return frozenset().union(*self.parts)

    def changing(self, tensors: Collection[str]) -> QuantisedDestination:
        """The parts in which any of these weights is: all of a matrix comes anew when some of it does."""
        return replace(self, parts=[part for part in self.parts if not part.isdisjoint(tensors)])


class QuantisedLanding:
    """Takes everything that goes into quantised weights. Asked before the other transports, it works after them."""

    def __init__(self, dest: QuantisedDestination, parts: Sequence[_Part]) -> None:
        self._dest, self._parts = dest, parts

    @classmethod
    def take(cls, job: TransferJob, dest: QuantisedDestination, assign: Assign) -> QuantisedLanding:
        """Every rank takes part, those without an engine too."""
        parts = [_Part(job, tensors, assign) for tensors in dest.parts]
        job.leave_out(dest.tensors)
        return cls(dest, parts)

    def start(self, version: int) -> None:
        """The buffer holds one part at a time: nothing can go ahead."""
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
    """Some matrices, the way there, and their places in the buffer while they land."""

    def __init__(self, job: TransferJob, tensors: frozenset[str], assign: Assign) -> None:
        self.tensors = tensors
        layout = job.plan.dest_layout
        self._shapes: dict[Matrix, tuple[int, ...]] = {}
        for name in sorted(tensors & layout.global_shapes.keys()):
            for piece in layout.by_tensor.get(name, ()):
                shape = layout.local_shapes[piece.local]
                # an expert's matrix keeps an axis for the experts, of one
                self._shapes[Matrix(piece.local, slot_of(piece))] = (1,) * (len(shape) - 2) + shape[-2:]
        self._dtypes = {matrix: job.dest[matrix.local].dtype for matrix in self._shapes}
        self.nbytes = sum(prod(shape) * self._dtypes[matrix].itemsize for matrix, shape in self._shapes.items())
        self._staged: dict[str, torch.Tensor] = {}
        plan = job.plan.only(tensors.__contains__)
        plan = replace(
            plan,
            copies=tuple(map(_staged_transfer, plan.copies)),
            receives={peer: tuple(map(_staged_transfer, transfers)) for peer, transfers in plan.receives.items()},
        )
        sent = (transfer for transfers in plan.sends.values() for transfer in transfers)
        source = {transfer.source_local for transfer in (*plan.copies, *sent)}
        self._transports = assign(
            replace(
                job,
                plan=plan,
                source={name: job.source[name] for name in job.source if name in source},
                dest=self._staged,
                options=replace(job.options, alias=False),
            )
        )

    def bring(self, buffer: torch.Tensor, version: int) -> Moved:
        """Let the matrices land in the buffer."""
        start = 0
        for matrix, shape in self._shapes.items():
            stop = start + prod(shape) * self._dtypes[matrix].itemsize
            self._staged[_name(matrix)] = buffer[start:stop].view(self._dtypes[matrix]).view(shape)
            start = stop
        moved = Moved()
        for transport in self._transports:
            transport.start(version)
        for transport in self._transports:
            moved = moved.plus(transport.finish())
        return moved

    def view(self, local: str, box: Box) -> torch.Tensor:
        """The box of a local tensor, where it has landed."""
        matrix, box = _in_matrix(local, box)
        return view(self._staged[_name(matrix)], box)

    def landed(self) -> Collection[tuple[Matrix, torch.Tensor]]:
        return [(matrix, self._staged[_name(matrix)].view(shape[-2:])) for matrix, shape in self._shapes.items()]

    def close(self) -> None:
        self._staged.clear()


def _staged_transfer(transfer: Transfer) -> Transfer:
    matrix, box = _in_matrix(transfer.dest_local, transfer.dest_box)
    return transfer._replace(dest_local=_name(matrix), dest_box=box)


def _in_matrix(local: str, box: Box) -> tuple[Matrix, Box]:
    """The matrix that a box of a local tensor is in, and the box there."""
    if len(box.start) < 3:
        return Matrix(local, 0), box
    return Matrix(local, box.start[0]), Box((0, *box.start[1:]), (1, *box.stop[1:]))


def _name(matrix: Matrix) -> str:
    return f"{matrix.local}[{matrix.slot}]"
