"""Episodes that begin with given prompts, for tests of what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaverl.rollout.environments import (
    Attempt,
    Begun,
    FaultLimits,
    Faults,
    Views,
    play,
)


def play_begun(
    prompts: Sequence[Mapping[str, Sequence[int]]],
    acting: Sequence[Sequence[str]],
    **options: Any,
) -> list[Views]:
    """Play episodes whose agents have these prompts, and write in this order."""

    def begin(attempts: Mapping[int, Attempt]) -> dict[int, Begun]:
        return {number: Begun(prompts[number], acting[number]) for number in attempts}

    options.setdefault("faults", Faults("test", FaultLimits(backoff_seconds=0.0)))
    rows = [next(iter(by_agent.values())) for by_agent in prompts]
    return play(rows, list(prompts[0]), begin=begin, **options)
