"""Islands of the actor on slowly connected nodes: their gradients added up, or every K steps their weights averaged.

K = 1: each island's gradient of its own samples becomes the gradient of all samples, and every island takes the same
step. K > 1 (DiLoCo, arXiv 2311.08105): each takes K steps of its own; then the mean way that they went is the gradient
of an outer optimizer, SGD with Nesterov momentum, that all take alike. Pure: what goes to the others is in
`island_exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Compressor:
    """bfloat16 with error feedback (arXiv 1901.09847): what rounding takes away is added to the next one.

    So what was sent, added up over time, is never further from what was meant than one rounding. What was left of
    values of another shape, from before a resume on another grid, is dropped.
    """

    def __init__(self) -> None:
        self._left: dict[str, Tensor] = {}

    def compress(self, name: str, values: Tensor) -> Tensor:
        """`values` and what was left of the last of this name, in bfloat16."""
        left = self._left.get(name)
        whole = values if left is None or left.shape != values.shape else values + left
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
        masters: this rank's weights in float32, by name; their values now are where the islands start from.
        lr, momentum: DiLoCo's 0.7 and 0.9.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self._start = {name: master.detach().clone() for name, master in masters.items()}
        self._buffer = {name: torch.zeros_like(start) for name, start in self._start.items()}

    def way(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far this island went, as a gradient: where it started less where it is. To be averaged over islands."""
        return {name: start - masters[name].detach() for name, start in self._start.items()}

    @torch.no_grad()
    def step(self, masters: Mapping[str, Tensor], mean_way: Mapping[str, Tensor]) -> None:
        """Put the masters where the outer step leads; the next inner steps start from there."""
        for name, start in self._start.items():
            gradient, buffer = mean_way[name], self._buffer[name]
            buffer.mul_(self.momentum).add_(gradient)
            start.sub_(self.lr * (gradient + self.momentum * buffer))
            masters[name].copy_(start)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"start": self._start, "buffer": self._buffer}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name in self._start:
            self._start[name].copy_(state["start"][name])
            self._buffer[name].copy_(state["buffer"][name])
