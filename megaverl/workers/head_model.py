"""EAGLE-3 head under FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.config.fsdp import FsdpConfig
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.hf_model import HeadModule
from megaverl.models.packing import MicroBatch
from megaverl.sharding.draft_head import HeadSpec
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeadModel(FSDPModel):
    """EAGLE-3 head, whose parameters are sharded over the data-parallel ranks and equal on tensor-parallel ones.

    Its output is [drafts, b, s, hidden]: the states of every step, which the output layer is applied to in chunks.

    Args:
        num_steps: number of drafts.
    """

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
        return states, None
