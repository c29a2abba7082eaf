"""A flow's edges between ranks: the job's where there is one; else torchrun's, met when a flow needs them first. They
carry what operators give from the ranks that made it to those that need it.

A batch is scattered over the ranks of a role, and redistributed to those that work on its samples. So a sample crosses
to the role once, though the tensor- and pipeline-parallel ranks of a replica all read it, and may leave before anyone
knows how long the others will be: who works on which follows from the lengths of all.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.batching import rows_of_rank
from megaverl.data.held_rows import (
    Moving,
    as_ragged,
    move_batch,
    move_tensors,
    receive_rows,
    receive_whole,
    send_rows,
    send_whole,
)
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.dataflow.plan import Edge, Places
from megaverl.distributed.collectives import barrier
from megaverl.distributed.placement import ResolvedPlacement, World, ranks_text
from megaverl.distributed.ragged import beside, flattened, put_together
from megaverl.distributed.rendezvous import NodeInfo, introduce
from megaverl.distributed.store import job_store
from megaverl.distributed.worlds import Fabric, PendingSends, join, receive_json, send_json
from megaverl.errors import ConfigError, DataError
from megaverl.platform import platform
from megaverl.sharding.rows import Rows, join_rows


@dataclass(frozen=True)
class Reads:
    """What an operator reads of a batch that comes from other ranks.

    Attributes:
        rows: rank of the job -> the samples that it works on; the same on all ranks that the batch comes to.
        of_all: tensors that each of these ranks has of every sample, to weigh its own against them; those of them that
            the batch has.
    """

    rows: Callable[[SequenceLengths], Rows]
    of_all: frozenset[str] = frozenset()

    @staticmethod
    def together(reads: Iterable[Reads]) -> Reads:
        """What several operators on the same ranks read."""
        parts = list(reads)
        return Reads(
            lambda lengths: join_rows(part.rows(lengths) for part in parts),
            frozenset[str]().union(*(part.of_all for part in parts)),
        )


class TensorChannel:
    """One rank's end of all edges between roles. All ranks of an edge call with the same names, in the same order.

    Batches go row by row: all to every rank, or each to those that read it; fields of a batch that the receivers have
    go as rows too; anything else (plain values, tensors, and dataclasses of `known`) goes whole. What lies on a device
    comes to one, where the fabric says so (`Fabric.rows`), and else goes from host to host. Nothing is pickled.

    Args:
        known: dataclasses that may travel.
    """

    def __init__(self, fabric: Fabric, known: Sequence[type] = ()) -> None:
        self.fabric = fabric
        self.known = {one.__name__: one for one in known}
        self._sent = PendingSends()

    def send(
        self,
        name: str,
        value: Any,
        source: Sequence[int],
        dest: Sequence[int],
        *,
        base: RolloutBatch | None = None,
        scattered: bool = False,
    ) -> None:
        """On the ranks that hold `value`, all of it; returns at once.

        Args:
            name: of the edge.
            source, dest: ranks of the job.
            base: the batch that the receivers have already, which `value` adds to or is a field of.
            scattered: the receivers say which samples of a batch they read, and get no others.
        """
        self._sent.forget_done()
        receivers, head, tensors = self._my_receivers(source, dest), dict[str, Any](), dict[str, Tensor]()
        ragged = None
        if isinstance(value, RolloutBatch):
            over = base if base is not None and value.tensors["input_ids"] is base.tensors["input_ids"] else None
            known = over.tensors if over is not None else {}
            fresh = {key: tensor for key, tensor in value.tensors.items() if known.get(key) is not tensor}
            head = {"kind": "batch", "over_base": over is not None, "count": len(value)}
            if scattered and over is None:
                head["lengths"] = sequence_lengths(value)
            ragged = as_ragged(fresh, value, value.columns if over is None else {})
        elif isinstance(value, Tensor) and base is not None and value.shape == _shape_of(name, base):
            head, ragged = {"kind": "field", "count": len(base)}, as_ragged({name: value}, base)
        else:
            head = {"kind": "plain", "value": flattened(value, tensors, self.known)}
            self._sent.add(send_whole(self.fabric, name, receivers, head, tensors))
            return
        for rank in receivers:
            self._sent.add(send_json(self.fabric, name, rank, head))
        self._sent.add(send_rows(self.fabric, self._moving(name, head, source, dest), ragged))

    def receive(
        self,
        name: str,
        source: Sequence[int],
        dest: Sequence[int],
        *,
        base: RolloutBatch | None = None,
        reads: Reads | None = None,
    ) -> Any:
        """On the ranks of `dest`: the value, when it is here.

        Args:
            reads: of a batch that is scattered: which samples each rank reads; of the others it has what
                `redistribute` says.

        Raises:
            TrainingStopped: a rank did not send its part in time, by number and role.
            DataError: something else came.
        """
        sender = sender_of(self.fabric.rank, source, dest, self.fabric.placement.node_of)
        head = receive_json(self.fabric, name, sender)
        if head["kind"] == "plain":
            return put_together(head["value"], receive_whole(self.fabric, name, sender, head), self.known)
        moving = self._moving(name, head, source, dest)
        ragged = receive_rows(self.fabric, moving)
        assert ragged is not None
        rows = list(moving.wanted)
        if head["kind"] == "field":
            if base is None:
                raise DataError(f"{name}: a field came, and this rank has no batch that it belongs to")
            return _field_of_all(name, ragged.tensors[name], rows, base)
        if head["over_base"]:
            if base is None:
                raise DataError(f"{name}: a batch came that adds to another, which this rank has not")
            fields = {key: _field_of_all(key, tensor, rows, base) for key, tensor in ragged.tensors.items()}
            return base.with_(**fields)
        batch = RolloutBatch(ragged.tensors, ragged.columns)
        if "lengths" not in head:
            return batch
        if reads is None:
            raise DataError(f"{name}: a batch came of which each rank reads a part, and this rank reads it all")
        return redistribute(self.fabric, name, batch, read_lengths(name, head["lengths"]), dest, reads)

    def settle(self) -> None:
        """Until all that was sent has left.

        Raises:
            TrainingStopped: a rank did not take its part in time.
        """
        self._sent.wait()

    def _moving(self, name: str, head: Mapping[str, Any], source: Sequence[int], dest: Sequence[int]) -> Moving:
        rows = range(head["count"])
        wanted: Rows = scatter_rows(len(rows), dest) if "lengths" in head else dict.fromkeys(dest, rows)
        return Moving.plan(self.fabric, name, dict.fromkeys(source, rows), wanted)

    def _my_receivers(self, source: Sequence[int], dest: Sequence[int]) -> list[int]:
        node_of = self.fabric.placement.node_of
        return [rank for rank in dest if sender_of(rank, source, dest, node_of) == self.fabric.rank]


def sender_of(rank: int, source: Sequence[int], dest: Sequence[int], node_of: Callable[[int], int]) -> int:
    """Who tells `rank`: of the holders on its node, or else of all, each serves as many, up to one."""
    near = [holder for holder in source if node_of(holder) == node_of(rank)] or list(source)
    return near[list(dest).index(rank) % len(near)]


def _field_of_all(name: str, part: Tensor, rows: Sequence[int], base: RolloutBatch) -> Tensor:
    shape = _shape_of(name, base)
    assert shape is not None
    return place_rows(part.new_zeros(shape), rows, part)


def _shape_of(name: str, base: RolloutBatch) -> tuple[int, ...] | None:
    """That of a field of the batch; None: a batch has no such field."""
    if name not in FIELDS:
        return None
    return tuple({"S": base.input_ids.shape, "R": base.generated_ids.shape}.get(FIELDS[name].axes, (len(base),)))


def scatter_rows(count: int, dest: Sequence[int]) -> dict[int, range]:
    """To which rank each of `count` samples goes first: by its number alone, as many to each rank, up to one."""
    return {rank: rows_of_rank(count, place, len(dest)) for place, rank in enumerate(dest)}


def redistribute(
    fabric: Fabric,
    name: str,
    scattered: RolloutBatch,
    lengths: SequenceLengths,
    dest: Sequence[int],
    reads: Reads,
    landed: Rows | None = None,
) -> RolloutBatch:
    """From where samples were scattered to those that read them; every rank of `dest` takes part.

    Args:
        scattered: this rank's, in the order of their numbers.
        landed: which rank has which; None: as `scatter_rows` says.

    Returns: a batch of all samples. Those that this rank does not read have their lengths, the number of their prompt
        and what is read of all, and no tokens.

    Raises:
        DataError: a sample that there is not is to be read.
        TrainingStopped: a rank that did not send or take its rows in time, by number and role.
    """
    count, found = len(lengths), reads.rows(lengths)
    here = scatter_rows(count, dest) if landed is None else landed
    wanted = {rank: sorted(found.get(rank, ())) for rank in dest}
    part = move_batch(fabric, Moving.plan(fabric, f"{name}, to their readers", here, wanted), scattered)
    assert part is not None
    batch = _all_samples(part, wanted[fabric.rank], lengths)
    weighed = {key: tensor for key, tensor in scattered.tensors.items() if key in reads.of_all}
    if weighed:
        others = {rank: sorted(set(range(count)) - set(wanted[rank])) for rank in dest}
        moving = Moving.plan(fabric, f"{name}, what is read of all", here, others)
        moved = move_tensors(fabric, moving, weighed, scattered)
        if (rows := others[fabric.rank]) and moved is not None:
            batch = batch.with_(**{key: place_rows(batch[key].clone(), rows, moved[key]) for key in moved})
    return batch


def _all_samples(part: RolloutBatch, rows: Sequence[int], lengths: SequenceLengths) -> RolloutBatch:
    """A batch of all rows whose other rows have their lengths and nothing else, so that all ranks plan alike."""
    count = len(lengths)
    longest = {"prompt": max(lengths.prompt_lengths, default=0), "response": max(lengths.response_lengths, default=0)}
    wide = part.trim().pad_to(**longest)
    if len(rows) == count:
        return wide
    tensors = {
        name: place_rows(tensor.new_full((count, *tensor.shape[1:]), FIELDS[name].fill), rows, tensor)
        for name, tensor in wide.tensors.items()
    }
    tensors["prompt_lengths"] = torch.tensor(lengths.prompt_lengths, dtype=torch.int64)
    tensors["response_lengths"] = torch.tensor(lengths.response_lengths, dtype=torch.int64)
    tensors["prompt_numbers"] = torch.tensor(lengths.prompts, dtype=torch.int64)
    place = {row: number for number, row in enumerate(rows)}
    columns = {
        name: [column[place[row]] if row in place else None for row in range(count)]
        for name, column in part.columns.items()
    }
    return RolloutBatch(tensors, columns)


def place_rows(whole: Tensor, rows: Sequence[int], part: Tensor) -> Tensor:
    """`whole`, in place, with these rows as in `part`; beyond the narrower of their widths there is nothing."""
    kept = (slice(None), *(slice(0, min(sizes)) for sizes in zip(whole.shape[1:], part.shape[1:], strict=True)))
    if rows:
        whole[kept][beside(whole, torch.tensor(list(rows), dtype=torch.int64))] = part[kept]
    return whole


def read_lengths(name: str, found: Any) -> SequenceLengths:
    """Lengths that came as JSON.

    Raises:
        DataError: they are none.
    """
    try:
        lengths = SequenceLengths(*found)
        if len({len(column) for column in lengths}) != 1:
            raise ValueError("its parts are of different lengths")
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: what came does not say which samples there are: {error}") from error
    return lengths


TIMEOUT = timedelta(minutes=10)  # for ranks to come, and for every message between them


class Carrier:
    """Carries values between the ranks of a job; `DataFlow.run` is given one.

    Args:
        known: dataclasses that may travel, besides batches, tensors and plain values.
        selective: operators that read some samples of a batch, and not all; known on every rank. Where all that take a
            batch on other ranks are such, each of these ranks gets what it reads.

    Attributes:
        reads: of those of them that this rank runs, which samples; asked when a batch is here.
        in_order: edges that all ranks go through in one order (`in_one_order`): what lies on devices may go from device
            to device; on any other edge all goes from host to host.
        step: whose values are sent.
    """

    def __init__(
        self,
        fabric: Fabric,
        known: Sequence[type] = (),
        selective: Collection[str] = (),
        in_order: Collection[Edge] = (),
    ) -> None:
        self.fabric, self._selective = replace(fabric, rows=None), frozenset(selective)
        self.reads: Mapping[str, Reads] = {}
        self.in_order, self.step = frozenset(in_order), 0
        self._channel, self._of_devices = TensorChannel(self.fabric, known), TensorChannel(fabric, known)
        self._held: list[tuple[int, Edge, Mapping[str, Any]]] = []
        self._reached = 0

    @property
    def rank(self) -> int:
        return self.fabric.rank

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        """Begin to send `edge.value`; what goes through devices only when all ranks have come as far (`reach`)."""
        if edge in self.in_order and self.step > self._reached:
            self._held.append((self.step, edge, {name: values.get(name) for name in (edge.value, *edge.bases)}))
            return
        channel, base, scattered = self._channel_of(edge), _base(edge, values), self._is_scattered(edge)
        channel.send(edge.value, values[edge.value], edge.source, edge.dest, base=base, scattered=scattered)

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        """`edge.value`, when it is here."""
        reads = self._reads_of(edge) if self._is_scattered(edge) else None
        base = _base(edge, values)
        return self._channel_of(edge).receive(edge.value, edge.source, edge.dest, base=base, reads=reads)

    def reach(self, step: int) -> None:
        """All ranks may begin this step: what was held of it goes."""
        self._reached, own, held = step, self.step, self._held
        self._held = []
        for self.step, edge, values in held:
            self.send(edge, values)
        self.step = own

    def _channel_of(self, edge: Edge) -> TensorChannel:
        return self._of_devices if edge in self.in_order else self._channel

    def settle(self) -> None:
        """Until all that was sent has been taken."""
        self._channel.settle()
        self._of_devices.settle()

    def _is_scattered(self, edge: Edge) -> bool:
        """Whether every rank that an edge leads to reads some samples alone."""
        return self._selective.issuperset(edge.takers)

    def _reads_of(self, edge: Edge) -> Reads:
        return Reads.together(self.reads[name] for name in edge.takers)


def _base(edge: Edge, values: Mapping[str, Any]) -> RolloutBatch | None:
    """The first batch that both sides have."""
    return next((values[name] for name in edge.bases if isinstance(values.get(name), RolloutBatch)), None)


class _Here:
    """The fabric of this process."""

    fabric: Fabric | None = None


def use_fabric(fabric: Fabric) -> None:
    """Flows that are run from here on go over this one, the job's."""
    _Here.fabric = fabric


def carrier_for(places: Places, in_order: Collection[Edge]) -> Carrier | None:
    """What carries values between these ranks, for `Carrier.in_order`; None where this process is the only one.

    Raises:
        ConfigError: a role has a rank that there is not.
        TrainingStopped: ranks that do not come.
    """
    fabric, size = _Here.fabric, int(os.environ.get("WORLD_SIZE", "1"))
    if fabric is not None:
        size = fabric.placement.size
    elif size == 1:
        return None
    outside = [
        f"places: {role} is on rank {max(ranks)}; the job has {size} ranks, 0 to {size - 1}"
        for role, ranks in places.items()
        if ranks and max(ranks) >= size
    ]
    if outside:
        raise ConfigError("\n".join(outside))
    if fabric is None:
        fabric = _Here.fabric = _join(places)
    return Carrier(fabric, in_order=in_order)


def _join(places: Places) -> Fabric:
    """One world of all ranks, in which every role has those that the flow gives it."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already. Leave that to the flow, or call megaverl's init_distributed."
        )
    platform.start()
    store, rank, size = job_store(TIMEOUT)
    nodes = introduce(store, rank, size, NodeInfo(), TIMEOUT)
    every = tuple(range(size))
    roles = {role: tuple(ranks) for role, ranks in places.items()}
    node_of = tuple(number for number, node in enumerate(nodes) for _ in range(node.size))
    world = World("flow on ranks " + ranks_text(every), every, tuple(roles))
    fabric = join(ResolvedPlacement(size, roles, (world,), (every,), nodes, node_of), store, rank, TIMEOUT)
    atexit.register(_leave)
    return fabric


def _leave() -> None:
    """At the program's end: with the others, unless an error ends it, which torchrun tells them."""
    if getattr(sys, "last_value", None) is None and dist.is_initialized():
        barrier()
        dist.destroy_process_group()
