"""Small agreements between ranks, as JSON in byte tensors: nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megaverl import errors
from megaverl.errors import MegaverlError
from megaverl.platform import platform


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors that go through `group` must lie: gloo's on the CPU, on a machine with CUDA as well."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else platform.device


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank of `group`."""
    size = dist.get_world_size(group)
    if size == 1:
        return [value]
    device = device_of(group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    padded = torch.zeros(max(int(n) for n in lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [json.loads(bytes(r[: int(n)].cpu().tolist())) for r, n in zip(received, lengths, strict=True)]


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate `rows` [n_i, ...] of all ranks of `group` in rank order; the n_i may differ."""
    size = dist.get_world_size(group)
    if size == 1:
        return rows
    rows = rows.to(device_of(group)).contiguous()
    count = torch.tensor([rows.shape[0]], dtype=torch.int64, device=rows.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    most = max(int(n) for n in counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return torch.cat([r[: int(n)] for r, n in zip(received, counts, strict=True)])


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
    report = None
    if error is not None:
        own = isinstance(error, MegaverlError)
        report = [type(error).__name__ if own else "", str(error) if own else f"{type(error).__name__}: {error}"]
    reports = gather_json(report, group)
    rank = next(rank for rank, found in enumerate(reports) if found is not None)
    name, text = reports[rank]
    if any(other != reports[rank] for other in reports):
        text = f"rank {rank}: {text}"
    raise getattr(errors, name, MegaverlError)(text) from error


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a body that may fail on some ranks only (no collectives inside); fail on all or on none."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # passed on to every rank, this one included
        error = caught
    raise_together(error, group)


def on_first_rank(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Call `function` on the group's first rank; every rank gets its JSON result, or its error."""
    result, error = None, None
    if dist.get_rank(group) == 0:
        try:
            result = function()
        except Exception as caught:  # passed on to every rank
            error = caught
    raise_together(error, group)
    return gather_json(result, group)[0]
