"""Process groups of a job with several worlds: each world's own default group, and a fabric that joins them all; and
messages between ranks of the job, point to point: sent at once, waited for when it suits, never for ever.

What goes through NCCL goes in batches (`batch_isend_irecv`). torch gives every pair of ranks that exchanges a lone
message a communicator of its own, with its buffers and a rendezvous that blocks both; those of a batch share the
group's (`pointToPoint` in torch 2.11's and 2.13's ProcessGroupNCCL.cpp). One communicator has one stream, on which
messages wait for those before them whomever they go to. So what may be taken late, such as samples that are sent
while they are written, goes from host to host (`HostMessages`); rows that lie on devices go through NCCL only where all
ranks give and take them in one order (`dataflow.in_one_order`).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megaverl.distributed.collectives import barrier, connects_lazily, device_of, reduce_json
from megaverl.distributed.failures import cause_of
from megaverl.distributed.messages import HostMessages
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
        control: all ranks, gloo on CPU tensors: agreements, which must not wait for a device or keep one waiting, and
            alone go through it: beside the default group it connects two ranks when both speak, as in a tree.
        store: the job's.
        timeout: of everything in these groups.
        messages: of hosts, point to point: reports, decisions and samples.
        traffic: what the samples cost; weights are not in it.
        rows: what rows of batches that lie on devices go through, from device to device: `group`, or None where they
            go from host to host. All ranks with devices have the same.
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
        """Where rows lie that go from one rank to another through `rows`; None: they go from host to host."""
        reached = self.rows is not None and self.has_device(source) and self.has_device(dest)
        return device_of(self.rows) if reached else None

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
    messages = HostMessages(store, rank, placement.size)
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
        with connects_lazily():
            group = control = joined("gloo", "control", placement.size)
        with _deadline("the coordinator's tree", timeout):  # opened here, where all are: who is lost later breaks it
            reduce_json(None, lambda every: None, control, placement.coordinator)
            messages.find(placement.coordinator)  # which is told who has ended when nobody may keep the store any more
        if rank < (count := placement.num_with_device):
            group = joined(platform.backend, "fabric", count)
    elif platform.backend != "gloo":  # one world that speaks gloo needs no second group
        control = _hosts_of_all(timeout)
    return Fabric(placement, rank, world, group, control, store, timeout, messages, rows=_for_rows(group))


def of_default_group(roles: Sequence[str], timeout: timedelta) -> Fabric:
    """The default group as a job of one world with all of these roles, where a program has made that group itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every, group = tuple(range(size)), default_group()
    world = World("the default group", every, tuple(roles))
    nodes = (Node("this job", size),)
    placement = ResolvedPlacement(size, dict.fromkeys(roles, every), (world,), (every,), nodes, (0,) * size)
    control = group if platform.backend == "gloo" else _hosts_of_all(timeout)
    store = distributed_c10d._get_default_store()
    messages = HostMessages(store, rank, size)
    return Fabric(placement, rank, world, group, control, store, timeout, messages, rows=_for_rows(group))


def _for_rows(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """`Fabric.rows`: a fabric's group where it reaches devices. All of its ranks take part."""
    if device_of(group).type == "cpu":
        return None
    dist.all_reduce(torch.zeros(1, device=device_of(group)), group=group)  # NCCL's first use of a group needs them all
    return group


def _hosts_of_all(timeout: timedelta) -> dist.ProcessGroup:
    """gloo beside the default group: two ranks connect when they first speak.

    The sender waits for the receiver then, which both come to in an agreement along a tree.
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
    except (dist.DistError, RuntimeError, TrainingStopped) as error:
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
        # The first use needs all ranks (NCCL), and shows that they reach each other: all of them, or along a tree.
        if backend == "gloo":
            barrier(group)
        else:
            dist.all_reduce(torch.ones(1, device=device_of(group)), group=group)
    return group


class Sending(Protocol):
    """Something on its way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass
class PendingSends:
    """Messages being sent; their tensors are kept until they have left."""

    _under_way: list[Sending] = field(default_factory=list)

    def add(self, other: PendingSends) -> None:
        self._under_way += other._under_way

    def forget_done(self) -> None:
        """Let go of what has left."""
        self._under_way = [one for one in self._under_way if not one.is_completed()]

    def wait(self) -> None:
        """Until all have left.

        Raises:
            TrainingStopped: a rank did not take one in time, by number and role.
        """
        while self._under_way:
            self._under_way[0].wait()
            del self._under_way[0]


@dataclass(frozen=True)
class Batch:
    """Messages through a group that were begun together, and their tensors, by peer."""

    channel: Channel
    works: Sequence[dist.Work]  # one for each message (gloo), or one for all (NCCL)
    tensors: Sequence[tuple[int, Tensor]]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, *, host: bool = True) -> None:
        """Until all have come or left; without `host` what a device computes next waits for those of the device."""
        for work, (peer, tensor) in zip(self.works, self.tensors, strict=False):
            self.channel.wait(work, peer, tensor, host=host)


@dataclass(frozen=True)
class ToHost:
    """A message from host to host."""

    channel: Channel
    dest: int
    taken: Future[None]

    def is_completed(self) -> bool:
        return self.taken.done()

    def wait(self) -> None:
        with self.channel.waiting_for(self.dest):
            self.taken.result(self.channel.deadline.total_seconds())


@dataclass(frozen=True)
class Channel:
    """Sends and receives under one name, with a deadline; under different names they do not mix (hosts, gloo).

    Attributes:
        patience: how much longer than the fabric's timeout a message may take.
    """

    fabric: Fabric
    name: str
    patience: timedelta = timedelta(0)

    @property
    def deadline(self) -> timedelta:
        return self.fabric.timeout + self.patience

    @property
    def _tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def send_to(self, dest: Sequence[int], *parts: Tensor | bytes) -> PendingSends:
        """One message from host to hosts, of what lies here; on its way when this returns."""
        sent = PendingSends()
        for rank in dest:
            with self.waiting_for(rank):
                sent.add(PendingSends([ToHost(self, rank, self.fabric.messages.send(rank, self.name, parts))]))
        return sent

    def receive_from(self, source: int) -> list[Tensor]:
        """The bytes of each part of what was sent so, [n] uint8, when it comes."""
        with self.waiting_for(source):
            return self.fabric.messages.receive(source, self.name, self.deadline)

    def send(self, group: dist.ProcessGroup, out: Mapping[int, Tensor]) -> PendingSends:
        """Through a group, by receiver; what is empty does not travel."""
        return PendingSends([self._begin(group, out, {})])

    def receive(self, group: dist.ProcessGroup, into: Mapping[int, Tensor]) -> None:
        """By sender, all at once; what is empty does not travel."""
        self._begin(group, {}, into).wait(host=False)

    def exchange(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """`out` by receiver, `into` by sender, all in one batch: NCCL would let two ranks wait for each other else."""
        self._begin(group, out, into).wait(host=False)

    def _begin(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> Batch:
        moving: list[tuple[Callable[..., dist.Work | None], int, Tensor]]
        moving = [(dist.irecv, peer, tensor) for peer, tensor in into.items() if tensor.numel()]
        moving += [(dist.isend, peer, tensor) for peer, tensor in out.items() if tensor.numel()]
        if not moving:
            return Batch(self, (), ())
        operations = [dist.P2POp(move, tensor, None, group, self._tag, peer) for move, peer, tensor in moving]
        with self.waiting_for(moving[0][1]):
            works = dist.batch_isend_irecv(operations)
        return Batch(self, works, [(peer, tensor) for _, peer, tensor in moving])

    def wait(self, work: dist.Work, peer: int, tensor: Tensor, *, host: bool = True) -> None:
        """Until a message from or to a peer has come or left; see `Batch.wait`."""
        with self.waiting_for(peer):
            if tensor.is_cuda:
                work.wait()
                if host:
                    torch.cuda.current_stream().synchronize()
            else:
                work.wait(self.deadline)

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """What is said of a peer that is gone, or does not come in time, becomes one of this project's errors."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise TrainingStopped(
                f"{self.name}: {self.fabric.describe(peer)} died or stalled: nothing went between it and rank "
                f"{self.fabric.rank} within {self.deadline.total_seconds():g} s "
                f"({cause_of(error) if str(error) else 'timed out'})"
            ) from error


def send_json(fabric: Fabric, name: str, dest: int, value: Any) -> PendingSends:
    """A small message to one rank."""
    return Channel(fabric, name).send_to([dest], json.dumps(value).encode())


def receive_json(fabric: Fabric, name: str, source: int) -> Any:
    """What `send_json` of that name has sent from there, when it comes."""
    (data,) = Channel(fabric, name).receive_from(source)
    return json.loads(data.numpy().tobytes())
