"""Boxes packed into messages of bounded size, and copied in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megaverl.sharding.boxes import Box, carry, split
from megaverl.sharding.plan import Transfer
from megaverl.weights.views import view

BUCKET_BYTES = 64 * 2**20
# A box of at least this part of a message travels alone, so that it can be sent from and land in its place.
ALONE = 1 / 16


class Message(NamedTuple):
    """Boxes that travel together from one rank to another, and the byte at which each starts: no byte between."""

    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        first, last = self.transfers[0], self.transfers[-1]
        rest = f" to {last.tensor} {last.box}" if len(self.transfers) > 1 else ""
        return f"{first.tensor} {first.box}{rest}"


def messages(
    transfers: Sequence[Transfer], dtype_of: Callable[[Transfer], torch.dtype], max_bytes: int
) -> list[Message]:
    """Pack the boxes from one rank to another into messages of at most `max_bytes`.

    Both ranks call this with the same boxes and get the same messages: it looks at sizes only. Their number
    grows with the bytes, not with the boxes: small boxes share a message, large ones travel alone, and those
    larger than a message in several parts. Wider dtypes go first, so that every box is aligned without padding.
    """
    out: list[Message] = []
    packed: list[Transfer] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        if packed:
            out.append(Message(tuple(packed), tuple(offsets), end))
            packed.clear()
            offsets.clear()

    by_width = sorted(transfers, key=lambda transfer: -dtype_of(transfer).itemsize)
    for transfer in _parts(by_width, dtype_of, max_bytes):
        nbytes = transfer.box.numel * dtype_of(transfer).itemsize
        if nbytes >= max_bytes * ALONE:
            out.append(Message((transfer,), (0,), nbytes))
            continue
        start = end if packed else 0
        if start + nbytes > max_bytes:
            close()
            start = 0
        packed.append(transfer)
        offsets.append(start)
        end = start + nbytes
    close()
    return out


def _parts(
    transfers: Iterable[Transfer], dtype_of: Callable[[Transfer], torch.dtype], max_bytes: int
) -> Iterator[Transfer]:
    for transfer in transfers:
        max_numel = max(1, max_bytes // dtype_of(transfer).itemsize)
        if transfer.box.numel <= max_numel:
            yield transfer
            continue
        for box in split(transfer.box, max_numel):
            yield transfer._replace(
                box=box,
                source_box=carry(box, transfer.box, transfer.source_box),
                dest_box=carry(box, transfer.box, transfer.dest_box),
            )


Where = Callable[[Transfer], tuple[str, Box]]


def at_source(transfer: Transfer) -> tuple[str, Box]:
    return transfer.source_local, transfer.source_box


def at_dest(transfer: Transfer) -> tuple[str, Box]:
    return transfer.dest_local, transfer.dest_box


def in_place(
    message: Message, tensors: Mapping[str, torch.Tensor], where: Where, dtype: torch.dtype
) -> torch.Tensor | None:
    """The bytes of a lone box where it lies, if they can travel from or land there as they are."""
    if len(message.transfers) > 1:
        return None
    name, box = where(message.transfers[0])
    data = view(tensors[name], box)
    if data.dtype != dtype or not data.is_contiguous():
        return None
    return data.view(-1).view(torch.uint8)


def pack(
    message: Message,
    tensors: Mapping[str, torch.Tensor],
    dtype_of: Callable[[Transfer], torch.dtype],
    space: torch.Tensor,
) -> None:
    """Copy a message's boxes from `tensors` of the source into `space`, bytes of at least its size."""
    boxes = [view(tensors[t.source_local], t.source_box) for t in message.transfers]
    copy_all([part.view(box.shape) for part, box in zip(_split(message, dtype_of, space), boxes, strict=True)], boxes)


def unpack(
    message: Message,
    tensors: Mapping[str, torch.Tensor],
    dtype_of: Callable[[Transfer], torch.dtype],
    space: torch.Tensor,
) -> None:
    """Copy a message's boxes from `space` into `tensors` of the destination."""
    boxes = [view(tensors[t.dest_local], t.dest_box) for t in message.transfers]
    copy_all(boxes, [part.view(box.shape) for part, box in zip(_split(message, dtype_of, space), boxes, strict=True)])


def _split(
    message: Message, dtype_of: Callable[[Transfer], torch.dtype], space: torch.Tensor
) -> Iterator[torch.Tensor]:
    for transfer, offset in zip(message.transfers, message.offsets, strict=True):
        dtype = dtype_of(transfer)
        yield space[offset : offset + transfer.box.numel * dtype.itemsize].view(dtype)


def copy_all(targets: Sequence[torch.Tensor], origins: Sequence[torch.Tensor]) -> None:
    """Copy each origin into its target, of the same shape; few kernels on a GPU, one call on a CPU."""
    if targets:
        torch._foreach_copy_(list(targets), list(origins))
