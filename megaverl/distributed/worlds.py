"""Process groups of a job with several worlds, and point-to-point messages between its ranks.

Each world has its own default group, and a context connects all worlds. Messages are
sent without blocking, and every wait has a deadline.

NCCL messages are sent in batches (`batch_isend_irecv`). For a single message torch
creates a communicator for each pair of ranks, with its own buffers and a rendezvous
that blocks both ranks; batches share the group's communicator (`pointToPoint` in torch
2.11's and 2.13's ProcessGroupNCCL.cpp). A communicator has one stream, on which a
message waits for all earlier ones, whatever their destination. So messages that may be
received late, such as samples that are sent while they are generated, go through host
memory (`HostMessages`). Rows on devices go through NCCL only if all ranks send and
receive them in the same order (`dataflow.in_one_order`).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megaverl.distributed.collectives import (
    barrier,
    connects_lazily,
    device_of,
    reduce_json,
)
from megaverl.distributed.failures import cause_of
from megaverl.distributed.messages import HostMessages
from megaverl.distributed.placement import Node, ResolvedPlacement, World
from megaverl.errors import TrainingStopped
from megaverl.platform import platform


@dataclass
class ReceivedBytes:
    """Bytes of batches and results that this rank has received from others since its start."""

    received: int = 0


@dataclass(frozen=True)
class JobContext:
    """This rank's place in the job, and the groups that connect all ranks.

    torch's default group is this rank's world, so Megatron and vLLM do not see other
    worlds. `group` and `control` work with every function of torch.distributed, and use
    the ranks of the job. They have no global ranks in torch's sense: address peers by
    `group_src`, `group_dst` or `group_peer`.

    Attributes:
        rank: rank in the job.
        world: this rank's world.
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
    world: World
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
    def world_rank(self) -> int:
        """This rank's number in its world."""
        return self.world.ranks.index(self.rank)

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
    """Make this rank's world torch's default group, and create the groups of all ranks. Collective over the job.

    Sets RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to the world's values, which libraries in
    it read. LOCAL_RANK, which selects the device, is unchanged.

    Args:
        store: the job's store (`job_store`).
        rank: rank in the job.

    Raises:
        TrainingStopped: a rank did not arrive in time.
    """
    world = placement.world_of(rank)
    own = world.ranks.index(rank)
    # Opened first: it needs only the store, and other ranks find this one through it.
    messages = HostMessages(store, rank, placement.size)
    here = placement.node_of(rank)
    # Megatron and vLLM read these, and must see only this world.
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(own), str(world.size)
    os.environ["LOCAL_WORLD_SIZE"] = str(
        sum(placement.node_of(other) == here for other in world.ranks)
    )
    # Collective over the world's ranks.
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
    elif platform.backend != "gloo":  # a single world on gloo needs no second group
        control = _hosts_of_all(timeout)
    return JobContext(
        placement,
        rank,
        world,
        group,
        control,
        store,
        timeout,
        messages,
        rows=_for_rows(group),
    )


def of_default_group(roles: Sequence[str], timeout: timedelta) -> JobContext:
    """Return the context of one world with all of these roles, for a program that has created the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every, group = tuple(range(size)), default_group()
    world = World("the default group", every, tuple(roles))
    nodes = (Node("this job", size),)
    placement = ResolvedPlacement(
        size, dict.fromkeys(roles, every), (world,), (every,), nodes, (0,) * size
    )
    control = group if platform.backend == "gloo" else _hosts_of_all(timeout)
    store = distributed_c10d._get_default_store()
    messages = HostMessages(store, rank, size)
    return JobContext(
        placement,
        rank,
        world,
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
    """Return a group of some ranks of the job, of any worlds. Collective over these ranks only.

    Ranks in the group are indices in `members`.

    Raises:
        TrainingStopped: a rank did not arrive in time.
    """
    # The ranks are exactly this world, whose group exists.
    if tuple(members) == context.world.ranks:
        return default_group()
    ranks = (list(members).index(context.rank), len(members), context.world_rank)
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
    """Return the default process group, which is this rank's world."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


@contextmanager
def _deadline(
    what: str, timeout: timedelta, key: str = "run.timeout_minutes"
) -> Iterator[None]:
    """Return a context that turns torch's errors about missing ranks into `TrainingStopped`."""
    try:
        yield
    except (dist.DistError, RuntimeError, TrainingStopped) as error:
        raise TrainingStopped(
            f"{what} did not come together within {timeout.total_seconds():g} s ({key}): {cause_of(error)}"
        ) from error


def _joined(
    backend: str,
    name: str,
    store: dist.Store,
    ranks: tuple[int, int, int],
    timeout: timedelta,
    key: str = "run.timeout_minutes",
) -> dist.ProcessGroup:
    """Create a group of ranks of the job, besides the default group of this rank's world. Collective over these ranks.

    torch only creates groups of ranks of the default group. This calls torch's own
    constructor with another store. torch then looks up each member's number in the
    default group. No other rank sees these numbers: this rank's is its real one, so
    that `dist.get_rank(group)` is right, and the others' are arbitrary but distinct.

    Args:
        ranks: this rank's number in the new group, the size of that group, and this rank's number in its world.
    """
    rank, size, own = ranks
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
        # Swap this rank's number in the group with its number in the world; see the
        # docstring.
        # torch translates numbers of the default group to numbers in this group by this
        # table.
        names = list(range(size))
        if own < size:
            names[own] = rank
        names[rank] = own
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


class Sending(Protocol):
    """Operation in progress."""

    def is_completed(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass
class PendingSends:
    """Messages in progress. Their tensors are kept until they are sent.

    Example:
        sends = channel.send_to([1, 2], tensor)
        ...
        sends.wait()
    """

    _under_way: list[Sending] = field(default_factory=list)

    def add(self, other: PendingSends) -> None:
        self._under_way += other._under_way

    # The tensors of finished messages are freed.
    def forget_done(self) -> None:
        """Drop messages that have been sent."""
        self._under_way = [one for one in self._under_way if not one.is_completed()]

    def wait(self) -> None:
        """Wait until all messages are sent.

        Raises:
            TrainingStopped: a rank did not receive one in time; names the rank and its roles.
        """
        while self._under_way:
            self._under_way[0].wait()
            del self._under_way[0]


@dataclass(frozen=True)
class Batch:
    """Messages through a group that were started together, with their tensors by peer."""

    channel: Channel
    works: Sequence[dist.Work]  # one per message (gloo), or one for all (NCCL)
    tensors: Sequence[tuple[int, Tensor]]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, *, host: bool = True) -> None:
        # Batches on NCCL have a single work for all tensors.
        """Wait until all messages are received or sent.

        With `host=False`, only the current stream waits for messages of a device.
        """
        for work, (peer, tensor) in zip(self.works, self.tensors, strict=False):
            self.channel.wait(work, peer, tensor, host=host)


@dataclass(frozen=True)
class ToHost:
    """Message between hosts."""

    channel: Channel
    dest: int
    taken: Future[None]

    def is_completed(self) -> bool:
        return self.taken.done()

    def wait(self) -> None:
        with self.channel.waiting_for(self.dest):
            self.taken.result(self.channel.context.timeout.total_seconds())


@dataclass(frozen=True)
class Channel:
    """Sends and receives under one name, with a deadline. Messages of different names do not mix (hosts, gloo).

    Attributes:
        name: name of the channel, which error messages mention.

    Example:
        channel = Channel(context, "samples")
        channel.send_to([1], tensor).wait()  # on rank 0
        (data,) = channel.receive_from(0)  # on rank 1: [n] uint8
    """

    context: JobContext
    name: str

    @property
    def _tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def send_to(self, dest: Sequence[int], *parts: Tensor | bytes) -> PendingSends:
        """Start sending one message of host data to several ranks through host memory."""
        sent = PendingSends()
        for rank in dest:
            # Finding a rank for the first time may fail.
            with self.waiting_for(rank):
                sent.add(
                    PendingSends(
                        [
                            ToHost(
                                self,
                                rank,
                                self.context.messages.send(rank, self.name, parts),
                            )
                        ]
                    )
                )
        return sent

    def receive_from(self, source: int) -> list[Tensor]:
        """Wait for the message that `send_to` sent from `source`, and return the bytes of its parts, [n] uint8 each."""
        with self.waiting_for(source):
            return self.context.messages.receive(
                source, self.name, self.context.timeout
            )

    def send(self, group: dist.ProcessGroup, out: Mapping[int, Tensor]) -> PendingSends:
        """Start sending tensors through a group, by receiver. Empty tensors are not sent."""
        return PendingSends([self._begin(group, out, {})])

    def receive(self, group: dist.ProcessGroup, into: Mapping[int, Tensor]) -> None:
        """Receive tensors through a group, by sender, all in one batch. Empty tensors are skipped."""
        self._begin(group, {}, into).wait(host=False)

    def exchange(
        self,
        group: dist.ProcessGroup,
        out: Mapping[int, Tensor],
        into: Mapping[int, Tensor],
    ) -> None:
        """Send `out` by receiver and receive `into` by sender, in one batch.

        Separate NCCL calls could deadlock, because each rank could wait for the other
        one to receive first.
        """
        self._begin(group, out, into).wait(host=False)

    def _begin(
        self,
        group: dist.ProcessGroup,
        out: Mapping[int, Tensor],
        into: Mapping[int, Tensor],
    ) -> Batch:
        moving: list[tuple[Callable[..., dist.Work | None], int, Tensor]]
        # Receives come first, so that no sender waits for a receiver that is itself
        # sending.
        moving = [
            (dist.irecv, peer, tensor)
            for peer, tensor in into.items()
            if tensor.numel()
        ]
        moving += [
            (dist.isend, peer, tensor) for peer, tensor in out.items() if tensor.numel()
        ]
        if not moving:
            return Batch(self, (), ())
        operations = [
            dist.P2POp(move, tensor, None, group, self._tag, peer)
            for move, peer, tensor in moving
        ]
        # The first peer stands for all in error messages.
        with self.waiting_for(moving[0][1]):
            # One batch, which NCCL runs as a single operation.
            works = dist.batch_isend_irecv(operations)
        return Batch(self, works, [(peer, tensor) for _, peer, tensor in moving])

    def wait(
        self, work: dist.Work, peer: int, tensor: Tensor, *, host: bool = True
    ) -> None:
        """Wait until a message from or to a peer is received or sent; see `Batch.wait`."""
        with self.waiting_for(peer):
            if tensor.is_cuda:
                # Lets the current stream wait, and returns at once.
                work.wait()
                if host:
                    torch.cuda.current_stream().synchronize()
            else:
                work.wait(self.context.timeout)

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """Return a context that turns errors about a lost or late peer into `TrainingStopped`."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise TrainingStopped(
                f"{self.name}: {self.context.describe(peer)} died or stalled: nothing went between it and rank "
                f"{self.context.rank} within {self.context.timeout.total_seconds():g} s "
                f"({cause_of(error) if str(error) else 'timed out'})"
            ) from error


def send_json(context: JobContext, name: str, dest: int, value: Any) -> PendingSends:
    """Start sending a small JSON message to one rank."""
    return Channel(context, name).send_to([dest], json.dumps(value).encode())


def receive_json(context: JobContext, name: str, source: int) -> Any:
    """Wait for the message that `send_json` sent under this name from `source`, and return its value."""
    (data,) = Channel(context, name).receive_from(source)
    return json.loads(data.numpy().tobytes())
