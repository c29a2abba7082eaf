"""Micro-batches of packed samples, in which the prompt that several share is counted, and computed, once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import check_cap, plan_micro_batches
from megaverl.data.images import COLUMN

GOOD_ENOUGH = 1.02  # the busiest rank's tokens, of the mean; no finer cut is tried


class _Columns(NamedTuple):
    prompt_lengths: list[int]
    response_lengths: list[int]
    prompts: list[int]


class SequenceLengths(_Columns):
    """What every rank that plans with a batch knows of all its samples, whichever it has itself.

    Attributes:
        prompt_lengths, response_lengths: tokens.
        prompts: the same number for samples whose prompts are the same, token for token.
    """

    @cached_property
    def plans(self) -> dict[Hashable, list[list[list[int]]]]:
        """Micro-batches that were planned with these, by what else they follow from: roles often plan alike, and each
        says what it will work on before it does."""
        return {}

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response together."""
        return [prompt + response for prompt, response in zip(self.prompt_lengths, self.response_lengths, strict=True)]


def sequence_lengths(batch: RolloutBatch) -> SequenceLengths:
    """That of a batch; one that has some of its samples alone says itself which prompts are the same."""
    if batch.held is not None:
        return batch.held.lengths
    said = batch.tensors.get("prompt_numbers")
    prompts = prompt_numbers(batch) if said is None else said.tolist()
    return SequenceLengths(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), prompts)


def prompt_numbers(batch: RolloutBatch) -> list[int]:
    """[B]: the same number for samples whose prompts are the same, token for token and image for image."""
    numbers: dict[Any, int] = {}
    lengths = batch.prompt_lengths.tolist()
    rows = batch.input_ids.cpu().numpy()
    images = batch.columns.get(COLUMN) or [None] * len(rows)
    return [
        numbers.setdefault((row[:length].tobytes(), *(image.key for image in own or ())), len(numbers))
        for row, length, own in zip(rows, lengths, images, strict=True)
    ]


def shared_tokens(prompt_lengths: Sequence[int]) -> list[int]:
    """How many tokens of a sample others with its prompt share: all of the prompt's but the last.

    From the last one a response's first token is predicted, so that every sample has its own.
    """
    return [max(0, length - 1) for length in prompt_lengths]


def packed_tokens(samples: Sequence[int], lengths: Sequence[int], shared: Sequence[int], prompts: Sequence[int]) -> int:
    """Tokens of the row that these samples are packed into."""
    beginnings = {prompts[sample]: shared[sample] for sample in samples}
    return sum(lengths[sample] - shared[sample] for sample in samples) + sum(beginnings.values())


def plan_packed_micro_batches(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    *,
    multiple_of: int = 1,
    count_multiple_of: int = 1,
    least: int = 1,
    key: str = "actor.micro_batch_tokens",
) -> list[list[list[int]]]:
    """`plan_micro_batches` for packed rows: samples with one prompt stay together as far as that pays.

    Kept together they share their prompt; cut apart they fill ranks more evenly. So plans are made with each prompt's
    samples whole, in two parts, in four and so on, and the one whose busiest rank has the fewest tokens is taken.

    Args:
        units: samples that are never split: [[0], [1], ...], or pairs.
        lengths, shared, prompts: of EVERY sample of the batch, see `shared_tokens` and `prompt_numbers`.
        num_ranks, max_tokens, multiple_of, count_multiple_of, least, key: see `plan_micro_batches`.

    Returns: for each rank the same number of micro-batches, each a list of samples, possibly empty.

    Raises:
        DataError: one unit alone is above the cap.
    """
    costs = [lengths[unit[0]] if len(unit) == 1 else packed_tokens(unit, lengths, shared, prompts) for unit in units]
    check_cap(costs, [unit[0] for unit in units], max_tokens, multiple_of=multiple_of, key=key)
    alike: dict[int, list[Sequence[int]]] = {}
    for unit in units:
        alike.setdefault(prompts[unit[0]], []).append(unit)
    share = -(-sum(packed_tokens(_samples(same), lengths, shared, prompts) for same in alike.values()) // num_ranks)
    best: list[list[list[int]]] = []
    best_worth = (0, True, 0, 0)
    cap = max_tokens - max_tokens % multiple_of
    most = max(len(same) for same in alike.values()) if alike else 1
    for parts in (2**power for power in range((most - 1).bit_length() + 1)):
        bundles = [bundle for same in alike.values() for bundle in _bundles(same, parts, cap, lengths, shared, prompts)]
        plan = plan_micro_batches(
            [bundle.tokens for bundle in bundles],
            num_ranks,
            max_tokens,
            padded=False,
            multiple_of=multiple_of,
            count_multiple_of=count_multiple_of,
            least=least,
            key=key,
        )
        found = [[_samples([bundles[number].samples for number in micro]) for micro in mine] for mine in plan]
        busiest = max(sum(_tokens_of([bundles[number] for number in micro]) for micro in mine) for mine in plan)
        # too few micro-batches, or a rank that could have had work: then a finer cut is better
        worth = (-min(least, len(found[0])), any(not micro for mine in found for micro in mine), busiest, len(found[0]))
        if not best or worth < best_worth:
            best, best_worth = found, worth
        if worth[:2] == (-least, False) and busiest <= GOOD_ENOUGH * share:
            break
    return best


class _Bundle:
    """Samples that are packed into one row.

    Attributes:
        beginnings: prompt -> its shared tokens, which are in the row once.
        own: all other tokens.
    """

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.beginnings: dict[int, int] = {}
        self.own = 0

    @property
    def tokens(self) -> int:
        return self.own + sum(self.beginnings.values())


def _tokens_of(bundles: Sequence[_Bundle]) -> int:
    """`packed_tokens` of all their samples."""
    beginnings: dict[int, int] = {}
    for bundle in bundles:
        beginnings |= bundle.beginnings
    return sum(bundle.own for bundle in bundles) + sum(beginnings.values())


def _samples(units: Sequence[Sequence[int]]) -> list[int]:
    return sorted(chain.from_iterable(units))


def _bundles(
    units: Sequence[Sequence[int]],
    parts: int,
    cap: int,
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
) -> list[_Bundle]:
    """Neighbours together: in `parts` parts of like size, or in more where `cap` tokens do not hold one."""
    size, result = -(-len(units) // parts), []
    for start in range(0, len(units), size):
        part, tokens = _Bundle(), 0
        for unit in units[start : start + size]:
            own, more = 0, 0
            for sample in unit:
                own += lengths[sample] - shared[sample]
            if fresh := {prompts[sample]: shared[sample] for sample in unit if prompts[sample] not in part.beginnings}:
                more = sum(fresh.values())
            if part.samples and tokens + own + more > cap:
                result.append(part)
                part, tokens = _Bundle(), 0
                fresh = {prompts[sample]: shared[sample] for sample in unit}
                more = sum(fresh.values())
            part.samples += unit
            part.own += own
            if fresh:
                part.beginnings |= fresh
            tokens += own + more
        result.append(part)
    return result
