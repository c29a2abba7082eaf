"""Reports to the coordinator, decisions back: two small messages for each role and update, whatever the model's size.

A role's first rank sends its report to the coordinator, and passes the decision on to the role's other ranks along a
tree. On the coordinator a thread for each role takes the reports, and one decides; so a rank that coordinates may have
a role as well, and other roles need not wait until it comes to its own update.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.coordinator.decide import Progress, Rules, Seat, decide
from megaverl.coordinator.liveness import Liveness
from megaverl.coordinator.reports import (
    DECISION_SIZE,
    REASONS,
    REPORT_SIZE,
    Decision,
    Flag,
    GradientReport,
    Reason,
    Verdict,
)
from megaverl.errors import TrainingStopped
from megaverl.fabric import Fabric

# Kinds of messages between the same two ranks; the seat's number is added.
_REPORTS, _DECISIONS, _RELAYS = 0x100000, 0x200000, 0x300000
# How much longer a role waits for a decision than the coordinator for its reports, so that it hears who is missing.
GRACE = timedelta(seconds=10)
_SOURCE = re.compile(r"^\[[^\]]*:\d+\] ")
_FOREVER = timedelta(days=365)


class Arrived(NamedTuple):
    """A report of a seat, or why none will come."""

    seat: int
    report: GradientReport | None
    why: str = ""


class Coordinator:
    """One rank's end of it; made on every rank of the job, with the same arguments.

    Args:
        seats: who reports; a role's islands are seats of their own.
        progress: of the run so far; used on the coordinator's rank.
        liveness: names the rank at fault where one is lost.
    """

    def __init__(
        self,
        fabric: Fabric,
        seats: Sequence[Seat],
        rules: Rules,
        *,
        progress: Progress | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.fabric, self.seats, self.liveness = fabric, tuple(seats), liveness
        self.bytes_sent = self.bytes_received = 0
        self._seconds, self._bytes_told = 0.0, 0
        self.rank = fabric.placement.coordinator
        self._own: dict[int, queue.Queue[Decision]] = {}
        self._service: Service | None = None
        if fabric.rank == self.rank:
            self._own = {n: queue.Queue() for n, seat in enumerate(self.seats) if seat.rank == fabric.rank}
            self._service = Service(self, rules, progress or Progress())

    @property
    def progress(self) -> Progress:
        """Where the run stands; on the coordinator's rank."""
        assert self._service is not None, "only the coordinator knows"
        return self._service.progress

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """The decision over this role's update; every rank of the role takes part.

        Args:
            report: on the role's first rank (of its island), which gives it; others may leave it out.
            partners: roles that decide together with this one; they name this one likewise.

        Raises:
            TrainingStopped: the run ends here, by a rule or because a rank is lost; says why, and who.
        """
        start = time.perf_counter()
        number = self._seat_of(role)
        seat = self.seats[number]
        if self.fabric.rank == seat.rank:
            if report is None:
                raise ValueError(f"the first rank of {seat} reports")
            together = {role, *partners}
            bits = sum(1 << n for n, other in enumerate(self.seats) if other.role in together)
            decision = self._ask(number, _with_partners(report, bits))
        else:
            decision = Decision.unpack(self._wait(torch.zeros(DECISION_SIZE, dtype=torch.float64), number))
        self._relay(number, decision)
        self._seconds += max(0.0, time.perf_counter() - start - decision.waited)
        if decision.verdict is Verdict.STOP:
            raise TrainingStopped(self._why(decision))
        return decision

    def costs(self) -> dict[str, float]:
        """What decisions have cost this rank since this was last asked: milliseconds, without the wait for partners,
        and bytes that it sent and got."""
        seconds, self._seconds = self._seconds, 0.0
        before, self._bytes_told = self._bytes_told, self.bytes_sent + self.bytes_received
        return {"coordinator/exchange_ms": seconds * 1e3, "coordinator/bytes": float(self._bytes_told - before)}

    def close(self) -> None:
        """The first ranks say that no report will follow; every rank of the job calls it at the end.

        The coordinator returns when all have said so, and until then serves: one that is nothing else calls it first.

        Raises:
            TrainingStopped: on the coordinator, if the run was stopped: the same as on the roles.
        """
        for number, seat in enumerate(self.seats):
            if seat.rank == self.fabric.rank and self._service is None:
                self._send(GradientReport(0, 0, 0.0, 0.0, flags=Flag.DONE).pack(), self.rank, _REPORTS + number)
        if self._service is not None:
            self._service.close()
            if self._service.end is not None:
                raise TrainingStopped(self._why(self._service.end))

    def _seat_of(self, role: str) -> int:
        """The seat of this rank in a role: its island's."""
        for number, seat in enumerate(self.seats):
            if seat.role == role and seat.rank in self.fabric.world.ranks:
                return number
        raise ValueError(f"no seat of {role} is in the world {self.fabric.world.name}")

    def _ask(self, number: int, report: GradientReport) -> Decision:
        if self._service is not None:
            self._service.arrived.put(Arrived(number, report))
            patience = self.fabric.timeout + GRACE
            try:
                return self._own[number].get(timeout=patience.total_seconds())
            except queue.Empty as error:
                raise self._lost(self.rank, f"no decision over {self.seats[number]}", error) from error
        self._send(report.pack(), self.rank, _REPORTS + number)
        return Decision.unpack(self._receive(self.rank, _DECISIONS + number, DECISION_SIZE))

    def _relay(self, number: int, decision: Decision) -> None:
        """Down a binary tree over the world's ranks, whose root is the seat's first rank."""
        for child in tree_children(self.fabric.world.ranks, self.seats[number].rank, self.fabric.rank):
            self._send(decision.pack(), child, _RELAYS + number)

    def _wait(self, into: Tensor, number: int) -> Tensor:
        parent = tree_parent(self.fabric.world.ranks, self.seats[number].rank, self.fabric.rank)
        return self._receive(parent, _RELAYS + number, into.numel())

    def _send(self, data: Tensor, to: int, tag: int) -> None:
        try:
            self._post(data, to, tag)
        except RuntimeError as error:
            raise self._lost(to, "sending to it failed", error) from error

    def _post(self, data: Tensor, to: int, tag: int) -> None:
        work = dist.isend(data, group=self.fabric.control, group_dst=to, tag=tag)
        assert work is not None
        work.wait(self.fabric.timeout)
        self.bytes_sent += data.numel() * data.element_size()

    def _receive(self, source: int, tag: int, count: int) -> Tensor:
        data = torch.zeros(count, dtype=torch.float64)
        try:
            work = dist.irecv(data, group=self.fabric.control, group_src=source, tag=tag)
            assert work is not None
            work.wait(self.fabric.timeout + GRACE)
        except RuntimeError as error:
            raise self._lost(source, "nothing came from it", error) from error
        self.bytes_received += data.numel() * data.element_size()
        return data

    def _lost(self, peer: int, what: str, error: Exception) -> TrainingStopped:
        text = f"{self.fabric.describe(peer)} died or stalled: {what} ({cause_of(error)}){self._last_heard(peer)}"
        return TrainingStopped(self.liveness.settle(_hearing(self.liveness), text) if self.liveness else text)

    def _last_heard(self, rank: int) -> str:
        heard = self.liveness.last_heard(rank) if self.liveness else ""
        return f"; when last heard of, {heard}" if heard else ""

    def _why(self, decision: Decision) -> str:
        if decision.reason is Reason.LOST:
            seat = self.seats[decision.seat]
            text = f"{self.fabric.describe(seat.rank)} died or stalled: no report of {seat} came"
            return self.liveness.settle(_hearing(self.liveness), text) if self.liveness else text
        who = f"{self.seats[decision.seat]}: " if decision.seat >= 0 else ""
        return f"update {decision.step} is not made, and the run ends: {who}{REASONS[decision.reason]}."


class Service:
    """The coordinator itself: takes reports, decides when all partners have come, and answers."""

    def __init__(self, end: Coordinator, rules: Rules, progress: Progress) -> None:
        self._end, self._rules = end, rules
        self.progress = progress
        self.arrived: queue.Queue[Arrived] = queue.Queue()
        self._reports: dict[int, tuple[GradientReport, float]] = {}
        self.end: Decision | None = None  # that stopped the run
        remote = [number for number, seat in enumerate(end.seats) if seat.rank != end.fabric.rank]
        self._threads = [threading.Thread(target=self._listen, args=(number,), daemon=True) for number in remote]
        self._threads.append(threading.Thread(target=self._serve, name="coordinator", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until every other rank has said that it is done."""
        for thread in self._threads[:-1]:
            thread.join()
        self.arrived.put(Arrived(-1, None))  # behind all that came before
        self._threads[-1].join()

    def _listen(self, number: int) -> None:
        """Reports of one seat, for as long as it reports."""
        fabric, seat = self._end.fabric, self._end.seats[number]
        while True:
            data = torch.zeros(REPORT_SIZE, dtype=torch.float64)
            try:
                work = dist.irecv(data, group=fabric.control, group_src=seat.rank, tag=_REPORTS + number)
                assert work is not None
                work.wait(_FOREVER)
                report = GradientReport.unpack(data)
            except (RuntimeError, TrainingStopped) as error:
                self.arrived.put(Arrived(number, None, cause_of(error)))
                return
            self._end.bytes_received += data.numel() * data.element_size()
            if Flag.DONE in report.flags:
                return
            self.arrived.put(Arrived(number, report))

    def _serve(self) -> None:
        while True:
            try:
                seat, report, why = self.arrived.get(timeout=self._patience())
            except queue.Empty:
                self._fail(self._missing(), "its partners have reported, and it has not")
                continue
            if report is not None:
                self._reports[seat] = (report, time.monotonic())
                self._answer()
            elif seat >= 0:
                self._fail(seat, why)
            else:
                return

    def _patience(self) -> float | None:
        """Seconds until the oldest report has waited too long for its partners."""
        if not self._reports or self.end is not None:
            return None
        oldest = min(since for _, since in self._reports.values())
        return max(0.0, oldest + self._end.fabric.timeout.total_seconds() - time.monotonic())

    def _missing(self) -> int:
        bits = min(self._reports.values(), key=lambda one: one[1])[0].partners
        with_it = [n for n, (report, _) in self._reports.items() if report.partners == bits]
        return next(n for n in range(len(self._end.seats)) if bits >> n & 1 and n not in with_it)

    def _answer(self) -> None:
        """Decide over every set of partners that is complete."""
        if self.end is not None:
            self._refuse_all()
            return
        while members := complete_set({n: report for n, (report, _) in self._reports.items()}):
            waited = {n: time.monotonic() - self._reports[n][1] for n in members}
            found = {n: self._reports.pop(n)[0] for n in members}
            decisions, self.progress = decide(found, self._end.seats, self.progress, self._rules)
            for n, decision in decisions.items():
                if decision.verdict is Verdict.STOP:
                    self.end = decision
                self._tell(n, replace(decision, waited=waited[n]))

    def _fail(self, lost: int, why: str) -> None:
        """A seat will not report any more: all that have reported, and all that will, are told so."""
        if self.end is None:
            end = self._end
            seat = end.seats[lost]
            # the liveness sees more than this thread: what the rank, and those of its world, were doing
            if end.liveness is not None and not end.liveness.wait(_hearing(end.liveness)):
                end.liveness.accuse(
                    f"{end.fabric.describe(seat.rank)} died or stalled: no report of {seat} came ({why})"
                    f"{end._last_heard(seat.rank)}"
                )
            self.end = Decision(0, Verdict.STOP, Reason.LOST, lost)
        self._refuse_all()

    def _refuse_all(self) -> None:
        assert self.end is not None
        for number in list(self._reports):
            report, _ = self._reports.pop(number)
            self._tell(number, replace(self.end, step=report.step))

    def _tell(self, number: int, decision: Decision) -> None:
        seat = self._end.seats[number]
        if seat.rank == self._end.fabric.rank:
            self._end._own[number].put(decision)
            return
        try:
            self._end._post(decision.pack(), seat.rank, _DECISIONS + number)
        except RuntimeError as error:
            self.arrived.put(Arrived(number, None, cause_of(error)))


def cause_of(error: Exception) -> str:
    """What a transport says, in short: without the place in its source, and the causes that it guesses."""
    said = str(error).splitlines()[0] if str(error) else "no answer"
    return _SOURCE.sub("", said).partition(". ")[0][:160]


def complete_set(reports: Mapping[int, GradientReport]) -> list[int]:
    """The seats of reports that name each other, all of which have come; none yet: empty.

    A seat may still be at an update that it is alone in, while one that will decide with it is further.
    """
    for report in (reports[number] for number in sorted(reports)):
        members = [n for n in range(report.partners.bit_length()) if report.partners >> n & 1]
        if all(n in reports and reports[n].partners == report.partners for n in members):
            return members
    return []


def _hearing(liveness: Liveness) -> float:
    """Seconds within which a rank that is gone is found to be: two beats to miss it, two to tell."""
    return 4 * liveness.patience.interval + 0.5


def _with_partners(report: GradientReport, bits: int) -> GradientReport:
    return replace(report, partners=bits)


def tree_children(ranks: Sequence[int], root: int, rank: int) -> list[int]:
    """The ranks that `rank` passes a message on to, of a binary tree over `ranks`."""
    order = [root, *(other for other in ranks if other != root)]
    place = order.index(rank)
    return order[2 * place + 1 : 2 * place + 3]


def tree_parent(ranks: Sequence[int], root: int, rank: int) -> int:
    """The rank that `rank` hears from; it is not the root."""
    order = [root, *(other for other in ranks if other != root)]
    return order[(order.index(rank) - 1) // 2]
