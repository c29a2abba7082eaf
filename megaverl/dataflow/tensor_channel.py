"""Carries what a flow's operators give from the ranks that made it to those that need it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.dataflow.redistribute import Reads, place_rows, read_lengths, redistribute, scatter_rows
from megaverl.dataflow.row_transfer import Moving, receive_rows, send_rows, table_of
from megaverl.distributed.p2p import Channel, PendingSends, receive_json, send_json
from megaverl.distributed.ragged import DTYPES
from megaverl.distributed.worlds import Fabric
from megaverl.errors import DataError
from megaverl.platform import platform
from megaverl.sharding.rows import Rows


class TensorChannel:
    """One rank's end of all edges between roles. All ranks of an edge call with the same names, in the same order.

    Batches go row by row: all to every rank, or each to those that read it; fields of a batch that the receivers have
    go as rows too; anything else (plain values, tensors, and dataclasses of `known`) goes whole. Nothing is pickled.

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
        receivers, head, tensors, table = self._my_receivers(source, dest), dict[str, Any](), list[Tensor](), None
        if isinstance(value, RolloutBatch):
            over = base if base is not None and value.tensors["input_ids"] is base.tensors["input_ids"] else None
            known = over.tensors if over is not None else {}
            fresh = {key: tensor for key, tensor in value.tensors.items() if known.get(key) is not tensor}
            head = {"kind": "batch", "over_base": over is not None, "count": len(value)}
            if scattered and over is None:
                head["lengths"] = sequence_lengths(value)
            table = table_of(fresh, value, value.columns if over is None else {})
        elif isinstance(value, Tensor) and base is not None and value.shape == _shape_of(name, base):
            head, table = {"kind": "field", "count": len(base)}, table_of({name: value}, base)
        else:
            head = {"kind": "plain", "value": _flat(value, tensors, self.known)}
            head["tensors"] = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        for rank in receivers:
            self._sent.add(send_json(self.fabric, name, rank, head))
            for tensor in tensors:
                self._sent.add(self._bytes_to(name, rank, tensor))
        if table is not None:
            self._sent.add(send_rows(self.fabric, self._moving(name, head, source, dest), table))

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
            tensors = [self._bytes_from(name, sender, dtype, shape) for dtype, shape in head["tensors"]]
            return _whole(head["value"], tensors, self.known)
        moving = self._moving(name, head, source, dest)
        table = receive_rows(self.fabric, moving)
        assert table is not None
        rows = list(moving.wanted)
        if head["kind"] == "field":
            if base is None:
                raise DataError(f"{name}: a field came, and this rank has no batch that it belongs to")
            return _field_of_all(name, table.tensors[name], rows, base)
        if head["over_base"]:
            if base is None:
                raise DataError(f"{name}: a batch came that adds to another, which this rank has not")
            fields = {key: _field_of_all(key, tensor, rows, base) for key, tensor in table.tensors.items()}
            return base.with_(**fields)
        batch = RolloutBatch(table.tensors, table.columns)
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

    def _bytes_to(self, name: str, dest: int, tensor: Tensor) -> PendingSends:
        data = tensor.detach().to(platform.device).contiguous().flatten().view(torch.uint8)
        return Channel(self.fabric, name).send(self.fabric.group_between(self.fabric.rank, dest), {dest: data})

    def _bytes_from(self, name: str, source: int, dtype: str, shape: Sequence[int]) -> Tensor:
        if dtype not in DTYPES:
            raise DataError(f"{name}: a tensor of {dtype} came, which does not travel")
        data = torch.empty(math.prod(shape) * DTYPES[dtype].itemsize, dtype=torch.uint8, device=platform.device)
        Channel(self.fabric, name).receive(self.fabric.group_between(source, self.fabric.rank), {source: data})
        self.fabric.traffic.received += data.numel()
        return data.view(DTYPES[dtype]).reshape(list(shape)).cpu()


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


def _flat(value: Any, tensors: list[Tensor], known: Mapping[str, type]) -> Any:
    """`value` as JSON, with its tensors taken out into the list."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_flat(each, tensors, known) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _flat(each, tensors, known) for key, each in value.items()}}
    name = type(value).__name__
    if known.get(name) is type(value) and dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"of": name, "dict": {key: _flat(each, tensors, known) for key, each in fields.items()}}
    raise DataError(
        f"a {name} cannot go to other ranks: give tensors, batches, plain values, or lists and mappings of them"
    )


def _whole(value: Any, tensors: Sequence[Tensor], known: Mapping[str, type]) -> Any:
    """Undo `_flat`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value or "tuple" in value:
        parts = [_whole(each, tensors, known) for each in value["list" if "list" in value else "tuple"]]
        return parts if "list" in value else tuple(parts)
    found = {key: _whole(each, tensors, known) for key, each in value["dict"].items()}
    return known[value["of"]](**found) if "of" in value else found
