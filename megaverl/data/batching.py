"""Assign samples to ranks, mini-batches and micro-batches, by arithmetic on lengths that is equal on every rank.

Every rank knows the lengths of all samples, computes the whole plan and takes its own
part, without communication. `mini_batches` splits a step's samples.
`plan_micro_batches` splits one mini-batch over the data-parallel ranks (`balance`), and
each rank's share into micro-batches under the token budget (`micro_batches`).
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from megaverl.errors import DataError


def mini_batches(
    num_samples: int,
    num_mini_batches: int,
    *,
    seed: int,
    step: int,
    epoch: int,
    group_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split samples at random into mini-batches of equal size (up to one sample).

    The draw depends only on (seed, step, epoch), through a hash. It is equal on every
    rank, platform and Python version, and after a resume.

    Args:
        group_ids: group of each sample. Samples of a group stay together, unless the mini-batch is full before the
            group ends. Such a group is split at random; at most `num_mini_batches` - 1 groups are.

    Returns:
        Sample indices per mini-batch, ascending. Every sample is in exactly one.

    Raises:
        DataError: there are fewer samples than mini-batches.
    """
    if not 1 <= num_mini_batches <= max(num_samples, 1):
        raise DataError(
            f"{num_samples} samples cannot be split into {num_mini_batches} mini-batches; "
            "lower algorithm.num_mini_batches or raise data.prompts_per_step"
        )

    def draw(sample: int) -> bytes:
        # A hash instead of a generator: the order of a sample depends on nothing but
        # its number, on every rank and version of Python.
        return hashlib.blake2b(
            f"mini_batches/{seed}/{step}/{epoch}/{sample}".encode(), digest_size=16
        ).digest()

    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(
        range(num_samples) if group_ids is None else group_ids
    ):
        groups.setdefault(int(group), []).append(sample)
    bounds = [num_samples * i // num_mini_batches for i in range(num_mini_batches + 1)]
    order: list[int] = []
    for members in sorted(groups.values(), key=lambda members: draw(members[0])):
        stop = len(order) + len(members)
        # Groups stay in one mini-batch where possible. If a bound splits a group,
        # a random part goes to each side.
        is_cut = bounds[bisect_right(bounds, len(order))] < stop
        order += sorted(members, key=draw) if is_cut else members
    return [
        sorted(order[start:stop])
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def rows_of_rank(num_samples: int, rank: int, size: int) -> range:
    """Return the samples of one of `size` ranks by number alone: consecutive runs of equal length, up to one."""
    return range(num_samples * rank // size, num_samples * (rank + 1) // size)


def blocks_of(rows: range, size: int) -> list[range]:
    """Split consecutive rows into blocks of `size`. The last block may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def groups_of_ranks(group_ids: Sequence[int], size: int) -> list[range]:
    """Return the rows of all ranks like `rows_of_rank`, without splitting groups of consecutive rows."""
    firsts = [
        row
        for row, group in enumerate(group_ids)
        if row == 0 or group != group_ids[row - 1]
    ]
    bounds = [*firsts, len(group_ids)]
    shares = (rows_of_rank(len(firsts), rank, size) for rank in range(size))
    return [range(bounds[share.start], bounds[share.stop]) for share in shares]


def balance(
    lengths: Sequence[int], num_ranks: int, *, equal_counts: bool = False
) -> list[list[int]]:
    """Split samples over ranks so that the ranks' token counts are close.

    Largest differencing (Karmarkar and Karp 1982), extended to k parts: each state is k
    partial sums, and the two states with the largest differences are combined, the
    largest sum of one with the smallest of the other. The ranks' totals differ by no
    more than the longest sample.

    Args:
        lengths: tokens per sample.
        equal_counts: every rank gets the same number of samples, up to one.

    Returns:
        Sample indices per rank, ascending. With fewer samples than ranks some lists are empty.
    """
    if num_ranks == 1:
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # With equal counts every state deals one sample to each rank. So their sums over
    # states have equal counts too.
    per_state = num_ranks if equal_counts else 1
    states: list[list[_Part]] = [
        [
            (int(lengths[sample]), (sample,))
            for sample in longest_first[start : start + per_state]
        ]
        for start in range(0, len(longest_first), per_state)
    ]
    # A sample without tokens ranks among the parts without samples, so these must be
    # explicit.
    if 0 in lengths:
        states = [parts + [(0, ())] * (num_ranks - len(parts)) for parts in states]

    def spread(parts: list[_Part]) -> int:
        return (parts[-1][0] if len(parts) == num_ranks else 0) - parts[0][0]

    heap = [(spread(parts), serial, parts) for serial, parts in enumerate(states)]
    heapq.heapify(heap)
    # Breaks ties between equal spreads, so that the result does not depend on how heapq
    # orders them.
    serial = len(heap)
    while len(heap) > 1:
        # The two states with the largest spread are joined first: their differences
        # cancel best (Karmarkar and Karp).
        joined = _join(heapq.heappop(heap)[2], heapq.heappop(heap)[2], num_ranks)
        heapq.heappush(heap, (spread(joined), serial, joined))
        serial += 1
    whole = [sorted(samples) for _, samples in heap[0][2]] if heap else []
    return whole + [[] for _ in range(num_ranks - len(whole))]


# Sum of some samples' lengths, and the samples.
_Part = tuple[int, tuple[int, ...]]


def _join(first: list[_Part], second: list[_Part], num_ranks: int) -> list[_Part]:
    """Combine two states: the largest sum of one with the smallest of the other, and so on. Returns the largest first.

    Each state omits parts without samples at its end. These are combined first, as most
    sums then meet no other.
    """
    # The largest sums of one state meet the smallest of the other, as far as there are
    # more sums than ranks.
    back = second[::-1]
    meet = max(0, len(first) + len(second) - num_ranks)
    num_single = len(first) - meet
    pairs = zip(first[num_single:], back[:meet], strict=True)
    met = [(a + b, left + right) for (a, left), (b, right) in pairs]
    return sorted(
        first[:num_single] + met + back[meet:], key=itemgetter(0), reverse=True
    )


def micro_batch_tokens(
    lengths: Sequence[int], *, padded: bool = True, multiple_of: int = 1
) -> int:
    """Return the cost in tokens of a micro-batch of samples with these lengths.

    Padded: rows x longest row, with the row rounded up to `multiple_of`. Packed: the
    sum of all, rounded up.
    """
    if not lengths:
        return 0
    if padded:
        return len(lengths) * _round_up(max(1, *lengths), multiple_of)
    return _round_up(sum(lengths), multiple_of)


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    padded: bool = True,
    multiple_of: int = 1,
    key: str = "actor.micro_batch_tokens",
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split samples into few micro-batches, each costing at most `max_tokens`.

    The budget is a cap: 6, 6, 6 under a budget of 10 are three micro-batches. Samples
    are taken longest first, so rows of similar length lie together and little is
    padding. Padded: each micro-batch is filled before the next is begun, which for this
    cost gives the fewest. Packed: first fit.

    Args:
        lengths: tokens per sample (prompt and response).
        key: the setting that the error message names.
        indices: names of the samples in the result and in messages. None: 0, 1, ...

    Returns:
        Sample indices per micro-batch, the longest samples first.

    Raises:
        DataError: one sample alone exceeds the cap. Names the sample, its length and the key.
    """
    names = list(range(len(lengths))) if indices is None else list(indices)
    check_cap(lengths, names, max_tokens, multiple_of=multiple_of, key=key)
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if padded:
        result: list[list[int]] = []
        width = 0
        for sample in longest_first:
            if result and (len(result[-1]) + 1) * width <= max_tokens:
                result[-1].append(sample)
            # Samples come longest first, so the first one of a micro-batch sets its
            # width.
            else:
                result.append([sample])
                width = micro_batch_tokens([lengths[sample]], multiple_of=multiple_of)
    else:
        result = _first_fit(
            longest_first, lengths, max_tokens - max_tokens % multiple_of
        )
    return [[names[sample] for sample in batch] for batch in result]


def check_cap(
    lengths: Sequence[int],
    names: Sequence[int],
    max_tokens: int,
    *,
    multiple_of: int = 1,
    key: str,
) -> None:
    """Check that every sample fits a micro-batch.

    Args:
        names: names of the samples in messages. For the others see `micro_batches`.

    Raises:
        DataError: one sample alone exceeds the cap. Names the sample, its length and the key.
    """
    if (
        micro_batch_tokens([max(lengths, default=0)], multiple_of=multiple_of)
        <= max_tokens
    ):
        return
    cost = [micro_batch_tokens([length], multiple_of=multiple_of) for length in lengths]
    above = [sample for sample, tokens in enumerate(cost) if tokens > max_tokens]
    if above:
        worst = max(above, key=lambda sample: cost[sample])
        raise DataError(
            f"sample {names[above[0]]} has {lengths[above[0]]} tokens, more than {key}={max_tokens} "
            f"allows in a micro-batch ({len(above)} such samples); raise {key} to at least {cost[worst]}, "
            "or lower data.max_prompt_tokens or rollout.sampling.max_tokens"
        )


def common_count(
    per_rank: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    *,
    padded: bool = True,
    count_multiple_of: int = 1,
    least: int = 1,
) -> list[list[list[int]]]:
    """Give every rank the same number of micro-batches, as pipelines and collectives need.

    The number is the largest that any rank needs, rounded up to `count_multiple_of` (an
    interleaved pipeline needs a multiple of its stages). It is at least `least`, if
    some rank has as many samples. A rank with fewer micro-batches splits its costliest
    ones in two, which never makes one larger, so the cap still holds. A rank with fewer
    samples than that number gets EMPTY lists at the end: it runs
    `batch.select([]).pad_to(samples=1)`, a row without a response, which has weight 0
    in every loss.

    Args:
        per_rank: micro-batches of sample indices per rank.
        lengths: tokens per sample, by these indices.

    Returns:
        Micro-batches per rank, costliest first, so that ranks work on similar sizes at the same time.
    """

    def cost(batch: Sequence[int]) -> int:
        return micro_batch_tokens([lengths[sample] for sample in batch], padded=padded)

    # No rank can have more micro-batches with samples than it has samples.
    most = max(sum(map(len, batches)) for batches in per_rank)
    count = _round_up(
        max(1, min(least, most), *(len(batches) for batches in per_rank)),
        count_multiple_of,
    )
    result = []
    for batches in per_rank:
        rank_batches = [list(batch) for batch in batches]
        while len(rank_batches) < count:
            divisible = [batch for batch in rank_batches if len(batch) > 1]
            if not divisible:
                # An empty micro-batch still takes part in the collectives.
                rank_batches.append([])
                continue
            largest = max(divisible, key=cost)
            place = rank_batches.index(largest)
            half = len(largest) // 2
            rank_batches[place : place + 1] = [largest[:half], largest[half:]]
        # The largest first, so that a lack of memory shows in the first micro-batch,
        # and ranks work on similar sizes at the same time.
        result.append(sorted(rank_batches, key=lambda batch: (-cost(batch), batch)))
    return result


@dataclass(frozen=True)
class MicroBatchRule:
    """Requirements on planned micro-batches.

    Attributes:
        multiple_of: a row, or a packed row, is padded to a multiple of it.
        count_multiple_of: the number of micro-batches is a multiple of it; an interleaved pipeline needs its stages.
        least: number of micro-batches that are made even if fewer would do, if some rank has as many samples.
        key: the setting that error messages name.
    """

    multiple_of: int = 1
    count_multiple_of: int = 1
    least: int = 1
    key: str = "actor.micro_batch_tokens"


# Rule of a plan without requirements.
ANY_MICRO_BATCHES = MicroBatchRule()


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    rule: MicroBatchRule = ANY_MICRO_BATCHES,
    *,
    indices: Sequence[int] | None = None,
    padded: bool = True,
    equal_counts: bool = False,
) -> list[list[list[int]]]:
    """Split a mini-batch into each rank's micro-batches: `balance`, `micro_batches` and `common_count` in sequence.

    Args:
        lengths: tokens of EVERY sample of the batch.
        num_ranks: number of data-parallel ranks.
        max_tokens, padded: see `micro_batches`.
        rule: requirements on rows and on the number of micro-batches.
        indices: samples of this mini-batch. None: all.
        equal_counts: see `balance`.

    Returns:
        The same number of micro-batches for each rank, each a list of sample indices, possibly empty.

    Raises:
        DataError: one sample alone exceeds the cap.
    """
    lengths = [int(length) for length in lengths]
    chosen = list(range(len(lengths))) if indices is None else list(indices)
    shares = balance(
        [lengths[sample] for sample in chosen], num_ranks, equal_counts=equal_counts
    )
    per_rank = []
    for share in shares:
        samples = [chosen[place] for place in share]
        per_rank.append(
            micro_batches(
                [lengths[sample] for sample in samples],
                max_tokens,
                padded=padded,
                multiple_of=rule.multiple_of,
                key=rule.key,
                indices=samples,
            )
        )
    return common_count(
        per_rank,
        lengths,
        padded=padded,
        count_multiple_of=rule.count_multiple_of,
        least=rule.least,
    )


def _first_fit(
    order: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Put each sample into the first micro-batch with room for it."""
    result: list[list[int]] = []
    totals: list[int] = []
    for sample in order:
        length = lengths[sample]
        # First fit over samples of descending length.
        place = next(
            (i for i, total in enumerate(totals) if total + length <= max_tokens),
            len(totals),
        )
        if place == len(totals):
            result.append([])
            totals.append(0)
        result[place].append(sample)
        totals[place] += length
    return result


def _round_up(number: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `number`."""
    return -(-number // multiple_of) * multiple_of
