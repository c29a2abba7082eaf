"""Transports within a rank: share the source's storage where both sides agree, and copy the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import torch

from megaverl.errors import ReshardError
from megaverl.sharding.boxes import Box
from megaverl.sharding.plan import Hop, Plan, Transfer
from megaverl.weights.transports import Moved, Tensors, TransferJob, copy_boxes, view


def copy_local(copies: Sequence[Transfer], source: Tensors, dest: Tensors) -> int:
    """Copy each box within this rank, converting the dtype; return the bytes written."""
    targets = [
        view(dest[transfer.dest_local], transfer.dest_box) for transfer in copies
    ]
    origins = [
        view(source[transfer.source_local], transfer.source_box) for transfer in copies
    ]
    copy_boxes(targets, origins)
    return sum(target.numel() * target.element_size() for target in targets)


class LocalCopy:
    """Takes all copies that were not aliased."""

    def __init__(
        self, copies: Sequence[Transfer], source: Tensors, dest: Tensors
    ) -> None:
        self._copies, self._source, self._dest = copies, source, dest

    @classmethod
    def take(cls, job: TransferJob) -> LocalCopy | None:
        copies, job.copies = job.copies, []
        return cls(copies, job.source, job.dest) if copies else None

    def start(self, version: int) -> None:
        """Do nothing: a copy needs no head start, and messages should leave first."""

    def finish(self) -> Moved:
        return Moved(local=copy_local(self._copies, self._source, self._dest))


class Pair(NamedTuple):
    """A destination tensor, and the contiguous box of a source tensor that holds all of it."""

    dest: str
    source: str
    box: Box
    numel: int  # elements of weights, without padding


class Alias:
    """Takes the copies into every destination tensor whose elements lie in one source tensor in the same order.

    If a source tensor's storage has changed since the last run (it was offloaded and
    brought back), the destination takes the new storage. It is copied instead if it
    must not move (`may_rebind` is False: a captured graph holds the address) or cannot
    (the source is on another device at the moment).
    """

    def __init__(
        self, pairs: Sequence[Pair], source: Tensors, dest: Tensors, may_rebind: bool
    ) -> None:
        self._pairs, self._source, self._dest, self._may_rebind = (
            pairs,
            source,
            dest,
            may_rebind,
        )
        # A run without changes only compares two addresses with their expected
        # distance.
        self._links = []
        for pair in pairs:
            origin = source[pair.source]
            rows_before = pair.box.start[0] * origin.stride(0) * origin.element_size()
            self._links.append((dest[pair.dest], origin, rows_before))
        self._nbytes = sum(
            pair.numel * dest[pair.dest].element_size() for pair in pairs
        )

    @classmethod
    def take(cls, job: TransferJob) -> Alias | None:
        if not job.options.alias:
            return None
        pairs = list(
            _pairs(
                job.plan,
                job.copies,
                job.hops,
                job.source,
                job.dest,
                job.options.never_alias,
            )
        )
        taken = {pair.dest for pair in pairs}
        job.copies = [
            transfer for transfer in job.copies if transfer.dest_local not in taken
        ]
        return (
            cls(pairs, job.source, job.dest, job.options.may_rebind) if pairs else None
        )

    def start(self, version: int) -> None:
        """Do nothing: no bytes travel."""

    def finish(self) -> Moved:
        changed = [not shared for shared in self._shared()]
        local = sum(self._bring(pair) for pair in compress(self._pairs, changed))
        return Moved(aliased=self._nbytes - local, local=local)

    def _bring(self, pair: Pair) -> int:
        """Move a tensor to the source's new storage, or copy it; return the bytes that were copied."""
        target, origin = (
            self._dest[pair.dest],
            view(self._source[pair.source], pair.box),
        )
        if self._may_rebind and target.device == origin.device:
            target.data = origin
            return 0
        if target.untyped_storage().nbytes() == 0:
            if not self._may_rebind:
                raise ReshardError(
                    f"{pair.dest}: its storage was freed with the source's, and a captured graph holds its address. "
                    "Set reshard.alias=never where the actor's weights are freed between steps."
                )
            target.data = torch.empty_like(origin, device=target.device)
        target.detach().copy_(origin)
        return pair.numel * target.element_size()

    def shares(self) -> bool:
        """Return whether any destination tensor shares the source's storage now."""
        return any(self._shared())

    def _shared(self) -> list[bool]:
        """List for each pair whether the destination shares the source's storage now."""
        return [
            target.data_ptr() - origin.data_ptr() == start
            for target, origin, start in self._links
        ]

    def freed(self) -> list[str]:
        """List the destination tensors whose storage was freed together with the source's."""
        return [
            pair.dest
            for pair in self._pairs
            if self._dest[pair.dest].numel()
            and self._dest[pair.dest].untyped_storage().nbytes() == 0
        ]


def adopt(
    plan: Plan, source: Tensors, dest: Tensors, never_alias: Collection[str] = ()
) -> int:
    """Alias everything possible except `never_alias`, before an engine captures graphs; return the number of tensors.

    Tensors of the plan that the destination does not have yet are left out.
    """
    adopted = 0
    for pair in _pairs(plan, plan.copies, plan.hops, source, dest, never_alias):
        dest[pair.dest].data = view(source[pair.source], pair.box)
        adopted += 1
    return adopted


def _pairs(
    plan: Plan,
    copies: Iterable[Transfer],
    hops: Iterable[Hop],
    source: Tensors,
    dest: Tensors,
    never_alias: Collection[str],
) -> Iterator[Pair]:
    """Yield a pair for every destination tensor that can share a source's storage.

    Tensors that other ranks fill, and tensors with views, cannot.
    """
    seen = {
        name
        for layout in (plan.source_layout, plan.dest_layout)
        for name in layout.views
    }
    not_shared = {*never_alias, *(name for name, _ in plan.dest_layout.views.values())}
    received = (transfers for hop in hops for transfers in hop.receives.values())
    arriving = {transfer.dest_local for transfers in received for transfer in transfers}
    by_dest: dict[str, list[Transfer]] = {}
    for transfer in copies:
        if transfer.source_local in seen or transfer.dest_local in seen:
            not_shared.add(transfer.dest_local)
        by_dest.setdefault(transfer.dest_local, []).append(transfer)
    for name, transfers in by_dest.items():
        free = name in dest and name not in arriving and name not in not_shared
        if free and (pair := alias_pair(transfers, source, dest)):
            yield pair


def alias_pair(
    copies: Sequence[Transfer], source: Tensors, dest: Tensors
) -> Pair | None:
    """Return how a destination tensor can share a source's storage, or None if it cannot.

    Args:
        copies: all copies into the tensor.
    """
    first = copies[0]
    if any(transfer.source_local != first.source_local for transfer in copies):
        return None
    origin, target = source[first.source_local], dest[first.dest_local]
    if (
        origin.dtype != target.dtype
        or origin.device != target.device
        or not origin.dim() == target.dim() > 0
    ):
        return None
    if not origin.is_contiguous() or not target.is_contiguous():
        return None
    # Only a range of the first axis is one contiguous part of the source, as the
    # destination needs.
    if origin.shape[1:] != target.shape[1:]:
        return None
    shifts = {
        tuple(
            a - b
            for a, b in zip(
                transfer.source_box.start, transfer.dest_box.start, strict=True
            )
        )
        for transfer in copies
    }
    same = all(
        transfer.source_box.shape == transfer.dest_box.shape for transfer in copies
    )
    shift = shifts.pop()
    if shifts or not same or any(shift[1:]):
        return None
    low, high = shift[0], shift[0] + target.shape[0]
    # The destination has rows beyond the copies (padding), which would lie outside the
    # source's storage.
    if low < 0 or high > origin.shape[0]:
        return None
    rest = tuple(origin.shape[1:])
    numel = sum(transfer.box.numel for transfer in copies)
    return Pair(
        first.dest_local,
        first.source_local,
        Box((low, *(0,) * len(rest)), (high, *rest)),
        numel,
    )
