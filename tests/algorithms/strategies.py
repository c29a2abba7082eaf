"""Random batches for the property tests: ragged masks, empty responses, any group sizes, all in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

settings.register_profile("algorithms", deadline=None, max_examples=60, database=None)
PROPERTY = settings.get_profile("algorithms")


class Case(NamedTuple):
    mask: Tensor  # [B, R] bool
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        shape = shape or tuple(self.mask.shape)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale

    def garbage(self, values: Tensor) -> Tensor:
        """The same values with NaN wherever the mask says that nobody may look."""
        return torch.where(self.mask, values, torch.nan)


@st.composite
def cases(draw: st.DrawFn, *, holes: bool = False) -> Case:
    """A right-padded mask, or one with holes, up to 6 responses of up to 9 tokens; lengths of 0 too."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    if holes:
        row = st.lists(st.booleans(), min_size=width, max_size=width)
        mask = torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))
    else:
        lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
        mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    return Case(mask, torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
