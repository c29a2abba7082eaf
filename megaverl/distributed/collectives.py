"""Collectives of small JSON values between hosts. Nothing is pickled, and an error on one rank is raised on all.

No device takes part, whatever the group's backend, so no rank blocks on a device. Only
`gather_rows` moves tensors on a device. Messages go up a tree to the root rank and
back. It is the binomial tree of MPI's broadcasts: a rank talks to at most log2(N) + 1
others. If each node has the same power of two of consecutive ranks, only the first rank
of a node talks to other nodes.

    rank 0  <- 1           a rank sends its own values and those of the ranks below it to its parent
            <- 2 <- 3      rank 0 computes the result, and sends it down the same edges
            <- 4 <- 5
                 <- 6 <- 7

Under NCCL the messages use gloo connections that are opened when two ranks first talk
(`TORCH_GLOO_LAZY_INIT` of torch 2.7 and newer; otherwise a gloo group connects every
pair of ranks at creation). The first message between two ranks blocks the sender until
the receiver expects it, which it does in these collectives.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl import errors
from megaverl.distributed.failures import cause_of
from megaverl.distributed.traffic import uncounted
from megaverl.errors import MegaverlError, TrainingStopped
from megaverl.outside import clean
from megaverl.platform import platform
from megaverl.user_code import describe

# Bytes of the first message, including the length; the rest of longer data is a second
# message.
FRAME = 2048
_LENGTH = 8  # bytes of an encoded length
_LAZY = "TORCH_GLOO_LAZY_INIT"


def parent(place: int) -> int:
    """Return the parent of a place in the tree, which forwards its messages to place 0. Undefined for place 0."""
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """Return the places whose parent is `place`. The subtree below a place is a contiguous range of places."""
    # Place 0 has children at all powers of two. Other places have them below their own
    # lowest set bit.
    reach = place & -place or size
    return [
        place + (1 << bit)
        for bit in range((reach - 1).bit_length())
        if place + (1 << bit) < size
    ]


def conclude(
    report: bytes,
    function: Callable[[list[bytes]], bytes],
    group: dist.ProcessGroup | None = None,
    kind: str = "",
    root: int = 0,
) -> bytes:
    """Apply `function` to every rank's bytes on the rank `root`, and return the result on every rank. Collective.

    `function` gets the bytes in rank order. It must not raise, because the other ranks
    would block. Collectives of different `kind` do not receive each other's messages:
    ranks in different ones block, and the controller reports where.

    Raises:
        TrainingStopped: a rank died or did not arrive within the group's timeout; names its rank in the group.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    ranks = _hosts_of(group)
    size = ranks.size()
    # Rotate the ranks so that the root has place 0. Any rank can then be the root of the
    # same tree.
    place = (ranks.rank() - root) % size
    below = [(child + root) % size for child in children(place, size)]
    # A tag of its own separates these messages from point-to-point ones of the same
    # group.
    tag = zlib.crc32(f"megaverl.host_tree {kind}".encode()) & 0x7FFFFFFF
    # The subtrees are contiguous ranges of places, so this concatenates in order.
    subtrees = [_chunk(report), *(_receive(ranks, child, tag) for child in below)]
    if place:
        above = (parent(place) + root) % size
        sent = _send(ranks, above, b"".join(subtrees), tag)
        # Blocks until the root has everything and the result has come down.
        result = _receive(ranks, above, tag)
        # The result comes after the parent has read this message, so this does not
        # block.
        _finish(sent)
    else:
        # Back from places to ranks.
        of_places = _split(b"".join(subtrees))
        result = function(of_places[size - root :] + of_places[: size - root])
    _finish(
        [
            sending
            for child in reversed(below)
            for sending in _send(ranks, child, result, tag)
        ]
    )  # largest subtree first
    return result


# Group with another backend -> gloo group of the same ranks.
_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _hosts_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks: `group` itself, or one that is created at its first use."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _hosts:
        rank, size, gloo = (
            group.rank(),
            group.size(),
            dist.ProcessGroup.BackendType.GLOO,
        )
        # The group's own store, which exactly its ranks can reach.
        store = dist.PrefixStore(
            "hosts", dist.distributed_c10d._get_process_group_store(group)
        )
        hosts = dist.ProcessGroup(store, rank, size)
        with connects_lazily():
            backend = dist.ProcessGroupGloo(store, rank, size, _timeout_of(group))
        hosts._set_default_backend(gloo)
        hosts._register_backend(torch.device("cpu"), gloo, backend)
        _hosts[group] = hosts
    return _hosts[group]


@contextmanager
def connects_lazily() -> Iterator[None]:
    """Return a context in which new gloo groups open a connection only when two ranks first talk."""
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
    """Return the timeout of a group, or torch's default if its backend, such as a fake one, has none."""
    options = group._get_backend(platform.device).options
    return (
        dist.distributed_c10d.default_pg_timeout
        if options is None
        else options._timeout
    )


def _chunk(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH, "little") + data


def _split(chunks: bytes) -> list[bytes]:
    """Split joined `_chunk`s."""
    values, start = [], 0
    # (length, data) pairs, one for each rank of a subtree.
    while start < len(chunks):
        end = (
            start + _LENGTH + int.from_bytes(chunks[start : start + _LENGTH], "little")
        )
        values.append(chunks[start + _LENGTH : end])
        start = end
    return values


_Pending = tuple[dist.Work, Tensor, int]


def _send(ranks: dist.ProcessGroup, peer: int, data: bytes, tag: int) -> list[_Pending]:
    """Begin to send `data`. The result holds the tensors until the messages are sent."""
    # The first frame has a fixed size, so that the receiver needs no message about its
    # length.
    framed = torch.frombuffer(
        bytearray(_chunk(data).ljust(FRAME, b"\0")), dtype=torch.uint8
    )
    parts = [part for part in (framed[:FRAME], framed[FRAME:]) if part.numel()]
    # The first message opens the connection, which may fail.
    with _waiting_for(peer):
        return [(ranks.send([part], peer, tag), part, peer) for part in parts]


def _receive(ranks: dist.ProcessGroup, peer: int, tag: int) -> bytes:
    head = _receive_some(ranks, peer, FRAME, tag)
    length = int.from_bytes(head[:_LENGTH], "little")
    rest = length - (FRAME - _LENGTH)
    return (
        head[_LENGTH:] + _receive_some(ranks, peer, rest, tag)
        if rest > 0
        else head[_LENGTH : _LENGTH + length]
    )


def _receive_some(ranks: dist.ProcessGroup, peer: int, count: int, tag: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8)
    with _waiting_for(peer):
        # Control messages are not the run's traffic.
        with uncounted():
            work = ranks.recv([data], peer, tag)
        work.wait()
    return data.numpy().tobytes()


def _finish(sent: Sequence[_Pending]) -> None:
    for work, _, peer in sent:
        with _waiting_for(peer):
            work.wait()


@contextmanager
def _waiting_for(peer: int) -> Iterator[None]:
    """Return a context that turns errors about a lost peer into `TrainingStopped`."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingStopped(
            f"rank {peer} of the group died or stalled: this rank waited for its part of an agreement "
            f"({cause_of(error)})"
        ) from error


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of tensors in collectives of `group`: the CPU for gloo, even on a machine with CUDA.

    A process without any group has the platform's device.
    """
    if group is None and not dist.is_initialized():
        return platform.device
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else platform.device


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON `value` in rank order, on every rank of `group`. Collective.

    If only a function of all values is needed, `reduce_json` sends less.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = json.loads(
        conclude(
            _encode(value),
            # The values are JSON already and need not be decoded on the root.
            lambda every: b"[" + b",".join(every) + b"]",
            group,
            "gather",
        )
    )
    return values


def reduce_json(
    value: Any,
    function: Callable[[list[Any]], Any],
    group: dist.ProcessGroup | None = None,
    root: int = 0,
) -> Any:
    """Apply `function` to every rank's `value` on the rank `root`, and return the result on every rank. Collective.

    `function` gets the values in rank order. Values and result are JSON. An error of
    `function` is raised on every rank.
    """
    if dist.get_world_size(group) == 1:
        return function([value])
    error: Exception | None = None

    def answer(every: list[bytes]) -> bytes:
        nonlocal error
        try:
            return _encode(
                {"result": function([json.loads(encoded) for encoded in every])}
            )
        # The root must answer in any case, since all others wait for it.
        except Exception as caught:  # passed on to every rank, this one included
            error = caught
            return _encode({"error": _report(caught)})

    return _result(
        json.loads(conclude(_encode(value), answer, group, "reduce", root)), "", error
    )


def broadcast_json(
    value: Any, source: int, group: dist.ProcessGroup | None = None
) -> Any:
    """Return the `value` of the rank `source` of `group` on every rank. Collective."""
    if dist.get_world_size(group) == 1:
        return value
    encoded = _encode(value) if dist.get_rank(group) == source else b""
    return json.loads(
        conclude(encoded, lambda every: every[source], group, "broadcast")
    )


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank of `group` has called this."""
    if dist.get_world_size(group) > 1:
        conclude(b"", lambda every: b"", group, "barrier")


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate `rows` [n_i, ...] of all ranks of `group` in rank order. The n_i may differ. Collective.

    The result lies on the device of the group's tensors (`device_of`).
    """
    if dist.get_world_size(group) == 1:
        return rows
    # Collective over `group`: everyone needs the longest part.
    counts = gather_json(rows.shape[0], group)
    padded = torch.zeros(
        (max(counts), *rows.shape[1:]), dtype=rows.dtype, device=device_of(group)
    )
    # all_gather needs equal shapes, so every rank pads to the longest.
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in counts]
    # Collective over `group`, on its devices.
    dist.all_gather(received, padded, group=group)
    return torch.cat(
        [rows[:count] for rows, count in zip(received, counts, strict=True)]
    )


def gather_host_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate small `rows` of all ranks like `gather_rows`, but in host memory. Collective."""
    if dist.get_world_size(group) == 1:
        return rows
    # Collective over `group`, without padding.
    joined = conclude(rows.contiguous().numpy().tobytes(), b"".join, group, "rows")
    flat = (
        torch.frombuffer(bytearray(joined), dtype=rows.dtype)
        if joined
        else rows.new_empty(0)
    )
    return flat.reshape(-1, *rows.shape[1:])


def raise_together(
    error: Exception | None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if any rank has an error, so that no rank waits for one that has left. Collective.

    All ranks raise the error of the lowest failing rank, with its class if it is one of
    megaverl's. The message names that rank, unless all ranks failed with the same
    error.
    """
    # Collective over `group`, also if this rank has no error.
    failure = reduce_json(
        None if error is None else _report(error), _first_failure, group
    )
    if failure is not None:
        prefix, report = failure
        raise _error(report, prefix) from error


def _first_failure(reports: list[list[str] | None]) -> tuple[str, list[str]] | None:
    """Return the prefix that names the lowest failing rank, and its report; None if no rank failed."""
    rank = next(
        (rank for rank, report in enumerate(reports) if report is not None), None
    )
    if rank is None:
        return None
    # A common cause, such as a wrong configuration, needs no rank in its message.
    alike = all(report == reports[rank] for report in reports)
    return "" if alike else f"rank {rank}: ", reports[rank] or []


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Return a context for code that may fail on some ranks only: it fails on all ranks or on none.

    The code inside must not contain collectives.

    Example:
        with together(group):
            spec = read(folder)  # may fail on one node
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # passed on to every rank, this one included
        error = caught
    raise_together(error, group)


def on_rank(
    function: Callable[[], Any], rank: int, group: dist.ProcessGroup | None = None
) -> Any:
    """Call `function` on one rank of `group`, and return its JSON result on every rank. Collective.

    An error is raised on every rank and names the rank.
    """
    outcome: dict[str, Any] = {}
    error: Exception | None = None
    # Other ranks wait for this one's result.
    if dist.get_rank(group) == rank:
        try:
            outcome = {"result": function()}
        except Exception as caught:  # passed on to every rank, this one included
            error, outcome = caught, {"error": _report(caught)}
    prefix = f"rank {rank}: " if dist.get_world_size(group) > 1 else ""
    return _result(broadcast_json(outcome, rank, group), prefix, error)


def on_first_rank(
    function: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> Any:
    """Call `on_rank` with rank 0."""
    return on_rank(function, 0, group)


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _result(outcome: dict[str, Any], prefix: str, error: Exception | None) -> Any:
    if "error" in outcome:
        raise _error(outcome["error"], prefix) from error
    return outcome["result"]


def _report(error: Exception) -> list[str]:
    """Return [class name, text] of an error. The class name is empty unless the class is one of megaverl's."""
    is_expected = isinstance(error, MegaverlError)
    return [
        type(error).__name__ if is_expected else "",
        # Errors of other libraries may contain anything, including terminal sequences.
        clean(str(error)) if is_expected else describe(error),
    ]


def _error(report: list[str], prefix: str) -> MegaverlError:
    name, text = report
    error: MegaverlError = getattr(errors, name, MegaverlError)(prefix + text)
    return error
