"""Link between an actor's ranks and the workers of inference servers, over which weights move shard to shard.

The senders (the actor's ranks) and the receivers (the servers' workers) belong to
different jobs. They meet in a store that the rank which talks to the servers opens for
each link:

    store   "source"          layouts of all senders, and the shapes of the weights    first sender   -> receivers
            "layout/RANK"     digest of a receiver's layout, "layouts/DIGEST" has it   each receiver  -> everyone
            "failed"          first error of any process                               anyone         -> everyone
    group   senders first, then the workers of one server after another: gloo, or NCCL
    plan    computed by every process from the layouts; a receiver gets each element once, straight into its place

A process that fails writes its error to the store and leaves the group, which ends the
others' waits at once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaverl.distributed.job_context import join_processes, leave
from megaverl.distributed.store import reach_store
from megaverl.errors import MegaverlError
from megaverl.sharding.layout import EMPTY, Layout
from megaverl.sharding.load_balance import RankLayouts
from megaverl.sharding.plan import make_plan
from megaverl.weights.reshard import Resharder, ReshardStats
from megaverl.weights.transports import DeltaMode, Tensors, TransportOptions

KEY = "rollout.servers.load_timeout_seconds"  # every wait of a link ends after so long
FAILED, SOURCE = "failed", "source"
POLL_SECONDS = 0.02
REACH_SECONDS = 60.0  # for the first connection to the store

LayoutOf = Callable[[int], Layout]
Shapes = Mapping[str, tuple[int, ...]]


class LinkError(MegaverlError):
    """Raised in a process of a link because another one failed; the message is that one's."""


@dataclass(frozen=True)
class LinkAddress:
    """Address at which the processes of a link meet.

    Attributes:
        host, port: of the store.
        name: unique among all links of the job.
        num_senders: the actor's ranks, which have the first numbers in the group.
        size: number of processes.
        backend: `gloo`, through host memory, or `nccl`.
        seconds: limit of every wait.
        delta: whether versions after the first are sent as changes (`reshard.delta`).
    """

    host: str
    port: int
    name: str
    num_senders: int
    size: int
    backend: str
    seconds: float
    delta: DeltaMode = "off"

    def to_json(self) -> dict[str, Any]:
        """Return the address as JSON values."""
        return asdict(self)

    @property
    def timeout(self) -> timedelta:
        """Limit of every wait."""
        return timedelta(seconds=self.seconds)

    def reach(self) -> dist.Store:
        """Connect to the store.

        Raises:
            TimeoutError: it cannot be reached.
        """
        end = time.monotonic() + min(REACH_SECONDS, self.seconds)
        return reach_store(self.host, self.port, self.timeout, end, lambda seen: None)

    def wait_for(self, store: dist.Store, keys: Sequence[str], awaited: str) -> None:
        """Wait until the store has all keys.

        Raises:
            LinkError: another process of the link failed.
            TimeoutError: this took too long.
        """
        end = time.monotonic() + self.seconds
        while not store.check(list(keys)):
            if store.check([FAILED]):
                raise LinkError(store.get(FAILED).decode())
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{awaited} did not come within {self.seconds:g} s ({KEY})"
                )
            time.sleep(POLL_SECONDS)


class Link:
    """One process's end of a link. Construction, and every `run`, are collective over all its processes.

    Args:
        store: the link's.
        rank: number of this process in the link.
        source_of: sender -> its layout.
        tensors: a sender's tensors, by the names of its layout.
        dest: a receiver's tensors, by the names of its layout.

    Example:
        link = open_as_sender(address, rank, layout_of, shapes, tensors)    # on the actor's ranks
        link = open_as_receiver(address, rank, lay_out)                     # on the servers' workers
        link.run()                                                          # on all: one version of the weights
        link.close()
    """

    def __init__(
        self,
        address: LinkAddress,
        store: dist.Store,
        rank: int,
        source_of: LayoutOf,
        tensors: Tensors,
        dest: Tensors,
    ) -> None:
        self.address = address
        self._store = store
        receivers = range(address.num_senders, address.size)
        dest_of = _layouts_of(address, store, receivers)
        self._group = join_processes(
            address.backend,
            address.name,
            store,
            rank,
            address.size,
            address.timeout,
            key=KEY,
        )
        self.plan = make_plan(
            lambda place: source_of(place) if place < address.num_senders else EMPTY,
            lambda place: dest_of[place] if place >= address.num_senders else EMPTY,
            address.size,
            rank,
            # Servers ignore some weights of a folder, as engines do.
            allow_unused=True,
        )
        options = TransportOptions(
            timeout=address.timeout,
            # Servers are not on the actor's nodes, or the link would not ask for deltas.
            node_of=lambda place: int(place >= address.num_senders),
            delta=address.delta,
        )
        self._resharder: Resharder | None = Resharder(
            self.plan, tensors, dest, self._group, options
        )

    def run(self) -> ReshardStats:
        """Move one version of the weights.

        Raises:
            ReshardError: a process died or stalled; names it by its number.
        """
        assert self._resharder is not None, "the link is closed"
        return self._resharder.run()

    def fail(self, error: str) -> None:
        """Report this process's error to the others, and close the link."""
        with suppress(dist.DistError):
            report_failure(self._store, error)
        self.close()

    def close(self) -> None:
        """Leave the group. Others that wait in it fail at once."""
        if self._resharder is not None:
            self._resharder = None
            leave(self._group)


def report_failure(store: dist.Store, error: str) -> None:
    """Tell all processes of a link the error of one of them. The first one stays."""
    store.compare_set(FAILED, "", error or "unknown error")


def open_as_sender(
    address: LinkAddress,
    rank: int,
    layout_of: LayoutOf,
    shapes: Shapes,
    tensors: Tensors,
) -> Link:
    """Open this sender's end of a link.

    Args:
        layout_of: sender -> its layout.
        shapes: global shapes of all weights, by the names of a Hugging Face folder.
        tensors: this sender's tensors, which are read in every run.

    Raises:
        LinkError, MegaverlError, TimeoutError: some process failed or did not come. All of them raise.
    """
    store = address.reach()
    with _reporting(store, f"rank {rank} of the actor"):
        if rank == 0:
            held = RankLayouts(layout_of, address.num_senders)
            description = {
                "class_of": held.class_of,
                "layouts": [layout.to_json() for layout in held.layouts],
                "shapes": shapes,
            }
            store.set(SOURCE, json.dumps(description))
        local_tensors = {name: tensors[name] for name in layout_of(rank).local_shapes}
        return Link(address, store, rank, layout_of, local_tensors, {})


def open_as_receiver(
    address: LinkAddress,
    rank: int,
    lay_out: Callable[[Shapes], tuple[Layout, Tensors]],
    name: str,
) -> Link:
    """Open this worker's end of a link.

    Args:
        lay_out: shapes of the weights -> this worker's layout and its tensors, which every run writes.
        name: of the worker, for errors.

    Raises:
        LinkError, MegaverlError, TimeoutError: some process failed or did not come. All of them raise.
    """
    store = address.reach()
    with _reporting(store, name):
        address.wait_for(store, [SOURCE], "the actor's layout")
        description = json.loads(store.get(SOURCE))
        layout, tensors = lay_out(
            {weight: tuple(shape) for weight, shape in description["shapes"].items()}
        )
        _publish(store, rank, layout)
        sources = [Layout.from_json(layout) for layout in description["layouts"]]
        return Link(
            address,
            store,
            rank,
            lambda place: sources[description["class_of"][place]],
            {},
            tensors,
        )


@contextmanager
def _reporting(store: dist.Store, reporter: str) -> Iterator[None]:
    """Return a context that reports an error of its body to all processes of a link."""
    try:
        yield
    except LinkError:
        raise
    except Exception as error:
        with suppress(dist.DistError):
            report_failure(store, f"{reporter}: {error or type(error).__name__}")
        raise


def _publish(store: dist.Store, rank: int, layout: Layout) -> None:
    """Publish a receiver's layout. Workers of equal place in their servers have equal layouts, stored once."""
    text = json.dumps(layout.to_json())
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    store.set(f"layouts/{digest}", text)
    store.set(f"layout/{rank}", digest)


def _layouts_of(
    address: LinkAddress, store: dist.Store, receivers: Sequence[int]
) -> dict[int, Layout]:
    """Wait for the layouts of all receivers. Receivers with equal layouts share one object."""
    keys = [f"layout/{rank}" for rank in receivers]
    address.wait_for(store, keys, "a server's worker")
    digests = [digest.decode() for digest in store.multi_get(keys)]
    layouts = {
        digest: Layout.from_json(json.loads(store.get(f"layouts/{digest}")))
        for digest in set(digests)
    }
    return {
        rank: layouts[digest] for rank, digest in zip(receivers, digests, strict=True)
    }


def dealt(layout_of: LayoutOf, num_ranks: int) -> LayoutOf:
    """Return layouts in which ranks that hold the same share it out, tensor by tensor.

    They describe the copies in host memory from which late servers are served: a rank
    need not keep what another keeps.
    """
    held = RankLayouts(layout_of, num_ranks)

    def shared_out(rank: int) -> Layout:
        layout = held.layouts[held.class_of[rank]]
        holders = held.ranks[held.class_of[rank]]
        # weight -> its local tensor; weights of one tensor stay together.
        home: dict[str, str] = {}
        for piece in layout.pieces:
            home.setdefault(piece.tensor, layout.stored_in(piece.local))
        number = {
            local: place for place, local in enumerate(dict.fromkeys(home.values()))
        }
        place = holders.index(rank)
        return layout.without(
            {
                weight
                for weight, local in home.items()
                if number[local] % len(holders) != place
            }
        )

    layouts = [shared_out(rank) for rank in range(num_ranks)]
    return layouts.__getitem__
