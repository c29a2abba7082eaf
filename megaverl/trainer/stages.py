"""What this rank is doing right now: for its timeline, and for the others should it stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaverl.monitoring.timeline import Timeline


def unheard(stage: str, step: int | None) -> None:
    """For a rank that nobody watches."""


class Stages:
    """Named stages of a step, entered one after the other.

    Args:
        timeline: gets a span for each.
        tell: hears of each as it begins, and of the step that it is in, if it is in one.
    """

    def __init__(self, timeline: Timeline, tell: Callable[[str, int | None], None] = unheard) -> None:
        self.timeline, self._tell = timeline, tell
        self.step: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around a stage."""
        self.note(name)
        with self.timeline.span(name):
            yield

    def note(self, name: str) -> None:
        """A stage begins that has no span of its own."""
        self._tell(name, self.step)
