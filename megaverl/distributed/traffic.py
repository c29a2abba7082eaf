"""Bytes that this rank receives in collectives, by the dimensions of the roles' grids: tp, cp, ep, pp and dp.

torch has no hook that every backend calls, so the methods of `ProcessGroup` through
which torch.distributed runs its collectives are wrapped once. A wrapped call adds a few
numbers and then runs unchanged. Collectives that torch runs in C++ are not counted:
DTensor's (tensor parallelism under FSDP2), and those of an inference engine. Control
messages between hosts (`collectives.conclude`) are not counted either, even where they
share a grid's group.

Roles may share a group under different dimensions, so bytes are counted by group and
named by `by_dimension`.

Bytes are those that a bandwidth-optimal algorithm receives, whichever one the backend
runs. For n ranks:

    all-reduce of B bytes                2 (n - 1) / n B
    all-gather, reduce-scatter, B whole    (n - 1) / n B
    all-to-all                           all that is received, without this rank's own part
    broadcast, receive                   B on the ranks that receive
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Function of the group and the arguments of a collective -> bytes that this rank
# receives.
Count = Callable[..., float]
# Kind of the bytes of gradients between islands, beside the names of groups.
ISLANDS = "islands"

_received: dict[str, float] = {}
_dimensions: dict[str, dict[str, str]] = {}
_thread = threading.local()


def name_groups(role: str, groups: Mapping[str, str]) -> None:
    """Count collectives from now on, and name the groups of a role's grid.

    Args:
        groups: name of a group -> its dimension.
    """
    _wrap_collectives()
    _dimensions[role] = dict(groups)


def received_bytes() -> dict[str, float]:
    """Return the bytes received since the start of the process, by the name of the group, and those between islands."""
    return dict(_received)


def by_dimension(role: str, counts: Mapping[str, float]) -> dict[str, float]:
    """Return a role's bytes by dimension. Groups that its grid does not have are left out.

    Args:
        counts: bytes by the name of the group.
    """
    dimensions = _dimensions.get(role, {}) | {ISLANDS: ISLANDS}
    total: dict[str, float] = {}
    for group, count in counts.items():
        if count and group in dimensions:
            total[dimensions[group]] = total.get(dimensions[group], 0.0) + count
    return total


def count_received(name: str, num_bytes: float) -> None:
    """Add bytes that this rank received in a group, or between islands."""
    _received[name] = _received.get(name, 0.0) + num_bytes


@contextmanager
def uncounted() -> Iterator[None]:
    """Return a context in which this thread's calls are not counted."""
    before = getattr(_thread, "is_control", False)
    _thread.is_control = True
    # Per thread, since other threads communicate at the same time.
    try:
        yield
    finally:
        _thread.is_control = before


def _bytes_of(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value))


def _all_to_all_single(
    group: dist.ProcessGroup,
    output: Tensor,
    whole: Tensor,
    output_sizes: Sequence[int] = (),
    *rest: Any,
) -> float:
    # megatron-core's dispatcher of experts hands over an array of NumPy.
    sizes = [int(size) for size in output_sizes]
    if not sizes:
        return _others_share(group) * _bytes_of(output)
    rows = sum(sizes)
    own_rows = sizes[group.rank()]
    return _bytes_of(output) * (rows - own_rows) / rows if rows else 0.0


def _is_root(group: dist.ProcessGroup, options: Any) -> bool:
    return group.rank() == getattr(options, "rootRank", 0)


def _others_share(group: dist.ProcessGroup) -> float:
    """Return the share of a tensor that is spread over the ranks which the other ranks hold."""
    return (group.size() - 1) / group.size()


# Methods of ProcessGroup, and the bytes that one call receives. torch 2.13 and older
# versions name some differently.
_RULES: tuple[tuple[tuple[str, ...], Count], ...] = (
    (
        ("allreduce", "allreduce_coalesced"),
        lambda group, tensors, *rest: 2 * _others_share(group) * _bytes_of(tensors),
    ),
    (
        (
            "allgather",
            "allgather_coalesced",
            "_allgather_base",
            "allgather_into_tensor_coalesced",
            "all_gather_single",
            "all_gather_single_coalesced",
            "gather",
        ),
        lambda group, output, *rest: _others_share(group) * _bytes_of(output),
    ),
    (
        (
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
        ),
        lambda group, output, whole, *rest: _others_share(group) * _bytes_of(whole),
    ),
    (("alltoall_base", "all_to_all_single"), _all_to_all_single),
    (
        ("alltoall",),
        lambda group, output, *rest: (
            _bytes_of(output) - _bytes_of(output[group.rank()])
        ),
    ),
    (
        ("broadcast",),
        lambda group, tensors, options=None, *rest: (
            0.0 if _is_root(group, options) else _bytes_of(tensors)
        ),
    ),
    (
        ("reduce",),
        lambda group, tensors, options=None, *rest: (
            _bytes_of(tensors) if _is_root(group, options) else 0.0
        ),
    ),
    (
        ("scatter",),
        lambda group, outputs, inputs, options=None, *rest: (
            0.0 if _is_root(group, options) else _bytes_of(outputs)
        ),
    ),
    (("recv", "recv_anysource"), lambda group, tensors, *rest: _bytes_of(tensors)),
)
COUNTED = {name: count for names, count in _RULES for name in names}


@functools.cache
def _wrap_collectives() -> None:
    """Wrap the collectives of torch's ProcessGroup, once in a process."""
    for name, count in COUNTED.items():
        # Only methods that this version of torch has.
        if hasattr(dist.ProcessGroup, name):
            setattr(
                dist.ProcessGroup,
                name,
                _counted(getattr(dist.ProcessGroup, name), count),
            )


def _counted(method: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Return a method that counts the bytes that its calls receive."""

    @functools.wraps(method)
    def counted(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if group.size() > 1 and not getattr(_thread, "is_control", False):
            count_received(group.group_name, count(group, *arguments, **keywords))
        return method(group, *arguments, **keywords)

    return counted
