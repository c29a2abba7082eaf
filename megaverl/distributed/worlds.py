"""Process groups of a job with several worlds: each world's own default group, and a fabric that joins them all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megaverl.distributed.collectives import device_of
from megaverl.distributed.failures import cause_of
from megaverl.distributed.host_tree import connects_lazily
from megaverl.distributed.placement import Node, ResolvedPlacement, World
from megaverl.errors import TrainingStopped
from megaverl.platform import platform


@dataclass
class ReceivedBytes:
    """Bytes of batches and results that have come to this rank from others, since its start."""

    received: int = 0


@dataclass(frozen=True)
class Fabric:
    """This rank's place in the job, and the groups that reach every rank of it.

    torch's default group is this rank's world, so Megatron and vLLM see nothing of the others. `group` and `control`
    can be given to any function of torch.distributed; their ranks are those of the job. torch's notion of a global
    rank means nothing in them: address peers by `group_src`, `group_dst` or `group_peer`.

    Attributes:
        rank: in the job.
        world: that this rank belongs to.
        group: all ranks, on the platform's backend: what lies on devices, such as weights. A coordinator without a GPU
            beside ranks that have one (`has_device`) is not in it, and has `control` in its place.
        control: all ranks, gloo on CPU tensors: reports, decisions and samples, which must not wait for a device or
            keep one waiting.
        store: the job's.
        timeout: of everything in these groups.
        traffic: what the samples cost; weights are not in it.
    """

    placement: ResolvedPlacement
    rank: int
    world: World
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    store: dist.Store
    timeout: timedelta
    traffic: ReceivedBytes = field(default_factory=ReceivedBytes)

    @property
    def world_rank(self) -> int:
        """This rank's number in its world."""
        return self.world.ranks.index(self.rank)

    @property
    def roles(self) -> tuple[str, ...]:
        """What this rank is."""
        return self.placement.roles_of(self.rank)

    def has(self, role: str) -> bool:
        """Whether this rank is one of the role's."""
        return role in self.roles

    def has_device(self, rank: int) -> bool:
        """Whether `group` reaches a rank."""
        return rank < self.placement.num_with_device

    def describe(self, rank: int) -> str:
        """A rank of the job for a message: "rank 3 (critic, node b)"."""
        placement = self.placement
        return f"rank {rank} ({'+'.join(placement.roles_of(rank))}, {placement.nodes[placement.node_of(rank)].name})"


def join(placement: ResolvedPlacement, store: dist.Store, rank: int, timeout: timedelta) -> Fabric:
    """Make this rank's world torch's default group, and the groups that join all; every rank of the job takes part.

    RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set to the world's, as the libraries in it read them; LOCAL_RANK, which
    names the device, stays.

    Args:
        store: the job's (`job_store`).
        rank: in the job.

    Raises:
        TrainingStopped: not every rank came in time.
    """
    world = placement.world_of(rank)
    own = world.ranks.index(rank)
    here = placement.node_of(rank)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(own), str(world.size)
    os.environ["LOCAL_WORLD_SIZE"] = str(sum(placement.node_of(other) == here for other in world.ranks))
    with _deadline(f"the world {world.name}", timeout):
        dist.init_process_group(
            platform.backend,
            store=dist.PrefixStore(f"world/{world.name}", store),
            rank=own,
            world_size=world.size,
            timeout=timeout,
        )

    def joined(backend: str, name: str, size: int) -> dist.ProcessGroup:
        return _joined(backend, name, store, (rank, size, own), timeout)

    group = control = default_group()
    if not placement.is_colocated:
        group = control = joined("gloo", "control", placement.size)
        if rank < (count := placement.num_with_device):
            group = joined(platform.backend, "fabric", count)
    elif platform.backend != "gloo":  # one world that speaks gloo needs no second group
        control = _hosts_of_all(timeout)
    return Fabric(placement, rank, world, group, control, store, timeout)


def of_default_group(roles: Sequence[str], timeout: timedelta) -> Fabric:
    """The default group as a job of one world with all of these roles, where a program has made that group itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every, group = tuple(range(size)), default_group()
    world = World("the default group", every, tuple(roles))
    nodes = (Node("this job", size),)
    placement = ResolvedPlacement(size, dict.fromkeys(roles, every), (world,), (every,), nodes, (0,) * size)
    control = group if platform.backend == "gloo" else _hosts_of_all(timeout)
    return Fabric(placement, rank, world, group, control, distributed_c10d._get_default_store(), timeout)


def _hosts_of_all(timeout: timedelta) -> dist.ProcessGroup:
    """gloo beside the default group: two ranks connect when they first speak.

    The sender waits for the receiver then. In one world that ends: agreements go along a tree, and what operators send
    each other comes in the order of one flow.
    """
    with connects_lazily():
        return dist.new_group(backend="gloo", timeout=timeout)


def join_some(fabric: Fabric, name: str, members: Sequence[int]) -> dist.ProcessGroup:
    """A group of some ranks of the job, of whatever worlds; they alone take part, and its ranks are their places.

    Raises:
        TrainingStopped: not every rank came in time.
    """
    if tuple(members) == fabric.world.ranks:
        return default_group()
    ranks = (list(members).index(fabric.rank), len(members), fabric.world_rank)
    return _joined(platform.backend, name, fabric.store, ranks, fabric.timeout)


def default_group() -> dist.ProcessGroup:
    """The default process group: this rank's world."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


@contextmanager
def _deadline(what: str, timeout: timedelta) -> Iterator[None]:
    """What torch says of a rank that did not come becomes one of this project's errors."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise TrainingStopped(
            f"{what} did not come together within {timeout.total_seconds():g} s (run.timeout_minutes): "
            f"{cause_of(error)}"
        ) from error


def _joined(
    backend: str, name: str, store: dist.Store, ranks: tuple[int, int, int], timeout: timedelta
) -> dist.ProcessGroup:
    """A group of ranks of the job, beside the default group of this rank's world.

    Args:
        ranks: this rank's number in the new group, the size of that, and its number in its world.

    torch makes groups only of ranks of the default group. This is its own constructor of those, given another store;
    what it then looks up in its books, the number of each member in the default group, is a name that no other rank
    sees: this rank's is its number there, so that `dist.get_rank(group)` is right, and the others' are any that differ.
    """
    rank, size, own = ranks
    name_of_group: Any = f"megaverl_{name}"  # a type of its own in newer versions of torch
    with _deadline(f"the group '{name}'", timeout):
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], backend, dist.PrefixStore(name, store), group_name=name_of_group, timeout=timeout
        )
        names = list(range(size))
        if own < size:
            names[own] = rank
        names[rank] = own
        distributed_c10d._world.pg_group_ranks[group] = {called: number for number, called in enumerate(names)}
        # The first use needs all ranks (NCCL), and shows that they reach each other.
        total = torch.ones(1, device=device_of(group))
        dist.all_reduce(total, group=group)
        assert int(total) == size
    return group
