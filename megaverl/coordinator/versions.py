"""How old samples may be: which generations may start, and which samples may still be trained on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Staleness:
    """The limit, in training steps: a sample for step s is generated with the weights after at least s - limit steps.

    With 0 every sample is of the newest weights, so that generation and training take turns.

    Attributes:
        limit: `max_staleness`.
    """

    limit: int

    def may_start(self, step: int, steps_done: int) -> bool:
        """Whether the generation for `step` may start with the weights after `steps_done` steps."""
        return step - steps_done <= self.limit

    def first_blocked(self, steps_done: int) -> int:
        """The first step whose generation must wait for newer weights."""
        return steps_done + self.limit + 1

    def too_old(self, step: int, versions: Iterable[int]) -> list[int]:
        """Numbers of the samples, of weights after so many steps each, that `step` may not train on."""
        return [number for number, version in enumerate(versions) if step - version > self.limit]
