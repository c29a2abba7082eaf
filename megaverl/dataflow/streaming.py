"""Finished samples are sent while others are still being written: from the engines to reward, actor and critic.

The first rank of each engine sends what is finished in parts; whoever takes the step's rollouts puts the parts in their
places, and may work on each as it comes. When all are there, they go on to the ranks that read them. In the end each
has the batch that it would have had at once, to the bit.

A forward pass is one of all ranks of a replica, on micro-batches that follow from the lengths of all that is scored.
Who is to score before the last sample is there takes shares of the step's groups, by number, each when it is finished:
which sample is read beside which then follows from the samples, and not from the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import rows_of_rank
from megaverl.data.held_rows import Moving, as_ragged, receive_rows, send_rows
from megaverl.data.prefix_packing import SequenceLengths, prompt_numbers
from megaverl.dataflow.carrier import Carrier, Reads, redistribute, scatter_rows
from megaverl.dataflow.plan import Edge
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.distributed.worlds import Fabric, PendingSends, receive_json, send_json
from megaverl.errors import DataError
from megaverl.sharding.rows import Move

STREAMED = "rollouts"
BY_NUMBER = frozenset({"reward"})  # operators that work on samples as they come
# A rank that sends waits until such a part of its samples is finished: small where each is worked on as it comes.
PARTS, PARTS_THAT_WAIT = 16, 4
_NEXT = f"{STREAMED}, the share that is finished"

# Called with the numbers of samples and with these.
Each = Callable[[Sequence[int], RolloutBatch], None]
# Opened with a name, around what has it.
Span = Callable[[str], AbstractContextManager[Any]]
# Called with the names of operators, the numbers of a share's samples and a batch of these.
Scored = Callable[[Sequence[str], range, RolloutBatch], None]


@dataclass(frozen=True)
class Shares:
    """Shares of a step's groups, and the operators that score one after the other.

    Attributes:
        rows: the samples of each.
    """

    rows: tuple[range, ...]
    operators: frozenset[str]

    @classmethod
    def of_groups(cls, count: int, groups: int, group_size: int, operators: Collection[str]) -> Shares:
        """So many shares, of as many groups up to one."""
        parts = (rows_of_rank(groups, number, count) for number in range(count))
        return cls(tuple(range(g.start * group_size, g.stop * group_size) for g in parts), frozenset(operators))


class StreamingCarrier(Carrier):
    """A carrier whose edges of `rollouts` are sent in parts; see `Carrier` for the rest.

    Args:
        speakers: the engines' first ranks, which have the samples; none: everything goes whole.
        samples_per_step: how many samples a step has.
        ahead: rollouts are steps ahead of training, which then finds its samples finished: an engine's go together.
        shares: what scores in shares; None: everything waits for the whole batch.

    Attributes:
        share_reads: of operators that score in shares, the samples of one that a rank reads.
    """

    def __init__(
        self,
        fabric: Fabric,
        known: Sequence[type],
        selective: Collection[str],
        speakers: Sequence[int],
        samples_per_step: int,
        ahead: bool = False,
        shares: Shares | None = None,
    ) -> None:
        super().__init__(fabric, known, selective)
        self.share_reads: Mapping[str, Reads] = {}
        self._shares = shares
        self._parts_that_wait = 1 if ahead else PARTS_THAT_WAIT
        self.speakers, self._count = tuple(speakers), samples_per_step
        self._outgoing: dict[Edge, Outgoing | OutgoingShares] = {}
        self._arrived: dict[Edge, RolloutBatch] = {}
        self._told = PendingSends()

    def follow(self, edges: Iterable[Edge]) -> None:
        """The edges of the flow that is run."""
        if self.fabric.rank in self.speakers:
            self._outgoing = {edge: self._outgoing_of(edge) for edge in edges if self.streams(edge)}

    def streams(self, edge: Edge) -> bool:
        """Whether an edge's value goes in parts: samples as the engines give them, and no operator after these."""
        return edge.value == STREAMED and edge.maker == "rollout" and bool(self.speakers)

    def in_shares(self, edge: Edge) -> tuple[str, ...]:
        """The operators that score an edge's samples in shares."""
        shared = self._shares.operators if self._shares is not None and self.streams(edge) else frozenset[str]()
        return tuple(name for name in edge.takers if name in shared)

    def begin(self, rows: Sequence[int]) -> None:
        """A step's samples will be given as they are finished; on the first rank of the engine that writes these."""
        for edge, outgoing in self._outgoing.items():
            if isinstance(outgoing, OutgoingShares):
                outgoing.begin(rows)
            else:
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
        self,
        edge: Edge,
        span: Span,
        each: Each = lambda rows, part: None,
        scored: Scored = lambda names, rows, share: None,
    ) -> None:
        """Take in a step's samples as they come; `receive` then has the whole.

        Args:
            span: opened with "wait" around waiting.
            each: called with every part that comes, of the samples that are scattered to this rank.
            scored: called with every share when all of it is there; on all ranks of the edge in the same order.

        Raises:
            TrainingStopped: an engine's rank did not send its part in time, by number and role.
            DataError: samples are missing.
        """
        parts: list[tuple[list[int], RaggedBatch]] = []
        known: dict[int, tuple[int, int, int]] = {}  # of each sample, its lengths and prompt
        if (operators := self.in_shares(edge)) and self._shares is not None:
            for number in self._finished(edge, len(self._shares.rows), span):
                rows = self._shares.rows[number]
                some, share = self._share_of(edge, number, rows, span, each)
                parts += some
                scored(operators, rows, share)
        waiting = list(self.speakers)
        while waiting:
            for sender in tuple(waiting):
                head, ragged = self._take(_name(edge), sender, span)
                if ragged is not None:
                    parts.append((head["rows"], ragged))
                    each(head["rows"], RolloutBatch(ragged.tensors, ragged.columns))
                if head["lengths"] is not None:
                    known |= {row: (prompt, response, number) for row, prompt, response, number in head["lengths"]}
                    waiting.remove(sender)
        lengths, batch = lengths_from(known), _joined(parts)
        if self._is_scattered(edge):
            with span("wait"):
                batch = redistribute(self.fabric, _name(edge), batch, lengths, edge.dest, self._reads_of(edge))
        self._arrived[edge] = batch

    def _take(self, name: str, sender: int, span: Span) -> tuple[dict[str, Any], RaggedBatch | None]:
        """What an engine's first rank has sent next under a name: what it says of samples, and those for this rank."""
        with span("wait"):
            head: dict[str, Any] = receive_json(self.fabric, name, sender)
            moving = _moving(name, head["rows"], sender, self.fabric.rank, receives=True)
            return head, receive_rows(self.fabric, moving) if head["holds"] else None

    def _finished(self, edge: Edge, count: int, span: Span) -> Iterator[int]:
        """The numbers of the shares, each when all engines are done with it. The edge's first rank hears of that from
        each engine, and tells the others which is next."""
        first, *others = edge.dest
        if self.fabric.rank != first:
            for _ in range(count):
                with span("wait"):
                    number = receive_json(self.fabric, _NEXT, first)
                yield number
            return
        heard, times = SimpleQueue[int | Exception](), Counter[int]()

        def hear(sender: int) -> None:
            try:
                for _ in range(count):
                    heard.put(receive_json(self.fabric, _NEXT, sender))
            except Exception as error:  # whoever waits for the queue is to hear of it
                heard.put(error)

        for sender in self.speakers:
            Thread(target=hear, args=(sender,), daemon=True).start()
        while times.total() < count * len(self.speakers):
            with span("wait"):
                found = heard.get()
            if isinstance(found, Exception):
                raise found
            times[found] += 1
            if times[found] == len(self.speakers):
                self._told.forget_done()
                for rank in others:
                    self._told.add(send_json(self.fabric, _NEXT, rank, found))
                yield found

    def _share_of(
        self, edge: Edge, number: int, rows: range, span: Span, each: Each
    ) -> tuple[list[tuple[list[int], RaggedBatch]], RolloutBatch]:
        """One share, when its groups are finished: what landed here of it; and a batch of what is read here."""
        name, parts, known = _name(edge, number), [], dict[int, tuple[int, int, int]]()
        for sender in self.speakers:
            head, ragged = self._take(name, sender, span)
            known |= {row - rows.start: tuple(what) for row, *what in head["lengths"]}
            if ragged is not None:
                parts.append((head["rows"], ragged))
            if ragged is not None and head["rows"]:
                each(head["rows"], RolloutBatch(ragged.tensors, ragged.columns))
        lengths, batch = lengths_from(known), _joined(parts)
        if self._is_scattered(edge):
            here = scatter_rows(self._count, edge.dest)
            landed = {rank: [row - rows.start for row in mine if row in rows] for rank, mine in here.items()}
            reads = Reads.together(self.share_reads[operator] for operator in self.in_shares(edge))
            with span("wait"):
                batch = redistribute(self.fabric, name, batch, lengths, edge.dest, reads, landed)
        # said, also where a rank has all of the tokens: so all plan alike
        return parts, batch.with_(prompt_numbers=torch.tensor(lengths.prompts, dtype=torch.int64))

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        return self._arrived.pop(edge) if edge in self._arrived else super().receive(edge, values)

    def settle(self) -> None:
        super().settle()
        for outgoing in self._outgoing.values():
            outgoing.sent.wait()
        self._told.wait()

    def _outgoing_of(self, edge: Edge) -> Outgoing | OutgoingShares:
        wanted = self._rows_by_rank(edge)
        if self._shares is not None and self.in_shares(edge):
            return OutgoingShares(self.fabric, edge, wanted, self._shares.rows)
        return Outgoing(self.fabric, edge, wanted)

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
        # who gets nothing makes an empty batch, and must know of what
        self._kept.append(([], batch.select([])))
        self._send_kept(_known(self._rows, self._rows, batch, prompt_numbers(batch)))
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
                self.sent.add(
                    _post(self.fabric, _name(self.edge), dest, [rows[place] for place in places], own, lengths)
                )


class OutgoingShares:
    """The same in shares: what this rank has of one goes when that is finished, in one message to each receiver. All
    receivers hear the lengths of all of its samples.

    Args:
        wanted: by receiver, the samples that go to it. shares: the samples of each.
    """

    def __init__(
        self, fabric: Fabric, edge: Edge, wanted: Mapping[int, frozenset[int]], shares: Sequence[range]
    ) -> None:
        self.fabric, self.edge, self.wanted, self._shares = fabric, edge, wanted, shares
        self.sent = PendingSends()
        self._mine: Sequence[int] | None = None  # samples of this rank, in a step
        self._kept: list[list[tuple[int, RolloutBatch]]] = []  # by share: given, and not sent

    def begin(self, rows: Sequence[int]) -> None:
        """A new step, of which these samples will be given."""
        self._mine, self._kept = rows, [[] for _ in self._shares]
        for number in range(len(self._shares)):
            self._send_if_whole(number)  # of some it may have none

    def give(self, rows: Sequence[int], part: RolloutBatch) -> None:
        """These samples are finished."""
        for number, share in enumerate(self._shares):
            if found := [(row, part.select([place])) for place, row in enumerate(rows) if row in share]:
                self._kept[number] += found
                self._send_if_whole(number)

    def finish(self, batch: RolloutBatch, share: Sequence[int]) -> None:
        """The step is over: say which prompts are the same. The arguments are those of `Outgoing.finish`."""
        if self._mine is None:
            self.begin(share)
            self.give(share, batch.select(share))
        assert self._mine is not None
        lengths = _known(self._mine, self._mine, batch, prompt_numbers(batch))
        for dest in self.wanted:
            self.sent.add(_post(self.fabric, _name(self.edge), dest, [], None, lengths))
        self._mine = None

    def _send_if_whole(self, number: int) -> None:
        share, kept, name = self._shares[number], self._kept[number], _name(self.edge, number)
        if len(kept) < sum(row in share for row in self._mine or ()):
            return
        self.sent.forget_done()
        rows = [row for row, _ in kept]
        part = RolloutBatch.concat([sample for _, sample in kept]) if kept else None
        lengths = [] if part is None else _known(rows, range(len(rows)), part, part.group_ids.tolist())
        self.sent.add(send_json(self.fabric, _NEXT, self.edge.dest[0], number))
        for dest, wanted in self.wanted.items():
            places = [place for place, row in enumerate(rows) if row in wanted]
            own = None if part is None else part.select(places)  # of no samples it says what they would be
            self.sent.add(_post(self.fabric, name, dest, [rows[place] for place in places], own, lengths))


def _known(rows: Sequence[int], places: Sequence[int], batch: RolloutBatch, prompts: Sequence[int]) -> list[list[int]]:
    """What is said of samples, by their numbers and their places in a batch: number, lengths and prompt of each."""
    prompt, response = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    return [[row, prompt[at], response[at], prompts[at]] for row, at in zip(rows, places, strict=True)]


def _post(
    fabric: Fabric, name: str, dest: int, rows: list[int], part: RolloutBatch | None, lengths: list[list[int]] | None
) -> PendingSends:
    sent = send_json(fabric, name, dest, {"rows": rows, "holds": part is not None, "lengths": lengths})
    if part is not None:
        moving = _moving(name, rows, fabric.rank, dest, receives=False)
        sent.add(send_rows(fabric, moving, as_ragged(part.tensors, part, part.columns)))
    return sent


def _joined(parts: Sequence[tuple[list[int], RaggedBatch]]) -> RolloutBatch:
    """Samples that came in parts, in the order of their numbers."""
    filled = [part for part in parts if part[0]] or parts[:1]  # what brings no rows must not widen those that do
    place = {row: number for number, row in enumerate(sorted(row for rows, _ in filled for row in rows))}
    whole = merge(len(place), [([place[row] for row in rows], part, range(len(rows))) for rows, part in filled])
    return RolloutBatch(whole.tensors, whole.columns)


def lengths_from(known: Mapping[int, tuple[int, int, int]]) -> SequenceLengths:
    """What is known of all samples, from what came of each.

    Raises:
        DataError: a sample is missing.
    """
    count = max(known, default=-1) + 1
    if missing := sorted(set(range(count)) - known.keys()):
        raise DataError(f"{STREAMED}: of {count} samples {missing} did not come")
    return SequenceLengths(*([known[row][part] for row in range(count)] for part in range(3)))


def _name(edge: Edge, share: int | None = None) -> str:
    return f"{edge.value}, " + ("by samples" if share is None else f"share {share + 1}")


def _moving(name: str, rows: Sequence[int], source: int, dest: int, *, receives: bool) -> Moving:
    held, wanted = ((), tuple(rows)) if receives else (tuple(rows), ())
    return Moving(name, held, wanted, (Move(source, dest, tuple(rows)),), receives)
