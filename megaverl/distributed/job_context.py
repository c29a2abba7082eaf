"""This rank's place in a job: its role group, and the process groups that connect all ranks.

A role group is torch's default process group of its ranks. The context of the job
connects all role groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megaverl.distributed.collectives import (
    barrier,
    connects_lazily,
    device_of,
    reduce_json,
)
from megaverl.distributed.failures import cause_of
from megaverl.distributed.messages import HostMessages
from megaverl.distributed.placement import Node, ResolvedPlacement, RoleGroup
from megaverl.errors import TrainingStopped
from megaverl.platform import platform


@dataclass
class ReceivedBytes:
    """Bytes of batches and results that this rank has received from others since its start."""

    received: int = 0


@dataclass(frozen=True)
class JobContext:
    """This rank's place in the job, and the groups that connect all ranks.

    torch's default group is this rank's role group, so Megatron and vLLM do not see
    other role groups. `group` and `control` work with every function of torch.distributed, and use
    the ranks of the job. They have no global ranks in torch's sense: address peers by
    `group_src`, `group_dst` or `group_peer`.

    Attributes:
        rank: rank in the job.
        role_group: this rank's role group.
        group: all ranks, on the platform's backend, for data on devices such as weights. A coordinator without a GPU,
            among ranks with one (`has_device`), is not a member and has `control` instead.
        control: all ranks, gloo on CPU tensors, for collectives of small values only, which must not wait for a device.
            If it is not the default group, two ranks connect when both first talk, as they do in a tree.
        store: the job's store.
        timeout: of every operation in these groups.
        messages: point-to-point messages between hosts: reports, decisions and samples.
        traffic: received bytes of samples, without weights.
        rows: group for rows of batches on devices: `group`, or None if they go through host memory. The same on all
            ranks with devices.
    """

    placement: ResolvedPlacement
    rank: int
    role_group: RoleGroup
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    store: dist.Store
    timeout: timedelta
    messages: HostMessages
    traffic: ReceivedBytes = field(default_factory=ReceivedBytes)
    rows: dist.ProcessGroup | None = None

    def device_between(self, source: int, dest: int) -> torch.device | None:
        """Return the device of rows between two ranks in `rows`, or None if they go through host memory."""
        reached = (
            self.rows is not None and self.has_device(source) and self.has_device(dest)
        )
        return device_of(self.rows) if reached else None

    @property
    def group_rank(self) -> int:
        """This rank's number in its role group."""
        return self.role_group.ranks.index(self.rank)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of this rank."""
        return self.placement.roles_of(self.rank)

    def has(self, role: str) -> bool:
        """Return whether this rank has a role."""
        return role in self.roles

    def has_device(self, rank: int) -> bool:
        """Return whether a rank is a member of `group`."""
        return rank < self.placement.num_with_device

    def describe(self, rank: int) -> str:
        """Return a rank of the job as text: "rank 3 (critic, node b)"."""
        placement = self.placement
        return f"rank {rank} ({'+'.join(placement.roles_of(rank))}, {placement.nodes[placement.node_of(rank)].name})"


def join(
    placement: ResolvedPlacement, store: dist.Store, rank: int, timeout: timedelta
) -> JobContext:
    """Make this rank's role group torch's default group, and create the groups of all ranks. Collective over the job.

    Sets RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to the role group's values, which
    libraries in it read. LOCAL_RANK, which selects the device, is unchanged.

    Args:
        store: the job's store (`job_store`).
        rank: rank in the job.

    Raises:
        TrainingStopped: a rank did not arrive in time.
    """
    role_group = placement.role_group_of(rank)
    group_rank = role_group.ranks.index(rank)
    messages = HostMessages(store, rank, placement.size)
    here = placement.node_of(rank)
    # Megatron and vLLM read these, and must see only this role group.
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group_rank), str(role_group.size)
    os.environ["LOCAL_WORLD_SIZE"] = str(
        sum(placement.node_of(member) == here for member in role_group.ranks)
    )
    with _deadline(f"the role group {role_group.name}", timeout):
        dist.init_process_group(
            platform.backend,
            store=dist.PrefixStore(f"role_group/{role_group.name}", store),
            rank=group_rank,
            world_size=role_group.size,
            timeout=timeout,
        )

    def joined(backend: str, name: str, size: int) -> dist.ProcessGroup:
        return _joined(backend, name, store, (rank, size, group_rank), timeout)

    group = control = default_group()
    if not placement.is_colocated:
        with connects_lazily():
            # Collective over all ranks of the job.
            group = control = joined("gloo", "control", placement.size)
        # Open the tree's connections now, while all ranks are here. A rank that is lost
        # later breaks them.
        with _deadline("the coordinator's tree", timeout):
            # A message in every direction of the tree opens its connections.
            reduce_json(None, lambda every: None, control, placement.coordinator)
            # Look up the coordinator now: lost ranks are reported to it even after the
            # store is gone.
            messages.find(placement.coordinator)
        if rank < (count := placement.num_with_device):
            # Collective over the ranks that have a device.
            group = joined(platform.backend, "context", count)
    elif (
        platform.backend != "gloo"
    ):  # a single role group on gloo needs no second group
        control = _hosts_of_all(timeout)
    return JobContext(
        placement,
        rank,
        role_group,
        group,
        control,
        store,
        timeout,
        messages,
        rows=_for_rows(group),
    )


def default_group_context(roles: Sequence[str], timeout: timedelta) -> JobContext:
    """Return the context of a role group with all of these roles, if a program has created the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every, group = tuple(range(size)), default_group()
    role_group = RoleGroup("the default group", every, tuple(roles))
    nodes = (Node("this job", size),)
    placement = ResolvedPlacement(
        size, dict.fromkeys(roles, every), (role_group,), (every,), nodes
    )
    control = group if platform.backend == "gloo" else _hosts_of_all(timeout)
    store = distributed_c10d._get_default_store()
    messages = HostMessages(store, rank, size)
    return JobContext(
        placement,
        rank,
        role_group,
        group,
        control,
        store,
        timeout,
        messages,
        rows=_for_rows(group),
    )


def _for_rows(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return `JobContext.rows`: the group if it is on devices, else None. Collective over the group."""
    if device_of(group).type == "cpu":
        return None
    # NCCL creates the communicator in the first operation, which needs all ranks.
    # Collective over the group.
    dist.all_reduce(torch.zeros(1, device=device_of(group)), group=group)
    return group


def _hosts_of_all(timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group of the default group's ranks, in which two ranks connect when they first talk.

    The first message blocks the sender until the receiver calls too, which both do in a
    collective along a tree.
    """
    with connects_lazily():
        # Collective over the default group.
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group


def join_some(
    context: JobContext, name: str, members: Sequence[int]
) -> dist.ProcessGroup:
    """Return a group of some ranks of the job, of any role groups. Collective over these ranks only.

    Ranks in the group are indices in `members`.

    Raises:
        TrainingStopped: a rank did not arrive in time.
    """
    if tuple(members) == context.role_group.ranks:
        return default_group()
    ranks = (list(members).index(context.rank), len(members), context.group_rank)
    return _joined(platform.backend, name, context.store, ranks, context.timeout)


def join_processes(
    backend: str,
    name: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    key: str,
) -> dist.ProcessGroup:
    """Return a group of processes of several jobs, such as an actor's ranks and the workers of inference servers.

    Collective over these processes, each of which has a default group of its own. End
    the group with `leave`.

    Args:
        store: reached by all of them.
        rank: this process's number in the group.
        key: setting that `timeout` comes from, for errors.

    Raises:
        TrainingStopped: a process did not arrive in time.
    """
    return _joined(backend, name, store, (rank, size, dist.get_rank()), timeout, key)


def leave(group: dist.ProcessGroup) -> None:
    """End a group of `join_processes` at once, so that the others' operations in it fail instead of waiting."""
    # Aborting wakes operations that wait for a lost peer.
    with suppress(RuntimeError, dist.DistError):
        group.abort()
    with suppress(RuntimeError, ValueError, dist.DistError):
        dist.destroy_process_group(group)


def default_group() -> dist.ProcessGroup:
    """Return the default process group, which is this rank's role group."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


@contextmanager
def _deadline(
    action: str, timeout: timedelta, key: str = "run.timeout_minutes"
) -> Iterator[None]:
    """Return a context that turns torch's errors about missing ranks into `TrainingStopped`."""
    try:
        yield
    except (dist.DistError, RuntimeError, TrainingStopped) as error:
        raise TrainingStopped(
            f"{action} did not come together within {timeout.total_seconds():g} s ({key}): {cause_of(error)}"
        ) from error


def _joined(
    backend: str,
    name: str,
    store: dist.Store,
    ranks: tuple[int, int, int],
    timeout: timedelta,
    key: str = "run.timeout_minutes",
) -> dist.ProcessGroup:
    """Create a group of ranks of the job, besides the default group of its role group. Collective over these ranks.

    torch only creates groups of ranks of the default group. This calls torch's own
    constructor with another store. torch then looks up each member's number in the
    default group. No other rank sees these numbers: this rank's is its real one, so
    that `dist.get_rank(group)` is right, and the others' are arbitrary but distinct.

    Args:
        ranks: this rank's number in the new group, the size of that group, and this rank's number in its role group.
    """
    rank, size, group_rank = ranks
    # Newer versions of torch have a type for it.
    name_of_group: Any = f"megaverl_{name}"
    with _deadline(f"the group '{name}'", timeout, key):
        group: dist.ProcessGroup
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],
            backend,
            dist.PrefixStore(name, store),
            group_name=name_of_group,
            timeout=timeout,
        )
        # Swap this rank's number in the group with its number in the role group; see the
        # docstring.
        # torch translates numbers of the default group to numbers in this group by this
        # table.
        names = list(range(size))
        if group_rank < size:
            names[group_rank] = rank
        names[rank] = group_rank
        distributed_c10d._world.pg_group_ranks[group] = {
            called: number for number, called in enumerate(names)
        }
        # NCCL's first operation in a group needs all ranks. It also checks that they
        # reach each other.
        if backend == "gloo":
            barrier(group)
        else:
            dist.all_reduce(torch.ones(1, device=device_of(group)), group=group)
    return group
