"""The value head, which stands on top of the critic's backbone, or beside the output layer of the actor's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ValueHead(nn.Module):
    """A linear map from hidden states to values at every position, in place of GPTModel's output layer.

    One value, or one for each of several agents. Its weight [num_values, hidden] is the same on every tensor-parallel
    rank and is computed in float32.
    """

    def __init__(self, config: Any, tp_group: dist.ProcessGroup, num_values: int = 1) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        # Zero: before any training the critic predicts nothing, whatever the backbone's scale.
        self.weight = nn.Parameter(torch.zeros(num_values, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, None]:
        """[s, b, hidden] -> ([s, b, num_values] float32, no bias), the signature of ColumnParallelLinear."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class ValuesBesideLogits(ValueHead):
    """A value head that sees the hidden states of a model's output layer, which stays as it is.

    One forward pass of the model then gives logits, and `take` the values to them.
    """

    def __init__(self, config: Any, tp_group: dist.ProcessGroup, output_layer: nn.Module, num_values: int = 1) -> None:
        super().__init__(config, tp_group, num_values)
        self._seen: torch.Tensor | None = None
        output_layer.register_forward_pre_hook(self._look)

    def _look(self, layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._seen = args[0]

    @property
    def waits(self) -> bool:
        """Whether the values of the last forward pass were not taken."""
        return self._seen is not None

    def take(self) -> torch.Tensor:
        """[b, s, num_values] float32: the values of the last forward pass, once."""
        assert self._seen is not None, "there was no forward pass, or its values were taken"
        hidden, self._seen = self._seen, None
        return self(hidden)[0].transpose(0, 1)
