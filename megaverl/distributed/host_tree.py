"""Small messages between the hosts of a group's ranks, whatever its backend: up a tree to the first rank, and back.

The tree is the binomial one of MPI's broadcasts: a rank speaks with at most log2(N) + 1 others, and where the ranks of
a node are neighbours and a power of two, with one on another node. No device takes part, so nothing waits for one.

Under NCCL the messages go over gloo connections that are opened when two ranks first speak (`TORCH_GLOO_LAZY_INIT` of
torch 2.7 and newer; a gloo group as torch makes it else joins every rank with every other). A first message between
two ranks then waits until both of them want to speak, which both do here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.failures import cause_of
from megaverl.errors import TrainingStopped
from megaverl.platform import platform

FRAME = 2048  # bytes of a message, its length among them; what is longer follows in a second one
_LENGTH = 8  # bytes of a length
_LAZY = "TORCH_GLOO_LAZY_INIT"


def parent(place: int) -> int:
    """Who passes a place's messages on towards place 0; not asked of that one."""
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """Those whose parent it is. They and all below them are the places behind it up to the next that is not."""
    reach = place & -place or size
    return [place + (1 << bit) for bit in range((reach - 1).bit_length()) if place + (1 << bit) < size]


def conclude(
    mine: bytes,
    function: Callable[[list[bytes]], bytes],
    group: dist.ProcessGroup | None = None,
    kind: str = "",
    root: int = 0,
) -> bytes:
    """What `function` makes of every rank's bytes, in rank order, on the rank `root`; its result, on every rank.

    Every rank of `group` takes part. `function` must not raise: the others would wait. One kind of agreement does not
    take another's messages: ranks that are not at the same one wait, and liveness says where.

    Raises:
        TrainingStopped: a rank died, or did not come within the group's timeout; by its number in the group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    ranks = _hosts_of(group)
    size = ranks.size()
    place = (ranks.rank() - root) % size
    below = [(child + root) % size for child in children(place, size)]
    tag = zlib.crc32(f"megaverl.host_tree {kind}".encode()) & 0x7FFFFFFF  # apart from what is sent point to point
    found = [_chunk(mine), *(_receive(ranks, child, tag) for child in below)]  # neighbours' come in the order of ranks
    if place:
        above = (parent(place) + root) % size
        sent = _send(ranks, above, b"".join(found), tag)
        result = _receive(ranks, above, tag)
        _finish(sent)
    else:
        of_places = _split(b"".join(found))
        result = function(of_places[size - root :] + of_places[: size - root])
    _finish([one for child in reversed(below) for one in _send(ranks, child, result, tag)])  # the longest way first
    return result


# Group -> gloo among the same ranks, where the group's own backend is another.
_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _hosts_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What joins the hosts of a group's ranks: a gloo group itself; beside another one, made at its first use."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _hosts:
        rank, size, gloo = group.rank(), group.size(), dist.ProcessGroup.BackendType.GLOO
        store = dist.PrefixStore("hosts", dist.distributed_c10d._get_process_group_store(group))
        hosts = dist.ProcessGroup(store, rank, size)
        with connects_lazily():
            backend = dist.ProcessGroupGloo(store, rank, size, _timeout_of(group))
        hosts._set_default_backend(gloo)
        hosts._register_backend(torch.device("cpu"), gloo, backend)
        _hosts[group] = hosts
    return _hosts[group]


@contextmanager
def connects_lazily() -> Iterator[None]:
    """A gloo group that is made inside opens a connection when two ranks first speak, and no others."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Of everything in a group; torch's own where the backend, such as a fake one, has none."""
    options = group._get_backend(platform.device).options
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def _chunk(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH, "little") + data


def _split(chunks: bytes) -> list[bytes]:
    """Undo the joining of `_chunk`s."""
    found, start = [], 0
    while start < len(chunks):
        end = start + _LENGTH + int.from_bytes(chunks[start : start + _LENGTH], "little")
        found.append(chunks[start + _LENGTH : end])
        start = end
    return found


_Pending = tuple[dist.Work, Tensor, int]


def _send(ranks: dist.ProcessGroup, peer: int, data: bytes, tag: int) -> list[_Pending]:
    """Begin to send; the tensors are kept until it is done."""
    framed = torch.frombuffer(bytearray(_chunk(data).ljust(FRAME, b"\0")), dtype=torch.uint8)
    parts = [part for part in (framed[:FRAME], framed[FRAME:]) if part.numel()]
    try:
        return [(ranks.send([part], peer, tag), part, peer) for part in parts]
    except RuntimeError as error:  # the first message opens the connection
        raise _lost(peer, error) from error


def _receive(ranks: dist.ProcessGroup, peer: int, tag: int) -> bytes:
    head = _receive_some(ranks, peer, FRAME, tag)
    length = int.from_bytes(head[:_LENGTH], "little")
    rest = length - (FRAME - _LENGTH)
    return head[_LENGTH:] + _receive_some(ranks, peer, rest, tag) if rest > 0 else head[_LENGTH : _LENGTH + length]


def _receive_some(ranks: dist.ProcessGroup, peer: int, count: int, tag: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8)
    try:
        ranks.recv([data], peer, tag).wait()
    except RuntimeError as error:
        raise _lost(peer, error) from error
    return data.numpy().tobytes()


def _finish(sent: Sequence[_Pending]) -> None:
    for work, _, peer in sent:
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(peer, error) from error


def _lost(peer: int, error: Exception) -> TrainingStopped:
    return TrainingStopped(
        f"rank {peer} of the group died or stalled: this rank waited for its part of an agreement ({cause_of(error)})"
    )
