"""Transfer of whole values between ranks: batches, tensors, plain values, and lists and mappings of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megaverl.controller.messages import RowTransfer
from megaverl.data.batch import RolloutBatch
from megaverl.data.row_transfer import as_ragged, hear, receive_whole, send_whole
from megaverl.distributed.channels import Channel, PendingSends, receive_json, send_json
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.ragged import (
    RaggedBatch,
    flattened,
    put_together,
)

_IS_BATCH = {"is": "batch"}  # header of a batch


class ValueMover:
    """Mover that transfers whole values.

    Tensors on devices are transferred from device to device if the context connects
    both. Everything else goes through host memory. Sends do not block, and nothing is
    pickled.

    Args:
        known: dataclasses that may be transferred.
    """

    def __init__(self, context: JobContext, known: Sequence[type] = ()) -> None:
        self._context = context
        self._known = {kind.__name__: kind for kind in known}
        self._sent = PendingSends()

    async def send(self, move: RowTransfer, value: object) -> None:
        """Start to send a value.

        Raises:
            DataError: the value has a type that cannot be transferred.
        """
        context, name = self._context, name_of(move)
        # Release the tensors of sends that have completed.
        self._sent.forget_done()
        if isinstance(value, RolloutBatch):
            self._sent.add(send_json(context, name, move.dest, _IS_BATCH))
            self._send_rows(
                move, as_ragged(value.tensors, value, value.columns), range(len(value))
            )
            return
        tensors: dict[str, Tensor] = {}
        head: Mapping[str, Any] = {"value": flattened(value, tensors, self._known)}
        self._sent.add(send_whole(context, name, move.dest, head, tensors))

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        """Receive the value of a move and return it."""
        context, name = self._context, name_of(move)
        head = receive_json(context, name, move.source)
        if head == _IS_BATCH:
            part, num_bytes = self._receive_rows(move)
            context.traffic.received += num_bytes
            return RolloutBatch(part.tensors, part.columns)
        tensors = receive_whole(context, name, move.source, head)
        return put_together(head["value"], tensors, self._known)

    def settle(self) -> None:
        """Wait until the receivers have taken everything that was sent.

        Raises:
            TrainingStopped: a rank did not take its part in time.
        """
        self._sent.wait()

    def _send_rows(
        self, move: RowTransfer, ragged: RaggedBatch, places: Sequence[int]
    ) -> None:
        context = self._context
        device = context.device_between(move.source, move.dest)
        # The ranks are not connected by devices, so all tensors take the path through
        # host memory.
        if device is None:
            ragged = ragged.on_host()
        header, payload, on_device = ragged.pack(places, device)
        channel = Channel(context, name_of(move))
        # The header goes first: the receiver allocates its device buffer from the size
        # in it.
        self._sent.add(channel.send_to([move.dest], header, payload))
        if context.rows is not None:
            self._sent.add(channel.send(context.rows, {move.dest: on_device}))

    def _receive_rows(self, move: RowTransfer) -> tuple[RaggedBatch, int]:
        """Receive rows. Return them and their number of bytes."""
        context, name = self._context, name_of(move)
        heard = hear(context, name, move.source)
        if heard.on_device is not None and context.rows is not None:
            Channel(context, name).receive(context.rows, {move.source: heard.on_device})
        return heard.unpack(), heard.num_bytes


def name_of(move: RowTransfer) -> str:
    """Return the name under which the messages of a move are sent."""
    return f"value {move.value}"
