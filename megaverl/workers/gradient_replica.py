"""Replica of a model whose optimizer is on other ranks (`coordinator.aggregates: gradients`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megaverl.config.roles import OffloadConfig
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.offload import Storages, storages_of
from megaverl.workers.optimizers import MegatronGradients, ddp_config_of


@dataclass(frozen=True)
class GlobalGradient:
    """Facts about the sum of all replicas' gradients, from the ranks that have the optimizer.

    Attributes:
        norm: norm before clipping; NaN if a loss or the gradient is not finite.
        learning_rate: learning rate of this update.
    """

    norm: float = math.nan
    learning_rate: float = math.nan


class GradientReplica(MegatronGradients):
    """`MegatronModel` that computes gradients and has no optimizer.

        update(): zero gradients -> forward/backward -> sum over the data-parallel ranks
          -> `islands.before_update` sends the gradients, and sets `global_gradient`
          -> report, decide -> `islands.after_update` receives the new weights

    Data-parallel ranks sum their gradients by an all-reduce and not by a
    reduce-scatter, because the replica has no optimizer that could be sharded. Each of
    them can then send a part of the whole gradient.

    Args:
        ddp: fields of megatron-core's DistributedDataParallelConfig.
        gradient_accumulation: minimum number of micro-batches of an update.
        offload: which state is offloaded while it is not needed.

    Attributes:
        global_gradient: facts about the sum of all replicas' gradients, set in each update.
        is_applied: whether the decision about the last gradient was to apply it.
    """

    def __init__(
        self,
        model: MegatronModel,
        *,
        ddp: Mapping[str, Any],
        gradient_accumulation: int = 1,
        offload: OffloadConfig | None = None,
    ) -> None:
        shape = model.grid.shape
        whole = {**ddp, "use_distributed_optimizer": False}
        super().__init__(
            model,
            ddp_config_of(model.role, whole, shape.dp * shape.cp),
            # Gradients are clipped where the optimizer is.
            max_norm=0.0,
            gradient_accumulation=gradient_accumulation,
        )
        self.global_gradient = GlobalGradient()
        self.is_applied = False
        without_optimizer = {"optimizer": False}
        self._offload((offload or OffloadConfig()).model_copy(update=without_optimizer))

    @property
    def learning_rate(self) -> float:
        return self.global_gradient.learning_rate

    def _gradient_norm(self) -> float:
        self.is_applied = False
        return self.global_gradient.norm

    def _multiply_gradients(self, factor: float) -> None:
        """Do nothing: the gradients are clipped where the optimizer is."""

    def _step(self) -> None:
        """Note the decision. The optimizer steps on other ranks."""
        self.is_applied = True

    def move_schedule(self, updates: int) -> None:
        """Do nothing: the schedule is where the optimizer is."""

    @property
    def trained(self) -> list[torch.Tensor]:
        return self.model.held

    def _optimizer_storages(self) -> Storages:
        return storages_of(())

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: gradient.view(-1) for name, gradient in self.whole_gradients.items()
        }

    def _masters(self) -> dict[str, torch.Tensor]:
        return {}

    def follow_masters(self) -> None:
        """Do nothing: there are no master weights here."""
