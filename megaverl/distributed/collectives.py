"""Small agreements between ranks, as JSON from host to host: nothing is pickled; an error on one is raised on all.

No device takes part, whatever the group's backend, so nothing waits for one; tensors on a device go through
`gather_rows` alone. Messages go up a tree to the first rank, and back. It is the binomial one of MPI's broadcasts: a
rank speaks with at most log2(N) + 1 others, and where the ranks of a node are neighbours and a power of two, with one
on another node.

Under NCCL the messages go over gloo connections that are opened when two ranks first speak (`TORCH_GLOO_LAZY_INIT` of
torch 2.7 and newer; a gloo group as torch makes it else joins every rank with every other). A first message between
two ranks then waits until both of them want to speak, which both do here.
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
from megaverl.errors import MegaverlError, TrainingStopped
from megaverl.outside import clean
from megaverl.platform import platform
from megaverl.user_code import describe

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


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors that go through `group` must lie: gloo's on the CPU, on a machine with CUDA as well."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else platform.device


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank of `group`.

    Where one answer is wanted of all values, `reduce_json` has it without sending them all to all.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    found: list[Any] = json.loads(
        conclude(_encode(value), lambda every: b"[" + b",".join(every) + b"]", group, "gather")
    )
    return found


def reduce_json(
    value: Any, function: Callable[[list[Any]], Any], group: dist.ProcessGroup | None = None, root: int = 0
) -> Any:
    """What `function` makes of every rank's `value`, in rank order; it is called on the rank `root` of `group` alone,
    and all get its result.

    Both are anything JSON can hold; what it raises is raised on every rank.
    """
    if dist.get_world_size(group) == 1:
        return function([value])
    error: Exception | None = None

    def answer(every: list[bytes]) -> bytes:
        nonlocal error
        try:
            return _encode({"result": function([json.loads(each) for each in every])})
        except Exception as caught:  # passed on to every rank, this one included
            error = caught
            return _encode({"error": _report(caught)})

    return _result(json.loads(conclude(_encode(value), answer, group, "reduce", root)), "", error)


def broadcast_json(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """`value` of the rank `source` of `group`, on every rank of it."""
    if dist.get_world_size(group) == 1:
        return value
    mine = _encode(value) if dist.get_rank(group) == source else b""
    return json.loads(conclude(mine, lambda every: every[source], group, "broadcast"))


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Until every rank of `group` is here."""
    if dist.get_world_size(group) > 1:
        conclude(b"", lambda every: b"", group, "barrier")


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate `rows` [n_i, ...] of all ranks of `group` in rank order; the n_i may differ.

    They go where the group's tensors lie (`device_of`), and are found there.
    """
    if dist.get_world_size(group) == 1:
        return rows
    counts = gather_json(rows.shape[0], group)
    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=rows.dtype, device=device_of(group))
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return torch.cat([each[:count] for each, count in zip(received, counts, strict=True)])


def gather_host_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`gather_rows` of a few bytes for each row, which lie on the host and stay there."""
    if dist.get_world_size(group) == 1:
        return rows
    joined = conclude(rows.contiguous().numpy().tobytes(), b"".join, group, "rows")
    flat = torch.frombuffer(bytearray(joined), dtype=rows.dtype) if joined else rows.new_empty(0)
    return flat.reshape(-1, *rows.shape[1:])


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank has an error, so that no rank waits for one that has left.

    Every rank of `group` takes part. All raise the same: the error of the lowest failing rank, with its class
    where it is one of megaverl's own. It names that rank, unless all ranks failed alike.
    """
    found = reduce_json(None if error is None else _report(error), _first_failure, group)
    if found is not None:
        who, report = found
        raise _error(report, who) from error


def _first_failure(reports: list[list[str] | None]) -> tuple[str, list[str]] | None:
    """Of the lowest rank that failed: how to name it, and its report."""
    rank = next((rank for rank, report in enumerate(reports) if report is not None), None)
    if rank is None:
        return None
    alike = all(other == reports[rank] for other in reports)
    return "" if alike else f"rank {rank}: ", reports[rank] or []


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a body that may fail on some ranks only (no collectives inside); fail on all or on none."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # passed on to every rank, this one included
        error = caught
    raise_together(error, group)


def on_rank(function: Callable[[], Any], rank: int, group: dist.ProcessGroup | None = None) -> Any:
    """Call `function` on one rank of `group`; every rank gets its JSON result, or its error, which names the rank."""
    outcome: dict[str, Any] = {}
    error: Exception | None = None
    if dist.get_rank(group) == rank:
        try:
            outcome = {"result": function()}
        except Exception as caught:  # passed on to every rank, this one included
            error, outcome = caught, {"error": _report(caught)}
    who = f"rank {rank}: " if dist.get_world_size(group) > 1 else ""
    return _result(broadcast_json(outcome, rank, group), who, error)


def on_first_rank(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """`on_rank` 0."""
    return on_rank(function, 0, group)


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _result(outcome: dict[str, Any], who: str, error: Exception | None) -> Any:
    if "error" in outcome:
        raise _error(outcome["error"], who) from error
    return outcome["result"]


def _report(error: Exception) -> list[str]:
    """Class, where it is one of megaverl's, and text."""
    own = isinstance(error, MegaverlError)
    return [type(error).__name__ if own else "", clean(str(error)) if own else describe(error)]


def _error(report: list[str], who: str) -> MegaverlError:
    name, text = report
    error: MegaverlError = getattr(errors, name, MegaverlError)(who + text)
    return error
