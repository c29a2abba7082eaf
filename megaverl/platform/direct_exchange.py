"""Gathering and scattering of buffers as sends between pairs of ranks; gloo's own copy the whole buffer, some twice."""

from __future__ import annotations

import torch
import torch.distributed as dist

TAG = 1 << 20  # of these messages, whatever else their group is used for


def all_gather(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with what each rank gives, all as long as `mine`, which may be this rank's part of it."""
    rank, size = group.rank(), group.size()
    parts = whole.view(size, -1)
    if mine.data_ptr() != parts[rank].data_ptr():
        parts[rank].copy_(mine.flatten())
    for distance in range(1, size):
        source = (rank - distance) % size
        _exchange(parts[rank], (rank + distance) % size, parts[source], source, group)


def reduce_scatter(mine: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum over the ranks of this rank's part of `whole`, in `mine`, which may be that part.

    Added up in the order in which the ranks precede this one: the same bits each time, over as many ranks.
    """
    rank, size = group.rank(), group.size()
    parts = whole.view(size, -1)
    flat = mine.view(-1)
    if flat.data_ptr() != parts[rank].data_ptr():
        flat.copy_(parts[rank])
    received = torch.empty_like(flat)
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        _exchange(parts[target], target, received, source, group)
        flat.add_(received)


def _exchange(given: torch.Tensor, target: int, taken: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    works = [group.send([given], target, TAG), group.recv([taken], source, TAG)]
    for work in works:
        work.wait()
