"""One rank decides about the gradients, versions and checkpoints of the whole run. See docs/placement.md.

Each role sends a report to the coordinator and receives a decision for every update: two small messages, whatever the
model's size.

    role's first rank                 coordinator                        role's other ranks
    GradientReport   ------------->   a thread per role takes it
                                      the last report of a set of
                                      partners triggers decide()
    Decision         <-------------
    forwards it along a tree   ---------------------------------------->   Decision

Since threads serve the reports, a rank can be the coordinator and have a role as well, and other roles need not wait
for its own update. If all roles share their ranks, each rank decides locally (`LocalCoordinator`).
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


# A role waits this much longer for a decision than the coordinator waits for reports, so that it learns who is missing.
GRACE = timedelta(seconds=10)
_FOREVER = timedelta(days=365)
# Names of the messages between two ranks; the participant's name is appended.
_REPORT, _DECISION, _RELAYED = "the report of", "the decision over", "the decision, passed on, over"


class Coordinator:
    """One rank's connection to the coordinator. Every rank of the job creates one, with the same arguments.

    Args:
        participants: the reporting roles; with islands, each island of a role.
        rules: rules of the decisions.
        progress: progress of the run so far; used on the coordinator's rank.
        liveness: finds the rank at fault if one is lost.

    Example:
        coordinator = Coordinator(fabric, [Participant("actor", 0)], Rules())
        decision = coordinator.decide("actor", report)  # on every rank of the actor
        coordinator.close()  # on every rank of the job
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
        """Progress of the run. Available only on the coordinator's rank."""
        assert self._server is not None, "only the coordinator knows"
        return self._server.progress

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """Return the decision about this role's update. Collective over the role's ranks.

        Args:
            report: the gradient report; needed only on the first rank of the role or island.
            partners: roles whose updates are decided together with this one. They must name this role too.

        Raises:
            TrainingStopped: the run ends here, because of a rule or a lost rank. The message names both.
            ValueError: the first rank has no report.
        """
        start = time.perf_counter()
        number = self._number_of(role)
        reporter, ranks = self.participants[number], self.fabric.world.ranks
        self._settle()  # messages of the previous update
        # Only the reporting rank talks to the coordinator. The others receive the decision along a tree rooted at it.
        if self.fabric.rank == reporter.rank:
            if report is None:
                raise ValueError(f"only the first rank of {reporter} may report")
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
        """Return the costs of decisions on this rank since the last call.

        They are milliseconds, without the wait for partners, and bytes sent and received.
        """
        seconds, self._seconds = self._seconds, 0.0
        before, self._bytes_counted = self._bytes_counted, self.bytes_sent + self.bytes_received
        return {"coordinator/exchange_ms": seconds * 1e3, "coordinator/bytes": float(self._bytes_counted - before)}

    def close(self) -> None:
        """Announce that no report follows. Every rank of the job calls this at the end.

        On the coordinator it returns when all participants have announced this, and serves them until then. A rank with
        roles on the coordinator therefore calls it after its last update, and a rank without roles calls it first.

        Raises:
            TrainingStopped: on the coordinator, if the run was stopped; the same error as on the roles.
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
        """Start sending numbers to one rank, as float64."""
        data = torch.tensor(numbers, dtype=torch.float64)
        self.bytes_sent += data.nbytes
        return Channel(self.fabric, name).send_to([peer], data)

    def receive(self, peer: int, name: str, patience: timedelta) -> list[float]:
        """Wait for numbers from one rank.

        Args:
            patience: added to the fabric's timeout.

        Raises:
            TrainingStopped: the rank died or stalled.
        """
        (data,) = Channel(self.fabric, name, patience).receive_from(peer)
        self.bytes_received += data.nbytes
        return data.view(torch.float64).tolist()

    def last_heard(self, rank: int) -> str:
        """Return the last known state of a rank, as the end of an error message."""
        heard = self.liveness.last_heard(rank) if self.liveness else ""
        return f"; when last heard of, {heard}" if heard else ""

    def _number_of(self, role: str) -> int:
        """Return the number of the participant that this rank belongs to.

        Raises:
            ValueError: no participant of the role is in this rank's world.
        """
        for number, participant in enumerate(self.participants):
            if participant.role == role and participant.rank in self.fabric.world.ranks:
                return number
        raise ValueError(f"no rank of the role group {self.fabric.world.name} reports for {role}")

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
        """Wait until all messages are sent."""
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
        """Return an error with liveness' failure reason, which rests on more than one message, or with `text`."""
        seen = self.liveness
        return TrainingStopped(seen.settle(seen.timeouts.until_found, text) if seen is not None else text)


class Server:
    """The coordinator's own state. The thread that takes the last report of a set of partners decides and answers.

    A single lock ensures that a report is fully handled before the next one.

    Attributes:
        progress: progress of the run.
        own: queues of decisions for participants on the coordinator's rank.
        end: the decision that stopped the run, or None.
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
        """Wait until every participant on other ranks has announced its last report."""
        for thread in self._listeners:
            thread.join()
        self._closed.set()

    def take(self, number: int, report: GradientReport) -> None:
        """Store a participant's report, and decide about every set of partners that is now complete."""
        with self._lock:
            self._reports[number] = (report, time.monotonic())
            if self.end is not None:
                self._refuse_all()
            while members := complete_set({n: report for n, (report, _) in self._reports.items()}):
                now = time.monotonic()
                waited = {n: now - self._reports[n][1] for n in members}
                # Remove the set before the next iteration, which looks for another complete set.
                found = {n: self._reports.pop(n)[0] for n in members}
                decisions, self.progress = decide(found, self._end.participants, self.progress, self._rules)
                # Answer the coordinator's own participants last, after all messages are on their way.
                for n in sorted(decisions, key=self.own.__contains__):
                    if decisions[n].verdict is Verdict.STOP:
                        self.end = decisions[n]
                    self._answer(n, replace(decisions[n], waited=waited[n]))

    def _listen(self, number: int) -> None:
        """Take the reports of one participant until its last one."""
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
        """Stop the run if a report waits for its partners' reports for longer than the timeout."""
        patience = self._end.fabric.timeout.total_seconds()
        while not self._closed.wait(min(1.0, patience / 10)):
            with self._lock:
                since = min((since for _, since in self._reports.values()), default=math.inf)
                if self.end is None and time.monotonic() - since > patience:
                    self._fail(self._missing(), "its partners have reported, and it has not")

    def _missing(self) -> int:
        bits = min(self._reports.values(), key=lambda one: one[1])[0].partners
        # The report that has waited longest names the partners; one of them has not reported.
        with_it = [n for n, (report, _) in self._reports.items() if report.partners == bits]
        return next(n for n in range(len(self._end.participants)) if bits >> n & 1 and n not in with_it)

    def _fail(self, lost: int, why: str) -> None:
        """Stop the run, because a participant will not report again.

        All reports that wait, and all later ones, are answered with the stop.
        """
        if self.end is None:
            end, reporter = self._end, self._end.participants[lost]
            # Liveness sees more than this thread: the stages of that rank, and of the others of its world.
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
            # The previous answer has been received, because the participant has reported since. So this does not block.
            self._answers[number].wait()
            self._answers[number] = self._end.send(reporter.rank, f"{_DECISION} {reporter}", decision.numbers())
            if decision.verdict is Verdict.STOP:
                self._answers[number].wait()
        except TrainingStopped as error:
            self._fail(number, cause_of(error.__cause__ or error))


def complete_set(reports: Mapping[int, GradientReport]) -> list[int]:
    """Return the participants of a set of partners that have all reported, or an empty list.

    All reports of a set must name the same partners, because one participant may still be at an update that it takes
    alone while a later partner of it is ahead.
    """
    for report in (reports[number] for number in sorted(reports)):
        members = [n for n in range(report.partners.bit_length()) if report.partners >> n & 1]
        if all(n in reports and reports[n].partners == report.partners for n in members):
            return members
    return []


def tree_children(ranks: Sequence[int], root: int, rank: int) -> list[int]:
    """Return the ranks that `rank` forwards a message to, in the tree over `ranks`."""
    order = [root, *(other for other in ranks if other != root)]
    return [order[place] for place in children(order.index(rank), len(order))]


def tree_parent(ranks: Sequence[int], root: int, rank: int) -> int:
    """Return the rank that `rank`, which is not the root, receives a message from."""
    order = [root, *(other for other in ranks if other != root)]
    return order[parent(order.index(rank))]


class LocalCoordinator:
    """Coordinator of a run with a single world. Every rank has all reports, and computes the same decision by itself.

    Args:
        roles: the trained roles.
        rules: rules of the decisions.
        progress: progress of the run so far.
    """

    def __init__(self, roles: Sequence[str], rules: Rules, progress: Progress | None = None) -> None:
        self._participants = tuple(Participant(role, number) for number, role in enumerate(roles))
        self._rules, self.progress = rules, progress or Progress()

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """Return the same decision as `Coordinator.decide`, without messages.

        Raises:
            TrainingStopped: a rule ends the run; the message names it.
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
    """Client of one role. Every rank of the role calls it for each of its updates, with the same numbers.

    The schedule may differ from the number of applied updates, because a run that was resumed with another number of
    updates per step has moved it. The difference stays constant for the rest of the run.

    Args:
        progress: progress of the run so far.

    Attributes:
        partners: roles whose current updates are decided together with this role's.
        share: fraction of an update's tokens that this island trains on.
        oldest, newest: weight versions of the samples; see `GradientReport`.
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
            schedule_step: current step of the role's schedule. None: the number of applied updates.
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
        """Return the decision about a gradient. Collective over the role's ranks.

        Args:
            sums: statistics of the loss. Those in `STATISTICS` are reported, each as count, sum and sum of squares.
            norm: of the whole gradient before clipping, for a loss divided by `tokens`.
            tokens: number of tokens of the update.
            overflow: loss scaling found a value out of range.
            max_norm: norm to which the gradient is clipped; 0: no clipping.

        Raises:
            TrainingStopped: the run ends here; the message gives the reason.
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
