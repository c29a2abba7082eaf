"""Prompts one after the other, as a run takes them; where it stands is all that a checkpoint needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.sampler import PromptSampler


class Prompts(Protocol):
    """An endless stream of prompts: `PromptStream`, or `streaming.StreamedPrompts`."""

    position: int

    @property
    def epoch(self) -> float: ...

    @property
    def losses(self) -> str:
        """Rows that were left out or cut, in words; empty where none was."""

    def take(self, count: int) -> list[PromptRecord]: ...

    def seek(self, position: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], next_step: int) -> None: ...


class PromptStream:
    """The sampler's endless stream of prompts, from a position on.

    A step takes `prompts_per_step`, and more where groups are refilled (`algorithm.dynamic_sampling`).

    Attributes:
        position: how many prompts have been taken.
    """

    def __init__(self, dataset: PromptDataset, sampler: PromptSampler) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.position = 0

    def take(self, count: int) -> list[PromptRecord]:
        """The next `count` prompts."""
        rows = self.sampler.rows(self.position, count)
        self.position += count
        return [self.dataset[row] for row in rows]

    @property
    def losses(self) -> str:
        """Rows that were left out or cut for their length, in words; empty where none was."""
        report = self.dataset.report
        return str(report) if report.num_dropped + report.num_truncated + report.num_short else ""

    def seek(self, position: int) -> None:
        """Stand where so many prompts have been taken."""
        self.position = position

    @property
    def epoch(self) -> float:
        """Epochs that are behind: 1.5 is half-way through the second."""
        return self.position / self.sampler.num_rows

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on, and the position: JSON, a few bytes."""
        return {**self.sampler.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any], next_step: int) -> None:
        """Go on where a checkpoint was made.

        Args:
            next_step: a checkpoint without a position had taken `prompts_per_step` in every step before this one.

        Raises:
            DataError: it was made with other prompts, or in another order.
        """
        self.sampler.check_state(state)
        self.position = int(state.get("position", next_step * self.sampler.prompts_per_step))
