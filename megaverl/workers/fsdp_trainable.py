"""A model under FSDP2 with torch's AdamW on its shards, and megatron-core's scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megaverl.config.passthrough import coerce
from megaverl.config.roles import OffloadConfig
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import ConfigError
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_trainable import scheduler_options
from megaverl.workers.model import Loss
from megaverl.workers.offload import Storages, storages_of
from megaverl.workers.trainable import TrainableModel

platform.adapt_megatron()

from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


class FSDPTrainable(TrainableModel):
    """An `FSDPModel` whose float32 shards AdamW steps on.

    Args:
        optimizer: fields of megatron-core's OptimizerConfig; its defaults count here too. As there, what has one axis
            (biases, norms) does not decay.
        scheduler: arguments of megatron-core's OptimizerParamScheduler.
        total_updates: how many optimizer steps the run will take; the learning rate decays over them.
        gradient_accumulation: micro-batches of an optimizer step, at least.
        offload: what is away while it is not needed.
    """

    model: FSDPModel

    def __init__(
        self,
        model: FSDPModel,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any],
        total_updates: int,
        gradient_accumulation: int = 1,
        offload: OffloadConfig | None = None,
    ) -> None:
        try:
            fields = {"min_lr": 0.0} | coerce(OptimizerConfig, optimizer, f"{model.role}.optimizer")
            config = OptimizerConfig(**fields)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(f"{model.role}.optimizer: {error}") from error
        if model.dtype == torch.float16:
            raise ConfigError(
                f"{model.role}: engine: fsdp trains in float32 or bfloat16; float16 would need its loss scaled. Set "
                "model.dtype=bfloat16."
            )
        super().__init__(model, max_norm=float(config.clip_grad), gradient_accumulation=gradient_accumulation)
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self.parameters = [p for p in parameters if local(p).numel()]  # a rank may have no row of a small one
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() != 1], "wd_mult": 1.0},
                {"params": [p for p in self.parameters if p.dim() == 1], "wd_mult": 0.0},
            ],
            lr=config.lr or 1e-6,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.scheduler = OptimizerParamScheduler(self.optimizer, **scheduler_options(config, scheduler, total_updates))
        self._offload(offload or OffloadConfig())

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> list[Mapping[str, torch.Tensor]]:
        return self.model.forward_backward(micro_batches, loss)

    def _gradient_norm(self) -> float | None:
        """Of all shards, each once: squares are added up in float64, in the order of parameters and ranks."""
        mine = 0.0
        found = [local(p.grad) for p in self.parameters if p.grad is not None and self.model.speaks_for(p)]
        if found:
            mine = float(torch.stack(torch._foreach_norm(found)).double().square().sum())
        return math.sqrt(reduce_json(mine, sum, self.model.grid.world))

    def _multiply_gradients(self, factor: float) -> None:
        if factor != 1.0 and (found := list(self.gradients.values())):
            torch._foreach_mul_(found, factor)

    def _step(self) -> None:
        self.optimizer.step()
        self._zero_gradients()  # between updates they would only take room

    @property
    def trained(self) -> list[torch.Tensor]:
        return [*self.model.held, *self._state]

    @property
    def _state(self) -> list[torch.Tensor]:
        """Moments and counts of steps."""
        found = (value for state in self.optimizer.state.values() for value in state.values())
        return [local(value) for value in found if isinstance(value, torch.Tensor)]

    def _optimizer_storages(self) -> Storages:
        return storages_of(self._state)

    @property
    def _gradient_buffers(self) -> list[torch.Tensor]:
        return []

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        found = ((number, parameter.grad) for number, parameter in enumerate(self.parameters))
        return {str(number): local(gradient) for number, gradient in found if gradient is not None}

    def _masters(self) -> dict[str, torch.Tensor]:
        return {str(number): local(parameter).detach() for number, parameter in enumerate(self.parameters)}

    def follow_masters(self) -> None:
        """Nothing to do: the weights are what the optimizer steps on."""

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
