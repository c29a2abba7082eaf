"""Plan micro-batches of packed samples, in which a shared prompt is counted and computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import (
    ANY_MICRO_BATCHES,
    MicroBatchRule,
    check_cap,
    plan_micro_batches,
)
from megaverl.data.images import COLUMN
from megaverl.data.sequence_lengths import SequenceLengths

# Stop refining once the busiest rank has at most this many times the mean tokens.
GOOD_ENOUGH = 1.02


def sequence_lengths(batch: RolloutBatch) -> SequenceLengths:
    """Return the lengths of a batch. A batch with only some of a step's samples stores which prompts are equal."""
    if batch.held is not None:
        return batch.held.lengths
    stored_numbers = batch.tensors.get("prompt_numbers")
    prompts = (
        prompt_numbers(batch) if stored_numbers is None else stored_numbers.tolist()
    )
    return SequenceLengths(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), prompts
    )


def prompt_numbers(batch: RolloutBatch) -> list[int]:
    """Return a number per sample, [B], that is equal for samples with identical prompts, including images."""
    numbers: dict[Any, int] = {}
    lengths = batch.prompt_lengths.tolist()
    rows = batch.input_ids.cpu().numpy()
    images = batch.columns.get(COLUMN) or [None] * len(rows)
    number_of_sample = []
    for row, length, row_images in zip(rows, lengths, images, strict=True):
        # Prompts are compared by their tokens: copies of a row in a data set share a
        # prompt as well.
        prompt = row[:length].tobytes()
        image_keys = [image.key for image in row_images or ()]
        number_of_sample.append(numbers.setdefault((prompt, *image_keys), len(numbers)))
    return number_of_sample


def shared_tokens(prompt_lengths: Sequence[int]) -> list[int]:
    """Return the number of each sample's tokens that others with the same prompt share: all of the prompt but the last.

    The last one predicts the response's first token, so every sample needs its own
    copy.
    """
    return [max(0, length - 1) for length in prompt_lengths]


def packed_tokens(
    samples: Sequence[int],
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
) -> int:
    """Return the tokens of the row that these samples are packed into."""
    beginnings = {prompts[sample]: shared[sample] for sample in samples}
    return sum(lengths[sample] - shared[sample] for sample in samples) + sum(
        beginnings.values()
    )


def plan_packed_micro_batches(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    rule: MicroBatchRule = ANY_MICRO_BATCHES,
) -> list[list[list[int]]]:
    """Plan micro-batches of packed rows, keeping samples with one prompt together as far as that pays off.

    Together they share their prompt, apart they balance ranks better. Plans are made
    with each prompt's samples whole, in two parts, in four and so on. The plan whose
    busiest rank has the fewest tokens is returned.

    Args:
        units: samples that are never separated: [[0], [1], ...], or pairs.
        lengths, shared, prompts: of EVERY sample of the batch; see `shared_tokens` and `prompt_numbers`.
        num_ranks, max_tokens, rule: see `plan_micro_batches`.

    Returns:
        The same number of micro-batches for each rank, each a list of samples, possibly empty.

    Raises:
        DataError: one unit alone exceeds the cap.
    """
    costs = [
        lengths[unit[0]]
        if len(unit) == 1
        else packed_tokens(unit, lengths, shared, prompts)
        for unit in units
    ]
    check_cap(
        costs,
        [unit[0] for unit in units],
        max_tokens,
        multiple_of=rule.multiple_of,
        key=rule.key,
    )
    units_by_prompt: dict[int, list[Sequence[int]]] = {}
    for unit in units:
        units_by_prompt.setdefault(prompts[unit[0]], []).append(unit)
    total = sum(
        packed_tokens(_samples(alike), lengths, shared, prompts)
        for alike in units_by_prompt.values()
    )
    share = -(-total // num_ranks)
    best: list[list[list[int]]] = []
    best_rating = (0, True, 0, 0)
    cap = max_tokens - max_tokens % rule.multiple_of
    most = max(map(len, units_by_prompt.values()), default=1)
    # Keep all samples of a prompt together at first, then split them into 2, 4, 8, ...
    # parts. Every split computes the prompt once more, but makes the ranks' loads more
    # even.
    for parts in (2**power for power in range((most - 1).bit_length() + 1)):
        bundles = [
            bundle
            for alike in units_by_prompt.values()
            for bundle in _bundles(alike, parts, cap, lengths, shared, prompts)
        ]
        plan = plan_micro_batches(
            [bundle.tokens for bundle in bundles],
            num_ranks,
            max_tokens,
            rule,
            padded=False,
        )
        sample_plan = []
        tokens_by_rank = []
        for rank_plan in plan:
            bundles_of_rank = [
                [bundles[number] for number in micro] for micro in rank_plan
            ]
            sample_plan.append(
                [
                    _samples([bundle.samples for bundle in micro])
                    for micro in bundles_of_rank
                ]
            )
            tokens_by_rank.append(sum(_tokens_of(micro) for micro in bundles_of_rank))
        count = len(sample_plan[0])
        has_idle_rank = any(
            not micro for rank_plan in sample_plan for micro in rank_plan
        )
        busiest = max(tokens_by_rank)
        # Compare plans: enough micro-batches first, then no idle rank, then the busiest
        # rank's tokens.
        rating = (-min(rule.least, count), has_idle_rank, busiest, count)
        if not best or rating < best_rating:
            best = sample_plan
            best_rating = rating
        is_complete = count >= rule.least and not has_idle_rank
        if is_complete and busiest <= GOOD_ENOUGH * share:
            break
    return best


class _Bundle:
    """Samples that are packed into one row.

    Attributes:
        samples: the samples.
        beginnings: prompt -> its shared tokens, which are in the row once.
        own: all other tokens.
    """

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.beginnings: dict[int, int] = {}
        self.own = 0

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.own + sum(self.beginnings.values())


def _tokens_of(bundles: Sequence[_Bundle]) -> int:
    """Return the tokens of a row that all these bundles are packed into."""
    beginnings: dict[int, int] = {}
    for bundle in bundles:
        beginnings |= bundle.beginnings
    return sum(bundle.own for bundle in bundles) + sum(beginnings.values())


def _samples(units: Sequence[Sequence[int]]) -> list[int]:
    """Return the samples of several units, ascending."""
    return sorted(chain.from_iterable(units))


def _bundles(
    units: Sequence[Sequence[int]],
    parts: int,
    cap: int,
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
) -> list[_Bundle]:
    """Group consecutive units into `parts` parts of similar size, or more if a part exceeds `cap` tokens."""
    size = -(-len(units) // parts)
    result = []
    for start in range(0, len(units), size):
        part = _Bundle()
        tokens = 0
        for unit in units[start : start + size]:
            own_tokens = 0
            shared_tokens = 0
            for sample in unit:
                own_tokens += lengths[sample] - shared[sample]
            if fresh := {
                prompts[sample]: shared[sample]
                for sample in unit
                if prompts[sample] not in part.beginnings
            }:
                shared_tokens = sum(fresh.values())
            # A unit larger than the cap was refused by `check_cap`, so a new part
            # always takes it.
            if part.samples and tokens + own_tokens + shared_tokens > cap:
                result.append(part)
                part = _Bundle()
                tokens = 0
                fresh = {prompts[sample]: shared[sample] for sample in unit}
                shared_tokens = sum(fresh.values())
            part.samples += unit
            part.own += own_tokens
            if fresh:
                part.beginnings |= fresh
            tokens += own_tokens + shared_tokens
        result.append(part)
    return result
