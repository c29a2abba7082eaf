"""Small agreements between ranks, as JSON in byte tensors: nothing is pickled; an error on one is raised on all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl import errors
from megaverl.errors import MegaverlError
from megaverl.platform import platform


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors that go through `group` must lie: gloo's on the CPU, on a machine with CUDA as well."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else platform.device


def to_bytes(value: Any) -> Tensor:
    """`value` (anything JSON can hold) as [length] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Undo `to_bytes`."""
    return json.loads(bytes(data.cpu().numpy()))


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank of `group`."""
    if dist.get_world_size(group) == 1:
        return [value]
    return [from_bytes(data) for data in _gather(to_bytes(value), group)]


def broadcast_json(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """`value` of the rank `source` of `group`, on every rank of it."""
    if dist.get_world_size(group) == 1:
        return value
    data, device = to_bytes(value).to(device_of(group)), device_of(group)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, group=group, group_src=source)
    if dist.get_rank(group) != source:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=source)
    return from_bytes(data)


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate `rows` [n_i, ...] of all ranks of `group` in rank order; the n_i may differ."""
    return rows if dist.get_world_size(group) == 1 else torch.cat(_gather(rows, group))


def _gather(rows: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's `rows` [n_i, ...]."""
    size, device = dist.get_world_size(group), device_of(group)
    rows = rows.to(device).contiguous()
    count = torch.tensor([rows.shape[0]], dtype=torch.int64, device=device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    padded = rows.new_zeros((max(int(n) for n in counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [r[: int(n)] for r, n in zip(received, counts, strict=True)]


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank has an error, so that no rank waits for one that has left.

    Every rank of `group` takes part. All raise the same: the error of the lowest failing rank, with its class
    where it is one of megaverl's own. It names that rank, unless all ranks failed alike.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device_of(group))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return
    reports = gather_json(None if error is None else _report(error), group)
    rank = next(rank for rank, found in enumerate(reports) if found is not None)
    alike = all(other == reports[rank] for other in reports)
    raise _error(reports[rank], "" if alike else f"rank {rank}: ") from error


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
    outcome = broadcast_json(outcome, rank, group)
    if "error" in outcome:
        raise _error(outcome["error"], f"rank {rank}: " if dist.get_world_size(group) > 1 else "") from error
    return outcome["result"]


def on_first_rank(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """`on_rank` 0."""
    return on_rank(function, 0, group)


def _report(error: Exception) -> list[str]:
    """Class, where it is one of megaverl's, and text."""
    own = isinstance(error, MegaverlError)
    return [type(error).__name__ if own else "", str(error) if own else f"{type(error).__name__}: {error}"]


def _error(report: list[str], who: str) -> MegaverlError:
    name, text = report
    error: MegaverlError = getattr(errors, name, MegaverlError)(who + text)
    return error
