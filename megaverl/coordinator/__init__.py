"""One rank decides for the whole run over gradients, versions and checkpoints. See docs/placement.md.

Reports to the coordinator, decisions back: two small messages for each role and update, whatever the model's size.

A role's first rank sends its report to the coordinator, and passes the decision on to the role's other ranks along a
tree. On the coordinator a thread for each role takes its reports, and the one that comes last decides; so a rank that
coordinates may have a role as well, and other roles need not wait until it comes to its own update. Where all roles
share their ranks, each rank decides for itself (`LocalCoordinator`).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from megaverl.coordinator.decide import (
    STATISTICS,
    Decision,
    Flag,
    GradientReport,
    Participant,
    Progress,
    Reason,
    Rules,
    Verdict,
    decide,
)
from megaverl.distributed.collectives import children, parent
from megaverl.distributed.failures import cause_of
from megaverl.distributed.liveness import Liveness
from megaverl.distributed.worlds import Channel, Fabric, PendingSends
from megaverl.errors import TrainingStopped

__all__ = [
    "Coordinator",
    "CoordinatorClient",
    "GradientReport",
    "LocalCoordinator",
    "Participant",
    "Progress",
    "Rules",
]


# How much longer a role waits for a decision than the coordinator for its reports, so that it hears who is missing.
GRACE = timedelta(seconds=10)
_FOREVER = timedelta(days=365)
# What the messages between two ranks are called, with the participant.
_REPORT, _DECISION, _RELAYED = "the report of", "the decision over", "the decision, passed on, over"


class Coordinator:
    """One rank's end of it; made on every rank of the job, with the same arguments.

    Args:
        participants: who reports; a role's islands each do.
        progress: of the run so far; used on the coordinator's rank.
        liveness: names the rank at fault where one is lost.
    """

    def __init__(
        self,
        fabric: Fabric,
        participants: Sequence[Participant],
        rules: Rules,
        *,
        progress: Progress | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.fabric, self.participants, self.liveness = fabric, tuple(participants), liveness
        self.bytes_sent = self.bytes_received = 0
        self._seconds, self._bytes_counted = 0.0, 0
        self.rank = fabric.placement.coordinator
        self._sent = PendingSends()
        self._server = Server(self, rules, progress or Progress()) if fabric.rank == self.rank else None

    @property
    def progress(self) -> Progress:
        """Where the run stands; on the coordinator's rank."""
        assert self._server is not None, "only the coordinator knows"
        return self._server.progress

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """The decision over this role's update; every rank of the role takes part.

        Args:
            report: on the role's first rank (of its island), which gives it; others may leave it out.
            partners: roles that decide together with this one; they name this one likewise.

        Raises:
            TrainingStopped: the run ends here, by a rule or because a rank is lost; says why, and who.
        """
        start = time.perf_counter()
        number = self._number_of(role)
        reporter, ranks = self.participants[number], self.fabric.world.ranks
        self._settle()  # of the update before
        if self.fabric.rank == reporter.rank:
            if report is None:
                raise ValueError(f"the first rank of {reporter} reports")
            together = {role, *partners}
            bits = sum(1 << n for n, other in enumerate(self.participants) if other.role in together)
            decision = self._ask(number, replace(report, partners=bits))
        else:
            decision = self._hear(tree_parent(ranks, reporter.rank, self.fabric.rank), f"{_RELAYED} {reporter}")
        for child in tree_children(ranks, reporter.rank, self.fabric.rank):
            self._sent.add(self.send(child, f"{_RELAYED} {reporter}", decision.numbers()))
        self._seconds += max(0.0, time.perf_counter() - start - decision.waited)
        if decision.verdict is Verdict.STOP:
            self._settle()
            raise TrainingStopped(self._why(decision))
        return decision

    def costs(self) -> dict[str, float]:
        """What decisions have cost this rank since this was last asked: milliseconds, without the wait for partners,
        and bytes that it sent and got."""
        seconds, self._seconds = self._seconds, 0.0
        before, self._bytes_counted = self._bytes_counted, self.bytes_sent + self.bytes_received
        return {"coordinator/exchange_ms": seconds * 1e3, "coordinator/bytes": float(self._bytes_counted - before)}

    def close(self) -> None:
        """The first ranks say that no report will follow; every rank of the job calls it at the end.

        The coordinator returns when all have said so, and until then serves: one that is nothing else calls it first.

        Raises:
            TrainingStopped: on the coordinator, if the run was stopped: the same as on the roles.
        """
        self._settle()
        if self._server is not None:
            self._server.close()
            if self._server.end is not None:
                raise TrainingStopped(self._why(self._server.end))
            return
        done = GradientReport(0, 0, 0.0, 0.0, flags=Flag.DONE).numbers()
        for reporter in self.participants:
            if reporter.rank == self.fabric.rank:
                self._sent.add(self.send(self.rank, f"{_REPORT} {reporter}", done))
        self._settle()

    def send(self, peer: int, name: str, numbers: Sequence[float]) -> PendingSends:
        """Begin to send numbers to one rank."""
        data = torch.tensor(numbers, dtype=torch.float64)
        self.bytes_sent += data.nbytes
        return Channel(self.fabric, name).send_to([peer], data)

    def receive(self, peer: int, name: str, patience: timedelta) -> list[float]:
        """Numbers from one rank, when they are here."""
        (data,) = Channel(self.fabric, name, patience).receive_from(peer)
        self.bytes_received += data.nbytes
        return data.view(torch.float64).tolist()

    def last_heard(self, rank: int) -> str:
        """What is known of a rank, to be added to what it has failed to do."""
        heard = self.liveness.last_heard(rank) if self.liveness else ""
        return f"; when last heard of, {heard}" if heard else ""

    def _number_of(self, role: str) -> int:
        """Of the participant in whose role, or island of it, this rank is."""
        for number, participant in enumerate(self.participants):
            if participant.role == role and participant.rank in self.fabric.world.ranks:
                return number
        raise ValueError(f"nobody reports on {role} in the world {self.fabric.world.name}")

    def _ask(self, number: int, report: GradientReport) -> Decision:
        reporter = self.participants[number]
        if self._server is None:
            self._sent.add(self.send(self.rank, f"{_REPORT} {reporter}", report.numbers()))
            return self._hear(self.rank, f"{_DECISION} {reporter}")
        self._server.take(number, report)
        try:
            return self._server.own[number].get(timeout=(self.fabric.timeout + GRACE).total_seconds())
        except queue.Empty as error:
            text = f"{self.fabric.describe(self.rank)} died or stalled: no decision over {reporter}"
            raise self._stopped(text + self.last_heard(self.rank)) from error

    def _hear(self, source: int, name: str) -> Decision:
        try:
            return Decision.of(self.receive(source, name, GRACE))
        except TrainingStopped as error:
            raise self._stopped(f"{error}{self.last_heard(source)}") from error

    def _settle(self) -> None:
        """Until all that was sent has left."""
        try:
            self._sent.wait()
        except TrainingStopped as error:
            raise self._stopped(str(error)) from error

    def _why(self, decision: Decision) -> str:
        if decision.reason is Reason.LOST:
            lost = self.participants[decision.participant]
            text = f"{self.fabric.describe(lost.rank)} died or stalled: no report of {lost} came"
            return str(self._stopped(text))
        who = f"{self.participants[decision.participant]}: " if decision.participant >= 0 else ""
        return f"update {decision.step} is not made, and the run ends: {who}{decision.reason.text}."

    def _stopped(self, text: str) -> TrainingStopped:
        """What the liveness, which sees more than one message, finds to be the reason; else `text`."""
        seen = self.liveness
        return TrainingStopped(seen.settle(seen.timeouts.until_found, text) if seen is not None else text)


class Server:
    """The coordinator itself: the thread that takes the last of the reports that belong together decides, and answers.

    One lock: a report is handled whole before the next.

    Attributes:
        own: decisions for participants on the coordinator's own rank.
        end: the decision that stopped the run.
    """

    def __init__(self, end: Coordinator, rules: Rules, progress: Progress) -> None:
        self._end, self._rules = end, rules
        self.progress = progress
        self.end: Decision | None = None
        self.own: dict[int, queue.Queue[Decision]] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._reports: dict[int, tuple[GradientReport, float]] = {}
        self._answers = [PendingSends() for _ in end.participants]
        self._listeners: list[threading.Thread] = []
        for number, participant in enumerate(end.participants):
            if participant.rank == end.fabric.rank:
                self.own[number] = queue.Queue()
            else:
                self._listeners.append(threading.Thread(target=self._listen, args=(number,), daemon=True))
        watch = threading.Thread(target=self._watch, name="coordinator", daemon=True)
        for thread in (*self._listeners, watch):
            thread.start()

    def close(self) -> None:
        """Wait until every other rank has said that it is done."""
        for thread in self._listeners:
            thread.join()
        self._closed.set()

    def take(self, number: int, report: GradientReport) -> None:
        """A participant's report: decide over every set of partners that is complete with it."""
        with self._lock:
            self._reports[number] = (report, time.monotonic())
            if self.end is not None:
                self._refuse_all()
            while members := complete_set({n: report for n, (report, _) in self._reports.items()}):
                now = time.monotonic()
                waited = {n: now - self._reports[n][1] for n in members}
                found = {n: self._reports.pop(n)[0] for n in members}
                decisions, self.progress = decide(found, self._end.participants, self.progress, self._rules)
                for n in sorted(decisions, key=self.own.__contains__):  # its own last, when all others are sent
                    if decisions[n].verdict is Verdict.STOP:
                        self.end = decisions[n]
                    self._answer(n, replace(decisions[n], waited=waited[n]))

    def _listen(self, number: int) -> None:
        """Reports of one participant, for as long as it reports."""
        reporter = self._end.participants[number]
        while True:
            try:
                numbers = self._end.receive(reporter.rank, f"{_REPORT} {reporter}", _FOREVER)
                report = GradientReport.of(numbers)
            except TrainingStopped as error:
                with self._lock:
                    self._fail(number, cause_of(error.__cause__ or error))
                return
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
        return next(n for n in range(len(self._end.participants)) if bits >> n & 1 and n not in with_it)

    def _fail(self, lost: int, why: str) -> None:
        """A participant will not report any more: all that have reported, and all that will, hear so."""
        if self.end is None:
            end, reporter = self._end, self._end.participants[lost]
            # the liveness sees more than this thread: what the rank, and those of its world, were doing
            if end.liveness is not None and not end.liveness.wait(end.liveness.timeouts.until_found):
                end.liveness.report_failure(
                    f"{end.fabric.describe(reporter.rank)} died or stalled: no report of {reporter} came ({why})"
                    f"{end.last_heard(reporter.rank)}"
                )
            self.end = Decision(0, Verdict.STOP, Reason.LOST, lost)
        self._refuse_all()

    def _refuse_all(self) -> None:
        assert self.end is not None
        for number in list(self._reports):
            report, _ = self._reports.pop(number)
            self._answer(number, replace(self.end, step=report.step))

    def _answer(self, number: int, decision: Decision) -> None:
        reporter = self._end.participants[number]
        if number in self.own:
            self.own[number].put(decision)
            return
        try:
            self._answers[number].wait()  # of the update before: the participant has reported since, and so has it
            self._answers[number] = self._end.send(reporter.rank, f"{_DECISION} {reporter}", decision.numbers())
            if decision.verdict is Verdict.STOP:
                self._answers[number].wait()
        except TrainingStopped as error:
            self._fail(number, cause_of(error.__cause__ or error))


def complete_set(reports: Mapping[int, GradientReport]) -> list[int]:
    """The participants whose reports name each other, all of which have come; none yet: empty.

    One may still be at an update that it is alone in, while one that will decide with it is further.
    """
    for report in (reports[number] for number in sorted(reports)):
        members = [n for n in range(report.partners.bit_length()) if report.partners >> n & 1]
        if all(n in reports and reports[n].partners == report.partners for n in members):
            return members
    return []


def tree_children(ranks: Sequence[int], root: int, rank: int) -> list[int]:
    """The ranks that `rank` passes a message on to, of the tree of messages over `ranks`."""
    order = [root, *(other for other in ranks if other != root)]
    return [order[place] for place in children(order.index(rank), len(order))]


def tree_parent(ranks: Sequence[int], root: int, rank: int) -> int:
    """The rank that `rank` hears from; it is not the root."""
    order = [root, *(other for other in ranks if other != root)]
    return order[parent(order.index(rank))]


class LocalCoordinator:
    """In a run of one world every rank has every report, and decides by itself, to the same end.

    Args:
        roles: that are trained.
    """

    def __init__(self, roles: Sequence[str], rules: Rules, progress: Progress | None = None) -> None:
        self._participants = tuple(Participant(role, number) for number, role in enumerate(roles))
        self._rules, self.progress = rules, progress or Progress()

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """As `Coordinator.decide`, without a message.

        Raises:
            TrainingStopped: the run ends here; says why.
        """
        assert report is not None, "every rank has a report"
        number = next(n for n, one in enumerate(self._participants) if one.role == role)
        decisions, self.progress = decide({number: report}, self._participants, self.progress, self._rules)
        decision = decisions[number]
        if decision.verdict is Verdict.STOP:
            raise TrainingStopped(
                f"update {decision.step} is not made, and the run ends: {role}: {decision.reason.text}."
            )
        return decision


class CoordinatorClient:
    """Of one role. Called by every rank of the role for each of its updates, with the same numbers.

    Args:
        progress: of the run so far.

    Attributes:
        partners: roles whose update of this moment is decided on together with this one's.
        share: of the tokens of an update, those that this island trains on.
        oldest, newest: of the samples that are trained on; see `GradientReport`.

    The schedule may stand elsewhere than the number of applied updates says: a run that was resumed with another number
    of updates per step has moved it. The distance stays the same for the rest of the run.
    """

    def __init__(
        self,
        coordinator: Coordinator | LocalCoordinator,
        role: str,
        progress: Progress,
        schedule_step: int | None = None,
    ) -> None:
        """Create the client of `role`.

        Args:
            schedule_step: where the role's schedule stands; None: where the number of applied updates says.
        """
        self._coordinator, self._role = coordinator, role
        self._step, self._version = progress.steps.get(role, 0), progress.versions.get(role, 0)
        self._schedule_offset = 0 if schedule_step is None else schedule_step - self._version
        self.partners: tuple[str, ...] = ()
        self.share = 1.0
        self.oldest, self.newest = 0, 0

    def __call__(
        self, sums: Mapping[str, Tensor], norm: float, tokens: float, *, overflow: bool, max_norm: float
    ) -> Decision:
        """What to do with a gradient.

        Args:
            sums: the loss's statistics, of which those that the coordinator keeps are count, sum and sum of squares.
            norm: of the whole gradient, before clipping; of a loss divided by `tokens`.
            overflow: loss scaling found it out of range.
            max_norm: to which it is to be clipped; 0: not at all.

        Raises:
            TrainingStopped: the run ends here; says why.
        """
        statistics = {}
        for name in STATISTICS:
            if name in sums and sums[name].numel() == 3:
                count, total, squares = sums[name].tolist()
                statistics[name] = (float(count), float(total), float(squares))
        report = GradientReport(
            step=self._step,
            version=self._version,
            tokens=tokens * self.share,
            squared_norm=0.0 if overflow else norm * norm,
            divided_by=tokens,
            oldest=self.oldest,
            newest=self.newest,
            flags=Flag.OVERFLOW if overflow else Flag(0),
            max_norm=max_norm,
            statistics=statistics,
        )
        decision = self._coordinator.decide(self._role, report, self.partners)
        self._step, self._version = self._step + 1, decision.version
        if self._schedule_offset:
            decision = replace(decision, schedule_step=decision.schedule_step + self._schedule_offset)
        return decision
