"""A few samples of a run, from its first step to its last."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from megaverl.monitoring.report.run_folder import RunRecord

STEPS = 12
PER_STEP = 3
LONGEST = 1500


class Sample(NamedTuple):
    """One prompt and response; `level` from 0 to 4 is where its reward stands among those shown."""

    prompt: str
    response: str
    reference: str
    reward: float
    level: int
    finish_reason: str


class StepSamples(NamedTuple):
    step: int
    split: str
    samples: list[Sample]


def shown_samples(run: RunRecord) -> list[StepSamples]:
    """At most `STEPS` steps of each split, evenly spread, with at most `PER_STEP` samples each."""
    held: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in run.samples:
        held[str(record.get("split", "train")), int(record["step"])].append(record)
    chosen: list[tuple[str, int]] = []
    for split in sorted({split for split, _ in held}):
        steps = sorted(step for other, step in held if other == split)
        chosen += [(split, steps[place]) for place in _spread(len(steps), STEPS)]
    rewards = [float(record.get("reward", 0.0)) for key in chosen for record in held[key][:PER_STEP]]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    found = []
    for split, step in chosen:
        samples = [_sample(record, low, high) for record in held[split, step][:PER_STEP]]
        found.append(StepSamples(step, split, samples))
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most `most` places out of `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})


def _sample(record: dict[str, Any], low: float, high: float) -> Sample:
    reward = float(record.get("reward", 0.0))
    level = round(4 * (reward - low) / (high - low)) if high > low else 2
    reference = record.get("reference")
    return Sample(
        _cut(record.get("prompt", "")),
        _cut(record.get("response", "")),
        "" if reference is None else _cut(reference),
        reward,
        level,
        str(record.get("finish_reason", "")),
    )


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    text = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"
