"""Samples that are scored while the engines still generate others.

    engines' ranks           generate: sample 0 .. sample 3 .. sample 1 .. end
                                          |           |          |
    ranks of the rewards     score_arriving:  score 0    score 3    score 1

The first rank of an engine sends each sample through host memory to the rank that
scores it. Rewards do not depend on when they are computed, so a run gives the same
results with and without this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import rows_of_rank
from megaverl.data.row_transfer import Heard, as_ragged
from megaverl.distributed.channels import Channel, PendingSends
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.placement import ResolvedPlacement

_NAME = "arriving samples"


def can_arrive(config: Config, placement: ResolvedPlacement) -> bool:
    """Return whether samples can be scored before a step is complete, on ranks that are idle meanwhile."""
    engines, rewards = placement.ranks["rollout"], placement.ranks["reward"]
    is_apart = set(engines).isdisjoint(rewards)
    is_whole = (
        config.environment.name is not None  # episodes end at the same time
        # A function returns all responses at once.
        or config.rollout.function is not None
        or config.rollout.in_flight_updates
        or config.samples_in_rounds
        or config.trainer.replay_rollouts is not None
        # Operators may change responses before they are scored.
        or bool(config.trainer.operators)
    )
    return is_apart and not is_whole


class SampleSender:
    """Sender of finished samples to the ranks that score them, on the first rank of an engine.

    Example:
        sender = SampleSender(context, num_samples)
        sender.give(row, sample)  # for each finished sample
        sender.end()
    """

    def __init__(self, context: JobContext, num_samples: int) -> None:
        self._context, self._num_samples = context, num_samples
        self._rewards = context.placement.ranks["reward"]
        self._channel = Channel(context, _NAME)
        self._sent = PendingSends()

    def give(self, row: int, sample: RolloutBatch) -> None:
        """Start to send one sample."""
        self._sent.forget_done()
        ragged = as_ragged(sample.tensors, sample, sample.columns).on_host()
        header, payload, _ = ragged.pack([0])
        self._sent.add(
            self._channel.send_to(
                [self._scorer_of(row)], row.to_bytes(8, "little"), header, payload
            )
        )

    def end(self) -> None:
        """Notify the scoring ranks that this engine sends no further sample of the step."""
        self._sent.add(self._channel.send_to(self._rewards, b""))

    def _scorer_of(self, row: int) -> int:
        size = len(self._rewards)
        return next(
            rank
            for n, rank in enumerate(self._rewards)
            if row in rows_of_rank(self._num_samples, n, size)
        )


def receive_samples(
    context: JobContext,
    engines: Sequence[int],
    waiting: Callable[[], AbstractContextManager[object]],
) -> Iterator[tuple[int, RolloutBatch]]:
    """Yield the samples of a step that this rank scores, with their numbers, until every engine has ended.

    Args:
        engines: first rank of each engine.
        waiting: opens a context around each wait.

    Raises:
        TrainingStopped: an engine's rank sent nothing in time. The message names its number and role.
    """
    channel = Channel(context, _NAME)
    pending = list(engines)
    while pending:
        for source in tuple(pending):
            with waiting():
                parts = channel.receive_from(source)
            # An empty message ends the step for this engine, see `SampleSender.end`.
            if len(parts) == 1:
                pending.remove(source)
                continue
            row, header, payload = parts
            ragged = Heard(header.numpy().tobytes(), payload).unpack()
            yield (
                int.from_bytes(row.numpy().tobytes(), "little"),
                RolloutBatch(ragged.tensors, ragged.columns),
            )
