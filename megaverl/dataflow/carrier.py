"""A flow's edges on the fabric: what the operators of one role give, to those of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.plan import Edge
from megaverl.fabric import Fabric
from megaverl.fabric.courier import Courier, Readers


class Carrier:
    """Carries values between the ranks of a job; `DataFlow.run` is given one.

    Args:
        known: dataclasses that may travel, besides batches, tensors and plain values.
        readers: operator -> who reads which rows of a batch that it takes; those left out read all. A batch goes in
            parts only where all of its takers say so.
    """

    def __init__(
        self, fabric: Fabric, known: Sequence[type] = (), readers: Mapping[str, Readers] | None = None
    ) -> None:
        self.fabric, self._readers = fabric, dict(readers or {})
        self._courier = Courier(fabric, known)

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
            readers=self._readers_of(edge),
        )

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        """`edge.value`, when it is here."""
        return self._courier.receive(
            edge.value, edge.source, edge.dest, base=_base(edge, values), readers=self._readers_of(edge)
        )

    def settle(self) -> None:
        """Until all that was sent has been taken."""
        self._courier.settle()

    def _readers_of(self, edge: Edge) -> Readers | None:
        found = [self._readers.get(name) for name in edge.takers]
        if any(reader is None for reader in found):
            return None

        def together(prompts: Sequence[int], responses: Sequence[int]) -> dict[int, list[int]]:
            rows: dict[int, set[int]] = {rank: set() for rank in edge.dest}
            for reader in found:
                assert reader is not None
                for rank, read in reader(prompts, responses).items():
                    rows.get(rank, set()).update(read)
            return {rank: sorted(read) for rank, read in rows.items()}

        return together


def _base(edge: Edge, values: Mapping[str, Any]) -> RolloutBatch | None:
    """The first batch that both sides have."""
    return next((values[name] for name in edge.bases if isinstance(values.get(name), RolloutBatch)), None)
