"""A flow's edges on the fabric: what the operators of one role give, to those of the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.plan import Edge
from megaverl.dataflow.redistribute import Reads
from megaverl.dataflow.tensor_channel import TensorChannel
from megaverl.distributed.worlds import Fabric


class Carrier:
    """Carries values between the ranks of a job; `DataFlow.run` is given one.

    Args:
        known: dataclasses that may travel, besides batches, tensors and plain values.
        selective: operators that read some samples of a batch, and not all; known on every rank. Where all that take a
            batch on other ranks are such, each of these ranks gets what it reads.

    Attributes:
        reads: of those of them that this rank runs, which samples; asked when a batch is here.
    """

    def __init__(self, fabric: Fabric, known: Sequence[type] = (), selective: Collection[str] = ()) -> None:
        self.fabric, self._selective = fabric, frozenset(selective)
        self.reads: Mapping[str, Reads] = {}
        self._courier = TensorChannel(fabric, known)

    @property
    def rank(self) -> int:
        return self.fabric.rank

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        """Set `edge.value` on its way."""
        self._courier.send(
            edge.value,
            values[edge.value],
            edge.source,
            edge.dest,
            base=_base(edge, values),
            lands=self._lands(edge),
        )

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        """`edge.value`, when it is here."""
        reads = self._reads_of(edge) if self._lands(edge) else None
        return self._courier.receive(edge.value, edge.source, edge.dest, base=_base(edge, values), reads=reads)

    def settle(self) -> None:
        """Until all that was sent has been taken."""
        self._courier.settle()

    def _lands(self, edge: Edge) -> bool:
        """Whether every rank that an edge leads to reads some samples alone."""
        return self._selective.issuperset(edge.takers)

    def _reads_of(self, edge: Edge) -> Reads:
        return Reads.together(self.reads[name] for name in edge.takers)


def _base(edge: Edge, values: Mapping[str, Any]) -> RolloutBatch | None:
    """The first batch that both sides have."""
    return next((values[name] for name in edge.bases if isinstance(values.get(name), RolloutBatch)), None)
