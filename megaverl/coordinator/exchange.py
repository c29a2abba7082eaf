"""Reports to the coordinator, decisions back: two small messages for each role and update, whatever the model's size.

A role's first rank sends its report to the coordinator, and passes the decision on to the role's other ranks along a
tree. On the coordinator a thread for each role takes its reports, and the one that comes last decides; so a rank that
coordinates may have a role as well, and other roles need not wait until it comes to its own update.
"""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from megaverl.coordinator.decide import Participant, Progress, Rules, decide
from megaverl.coordinator.packed_message import PackedMessage
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
from megaverl.distributed.liveness import Liveness
from megaverl.distributed.worlds import Fabric
from megaverl.errors import TrainingStopped

# Kinds of messages between the same two ranks; the seat's number is added.
_REPORTS, _DECISIONS, _RELAYS = 0x100000, 0x200000, 0x300000
# How much longer a role waits for a decision than the coordinator for its reports, so that it hears who is missing.
GRACE = timedelta(seconds=10)
_SOURCE = re.compile(r"^\[[^\]]*:\d+\] ")
_FOREVER = timedelta(days=365)


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
        seats: Sequence[Participant],
        rules: Rules,
        *,
        progress: Progress | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.fabric, self.seats, self.liveness = fabric, tuple(seats), liveness
        self.bytes_sent = self.bytes_received = 0
        self._seconds, self._bytes_told = 0.0, 0
        self.rank = fabric.placement.coordinator
        self._report, self._decision = PackedMessage(REPORT_SIZE), PackedMessage(DECISION_SIZE)
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
        self._settle(self._decision)  # of the update before
        if self.fabric.rank == seat.rank:
            if report is None:
                raise ValueError(f"the first rank of {seat} reports")
            together = {role, *partners}
            bits = sum(1 << n for n, other in enumerate(self.seats) if other.role in together)
            decision = self._ask(number, replace(report, partners=bits))
        else:
            parent = tree_parent(self.fabric.world.ranks, seat.rank, self.fabric.rank)
            decision = self._hear(parent, _RELAYS + number)
        self._relay(number)
        self._seconds += max(0.0, time.perf_counter() - start - decision.waited)
        if decision.verdict is Verdict.STOP:
            self._settle(self._decision)
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
        self._settle(self._decision)
        for number, seat in enumerate(self.seats):
            if seat.rank == self.fabric.rank and self._service is None:
                self._send(self._report, GradientReport(0, 0, 0.0, 0.0, flags=Flag.DONE), _REPORTS + number)
                self._settle(self._report)
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
        if self._service is None:
            self._send(self._report, report, _REPORTS + number)
            decision = self._hear(self.rank, _DECISIONS + number)
            self._settle(self._report)  # it has long arrived
            return decision
        self._service.take(number, report)
        patience = self.fabric.timeout + GRACE
        try:
            decision = self._own[number].get(timeout=patience.total_seconds())
        except queue.Empty as error:
            raise self._lost(self.rank, f"no decision over {self.seats[number]}", error) from error
        self._decision.write(decision.numbers())
        return decision

    def _relay(self, number: int) -> None:
        """The decision that was heard, down a binary tree over the world's ranks, whose root is the seat's first."""
        for child in tree_children(self.fabric.world.ranks, self.seats[number].rank, self.fabric.rank):
            self._decision.send(self.fabric.control, child, _RELAYS + number)
            self.bytes_sent += self._decision.num_bytes

    def _send(self, letter: PackedMessage, report: GradientReport, tag: int) -> None:
        letter.write(report.numbers())
        letter.send(self.fabric.control, self.rank, tag)
        self.bytes_sent += letter.num_bytes

    def _settle(self, letter: PackedMessage) -> None:
        try:
            letter.settle(self.fabric.timeout)
        except RuntimeError as error:
            raise self._lost(letter.peer, "sending to it failed", error) from error

    def _hear(self, source: int, tag: int) -> Decision:
        try:
            numbers = self._decision.receive(self.fabric.control, source, tag, self.fabric.timeout + GRACE)
        except RuntimeError as error:
            raise self._lost(source, "nothing came from it", error) from error
        self.bytes_received += self._decision.num_bytes
        return Decision.of(numbers)

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
    """The coordinator itself: the thread that takes the last of the reports that belong together decides, and answers.

    One lock: a report is handled whole before the next.
    """

    def __init__(self, end: Coordinator, rules: Rules, progress: Progress) -> None:
        self._end, self._rules = end, rules
        self.progress = progress
        self.end: Decision | None = None  # that stopped the run
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._reports: dict[int, tuple[GradientReport, float]] = {}
        self._answers = [PackedMessage(DECISION_SIZE) for _ in end.seats]
        remote = [number for number, seat in enumerate(end.seats) if seat.rank != end.fabric.rank]
        self._listeners = [threading.Thread(target=self._listen, args=(number,), daemon=True) for number in remote]
        watch = threading.Thread(target=self._watch, name="coordinator", daemon=True)
        for thread in (*self._listeners, watch):
            thread.start()

    def close(self) -> None:
        """Wait until every other rank has said that it is done."""
        for thread in self._listeners:
            thread.join()
        self._closed.set()

    def take(self, number: int, report: GradientReport) -> None:
        """A report of a seat: decide over every set of partners that is complete with it."""
        with self._lock:
            self._reports[number] = (report, time.monotonic())
            if self.end is not None:
                self._refuse_all()
            while members := complete_set({n: report for n, (report, _) in self._reports.items()}):
                now = time.monotonic()
                waited = {n: now - self._reports[n][1] for n in members}
                found = {n: self._reports.pop(n)[0] for n in members}
                decisions, self.progress = decide(found, self._end.seats, self.progress, self._rules)
                for n, decision in decisions.items():
                    if decision.verdict is Verdict.STOP:
                        self.end = decision
                    self._tell(n, replace(decision, waited=waited[n]))

    def _listen(self, number: int) -> None:
        """Reports of one seat, for as long as it reports."""
        fabric, seat, letter = self._end.fabric, self._end.seats[number], PackedMessage(REPORT_SIZE)
        while True:
            try:
                report = GradientReport.of(letter.receive(fabric.control, seat.rank, _REPORTS + number, _FOREVER))
            except (RuntimeError, TrainingStopped) as error:
                with self._lock:
                    self._fail(number, cause_of(error))
                return
            self._end.bytes_received += letter.num_bytes
            if Flag.DONE in report.flags:
                return
            self.take(number, report)

    def _watch(self) -> None:
        """Whether a report waits too long for its partners'."""
        patience = self._end.fabric.timeout.total_seconds()
        while not self._closed.wait(min(1.0, patience / 10)):
            with self._lock:
                since = min((since for _, since in self._reports.values()), default=math.inf)
                if self.end is None and time.monotonic() - since > patience:
                    self._fail(self._missing(), "its partners have reported, and it has not")

    def _missing(self) -> int:
        bits = min(self._reports.values(), key=lambda one: one[1])[0].partners
        with_it = [n for n, (report, _) in self._reports.items() if report.partners == bits]
        return next(n for n in range(len(self._end.seats)) if bits >> n & 1 and n not in with_it)

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
        end, seat, letter = self._end, self._end.seats[number], self._answers[number]
        if seat.rank == end.fabric.rank:
            end._own[number].put(decision)
            return
        try:
            letter.settle(end.fabric.timeout)  # of the update before: it has reported since, and so has it
            letter.write(decision.numbers())
            letter.send(end.fabric.control, seat.rank, _DECISIONS + number)
            end.bytes_sent += letter.num_bytes
            if decision.verdict is Verdict.STOP:
                letter.settle(end.fabric.timeout)
        except RuntimeError as error:
            self._fail(number, cause_of(error))


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


def tree_children(ranks: Sequence[int], root: int, rank: int) -> list[int]:
    """The ranks that `rank` passes a message on to, of a binary tree over `ranks`."""
    order = [root, *(other for other in ranks if other != root)]
    place = order.index(rank)
    return order[2 * place + 1 : 2 * place + 3]


def tree_parent(ranks: Sequence[int], root: int, rank: int) -> int:
    """The rank that `rank` hears from; it is not the root."""
    order = [root, *(other for other in ranks if other != root)]
    return order[(order.index(rank) - 1) // 2]
