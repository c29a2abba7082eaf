"""The actor's side of weights that go to inference servers shard to shard (`rollout.servers.transfer: direct`).

During a reshard the main thread sends the actor's own tensors to all servers. A server
that comes later gets a copy of the same version from host memory, which a thread sends
beside the training, since a second thread must not use the device's collectives:

    main thread   | reshard: serve, keep_copy |   train, generate, ...   | reshard ...
    late thread                               |  watch for deliveries    |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megaverl.errors import MegaverlError, ReshardError
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import shapes_of
from megaverl.weights.server_link import Link, LinkAddress, dealt, open_as_sender
from megaverl.workers.model import TrainingModel
from megaverl.workers.server_transfer import DeliveryBoard

# The main thread polls often, because it has nothing else to do.
POLL_SECONDS = 0.02
# With more ranks, each polls less often, to bound the load on the job's store.
RANKS_PER_POLL = 32
# Every rank of the actor polls the job's store from a background thread.
LATE_POLL_SECONDS = 1.0

LayoutOf = Callable[[int], Layout]


class WeightSender:
    """One actor rank's sender.

    Args:
        model: the actor on this rank.
        board: announcements of deliveries.
        seconds: how long the main thread waits for the next announcement.

    Attributes:
        bytes_sent: bytes of all deliveries so far.
        num_messages: messages of all deliveries so far.

    Example:
        with sender.exclusive():                            # no late server is being served
            sender.serve(lambda: board.is_finished(name))   # the servers' rank announces deliveries meanwhile
            sender.keep_copy()                              # for servers that come later
    """

    def __init__(
        self, model: TrainingModel, board: DeliveryBoard, seconds: float
    ) -> None:
        self._model, self._board, self._seconds = model, board, seconds
        self._rank = dist.get_rank(model.grid.world)
        self._num_ranks = dist.get_world_size(model.grid.world)
        self._next = 0  # number of the next delivery
        # Held by the thread that serves: the main thread during a reshard, else the
        # watcher.
        self._turn = threading.Lock()
        self._link: Link | None = None
        self._copy: dict[str, torch.Tensor] = {}
        self._copy_layouts: LayoutOf | None = None
        self._watcher: threading.Thread | None = None
        self.bytes_sent = self.num_messages = 0

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Return a context in which only the main thread serves deliveries."""
        with self._turn:
            yield

    def serve(self, is_finished: Callable[[], bool]) -> None:
        """Serve deliveries until `is_finished` returns True.

        Raises:
            ReshardError: there was no delivery for too long.
        """
        last = time.monotonic()
        # Checked before the announcements, so that none is missed.
        while (
            # A delivery that was announced before the end is still to be served.
            not (finished := is_finished())
            or self._board.announced(self._next) is not None
        ):
            if self._serve_next(live=True):
                last = time.monotonic()
            elif not finished and time.monotonic() - last > self._seconds:
                raise ReshardError(
                    f"the rank that talks to the servers has asked for no weights for {self._seconds:g} s "
                    "(rollout.servers.wait_seconds and load_timeout_seconds). Look at the first rollout rank's log."
                )
            else:
                # Many ranks that ask often would slow down the job's store.
                time.sleep(POLL_SECONDS * max(1.0, self._num_ranks / RANKS_PER_POLL))

    def keep_copy(self) -> None:
        """Copy this rank's share of the weights to host memory, and serve late servers from it."""
        if self._copy_layouts is None:
            self._copy_layouts = dealt(self._model.layout_of, self._num_ranks)
        for name in self._copy_layouts(self._rank).local_shapes:
            tensor = self._model.parameters[name].detach()
            if name not in self._copy:
                # The copies are reused in every reshard. They take a share of the
                # weights, since ranks divide them.
                self._copy[name] = torch.empty_like(tensor, device="cpu")
            # A blocking copy: the next optimizer step may overwrite the weights.
            self._copy[name].copy_(tensor)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="late servers", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        """Serve late servers until the job ends."""
        # The thread ends with the job, whose store it asks.
        while threading.main_thread().is_alive() and dist.is_initialized():
            # A reshard serves by itself.
            if self._turn.acquire(blocking=False):
                try:
                    self._serve_next(live=False)
                except dist.DistError:  # the store has ended with the job
                    return
                finally:
                    self._turn.release()
            time.sleep(LATE_POLL_SECONDS)

    def _serve_next(self, *, live: bool) -> bool:
        """Serve the next delivery if it has been announced for this thread; return whether it was.

        Args:
            live: whether the main thread asks, which serves live deliveries alone.
        """
        announcement = self._board.announced(self._next)
        if announcement is None or announcement.live != live:
            return False
        # Counted before sending, so that a failed delivery is not tried twice.
        number, self._next = self._next, self._next + 1
        error: str | None = None
        try:
            self._send(LinkAddress(**announcement.link), live=live)
        # The rank that talks to the servers decides what a failure means.
        except (MegaverlError, RuntimeError, OSError) as caught:
            error = f"rank {self._rank} of the actor: {caught or type(caught).__name__}"
            if self._link is not None:
                self._link.fail(error)
                self._link = None
        self._board.done(number, error)
        return True

    def _send(self, address: LinkAddress, *, live: bool) -> None:
        with torch.no_grad():
            # Another address means other servers, and a new link.
            if self._link is None or self._link.address != address:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                layout_of, tensors = self._source(live=live)
                shapes = shapes_of(self._model.weights)
                self._link = open_as_sender(
                    address, self._rank, layout_of, shapes, tensors
                )
            stats = self._link.run()
        self.bytes_sent += stats.bytes_sent
        self.num_messages += stats.num_messages

    def _source(self, *, live: bool) -> tuple[LayoutOf, Mapping[str, torch.Tensor]]:
        """Return layouts and tensors that are sent."""
        if live:
            return self._model.layout_of, self._model.parameters
        assert self._copy_layouts is not None, "a late delivery comes after a reshard"
        return self._copy_layouts, self._copy
