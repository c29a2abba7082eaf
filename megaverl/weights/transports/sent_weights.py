"""Copies of the weights that a rank sent last, by which the next version is compared (`reshard.delta`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from megaverl.sharding.boxes import Box
from megaverl.sharding.deltas import AUTO_ITEMSIZE
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.tensor_views import Tensors, view

DeltaMode = Literal["auto", "on", "off"]
# With reshard.delta=auto, a sender whose changes take more than this share of its whole
# messages sends whole ones in the next versions, without comparing.
PAYS_BELOW = 0.5
VERSIONS_WITHOUT = 8


@dataclass
class SentWeights:
    """Copies of the weights that this rank sends to other ranks, as of the last version.

    Each element is kept once, however many ranks receive it, in the dtype in which it
    is sent. The transports of a resharder share one object.

    Args:
        mode: `reshard.delta`: "auto" or "on".
        source: the source's tensors, by local name.
        device: of the copies.

    Attributes:
        due: the version that moves may be sent as changes: all destinations have the last version.
        destination_drops: this rank's engine drops its weights between versions, so that copies would be of no use.
    """

    mode: DeltaMode
    source: Tensors
    device: torch.device
    due: bool = False
    destination_drops: bool = False
    _boxes: dict[str, Box] = field(default_factory=dict)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    _are_current: bool = False
    _versions_without: int = 0
    _sent: int = 0
    _whole: int = 0

    def add(self, transfers: Sequence[Transfer], dtype: torch.dtype) -> None:
        """Keep copies of these boxes of the source from now on, in `dtype`."""
        for transfer in transfers:
            name, box = transfer.source_local, transfer.source_box
            known = self._boxes.get(name, box)
            low = tuple(map(min, known.start, box.start))
            high = tuple(map(max, known.stop, box.stop))
            self._boxes[name] = Box(low, high)
            self._dtypes[name] = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(
            box.numel * self._dtypes[name].itemsize for name, box in self._boxes.items()
        )

    @property
    def compares(self) -> bool:
        """Return whether this rank compares its messages in the version that moves."""
        return self.due and self._are_current

    def boxes(self, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        """Return the copies of the boxes that these transfers read."""
        return [
            view(
                self._copies[transfer.source_local],
                within(transfer.source_box, self._boxes[transfer.source_local]),
            )
            for transfer in transfers
        ]

    def count(self, sent: int, whole: int) -> None:
        """Count the bytes of compared messages, and the bytes of the same messages if they were whole."""
        self._sent += sent
        self._whole += whole

    def keep(self) -> None:
        """Copy the source's weights, which all destinations have received.

        No copy is made if the next version will not be compared.
        """
        if self.compares and self.mode == "auto":
            is_worthwhile = self._sent <= PAYS_BELOW * self._whole
            self._versions_without = 0 if is_worthwhile else VERSIONS_WITHOUT
        elif self._versions_without:
            self._versions_without -= 1
        self._sent = self._whole = 0
        self._are_current = not self._versions_without and not self.destination_drops
        if not self._are_current:
            return
        targets, origins = [], []
        for name, box in self._boxes.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(
                    box.shape, dtype=self._dtypes[name], device=self.device
                )
            targets.append(self._copies[name])
            origins.append(view(self.source[name], box))
        if targets:
            torch._foreach_copy_(targets, origins)


def is_compared(mode: DeltaMode, dtype: torch.dtype, *, same_node: bool) -> bool:
    """Return whether messages of this dtype between two ranks are compared. Both ends decide alike.

    `auto` leaves out ranks of one node, whose links are about as fast as comparing.
    """
    if mode == "auto":
        return not same_node and dtype.itemsize == AUTO_ITEMSIZE
    return mode == "on"


def within(box: Box, outer: Box) -> Box:
    """Return the place of a box relative to the start of a box around it."""

    def moved(corner: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at - base for at, base in zip(corner, outer.start, strict=True))

    return Box(moved(box.start), moved(box.stop))
