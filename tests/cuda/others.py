"""What the other ranks say and send in a step, where a fake process group moves nothing: made up on this one.

All ranks know who holds which samples, so that every message is of the rows and the
bytes that it would have; a sample's length follows from its number, and what others
have computed of it is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaverl.data import row_transfer
from megaverl.data.row_transfer import Heard, Moving
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.ragged import RaggedBatch, num_bytes_on_device
from megaverl.rollout.engine import Generation
from megaverl.workers.rollout import _as_rows

SHORTEST, LONGEST = 8, 128  # tokens of a response


def response(number: int) -> Generation:
    """Of the sample of that number, in the step."""
    size = SHORTEST + 37 * number % (LONGEST - SHORTEST + 1)
    return Generation(
        [3 + number % 7] * size, [-1.0] * size, "length" if size == LONGEST else "stop"
    )


@dataclass
class Others:
    """The other ranks of the step that is running.

    Attributes:
        writers: by sample the rank that speaks for the engine which has written it.
        received: bytes of samples and results that have come.
    """

    writers: list[int] = field(default_factory=list)
    received: int = 0
    _sent: dict[str, RaggedBatch] = field(default_factory=dict)

    def begin(self, writers: Sequence[int]) -> None:
        """A step."""
        self.writers, self.received = list(writers), 0
        self._sent.clear()

    def install(self) -> None:
        """Before anything of megaverl takes the names that are replaced here, but `row_transfer`."""
        send: Any = row_transfer._send_from_host

        def remember(
            context: JobContext, moving: Moving, ragged: RaggedBatch | None
        ) -> Any:
            assert ragged is not None, (
                "every rank of one world has the tensors, be it of no rows"
            )
            self._sent[moving.name] = ragged
            return send(context, moving, ragged)

        row_transfer._send_from_host = remember
        row_transfer._hear = self._hear

    def gather_host_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, ...]: what the engines' ranks say of the responses' lengths; or else numbers, of all samples."""
        if rows.dtype == torch.int32 and rows.shape[1:] == (3,):
            table = [
                [number, len(response(number).token_ids), rank]
                for number, rank in enumerate(self.writers)
            ]
            return torch.tensor(table, dtype=torch.int32)
        numbers = torch.arange(len(self.writers)) % 2
        shape = (len(numbers), *[1] * (rows.dim() - 1))
        return (
            numbers.to(rows.dtype)
            .reshape(shape)
            .expand(len(numbers), *rows.shape[1:])
            .clone()
        )

    def _hear(self, context: JobContext, moving: Moving) -> dict[int, Heard]:
        heard = {}
        for move in moving.moves:
            if move.dest == context.rank:
                places, device = (
                    range(len(move.rows)),
                    context.device_between(move.source, move.dest),
                )
                header, host, on_device = self._rows(moving.name, move.rows).pack(
                    places, device
                )
                has_more = num_bytes_on_device(header) is not None
                heard[move.source] = Heard(
                    header, host, on_device if has_more else None
                )
                self.received += host.numel() + on_device.numel()
        return heard

    def _rows(self, name: str, rows: Sequence[int]) -> RaggedBatch:
        """What another rank holds of these samples, of the same kind as what this rank holds of others."""
        if name == "responses":
            return _as_rows(rows, [response(row) for row in rows])
        like = self._sent[name]
        sizes = torch.tensor(
            [len(response(row).token_ids) for row in rows], dtype=torch.int64
        )
        # "1 more" than the response.
        lengths = {axis: sizes + axis.startswith("1") for axis in like.lengths}
        tensors = {
            key: tensor.new_zeros((len(rows), *tensor.shape[1:]))
            for key, tensor in like.tensors.items()
        }
        return RaggedBatch(tensors, like.axes, lengths)


OTHERS = Others()
