"""How many sequences an engine works on at once: as many as their keys and values have room for, within bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class InFlight:
    """Of one engine.

    Attributes:
        least, most: bounds; with too little room for `least`, the engine has to make some (vLLM preempts).
        budget: bytes for keys and values, where the engine has no cache of its own to ask; None: not measured yet.
        measures: whether the budget follows the device's free memory.
        number: what was chosen last.
    """

    least: int
    most: int
    budget: int | None = None
    measures: bool = False
    number: int = 0

    def fit(self, free: int) -> None:
        """Make the budget half of the `free` bytes, a power of two, unless there is one that they still hold.

        The other half is for activations. A budget stays as long as it can, and a checkpoint keeps it: engines whose
        batches have other sizes round otherwise.
        """
        if self.measures and (self.budget is None or free < self.budget):
            self.budget = 1 << max(0, (free // 2).bit_length() - 1)

    def choose(self, free_tokens: int, longest: int) -> int:
        """The number for responses whose prompt and response together take up to `longest` tokens.

        Args:
            free_tokens: for whose keys and values there is room.
        """
        self.number = max(self.least, min(self.most, free_tokens // max(longest, 1)))
        return self.number
