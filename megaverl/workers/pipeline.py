"""What pipeline stages tell each other: activations and gradients alone, as every stage knows all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaverl.distributed.groups import Grid
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

Shape = tuple[int, int, int]  # sequence, samples, hidden


class StageCommunicator(P2PCommunicator):
    """megatron-core's, which does not ask for shapes that follow from the micro-batches.

    For micro-batches of different lengths megatron-core (0.16 to 0.19, `pipeline_parallel/p2p_communication.py`) sends
    the shape of each tensor ahead of it, and on either side the host waits for the device, in each direction of each
    micro-batch. Stages take micro-batches in the same order, forward and backward. With virtual stages the order is
    another, and shapes are still sent.
    """

    def __init__(self, grid: Grid, config: TransformerConfig) -> None:
        super().__init__(grid.pp_group, config)
        self._tp = grid.shape.tp if config.sequence_parallel else 1
        self._shapes: list[Shape] = []
        self._forward = self._backward = 0

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """These go through the pipeline next."""
        width = self.config.hidden_size
        sizes = [batch.tokens.shape for batch in micro_batches]
        self._shapes = [(-(-length // self._tp), samples, width) for samples, length in sizes]
        self._forward = self._backward = 0

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> Any:
        """Shapes of the activations that come from the stage before, and of the gradient from the one after."""
        if self.virtual_pipeline_model_parallel_size is not None:
            return super()._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        nothing = (0, 0, 0)
        forward = self._shapes[self._forward] if recv_prev else nothing
        backward = self._shapes[self._backward] if recv_next else nothing
        self._forward += recv_prev
        self._backward += recv_next
        return forward, backward
