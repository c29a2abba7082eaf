"""Islands of the actor on slowly connected nodes: their gradients added up, or every K steps their weights averaged.

K = 1: each island's gradient of its own samples becomes the gradient of all samples, and every island takes the same
step. K > 1 (DiLoCo, arXiv 2311.08105): each takes K steps of its own; then the mean way that they went is the gradient
of an outer optimizer, SGD with Nesterov momentum, that all take alike. Pure: what goes to the others is in
`island_exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def joined_gradient(gradients: Sequence[Tensor], tokens: Sequence[float], divided_by: Sequence[float]) -> Tensor:
    """The gradient of the mean loss over the tokens of all islands, in float64 inside.

    Args:
        gradients: of each island, of one shape, of its loss divided by `divided_by`.
        tokens: that each island's loss was taken over; all together above 0.
    """
    total = sum(tokens)
    if total <= 0:
        raise ValueError(f"islands with {list(tokens)} tokens have no mean loss")
    joined = torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient, divisor in zip(gradients, divided_by, strict=True):
        joined += gradient.double() * (divisor / total)
    return joined.to(gradients[0].dtype)


class Compressor:
    """bfloat16 with error feedback (arXiv 1901.09847): what rounding takes away is added to the next one.

    So what was sent, added up over time, is never further from what was meant than one rounding.
    """

    def __init__(self) -> None:
        self._left: dict[str, Tensor] = {}

    def compress(self, name: str, values: Tensor) -> Tensor:
        """`values` and what was left of the last of this name, in bfloat16."""
        whole = values + self._left[name] if name in self._left else values
        rounded = whole.to(torch.bfloat16)
        left = whole - rounded.to(values.dtype)
        self._left[name] = torch.where(torch.isfinite(left), left, 0.0)  # an inf is skipped, not carried on
        return rounded

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._left)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._left = dict(state)


class OuterOptimizer:
    """SGD with Nesterov momentum on the way that the islands went, DiLoCo's outer step.

    Args:
        parameters: this rank's, by name; their values now are where the islands start from.
        every: inner steps between outer ones.
        lr, momentum: DiLoCo's 0.7 and 0.9.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, every: int, lr: float = 0.7, momentum: float = 0.9) -> None:
        if every < 1:
            raise ValueError(f"every={every}: at least 1 inner step")
        self.every, self.lr, self.momentum = every, lr, momentum
        self._parameters = dict(parameters)
        self._start = {name: p.detach().clone() for name, p in parameters.items()}
        self._buffer = {name: torch.zeros_like(p) for name, p in self._start.items()}

    def is_due(self, steps_done: int) -> bool:
        """Whether the islands meet after so many inner steps."""
        return steps_done % self.every == 0

    def way(self) -> dict[str, Tensor]:
        """How far this island went, as a gradient: where it started less where it is. To be averaged over islands."""
        return {name: self._start[name] - p.detach() for name, p in self._parameters.items()}

    @torch.no_grad()
    def step(self, mean_way: Mapping[str, Tensor]) -> None:
        """Put the parameters where the outer step leads; the next inner steps start from there."""
        for name, parameter in self._parameters.items():
            gradient, buffer = mean_way[name].to(parameter.dtype), self._buffer[name]
            buffer.mul_(self.momentum).add_(gradient)
            self._start[name].sub_(self.lr * (gradient + self.momentum * buffer))
            parameter.copy_(self._start[name])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"start": self._start, "buffer": self._buffer}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name in self._start:
            self._start[name].copy_(state["start"][name])
            self._buffer[name].copy_(state["buffer"][name])
