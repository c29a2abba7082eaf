"""Resharding: execute a plan on the tensors of both sides, through transports.

A run has these stages:

    start()   begins what can proceed on its own; a background version moves part by part
    finish()  waits for all transports; then all ranks agree on the version
    version   increases by one; only now is the destination consistent
"""

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
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import device_of, reduce_json, together
from megaverl.distributed.failures import (
    GRACE_SECONDS,
    Failures,
    record_event,
    wait,
    wait_for_event,
)
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.plan import Plan
from megaverl.sharding.proof import check_plan
from megaverl.sharding.weight import listed
from megaverl.weights.transports import (
    DeltaMode,
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
from megaverl.weights.transports.sent_weights import SentWeights
from megaverl.weights.transports.shared_folder import SharedFolder

# Each transport takes the transfers that it supports and leaves the rest to the next
# one.
TRANSPORTS: tuple[TransportKind, ...] = (
    Alias,
    LocalCopy,
    CrossMemory,
    CudaIpc,
    SharedFolder,
    PointToPoint,
)

HIDDEN = "reshard/hidden_fraction"
# Limit of parts of a background version. Each part has transports of its own, with one
# or two collectives per run.
MAX_PARTS = 8


@dataclass(frozen=True)
class ReshardStats:
    """Statistics of one run on this rank.

    Attributes:
        bytes_local: bytes copied within the rank.
        bytes_sent, bytes_received: bytes to and from other ranks.
        seconds: time of the run, including background work.
        hidden_seconds: the part of it that overlapped with other work of the main thread; None: the main thread waited.
        num_messages: sends and receives.
        bytes_aliased: bytes of tensors that share their storage with the source, which do not move.
        version: version of the weights that the destination now holds.
        busiest_sent: bytes that the busiest rank of the group sent.
        busiest_whole: bytes that it would have sent, had nothing been left out as unchanged.
        changed_fraction: share of the compared elements that changed since the last version, over all ranks. None: no
            rank compared any.
    """

    bytes_local: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    num_messages: int
    bytes_aliased: int = 0
    version: int = 0
    hidden_seconds: float | None = None
    busiest_sent: int = 0
    busiest_whole: int = 0
    changed_fraction: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the statistics under their metric names."""
        metrics = {
            "reshard/seconds": self.seconds,
            "reshard/bytes_received": float(self.bytes_received),
            "reshard/bytes_local": float(self.bytes_local),
            "reshard/bytes_sent": float(self.busiest_sent),
        }
        if self.hidden_seconds is not None:
            metrics[HIDDEN] = self.hidden_seconds / self.seconds
        if self.changed_fraction is not None:
            metrics["reshard/changed_fraction"] = self.changed_fraction
            metrics["reshard/bytes_sent_whole"] = float(self.busiest_whole)
        return metrics


class RankTotals(NamedTuple):
    """Numbers of one run over all ranks, as in `ReshardStats`."""

    busiest_sent: int = 0
    busiest_whole: int = 0
    changed_fraction: float | None = None


class Resharder:
    """Moves one set of weights into another's layout, in place, any number of times.

    Construction and every run are collective over `group`. Between `start` and `finish`
    the source's tensors must not change, and the destination holds no complete version.
    After a failed run the destination counts as inconsistent until a complete run has
    succeeded.

    Args:
        plan: this rank's plan; checked here.
        source_tensors: local name -> tensor, exactly those of `plan.source_layout`. Their storage is looked up again in
            every run, so that offloading may move them in between.
        dest_tensors: the same for the destination.
        group: the ranks of the plan, in order; None: all.
        options: permitted ways to move weights. With `alias`, destination tensors that share the source's storage
            change with the source: call `source_changes` first.
        background: a second group of the same ranks, for transports that work in a thread while main threads use
            `group`. Every version after the first moves there, in parts. None: no background work.
        in_order: sets of source tensors, in the order in which they get their new values on this rank; tensors in no
            set come last. Determines the parts.
        changing: the weights that the source changes, or that `options.never_alias` names. Other weights move only in
            runs that bring everything. None: all change.
        quantised: the weights that the destination holds in 8 bits. For these, `dest_tensors` has meta tensors with the
            shape of the layout and the dtype that is sent; `quantised` has their storage.

    Raises:
        ReshardError: the plan is not exact, or parameters or dtypes do not fit. Nothing has moved then.

    Example:
        resharder = Resharder(plan, actor_tensors, engine_tensors, group)
        resharder.source_changes()
        optimizer.step()
        stats = resharder.run()   # or start(), other work, finish()
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
        # All ranks raise together: a rank that raised alone would leave the others
        # waiting in the next collective.
        with together(group) if plan.world > 1 else nullcontext():
            check_plan(plan)
            check_tensors(
                plan.source_layout,
                source_tensors,
                "the source",
                ReshardError,
                exact=True,
            )
            check_tensors(
                plan.dest_layout,
                dest_tensors,
                "the destination",
                ReshardError,
                exact=True,
            )
        source, dest = dict(source_tensors), dict(dest_tensors)
        sides = {
            "source": (plan.source_layout, source),
            "destination": (plan.dest_layout, dest),
        }
        dtypes = agree_on_dtypes(sides, group)
        self._failures = Failures(group, plan.rank, options.timeout)
        wire, converts = wire_dtypes(dtypes), converting(dtypes)
        views = viewed(plan.source_layout, source), viewed(plan.dest_layout, dest)
        delta: DeltaMode = "off"
        if plan.world > 1:
            # Both ends of a message must know whether its size is announced.
            delta = reduce_json(options.delta, _joint_mode, group)
        options = replace(options, delta=delta)
        self._sent_weights = (
            None if delta == "off" else SentWeights(delta, views[0], device_of(group))
        )
        self._job = TransferJob(
            plan,
            *views,
            wire,
            converts,
            group,
            options,
            self._failures,
            self._sent_weights,
        )
        self._all_transports = self._transports = assign(self._job, quantised)
        self._aliases = [
            transport for transport in self._transports if isinstance(transport, Alias)
        ]
        self._later_transports, later = self._transports, self._job
        if changing is not None:
            changing = frozenset(changing)
            if quantised is not None:
                quantised = quantised.changing(changing)
                changing |= quantised.tensors
            # Frozen weights travel once, in the first version; every later one moves
            # only those that the source changes.
            later = replace(self._job, plan=plan.only(changing.__contains__))
            # Transports take their transfers out of the job, so that later versions
            # need a job and transports of their own.
            if background is None:
                self._later_transports = assign(later, quantised)
        self._parts: list[list[Transport]] = []
        if background is not None:
            self._later_transports = self._take_parts(
                replace(later), background, in_order
            )
        # The next run moves all weights, not only those that change.
        self.brings_all = True
        # If all weights stay on their ranks, no rank can be behind another, and
        # `_agree` needs no collective.
        self._anything_travels = plan.world > 1 and reduce_json(
            plan.travels, any, group
        )
        self._background: Future[tuple[Moved, float]] | None = None
        self._started = self._hides = False

    def run(self) -> ReshardStats:
        """Bring the destination up to date. Collective over the group.

        Raises:
            ReshardError: a rank died or stalled; names the rank and the weights.
        """
        self.start()
        return self.finish()

    def start(self, final: FinalParts | None = None) -> None:
        """Begin to move the next version.

        Args:
            final: for a background version, reports which parts of the source have their new values; the others are
                moved once they have. None: all have.
        """
        assert not self._started, "finish() the version that was started"
        begin = time.perf_counter()
        self._started = True
        self._transports = (
            self._all_transports if self.brings_all else self._later_transports
        )
        self._hides = final is not None
        if self._sent_weights is not None:
            # After a run that brought everything, every destination has the last
            # version.
            self._sent_weights.due = not self.brings_all
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
        """Wait until the started version is complete on every rank, and make it the destination's version.

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
            totals = self._agree(moved)
            if self._sent_weights is not None:
                self._sent_weights.keep()
        self.version += 1
        self.inconsistent = None
        self.brings_all, self._started, self._background = False, False, None
        own_seconds, last = (
            self._seconds + time.perf_counter() - begin,
            time.perf_counter() - arrived,
        )
        # A version in the background took at least as long as its moves, though the
        # main thread waited for less.
        seconds = max(own_seconds, self._seconds + moving + last)
        return ReshardStats(
            bytes_local=moved.local,
            bytes_sent=moved.sent,
            bytes_received=moved.received,
            seconds=seconds,
            num_messages=moved.messages,
            bytes_aliased=moved.aliased,
            version=self.version,
            hidden_seconds=seconds - own_seconds if self._hides else None,
            busiest_sent=totals.busiest_sent,
            busiest_whole=totals.busiest_whole,
            changed_fraction=totals.changed_fraction,
        )

    def _result_of(
        self, background: Future[tuple[Moved, float]]
    ) -> tuple[Moved, float]:
        """Wait for the background thread and return its `Moved`, and the seconds that its moves took.

        The time limit allows every part one wait for other ranks.
        """
        seconds = (
            None
            if self._timeout is None
            else self._timeout.total_seconds() * (self.num_parts + 1)
        )
        if not futures.wait([background], seconds).done:
            raise ReshardError(
                f"this rank's weights of version {self.version + 1} have not moved in the background within "
                f"{seconds:g} s, and it waited for no other rank: a copy on its device stalls."
            )
        return background.result()

    def source_changes(self) -> None:
        """Declare that the source's weights are about to change.

        Tensors that share storage change with the source, while copies stay behind. So
        the destination holds no complete version until the next run.
        """
        if self.inconsistent is None and any(alias.shares() for alias in self._aliases):
            self.inconsistent = (
                "part of it shares storage with the source, which has changed since "
                f"version {self.version}"
            )

    def destination_lost(self) -> None:
        """Declare that the destination's tensors have lost their contents: the next run moves all weights."""
        self.brings_all = True
        if self._sent_weights is not None:
            self._sent_weights.destination_drops = True

    def check_whole(self) -> None:
        """Refuse to use a destination that holds parts of two versions.

        Raises:
            ReshardError: gives the reason.
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
        """Mark the destination as inconsistent while it is written, and keep the reason if the block fails."""
        wanted = self.version + 1
        self.inconsistent = (
            f"version {wanted} is being written over version {self.version}"
        )
        try:
            yield
        except Exception as error:
            self._started, self._background = False, None
            # It is unknown which weights have arrived, so the next run brings all of
            # them.
            self.brings_all = True
            self.inconsistent = (
                f"the reshard from version {self.version} to {wanted} failed ({error})"
            )
            raise

    def _take_parts(
        self,
        job: TransferJob,
        background: dist.ProcessGroup,
        in_order: Sequence[Collection[str]],
    ) -> list[Transport]:
        """Make the transports of each background part. Aliases move nothing, so they are updated once at the end."""
        aliases = Alias.take(job)
        left = replace(job.plan, copies=tuple(job.copies))
        first = parts_of(job.plan.source_layout, in_order, self._group)
        named = frozenset().union(*first)
        plans = [
            *(left.only(part.__contains__) for part in first),
            left.only(lambda tensor: tensor not in named),
        ]
        # The aliases above cover all tensors that share storage. The others must be
        # copied, however their storage lies.
        job = replace(job, group=background, options=replace(job.options, alias=False))
        self._parts = [assign(replace(job, plan=plan)) for plan in plans]
        return [] if aliases is None else [aliases]

    @property
    def num_parts(self) -> int:
        """Number of parts of a background version, equal on every rank."""
        return len(self._parts)

    def _move(self, final: FinalParts) -> tuple[Moved, float]:
        """Move one part after the other, in the same order on every rank; return the
        sum of their moves, and the seconds.
        """
        moved, seconds = Moved(), 0.0
        for number, transports in enumerate(self._parts):
            final.wait_for(number, self._timeout)
            start = time.perf_counter()
            for transport in transports:
                transport.start(self.version + 1)
            moved = moved.plus(finished(transports))
            seconds += time.perf_counter() - start
        return moved, seconds

    def _agree(self, moved: Moved) -> RankTotals:
        """Check that every rank has reached the same version, by an all-gather of a few numbers; return their totals.

        Skipped if nothing travels.

        Args:
            moved: what this rank moved.
        """
        if not self._anything_travels:
            return RankTotals()
        device = device_of(self._group)
        own_numbers = [
            self.version + 1,
            moved.sent,
            moved.sent + moved.unsent,
            moved.compared,
            moved.changed,
        ]
        own_report = torch.tensor(own_numbers, device=device)
        reports = torch.empty(
            self._plan.world * len(own_numbers), dtype=torch.int64, device=device
        )
        patience = (
            None
            if self._timeout is None
            else self._timeout + timedelta(seconds=GRACE_SECONDS)
        )
        try:
            work = dist.all_gather_into_tensor(
                reports, own_report, group=self._group, async_op=True
            )
            wait(work, patience)
            wait_for_event(record_event(), patience)
        except (RuntimeError, TimeoutError) as error:
            state = "with its own part whole and waiting for the others"
            raise self._failures.blame(self.version + 1, -1, state, error) from error
        by_number = reports.view(self._plan.world, len(own_numbers)).T.tolist()
        versions, sent, whole, compared, changed = by_number
        if outdated := {
            rank: version
            for rank, version in enumerate(versions)
            if version != self.version + 1
        }:
            raise ReshardError(
                f"this rank brought the weights to version {self.version + 1}, others to {outdated}."
            )
        fraction = sum(changed) / sum(compared) if any(compared) else None
        return RankTotals(max(sent), max(whole), fraction)


def _joint_mode(modes: list[DeltaMode]) -> DeltaMode:
    """Return `reshard.delta` of all ranks: off if any rank must send or receive whole weights."""
    return "off" if "off" in modes else modes[0]


def assign(
    job: TransferJob, quantised: QuantisedDestination | None = None
) -> list[Transport]:
    """Assign every copy, send and receive of the job to a transport, in working order. Collective over the group.

    Raises:
        ReshardError: no transport supports some transfer.
    """
    last: list[Transport] = (
        [] if quantised is None else [QuantisedLanding.take(job, quantised, assign)]
    )
    transports = [
        transport for cls in TRANSPORTS if (transport := cls.take(job)) is not None
    ]
    transports += last
    if job.copies or any(hop.sends or hop.receives for hop in job.hops):
        raise ReshardError(
            f"no transport carries the weights between rank {job.plan.rank} and {sorted(job.sends)}."
        )
    return transports


def finished(transports: Sequence[Transport]) -> Moved:
    """Finish the transports, including their work on the device."""
    moved = Moved()
    for transport in transports:
        moved = moved.plus(transport.finish())
    if platform.is_cuda:
        torch.cuda.current_stream().synchronize()
    return moved


def parts_of(
    source: Layout, in_order: Sequence[Collection[str]], group: dist.ProcessGroup | None
) -> list[frozenset[str]]:
    """Return the weights of each part of a background version except the last, which
    has the rest. Collective over the group.

    A weight that several ranks hold belongs to the part in which the last of them gets
    its new values.

    Args:
        source: this rank's layout.
        in_order: as in `Resharder`.
    """
    # Ranks of different pipeline stages have different numbers of sets; all must agree
    # on the number of parts.
    number = (
        min(MAX_PARTS, reduce_json(len(in_order), max, group))
        if dist.is_initialized()
        else 0
    )
    # A single part could only begin after the last step, which is what a run without
    # background does.
    if number < 2:
        return []
    places = {local: at for at, names in enumerate(in_order) for local in names}
    last_part: dict[str, int] = {}
    for piece in source.pieces:
        at = places.get(source.stored_in(piece.local))
        part = number - 1 if at is None else at * number // len(in_order)
        last_part[piece.tensor] = max(part, last_part.get(piece.tensor, 0))

    def latest(reports: list[dict[str, int]]) -> list[list[str]]:
        parts = {
            name: max(report.get(name, 0) for report in reports)
            for name in set().union(*reports)
        }
        return [
            sorted(name for name, part in parts.items() if part == at)
            for at in range(number - 1)
        ]

    return [frozenset(names) for names in reduce_json(last_part, latest, group)]


class FinalParts:
    """Tracks which parts of a version have their new values on this rank.

        training thread                          reshard thread
        optimizer step 1, after(1)  ---------->  wait_for(0) returns, part 0 moves
        optimizer step 2, after(2)  ---------->  wait_for(1) returns, part 1 moves
        after(None)                 ---------->  all remaining parts move

    Args:
        num_parts: parts of the version.
        num_steps: steps in which the new values are made.
    """

    def __init__(self, num_parts: int, num_steps: int = 1) -> None:
        self._num_parts, self._num_steps = num_parts, num_steps
        self._condition, self._final = threading.Condition(), 0
        self._event: torch.cuda.Event | None = None

    def after(self, step: int | None) -> None:
        """Report that the first `step` steps (None: all of them) have been enqueued on the current stream."""
        event = record_event()
        with self._condition:
            self._final = (
                self._num_parts
                if step is None
                else step * self._num_parts // self._num_steps
            )
            self._event = event
            self._condition.notify_all()

    def wait_for(self, part: int, timeout: timedelta | None) -> None:
        """Wait until a part has its new values, on the device too.

        Raises:
            ReshardError: this took longer than `timeout`.
        """
        with self._condition:
            seconds = None if timeout is None else timeout.total_seconds()
            if not self._condition.wait_for(lambda: self._final > part, seconds):
                raise ReshardError(
                    f"an optimizer step has not made new weights within {seconds:g} s."
                )
            event = self._event
        wait_for_event(event, timeout)


Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Run `function` in a thread with its own CUDA stream, which waits only for events that the function waits for."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            # The current device is a property of the thread.
            platform.start()
            stream = torch.cuda.Stream() if platform.is_cuda else None
            with (
                torch.no_grad(),
                torch.cuda.stream(stream) if stream is not None else nullcontext(),
            ):
                future.set_result(function())
        except BaseException as error:
            # Raised again by future.result().
            future.set_exception(error)

    threading.Thread(target=run, name="reshard", daemon=True).start()
    return future
