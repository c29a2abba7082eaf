"""Small agreements between ranks, as JSON from host to host: nothing is pickled; an error on one is raised on all.

No device takes part, whatever the group's backend (`host_tree`); tensors on a device go through `gather_rows` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl import errors
from megaverl.distributed.host_tree import conclude
from megaverl.errors import MegaverlError
from megaverl.platform import platform


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
    return [type(error).__name__ if own else "", str(error) if own else f"{type(error).__name__}: {error}"]


def _error(report: list[str], who: str) -> MegaverlError:
    name, text = report
    error: MegaverlError = getattr(errors, name, MegaverlError)(who + text)
    return error
