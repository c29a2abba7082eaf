"""Finished samples are sent while others are still being written: from the engines to reward, actor and critic.

The first rank of each engine sends what is finished in parts; whoever takes the step's rollouts puts the parts in their
places, and may work on each as it comes. When all are there, they go on to the ranks that read them. In the end each
has the batch that it would have had at once, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.data.held_rows import Moving, as_ragged, receive_rows, send_rows
from megaverl.data.prefix_packing import SequenceLengths, prompt_numbers
from megaverl.dataflow.carrier import Carrier, redistribute, scatter_rows
from megaverl.dataflow.plan import Edge
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.distributed.worlds import Fabric, PendingSends, receive_json, send_json
from megaverl.errors import DataError
from megaverl.sharding.rows import Move

STREAMED = "rollouts"
BY_NUMBER = frozenset({"reward"})  # operators that work on samples as they come
# A rank that sends waits until such a part of its samples is finished: small where each is worked on as it comes.
PARTS, PARTS_THAT_WAIT = 16, 4

# Called with the numbers of samples and with these.
Each = Callable[[Sequence[int], RolloutBatch], None]


class StreamingCarrier(Carrier):
    """A carrier whose edges of `rollouts` are sent in parts; see `Carrier` for the rest.

    Args:
        speakers: the engines' first ranks, which have the samples; none: everything goes whole.
        samples_per_step: how many samples a step has.
        ahead: rollouts are steps ahead of training, which then finds its samples finished: an engine's go together.
    """

    def __init__(
        self,
        fabric: Fabric,
        known: Sequence[type],
        selective: Collection[str],
        speakers: Sequence[int],
        samples_per_step: int,
        ahead: bool = False,
    ) -> None:
        super().__init__(fabric, known, selective)
        self._parts_that_wait = 1 if ahead else PARTS_THAT_WAIT
        self.speakers, self._count = tuple(speakers), samples_per_step
        self._outgoing: dict[Edge, Outgoing] = {}
        self._arrived: dict[Edge, RolloutBatch] = {}

    def follow(self, edges: Iterable[Edge]) -> None:
        """The edges of the flow that is run."""
        if self.fabric.rank in self.speakers:
            mine = [edge for edge in edges if self.streams(edge)]
            self._outgoing = {edge: Outgoing(self.fabric, edge, self._rows_by_rank(edge)) for edge in mine}

    def streams(self, edge: Edge) -> bool:
        """Whether an edge's value goes in parts."""
        return edge.value == STREAMED and bool(self.speakers)

    def begin(self) -> None:
        """A step's samples will be given as they are finished."""
        for edge, outgoing in self._outgoing.items():
            parts = PARTS if BY_NUMBER.issuperset(edge.takers) else self._parts_that_wait
            outgoing.begin(max(1, self._count // (parts * len(self.speakers))))

    def give(self, rows: Sequence[int], part: RolloutBatch) -> None:
        """These samples are finished; on the first rank of the engine that wrote them."""
        for outgoing in self._outgoing.values():
            outgoing.give(rows, part)

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        if not self.streams(edge):
            super().send(edge, values)
        elif edge in self._outgoing:
            place = self.speakers.index(self.fabric.rank)
            self._outgoing[edge].finish(values[edge.value], range(place, self._count, len(self.speakers)))

    def arrive(
        self, edge: Edge, span: Callable[[str], AbstractContextManager[Any]], each: Each = lambda rows, part: None
    ) -> None:
        """Take in a step's samples as they come; `receive` then has the whole.

        Args:
            span: opened with "wait" around waiting.
            each: called with every part that comes, of the samples that are scattered to this rank.

        Raises:
            TrainingStopped: an engine's rank did not send its part in time, by number and role.
            DataError: samples are missing.
        """
        parts: list[tuple[list[int], RaggedBatch]] = []
        known: dict[int, tuple[int, int, int]] = {}  # of each sample, its lengths and prompt
        waiting = list(self.speakers)
        while waiting:
            for sender in tuple(waiting):
                with span("wait"):
                    head: dict[str, Any] = receive_json(self.fabric, _name(edge), sender)
                    moving = _moving(edge, head["rows"], sender, self.fabric.rank, receives=True)
                    ragged = receive_rows(self.fabric, moving) if head["holds"] else None
                if ragged is not None:
                    parts.append((head["rows"], ragged))
                    each(head["rows"], RolloutBatch(ragged.tensors, ragged.columns))
                if head["lengths"] is not None:
                    known |= {row: (prompt, response, number) for row, prompt, response, number in head["lengths"]}
                    waiting.remove(sender)
        lengths = lengths_from(known)
        place = {row: number for number, row in enumerate(sorted(row for rows, _ in parts for row in rows))}
        whole = merge(len(place), [([place[row] for row in rows], part, range(len(rows))) for rows, part in parts])
        batch = RolloutBatch(whole.tensors, whole.columns)
        if self._is_scattered(edge):
            with span("wait"):
                batch = redistribute(self.fabric, _name(edge), batch, lengths, edge.dest, self._reads_of(edge))
        self._arrived[edge] = batch

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        return self._arrived.pop(edge) if edge in self._arrived else super().receive(edge, values)

    def settle(self) -> None:
        super().settle()
        for outgoing in self._outgoing.values():
            outgoing.sent.wait()

    def _rows_by_rank(self, edge: Edge) -> dict[int, frozenset[int]]:
        if not self._is_scattered(edge):
            return dict.fromkeys(edge.dest, frozenset(range(self._count)))
        return {rank: frozenset(rows) for rank, rows in scatter_rows(self._count, edge.dest).items()}


class Outgoing:
    """What one rank sends along one edge, step by step.

    Args:
        wanted: by receiver, the samples that go to it.

    Attributes:
        sent: messages that may not have left yet.
    """

    def __init__(self, fabric: Fabric, edge: Edge, wanted: Mapping[int, frozenset[int]]) -> None:
        self.fabric, self.edge, self.wanted = fabric, edge, wanted
        self.sent = PendingSends()
        self._least: int | None = None
        self._rows: list[int] = []  # of this step, given so far
        self._kept: list[tuple[Sequence[int], RolloutBatch]] = []  # given, and not sent

    def begin(self, least: int) -> None:
        """A new step, whose samples go when `least` of them are finished."""
        self._least = least

    def give(self, rows: Sequence[int], part: RolloutBatch) -> None:
        """These samples are finished."""
        self._rows += rows
        self._kept.append((rows, part))
        if self._least is not None and sum(len(one) for one, _ in self._kept) >= self._least:
            self._send_kept()

    def finish(self, batch: RolloutBatch, share: Sequence[int]) -> None:
        """The step is over: send what was kept, and say that this was all.

        Args:
            batch: all samples of the step, on every rank that sends.
            share: those that this rank sends where none were given one by one.
        """
        if self._least is None and share:
            self.give(share, batch.select(share))
        known = (batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), prompt_numbers(batch))
        # who gets nothing makes an empty batch, and must know of what
        self._kept.append(([], batch.select([])))
        self._send_kept([[row, *(column[row] for column in known)] for row in self._rows])
        self._least, self._rows = None, []

    def _send_kept(self, lengths: list[list[int]] | None = None) -> None:
        """What was given and not sent; with the lengths of all, where it is the last."""
        self.sent.forget_done()
        rows = [row for some, _ in self._kept for row in some]
        part = RolloutBatch.concat([batch for _, batch in self._kept])
        self._kept = []
        for dest, wanted in self.wanted.items():
            places = [place for place, row in enumerate(rows) if row in wanted]
            if places or lengths is not None:
                own = part.select(places) if places or not wanted else None
                self._post(dest, [rows[place] for place in places], own, lengths)

    def _post(self, dest: int, rows: list[int], part: RolloutBatch | None, lengths: Any) -> None:
        head = {"rows": rows, "holds": part is not None, "lengths": lengths}
        self.sent.add(send_json(self.fabric, _name(self.edge), dest, head))
        if part is not None:
            moving = _moving(self.edge, rows, self.fabric.rank, dest, receives=False)
            self.sent.add(send_rows(self.fabric, moving, as_ragged(part.tensors, part, part.columns)))


def lengths_from(known: Mapping[int, tuple[int, int, int]]) -> SequenceLengths:
    """What is known of all samples, from what came of each.

    Raises:
        DataError: a sample is missing.
    """
    count = max(known, default=-1) + 1
    if missing := sorted(set(range(count)) - known.keys()):
        raise DataError(f"{STREAMED}: of {count} samples {missing} did not come")
    return SequenceLengths(*([known[row][part] for row in range(count)] for part in range(3)))


def _name(edge: Edge) -> str:
    return f"{edge.value}, by samples"


def _moving(edge: Edge, rows: Sequence[int], source: int, dest: int, *, receives: bool) -> Moving:
    held, wanted = ((), tuple(rows)) if receives else (tuple(rows), ())
    return Moving(_name(edge), held, wanted, (Move(source, dest, tuple(rows)),), receives)
