"""The distribution that tokens were drawn from: a temperature, and how many of the likeliest stood to choose."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Drawn(NamedTuple):
    """Of n tokens.

    Attributes:
        temperature: logits are divided by it; [n] float32 where tokens differ.
        top_k: [n] int64, so many of the likeliest tokens could be drawn, 0: all. None: all, for every token.
        floor: [n], the least logit, over the temperature, that could be drawn; found out of `top_k` by the first pass
            over the logits.
    """

    temperature: float | torch.Tensor = 1.0
    top_k: torch.Tensor | None = None
    floor: torch.Tensor | None = None

    def of(self, part: slice) -> Drawn:
        """Of these tokens alone."""
        temperature, top_k, floor = self
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[part]
        return Drawn(temperature, None if top_k is None else top_k[part], None if floor is None else floor[part])

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """A float32 copy of the rows, over the temperature."""
        return rows.to(torch.float32, copy=True).div_(self.divisor)

    @property
    def divisor(self) -> float | torch.Tensor:
        """What a row of logits is divided by."""
        return self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature

    def cut(self, z: torch.Tensor, local: torch.Tensor, here: torch.Tensor, lowest: float) -> torch.Tensor:
        """`z` [m, columns] in place, with `lowest` for what could not be drawn.

        A target stays, though it be below the floor: it was drawn, from weights that may have been others.

        Args:
            local, here: [m, 1], the target's column, and whether it is in this shard.
        """
        if self.floor is None:
            return z
        out = z < self.floor[:, None]
        out.scatter_(1, local, out.gather(1, local) & ~here)
        return z.masked_fill_(out, lowest)
