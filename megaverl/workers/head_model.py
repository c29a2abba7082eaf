"""Head of a speculative decoder under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaverl.config.fsdp import FsdpConfig
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.hf_model import HeadModule
from megaverl.models.layers import sum_gradients
from megaverl.models.packing import MicroBatch
from megaverl.sharding.draft_head import MTP, HeadSpec
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ActorsOutputLayer:
    """Output layer of an actor, for logits of a head.

    Attributes:
        weight: [padded_vocab / tp, hidden], this rank's part.
        group: the ranks that hold the parts.
    """

    weight: torch.Tensor
    group: dist.ProcessGroup


class HeadModel(FSDPModel):
    """Head, whose parameters are sharded over the data-parallel ranks and equal on tensor-parallel ones.

    Its output is [drafts, b, s, hidden]: the states of every step, which the output layer is applied to in chunks. An
    MTP head has no output layer, and uses the actor's inside `output_of`.

    Args:
        num_steps: number of drafts.

    Example:
        with head.output_of(actor):
            head.forward_backward(micro_batches, loss)
    """

    _of_actor: ActorsOutputLayer | None = None

    def __init__(
        self,
        folder: str | Path,
        grid: Grid,
        groups: ProcessGroupManager,
        options: ModelOptions,
        *,
        num_steps: int,
        fsdp: FsdpConfig,
        freeze: Sequence[str] = (),
    ) -> None:
        self.head, self.num_steps = HeadSpec.from_folder(folder), num_steps
        super().__init__(
            folder,
            grid,
            groups,
            replace(options, chunked_logits=True),
            fsdp=fsdp,
            freeze=freeze,
        )

    @contextmanager
    def output_of(self, actor: TrainingModel) -> Iterator[None]:
        """Compute logits inside with the actor's current output layer, if the head has none.

        No gradient reaches the layer. Collective over the actor's grid.
        """
        if self.head.method != MTP:
            yield
            return
        with actor.on_device:
            weight = actor.output_weight().to(self.dtype)
        self._head = self._of_actor = ActorsOutputLayer(weight, actor.vocab_group)
        try:
            yield
        finally:
            self._head = self._of_actor = None

    @property
    def vocab_group(self) -> dist.ProcessGroup:
        """The ranks that share the output layer."""
        of_actor = self._of_actor
        return super().vocab_group if of_actor is None else of_actor.group

    def _root_module(
        self,
        model: PreTrainedModel,
        gives_hidden: bool,
        dtype: torch.dtype,
        balances: bool,
    ) -> HeadModule:
        return HeadModule(model)

    def _logits_are_plain(self, model: PreTrainedModel) -> bool:
        return True

    def _forward(
        self, batch: MicroBatch, *, router_loss: bool = False
    ) -> tuple[torch.Tensor, None]:
        assert batch.observed is not None, "the actor has not run on this micro-batch"
        states: torch.Tensor = self.module(batch.observed, self.num_steps)
        if self._of_actor is not None:
            # Each rank computes the gradient of its part of the vocabulary.
            states = sum_gradients(states, self._of_actor.group)
        return states, None
