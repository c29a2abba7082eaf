"""Resharding: a plan, the tensors on both sides, and the transports that carry it out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import reduce_json, together
from megaverl.distributed.failures import GRACE_SECONDS, Failures, record_event, wait, wait_for_event
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.plan import Plan
from megaverl.sharding.proof import check_plan
from megaverl.sharding.weight import listed
from megaverl.weights.transports import (
    Moved,
    TransferJob,
    Transport,
    TransportKind,
    TransportOptions,
    agree_on_dtypes,
    check_tensors,
    converting,
    viewed,
    wire_dtypes,
)
from megaverl.weights.transports.ipc import CrossMemory, CudaIpc
from megaverl.weights.transports.local import Alias, LocalCopy
from megaverl.weights.transports.point_to_point import PointToPoint
from megaverl.weights.transports.quantised import QuantisedDestination, QuantisedLanding
from megaverl.weights.transports.shared_folder import SharedFolder

# Each takes what it can carry and leaves the rest to the next.
TRANSPORTS: tuple[TransportKind, ...] = (Alias, LocalCopy, CrossMemory, CudaIpc, SharedFolder, PointToPoint)

HIDDEN = "reshard/hidden_fraction"
# Of a version that moves in the background: each makes transports of its own, with an agreement or two in each run.
MAX_PARTS = 8


@dataclass(frozen=True)
class ReshardStats:
    """What one run moved on this rank.

    Attributes:
        bytes_local: copied within the rank.
        bytes_sent, bytes_received: to and from other ranks.
        seconds: that this rank spent in the run, in the background too.
        hidden_seconds: of these, while the main thread made new weights or did something else; None: it waited.
        num_messages: sends and receives.
        bytes_aliased: in tensors that share their storage with the source, of which nothing moved.
        version: of the weights that the destination now holds.
    """

    bytes_local: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    num_messages: int
    bytes_aliased: int = 0
    version: int = 0
    hidden_seconds: float | None = None

    def metrics(self) -> dict[str, float]:
        """Under the names that a step's metrics have them by."""
        found = {
            "reshard/seconds": self.seconds,
            "reshard/bytes_received": float(self.bytes_received),
            "reshard/bytes_local": float(self.bytes_local),
        }
        return found if self.hidden_seconds is None else found | {HIDDEN: self.hidden_seconds / self.seconds}


class Resharder:
    """Moves one set of weights into another's layout, in place, as often as asked.

    Making one is collective over `group`, and so is every run. Between `start` and `finish` the source's tensors
    must stay as they are, and the destination holds neither version whole. After a run that failed the destination
    counts as inconsistent until a whole one has passed.

    Args:
        plan: this rank's plan; checked here.
        source_tensors: local name -> tensor, all of `plan.source_layout` and no others; their storage is looked
            up anew at every run, so that offloading may move them in between.
        dest_tensors: the same for the destination.
        group: the ranks of the plan, in order; None: all.
        options: how weights may be moved. With `alias`, destination tensors that share the source's storage change when
            the source does: call `source_changes` before.
        background: the same ranks once more, for transports that work in a thread while the main threads use `group`:
            every version after the first moves there, in parts. None: nothing does.
        in_order: sets of source tensors, in the order in which they get their new values on this rank; what is in none
            comes last. It says what is in which part.
        changing: the weights that the source changes or `options.never_alias` speaks of; the others travel until they
            have arrived whole, and then no more. None: all.
        quantised: the weights that the destination holds in 8 bits. Of them, `dest_tensors` has the shape of the
            layout and the dtype in which they travel, on the meta device: their place is in here.

    Raises:
        ReshardError: a plan that is not exact, parameters that do not fit their layout, dtypes that do not fit. Nothing
            has moved then.
    """

    def __init__(
        self,
        plan: Plan,
        source_tensors: Mapping[str, torch.Tensor],
        dest_tensors: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        options: TransportOptions | None = None,
        *,
        background: dist.ProcessGroup | None = None,
        in_order: Sequence[Collection[str]] = (),
        changing: Collection[str] | None = None,
        quantised: QuantisedDestination | None = None,
    ) -> None:
        self.version = 0
        self.inconsistent: str | None = "no version has been moved yet"
        self._plan, self._group = plan, group
        options = options or TransportOptions()
        self._timeout = options.timeout
        with together(group) if plan.world > 1 else nullcontext():
            check_plan(plan)
            check_tensors(plan.source_layout, source_tensors, "the source", ReshardError, exact=True)
            check_tensors(plan.dest_layout, dest_tensors, "the destination", ReshardError, exact=True)
        source, dest = dict(source_tensors), dict(dest_tensors)
        sides = {"source": (plan.source_layout, source), "destination": (plan.dest_layout, dest)}
        dtypes = agree_on_dtypes(sides, group)
        self._failures = Failures(group, plan.rank, options.timeout)
        wire, converts = wire_dtypes(dtypes), converting(dtypes)
        views = viewed(plan.source_layout, source), viewed(plan.dest_layout, dest)
        self._job = TransferJob(plan, *views, wire, converts, group, options, self._failures)
        self._all_transports = self._transports = assign(self._job, quantised)
        self._aliases = [transport for transport in self._transports if isinstance(transport, Alias)]
        self._later_transports, later = self._transports, self._job
        if changing is not None:
            changing = frozenset(changing)
            if quantised is not None:
                quantised = quantised.changing(changing)
                changing |= quantised.tensors
            later = replace(self._job, plan=plan.only(changing.__contains__))
            if background is None:
                self._later_transports = assign(later, quantised)
        self._parts: list[list[Transport]] = []
        if background is not None:
            self._later_transports = self._take_parts(replace(later), background, in_order)
        self.brings_all = True  # the next run: not only what changes
        travels = bool(plan.sends or plan.receives)
        self._anything_travels = plan.world > 1 and reduce_json(travels, any, group)
        self._background: Future[tuple[Moved, float]] | None = None
        self._started = self._hides = False

    def run(self) -> ReshardStats:
        """Bring the destination up to date. Every rank of the group takes part.

        Raises:
            ReshardError: a rank died or stalled, by number and with the weights concerned.
        """
        self.start()
        return self.finish()

    def start(self, final: FinalParts | None = None) -> None:
        """Set the next version going.

        Args:
            final: of a version that moves in the background, which parts of the source have their new values; those
                that have not follow when they do. None: all have.
        """
        assert not self._started, "finish() the version that was started"
        begin = time.perf_counter()
        self._started = True
        self._transports = self._all_transports if self.brings_all else self._later_transports
        self._hides = final is not None
        with torch.no_grad(), self._writing():
            for transport in self._transports:
                transport.start(self.version + 1)
            if self._parts and not self.brings_all:
                if final is None:
                    final = FinalParts(self.num_parts)
                    final.after(None)
                self._background = in_background(partial(self._move, final))
        self._seconds = time.perf_counter() - begin

    def finish(self) -> ReshardStats:
        """Wait until the started version is whole on every rank, and make it the destination's.

        Raises:
            ReshardError: as `run`.
        """
        assert self._started, "start() comes first"
        begin = time.perf_counter()
        with torch.no_grad(), self._writing():
            moved, moving = Moved(), 0.0
            if self._background is not None:
                moved, moving = self._result_of(self._background)
            arrived = time.perf_counter()
            moved = moved.plus(finished(self._transports))
            self._agree()
        self.version += 1
        self.inconsistent = None
        self.brings_all, self._started, self._background = False, False, None
        here, last = self._seconds + time.perf_counter() - begin, time.perf_counter() - arrived
        seconds = max(here, self._seconds + moving + last)
        return ReshardStats(
            bytes_local=moved.local,
            bytes_sent=moved.sent,
            bytes_received=moved.received,
            seconds=seconds,
            num_messages=moved.messages,
            bytes_aliased=moved.aliased,
            version=self.version,
            hidden_seconds=seconds - here if self._hides else None,
        )

    def _result_of(self, background: Future[tuple[Moved, float]]) -> tuple[Moved, float]:
        """What the thread has moved: it may take as long as all of its parts may wait for other ranks."""
        seconds = None if self._timeout is None else self._timeout.total_seconds() * (self.num_parts + 1)
        if not futures.wait([background], seconds).done:
            raise ReshardError(
                f"this rank's weights of version {self.version + 1} have not moved in the background within "
                f"{seconds:g} s, and it waited for no other rank: a copy on its device stalls."
            )
        return background.result()

    def source_changes(self) -> None:
        """To be called before the source's weights change: what shares storage with them changes as well, and
        what does not stays behind, so the destination holds no version whole until the next run."""
        if self.inconsistent is None and any(alias.shares() for alias in self._aliases):
            self.inconsistent = (
                f"part of it shares storage with the source, which has changed since version {self.version}"
            )

    def destination_lost(self) -> None:
        """Its tensors hold nothing any more: the next run brings all weights, those that do not change as well."""
        self.brings_all = True

    def check_whole(self) -> None:
        """Refuse to use a destination that holds parts of two versions.

        Raises:
            ReshardError: says why.
        """
        if self.inconsistent is not None:
            raise ReshardError(
                f"the engine's weights are inconsistent: {self.inconsistent}. Nothing can be generated until a whole "
                "reshard has passed."
            )
        if freed := [name for alias in self._aliases for name in alias.freed()]:
            raise ReshardError(
                f"the engine's weights are gone: {', '.join(listed(freed))} share storage with the actor's, which was "
                "freed. Bring that back and reshard, or set reshard.alias=never."
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around everything that writes to the destination."""
        wanted = self.version + 1
        self.inconsistent = f"version {wanted} is being written over version {self.version}"
        try:
            yield
        except Exception as error:
            self._started, self._background = False, None
            self.brings_all = True
            self.inconsistent = f"the reshard from version {self.version} to {wanted} failed ({error})"
            raise

    def _take_parts(
        self, job: TransferJob, background: dist.ProcessGroup, in_order: Sequence[Collection[str]]
    ) -> list[Transport]:
        """Make `_parts` of all that moves; what shares storage stays, and is looked at when all have moved."""
        aliases = Alias.take(job)
        left = replace(job.plan, copies=tuple(job.copies))
        first = parts_of(job.plan.source_layout, in_order, self._group)
        named = frozenset().union(*first)
        plans = [*(left.only(part.__contains__) for part in first), left.only(lambda tensor: tensor not in named)]
        job = replace(job, group=background, options=replace(job.options, alias=False))
        self._parts = [assign(replace(job, plan=plan)) for plan in plans]
        return [] if aliases is None else [aliases]

    @property
    def num_parts(self) -> int:
        """Of a version that moves in the background; the same on every rank."""
        return len(self._parts)

    def _move(self, final: FinalParts) -> tuple[Moved, float]:
        """One part after the other, the same order on every rank: what moved, and the seconds that this took."""
        moved, seconds = Moved(), 0.0
        for number, transports in enumerate(self._parts):
            final.wait_for(number, self._timeout)
            start = time.perf_counter()
            for transport in transports:
                transport.start(self.version + 1)
            moved = moved.plus(finished(transports))
            seconds += time.perf_counter() - start
        return moved, seconds

    def _agree(self) -> None:
        """Every rank has got here with the same version: one number from each. Nothing if nothing travels."""
        if not self._anything_travels:
            return
        mine = torch.tensor([self.version + 1], device=platform.device)
        versions = torch.empty(self._plan.world, dtype=torch.int64, device=platform.device)
        patience = None if self._timeout is None else self._timeout + timedelta(seconds=GRACE_SECONDS)
        try:
            work = dist.all_gather_into_tensor(versions, mine, group=self._group, async_op=True)
            wait(work, patience)
            wait_for_event(record_event(), patience)
        except (RuntimeError, TimeoutError) as error:
            what = "with its own part whole and waiting for the others"
            raise self._failures.blame(self.version + 1, -1, what, error) from error
        if other := {rank: found for rank, found in enumerate(versions.tolist()) if found != self.version + 1}:
            raise ReshardError(f"this rank brought the weights to version {self.version + 1}, others to {other}.")


def assign(job: TransferJob, quantised: QuantisedDestination | None = None) -> list[Transport]:
    """Give every copy, send and receive of the job to a transport, in the order in which they work. Every rank of the
    group takes part.

    Raises:
        ReshardError: something is left that no transport carries.
    """
    last: list[Transport] = [] if quantised is None else [QuantisedLanding.take(job, quantised, assign)]
    found = [transport for cls in TRANSPORTS if (transport := cls.take(job)) is not None]
    found += last
    if job.copies or job.sends or job.receives:
        raise ReshardError(f"no transport carries the weights between rank {job.plan.rank} and {sorted(job.sends)}.")
    return found


def finished(transports: Sequence[Transport]) -> Moved:
    """Finish them, on the device too."""
    moved = Moved()
    for transport in transports:
        moved = moved.plus(transport.finish())
    if platform.is_cuda:
        torch.cuda.current_stream().synchronize()
    return moved


def parts_of(
    source: Layout, in_order: Sequence[Collection[str]], group: dist.ProcessGroup | None
) -> list[frozenset[str]]:
    """The weights of each part that a version moves in, but the last part, which has all others; the same on every
    rank, and all take part.

    A weight of which several ranks hold some goes with the part in which the last of them has its new values.

    Args:
        source: what this rank has. in_order: as `Resharder` has it.
    """
    number = min(MAX_PARTS, reduce_json(len(in_order), max, group)) if dist.is_initialized() else 0
    if number < 2:
        return []
    places = {local: at for at, names in enumerate(in_order) for local in names}
    mine: dict[str, int] = {}
    for piece in source.pieces:
        at = places.get(source.stored_in(piece.local))
        part = number - 1 if at is None else at * number // len(in_order)
        mine[piece.tensor] = max(part, mine.get(piece.tensor, 0))

    def latest(reports: list[dict[str, int]]) -> list[list[str]]:
        parts = {name: max(report.get(name, 0) for report in reports) for name in set().union(*reports)}
        return [sorted(name for name, part in parts.items() if part == at) for at in range(number - 1)]

    return [frozenset(names) for names in reduce_json(mine, latest, group)]


class FinalParts:
    """Which parts of a version have their new values on this rank: said by the thread that trains, waited for by the
    one that moves them.

    Args:
        num_parts: of the version.
        num_steps: in how many steps the new values come here.
    """

    def __init__(self, num_parts: int, num_steps: int = 1) -> None:
        self._num_parts, self._num_steps = num_parts, num_steps
        self._condition, self._final = threading.Condition(), 0
        self._event: torch.cuda.Event | None = None

    def after(self, step: int | None) -> None:
        """So many of the steps, None: all of them, are behind what the current stream has been given."""
        event = record_event()
        with self._condition:
            self._final = self._num_parts if step is None else step * self._num_parts // self._num_steps
            self._event = event
            self._condition.notify_all()

    def wait_for(self, part: int, timeout: timedelta | None) -> None:
        """Until a part has its new values, on the device too.

        Raises:
            ReshardError: that took longer than `timeout`.
        """
        with self._condition:
            seconds = None if timeout is None else timeout.total_seconds()
            if not self._condition.wait_for(lambda: self._final > part, seconds):
                raise ReshardError(f"an optimizer step has not made new weights within {seconds:g} s.")
            event = self._event
        wait_for_event(event, timeout)


Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Run `function` in a thread, on a stream of its own, that is behind what the function waits for alone."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            platform.start()  # the current device belongs to the thread
            stream = torch.cuda.Stream() if platform.is_cuda else None
            with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
                future.set_result(function())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="reshard", daemon=True).start()
    return future
