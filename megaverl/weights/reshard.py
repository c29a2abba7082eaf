"""Resharding: a plan, the tensors on both sides, and the transports that carry it out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import reduce_json, together
from megaverl.distributed.failures import GRACE_SECONDS, Failures, record_event, wait, wait_for_event
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.sharding.plan import Plan
from megaverl.sharding.proof import check_plan
from megaverl.sharding.weight import listed
from megaverl.weights.transfer import (
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
from megaverl.weights.transports.cuda_ipc import CudaIpc
from megaverl.weights.transports.ipc import CrossMemory
from megaverl.weights.transports.local import Alias, LocalCopy
from megaverl.weights.transports.point_to_point import PointToPoint
from megaverl.weights.transports.quantised import QuantisedDestination, QuantisedLanding
from megaverl.weights.transports.shared_folder import SharedFolder

# Each takes what it can carry and leaves the rest to the next.
TRANSPORTS: tuple[TransportKind, ...] = (Alias, LocalCopy, CrossMemory, CudaIpc, SharedFolder, PointToPoint)

OVERLAPS_QUANTISED = (
    "reshard.overlap gathers a second set of the engine's weights in floating point, and a quantised engine "
    "(rollout.vllm.quantization) takes them part by part. Leave one of the two out."
)


@dataclass(frozen=True)
class ReshardStats:
    """What one run moved on this rank.

    Attributes:
        bytes_local: copied within the rank.
        bytes_sent, bytes_received: to and from other ranks.
        seconds: that this rank spent in the run; with overlap, in the background and at the boundary.
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


class Resharder:
    """Moves one set of weights into another's layout, in place, as often as asked.

    Making one is collective over `group`, and so is every run. Between `start` and `finish` the source's tensors
    must stay as they are, and the destination holds neither version whole, unless `overlap` moves the new one
    into a set of its own. After a run that failed the destination counts as inconsistent until a whole one has passed.

    Args:
        plan: this rank's plan; checked here.
        source_tensors: local name -> tensor, all of `plan.source_layout` and no others; their storage is looked
            up anew at every run, so that offloading may move them in between.
        dest_tensors: the same for the destination.
        group: the ranks of the plan, in order; None: all.
        options: how weights may be moved. With `alias`, destination tensors that share the source's storage change when
            the source does: call `source_changes` before.
        overlap: move in the background, into a second set of the destination's tensors; nothing is aliased.
        changing: the weights that the source changes or `options.never_alias` speaks of; the others travel until they
            have arrived whole, and then no more. None: all.
        quantised: the weights that the destination holds in 8 bits. Of them, `dest_tensors` has the shape of the
            layout and the dtype in which they travel, on the meta device: their place is in here.

    Raises:
        ReshardError: a plan that is not exact, parameters that do not fit their layout, dtypes that do not fit,
            too little memory for a second set. Nothing has moved then.
    """

    def __init__(
        self,
        plan: Plan,
        source_tensors: Mapping[str, torch.Tensor],
        dest_tensors: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        options: TransportOptions | None = None,
        *,
        overlap: bool = False,
        changing: Collection[str] | None = None,
        quantised: QuantisedDestination | None = None,
    ) -> None:
        self.version = 0
        self.inconsistent: str | None = "no version has been moved yet"
        self._plan, self._group = plan, group
        options = options or TransportOptions()
        if overlap:
            options = replace(options, alias=False)
            if quantised is not None:
                raise ReshardError(OVERLAPS_QUANTISED)
        self._timeout = options.timeout
        with together(group) if plan.world > 1 else nullcontext():
            check_plan(plan)
            check_tensors(plan.source_layout, source_tensors, "the source", ReshardError, exact=True)
            check_tensors(plan.dest_layout, dest_tensors, "the destination", ReshardError, exact=True)
        source, dest = dict(source_tensors), dict(dest_tensors)
        sides = {"source": (plan.source_layout, source), "destination": (plan.dest_layout, dest)}
        dtypes = agree_on_dtypes(sides, group)
        self._buffer: DoubleBuffer | None = None
        moving = group
        if overlap:
            with together(group) if plan.world > 1 else nullcontext():
                self._buffer = DoubleBuffer(dest, options.may_rebind)
            dest = self._buffer.tensors
            if plan.world > 1:
                # a group of its own: what moves in the background must not meet the main thread's collectives
                ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
                everyone = len(ranks) == dist.get_world_size()
                moving = dist.new_group(ranks, timeout=options.timeout, use_local_synchronization=not everyone)
        self._failures = Failures(group, plan.rank, options.timeout)
        wire, converts = wire_dtypes(dtypes), converting(dtypes)
        views = viewed(plan.source_layout, source), viewed(plan.dest_layout, dest)
        self._job = TransferJob(plan, *views, wire, converts, moving, options, self._failures)
        self._all_transports = self._transports = assign(self._job, quantised)
        self._aliases = [transport for transport in self._transports if isinstance(transport, Alias)]
        self._later_transports = self._transports
        if changing is not None:
            changing = frozenset(changing)
            if quantised is not None:
                quantised = quantised.changing(changing)
                changing |= quantised.tensors
            later = replace(self._job, plan=plan.only(changing.__contains__))
            self._later_transports = assign(later, quantised)
        # the second set of an overlapped run is another one every time
        self._to_arrive = 2 if overlap and options.may_rebind else 1
        travels = bool(plan.sends or plan.receives)
        self._anything_travels = plan.world > 1 and reduce_json(travels, any, group)
        self._background: Future[tuple[Moved, float]] | None = None
        self._started = False

    def run(self) -> ReshardStats:
        """Bring the destination up to date. Every rank of the group takes part.

        Raises:
            ReshardError: a rank died or stalled, by number and with the weights concerned.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Set the next version going; with `overlap` it moves by itself, and the destination stays whole."""
        assert not self._started, "finish() the version that was started"
        begin = time.perf_counter()
        self._started = True
        self._transports = self._all_transports if self._to_arrive else self._later_transports
        if self._buffer is not None:
            self._background = in_background(self._move)
        else:
            with torch.no_grad(), self._writing():
                for transport in self._transports:
                    transport.start(self.version + 1)
        self._seconds = time.perf_counter() - begin

    def finish(self) -> ReshardStats:
        """Wait until the started version is whole on every rank, and make it the destination's.

        Raises:
            ReshardError: as `run`.
        """
        assert self._started, "start() comes first"
        begin = time.perf_counter()
        with torch.no_grad(), self._writing():
            if self._background is not None and self._buffer is not None:
                moved, seconds = self._background.result()
                self._seconds += seconds
                begin = time.perf_counter()
                self._agree()
                self._buffer.swap()
            else:
                moved = self._finish_transports()
                self._agree()
        self.version += 1
        self.inconsistent = None
        self._to_arrive = max(0, self._to_arrive - 1)
        self._started, self._background = False, None
        return ReshardStats(
            bytes_local=moved.local,
            bytes_sent=moved.sent,
            bytes_received=moved.received,
            seconds=self._seconds + time.perf_counter() - begin,
            num_messages=moved.messages,
            bytes_aliased=moved.aliased,
            version=self.version,
        )

    def source_changes(self) -> None:
        """To be called before the source's weights change: what shares storage with them changes as well, and
        what does not stays behind, so the destination holds no version whole until the next run."""
        if self.inconsistent is None and any(alias.shares() for alias in self._aliases):
            self.inconsistent = (
                f"part of it shares storage with the source, which has changed since version {self.version}"
            )

    def destination_lost(self) -> None:
        """Its tensors hold nothing any more: the next run brings all weights, those that do not change as well."""
        self._to_arrive = max(1, self._to_arrive)

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
        if self._buffer is None:
            self.inconsistent = f"version {wanted} is being written over version {self.version}"
        try:
            yield
        except Exception as error:
            self._started, self._background = False, None
            self._to_arrive = max(1, self._to_arrive)
            if self._buffer is None:
                self.inconsistent = f"the reshard from version {self.version} to {wanted} failed ({error})"
            raise

    def _move(self) -> Moved:
        for transport in self._transports:
            transport.start(self.version + 1)
        return self._finish_transports()

    def _finish_transports(self) -> Moved:
        moved = Moved()
        for transport in self._transports:
            moved = moved.plus(transport.finish())
        if platform.is_cuda:
            torch.cuda.current_stream().synchronize()
        return moved

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


# Left free beside the second set: allocations of the generation that goes on meanwhile.
HEADROOM = 1.05


class DoubleBuffer:
    """`reshard.overlap`: tensors like the destination's, padding included, and the swap at the boundary.

    Args:
        may_rebind: the destination's tensors may take other storage; else the swap is a copy on the device.

    Raises:
        ReshardError: there is no memory for a second set.
    """

    def __init__(self, dest: Mapping[str, torch.Tensor], may_rebind: bool) -> None:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in dest.values())
        free = platform.free_memory()
        if needed * HEADROOM > free:
            raise ReshardError(
                f"reshard.overlap needs {needed:,} bytes for a second set of the engine's weights, and {free:,} are "
                "free on this rank. Set reshard.overlap=false, or lower rollout.vllm.gpu_memory_utilization."
            )
        self._dest, self._may_rebind = dest, may_rebind
        self.tensors = {name: tensor.detach().clone() for name, tensor in dest.items()}

    def swap(self) -> None:
        """The staged version becomes the destination's."""
        for name, staged in self.tensors.items():
            target = self._dest[name]
            if self._may_rebind:
                target.data, staged.data = staged.data, target.data
            else:
                target.detach().copy_(staged)


Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[tuple[Result, float]]:
    """Run `function` in a thread, on a stream behind what the current one has been given: its result, and seconds."""
    future: Future[tuple[Result, float]] = Future()
    stream = torch.cuda.Stream() if platform.is_cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        start = time.perf_counter()
        try:
            platform.start()  # the current device belongs to the thread
            with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
                result = function()
                if stream is not None:
                    stream.synchronize()
            future.set_result((result, time.perf_counter() - start))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="reshard", daemon=True).start()
    return future
