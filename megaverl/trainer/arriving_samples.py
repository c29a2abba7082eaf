"""Samples that are scored while the engines still generate others.

    engines' ranks           generate: sample 0 .. sample 3 .. sample 1 .. end
                                          |           |          |
    ranks of the rewards     score_arriving:  score 0    score 3    score 1

Each sample goes from the first rank of its engine to the rank that scores it, from host to host. Rewards do not depend
on when they are computed, so a run computes the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.batching import rows_of_rank
from megaverl.data.held_rows import as_ragged
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.ragged import RaggedBatch
from megaverl.distributed.worlds import Channel, Fabric, PendingSends

_NAME = "arriving samples"
_FILLS: dict[str, float | bool] = {name: field.fill for name, field in FIELDS.items()}


class TakesSamples(Protocol):
    """Takes samples one by one as an engine finishes them."""

    def give(self, row: int, sample: RolloutBatch) -> None:
        """Take one sample; it has this number in its step."""


def can_arrive(config: Config, placement: ResolvedPlacement) -> bool:
    """Return whether samples can be scored before all of a step are generated, on ranks that are free meanwhile."""
    engines, rewards = placement.ranks["rollout"], placement.ranks["reward"]
    is_apart = set(engines).isdisjoint(rewards)
    is_whole = (
        config.environment.name is not None  # episodes end together
        or config.rollout.function is not None  # a function returns all responses at once
        or config.rollout.in_flight_updates
        or config.algorithm.dynamic_sampling.metric is not None
        or config.trainer.replay_rollouts is not None
        or bool(config.trainer.operators)  # which may change responses before they are scored
    )
    return is_apart and not is_whole


class SampleSender:
    """Sends samples to the ranks that score them, on the first rank of an engine."""

    def __init__(self, fabric: Fabric, num_samples: int) -> None:
        self._fabric, self._num_samples = fabric, num_samples
        self._rewards = fabric.placement.ranks["reward"]
        self._channel = Channel(fabric, _NAME)
        self._sent = PendingSends()

    def give(self, row: int, sample: RolloutBatch) -> None:
        """Begin to send one sample."""
        self._sent.forget_done()
        ragged = as_ragged(sample.tensors, sample, sample.columns).on_host()
        header, payload, _ = ragged.pack([0], None)
        self._sent.add(self._channel.send_to([self._scorer_of(row)], row.to_bytes(8, "little"), header, payload))

    def end(self) -> None:
        """Tell the ranks that score that no further sample of the step comes from this engine."""
        self._sent.add(self._channel.send_to(self._rewards, b""))

    def _scorer_of(self, row: int) -> int:
        size = len(self._rewards)
        return next(rank for n, rank in enumerate(self._rewards) if row in rows_of_rank(self._num_samples, n, size))


def receive_samples(
    fabric: Fabric, engines: Sequence[int], waiting: Callable[[], AbstractContextManager[object]]
) -> Iterator[tuple[int, RolloutBatch]]:
    """Yield the samples of a step that this rank scores, with their numbers, until every engine has ended.

    Args:
        engines: the first rank of each engine.
        waiting: opened around the wait for each.

    Raises:
        TrainingStopped: an engine's rank sent nothing in time, by number and role.
    """
    channel = Channel(fabric, _NAME)
    still = list(engines)
    while still:
        for source in tuple(still):
            with waiting():
                parts = channel.receive_from(source)
            if len(parts) == 1:
                still.remove(source)
                continue
            row, header, payload = parts
            ragged = RaggedBatch.unpack(header.numpy().tobytes(), payload, _FILLS, None)
            yield int.from_bytes(row.numpy().tobytes(), "little"), RolloutBatch(ragged.tensors, ragged.columns)
