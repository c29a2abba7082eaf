"""Plan micro-batches of packed samples, in which tokens that samples share are counted and computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import (
    ANY_MICRO_BATCHES,
    MicroBatchRule,
    check_cap,
    plan_micro_batches,
)
from megaverl.data.images import COLUMN
from megaverl.data.prefix_tree import GrowingRow, PrefixTree, limits_of
from megaverl.data.sequence_lengths import SequenceLengths

# Stop refining once the busiest rank has at most this many times the mean tokens.
GOOD_ENOUGH = 1.02


def sequence_lengths(batch: RolloutBatch) -> SequenceLengths:
    """Return the lengths of a batch, and what its samples share.

    The conversations of an agent share all tokens up to their first difference with
    another one of their group. Other samples share their prompt if it is equal, and so
    do samples with images, whose equal tokens may stand for different images. A batch
    with only some of a step's samples stores which prompts are equal.
    """
    if batch.held is not None:
        return batch.held.lengths
    prompt_lengths = batch.prompt_lengths.tolist()
    response_lengths = batch.response_lengths.tolist()
    are_conversations = "episode_ids" in batch and "group_ids" in batch
    if are_conversations and COLUMN not in batch.columns:
        groups = _numbered(batch.group_ids.tolist())
        tree = PrefixTree.of_tokens(
            _sequences(batch), limits_of(prompt_lengths), groups
        )
        return SequenceLengths(prompt_lengths, response_lengths, groups, tree)
    stored_numbers = batch.tensors.get("prompt_numbers")
    prompts = (
        prompt_numbers(batch) if stored_numbers is None else stored_numbers.tolist()
    )
    return SequenceLengths(prompt_lengths, response_lengths, prompts)


def _sequences(batch: RolloutBatch) -> list[np.ndarray]:
    """Return the tokens of each sample, prompt and response joined."""
    joined = batch.joined().cpu().numpy()
    lengths = batch.sequence_lengths.tolist()
    return [row[:length] for row, length in zip(joined, lengths, strict=True)]


def _numbered(values: Sequence[int]) -> list[int]:
    """Return a number per value, counted in the order of their first appearances."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


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


def plan_packed_micro_batches(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    tree: PrefixTree,
    num_ranks: int,
    max_tokens: int,
    rule: MicroBatchRule = ANY_MICRO_BATCHES,
) -> list[list[list[int]]]:
    """Plan micro-batches of packed rows, keeping samples that share tokens together as far as that pays off.

    Together they compute shared tokens once, apart they balance ranks better. Plans are
    made with each prompt's samples whole, in two parts, in four and so on, cut where the
    tree orders them. The plan whose busiest rank has the fewest tokens is returned.

    Args:
        units: samples that are never separated: [[0], [1], ...], or pairs.
        lengths, prompts: of EVERY sample of the batch; see `SequenceLengths`.
        tree: tree of the tokens that they share.
        num_ranks, max_tokens, rule: see `plan_micro_batches`.

    Returns:
        The same number of micro-batches for each rank, each a list of samples, possibly empty.

    Raises:
        DataError: one unit alone exceeds the cap.
    """
    costs = [tree.num_tokens(unit, lengths) for unit in units]
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
    for alike in units_by_prompt.values():
        # Neighbours of the tree stay in one part.
        first_samples = tree.in_order([unit[0] for unit in alike])
        place = {sample: number for number, sample in enumerate(first_samples)}
        alike.sort(key=lambda unit: place[unit[0]])
    total = sum(
        tree.num_tokens(_samples(alike), lengths) for alike in units_by_prompt.values()
    )
    share = -(-total // num_ranks)
    best: list[list[list[int]]] = []
    best_rating = (0, True, 0, 0)
    cap = max_tokens - max_tokens % rule.multiple_of
    most = max(map(len, units_by_prompt.values()), default=1)
    # Keep all samples of a prompt together at first, then split them into 2, 4, 8, ...
    # parts. Every split computes shared tokens once more, but makes the ranks' loads
    # more even.
    for parts in (2**power for power in range((most - 1).bit_length() + 1)):
        bundles = [
            bundle
            for alike in units_by_prompt.values()
            for bundle in _bundles(alike, parts, cap, lengths, tree)
        ]
        plan = plan_micro_batches(
            [bundle.num_tokens for bundle in bundles],
            num_ranks,
            max_tokens,
            rule,
            padded=False,
        )
        sample_plan = [
            [
                _samples([bundles[number].samples for number in micro])
                for micro in micros
            ]
            for micros in plan
        ]
        # Two parts of a prompt in one row share tokens again.
        tokens_by_rank = [
            sum(tree.num_tokens(micro, lengths) for micro in micros)
            for micros in sample_plan
        ]
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


def _samples(units: Sequence[Sequence[int]]) -> list[int]:
    """Return the samples of several units, ascending."""
    return sorted(chain.from_iterable(units))


def _bundles(
    units: Sequence[Sequence[int]],
    parts: int,
    cap: int,
    lengths: Sequence[int],
    tree: PrefixTree,
) -> list[GrowingRow]:
    """Group consecutive units into `parts` parts of similar size, or more if a part exceeds `cap` tokens."""
    size = -(-len(units) // parts)
    result = []
    for start in range(0, len(units), size):
        part = GrowingRow(tree, lengths)
        for unit in units[start : start + size]:
            # A unit larger than the cap was refused by `check_cap`, so a new part
            # always takes it.
            if part.samples and part.num_tokens + part.growth(unit) > cap:
                result.append(part)
                part = GrowingRow(tree, lengths)
            part.add(unit)
        result.append(part)
    return result
