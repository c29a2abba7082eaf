from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaverl.data.batching import (
    MicroBatchRule,
    balance,
    common_count,
    groups_of_ranks,
    micro_batch_tokens,
    micro_batches,
    mini_batches,
    plan_micro_batches,
    rows_of_rank,
)
from megaverl.errors import DataError

PROPERTY = settings(deadline=None, max_examples=80, database=None)
LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def flat(lists):
    return sorted(sample for inner in lists for sample in inner)


def test_the_budget_is_a_cap():
    # Known of another framework: 6, 6, 6 with a budget of 10 became 12 and 6.
    for padded in (True, False):
        assert micro_batches([6, 6, 6], 10, padded=padded) == [[0], [1], [2]]
        assert micro_batches([6, 6, 6], 12, padded=padded) == [[0, 1], [2]]


def test_micro_batches_by_hand():
    lengths = [3, 9, 1, 4, 8]
    assert micro_batches(lengths, 18) == [[1, 4], [3, 0, 2]]  # 2 x 9, 3 x 4
    # 9 + 8 + 1, 4 + 3.
    assert micro_batches(lengths, 18, padded=False) == [[1, 4, 2], [3, 0]]
    assert micro_batches(lengths, 18, indices=[10, 11, 12, 13, 14]) == [
        [11, 14],
        [13, 10, 12],
    ]
    assert micro_batches([5, 5], 15, multiple_of=8) == [[0], [1]]  # each costs 8
    assert micro_batches([], 1) == []
    assert (
        micro_batch_tokens([3, 5]) == 10
        and micro_batch_tokens([3, 5], padded=False) == 8
    )
    assert (
        micro_batch_tokens([3, 5], multiple_of=4) == 16 and micro_batch_tokens([]) == 0
    )


@PROPERTY
@given(LENGTHS, st.integers(52, 200), st.booleans(), st.integers(1, 4))
def test_no_micro_batch_is_above_the_cap(lengths, max_tokens, padded, multiple_of):
    batches = micro_batches(lengths, max_tokens, padded=padded, multiple_of=multiple_of)
    assert flat(batches) == list(range(len(lengths)))
    for batch in batches:
        chosen = [lengths[sample] for sample in batch]
        cost = len(chosen) * max(chosen) if padded else sum(chosen)
        assert batch and cost <= max_tokens
        assert (
            micro_batch_tokens(chosen, padded=padded, multiple_of=multiple_of)
            <= max_tokens
        )


@PROPERTY
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 20))
def test_padded_micro_batches_are_the_fewest_possible(lengths, max_tokens):
    def partitions(samples):
        if not samples:
            yield []
            return
        first, rest = samples[0], samples[1:]
        for smaller in partitions(rest):
            yield [[first], *smaller]
            for i in range(len(smaller)):
                yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]

    fewest = min(
        len(parts)
        for parts in partitions(lengths)
        if all(len(part) * max(part) <= max_tokens for part in parts)
    )
    assert len(micro_batches(lengths, max_tokens)) == fewest


def test_a_sample_above_the_cap_is_an_error_with_the_mend():
    with pytest.raises(DataError) as caught:
        micro_batches(
            [3, 12, 30], 10, indices=[5, 6, 7], key="critic.micro_batch_tokens"
        )
    message = str(caught.value)
    assert (
        "sample 6 has 12 tokens" in message
        and "critic.micro_batch_tokens=10" in message
    )
    assert "raise critic.micro_batch_tokens to at least 30" in message
    micro_batches([3, 12, 30], 30)  # what it says works
    with pytest.raises(DataError, match="to at least 16"):
        micro_batches([13], 13, multiple_of=8)
    with pytest.raises(DataError, match="sample 2 has 11 tokens"):
        plan_micro_batches([1, 99, 11], 2, 10, indices=[0, 2])


@pytest.mark.parametrize("equal_counts", [True, False])
def test_balance_by_hand(equal_counts):
    # Karmarkar-Karp on 8 7 6 5 4: {8, 6} and {7, 5, 4} (16 against 14), counts 2 and 3.
    parts = balance([8, 7, 6, 5, 4], 2, equal_counts=equal_counts)
    sums = sorted(sum([8, 7, 6, 5, 4][sample] for sample in part) for part in parts)
    assert sums == [14, 16] and sorted(map(len, parts)) == [2, 3]
    assert balance([5, 5], 4, equal_counts=equal_counts).count([]) == 2
    assert balance([], 3, equal_counts=equal_counts) == [[], [], []]
    assert balance([2, 1], 1, equal_counts=equal_counts) == [[0, 1]]


@PROPERTY
@given(LENGTHS, st.integers(1, 6), st.booleans())
def test_balance_covers_everything_and_is_even(lengths, num_ranks, equal_counts):
    parts = balance(lengths, num_ranks, equal_counts=equal_counts)
    assert len(parts) == num_ranks and flat(parts) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    totals = [sum(lengths[sample] for sample in part) for part in parts]
    assert max(totals) - min(totals) <= max(lengths, default=0)
    if equal_counts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_balance_of_many_random_lengths_is_close():
    draw = random.Random(0)
    lengths = [draw.randint(20, 2000) for _ in range(512)]
    for equal_counts in (True, False):
        totals = [
            sum(lengths[i] for i in part)
            for part in balance(lengths, 8, equal_counts=equal_counts)
        ]
        assert max(totals) <= 1.001 * min(totals)


def test_common_count_splits_and_fills():
    lengths = [4, 4, 4, 4, 9, 1]
    parts = common_count([[[0, 1, 2, 3]], [[4], [5]], []], lengths)
    assert parts == [[[0, 1], [2, 3]], [[4], [5]], [[], []]]
    assert common_count([[[0, 1, 2]], [[4]]], lengths, count_multiple_of=2) == [
        [[1, 2], [0]],
        [[4], []],
    ]
    assert common_count([[], []], lengths) == [[[]], [[]]]


@PROPERTY
@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(52, 150),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_plan_gives_every_rank_the_same_number_under_the_cap(
    lengths, num_ranks, max_tokens, padded, count_multiple_of, equal_counts
):
    chosen = list(range(0, len(lengths), 2))
    plan = plan_micro_batches(
        lengths,
        num_ranks,
        max_tokens,
        MicroBatchRule(count_multiple_of=count_multiple_of),
        indices=chosen,
        padded=padded,
        equal_counts=equal_counts,
    )
    assert len(plan) == num_ranks and len({len(batches) for batches in plan}) == 1
    assert len(plan[0]) >= 1 and len(plan[0]) % count_multiple_of == 0
    assert flat(batch for batches in plan for batch in batches) == chosen
    for batches in plan:
        costs = [
            micro_batch_tokens([lengths[i] for i in batch], padded=padded)
            for batch in batches
        ]
        assert max(costs) <= max_tokens and costs == sorted(costs, reverse=True)
        if not all(batches):  # empty ones only where nothing is left to split
            assert all(len(batch) <= 1 for batch in batches)


@PROPERTY
@given(
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 3),
    st.data(),
)
def test_mini_batches_are_even_and_complete(num_samples, seed, step, epoch, data):
    count = data.draw(st.integers(1, num_samples))
    parts = mini_batches(num_samples, count, seed=seed, step=step, epoch=epoch)
    assert len(parts) == count and flat(parts) == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@PROPERTY
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.integers(0, 5),
    st.integers(0, 3),
    st.data(),
)
def test_groups_stay_together_where_a_mini_batch_has_room(group_ids, seed, epoch, data):
    """Few are cut, and none where each is as large as the other and divides a mini-batch."""
    count = data.draw(st.integers(1, len(group_ids)))
    given = {"seed": seed, "step": 2, "epoch": epoch}
    parts = mini_batches(len(group_ids), count, group_ids=group_ids, **given)
    assert flat(parts) == list(range(len(group_ids)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    owners = [{group_ids[sample] for sample in part} for part in parts]
    assert sum(map(len, owners)) <= len(set(group_ids)) + count - 1
    even = [number // 4 for number in range(8 * count)]
    owners = [
        {even[sample] for sample in part}
        for part in mini_batches(8 * count, count, group_ids=even, **given)
    ]
    assert [len(each) for each in owners] == [2] * count
    alone = list(range(len(group_ids)))[::-1]
    assert mini_batches(len(alone), count, group_ids=alone, **given) == mini_batches(
        len(alone), count, **given
    )


def drawn_one_by_one(num_samples, num_mini_batches, group_ids, number):
    """As the docstring of `mini_batches` says it: every sample is drawn, behind its group's first."""
    draws = [
        hashlib.blake2b(
            f"mini_batches/{number}/{sample}".encode(), digest_size=16
        ).digest()
        for sample in range(num_samples)
    ]
    order = sorted(
        range(num_samples),
        key=lambda sample: (draws[group_ids.index(group_ids[sample])], draws[sample]),
    )
    bounds = [num_samples * i // num_mini_batches for i in range(num_mini_batches + 1)]
    return [
        sorted(order[start:stop])
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


@PROPERTY
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 99), st.data()
)
def test_only_what_counts_is_drawn(group_ids, seed, data):
    count = data.draw(st.integers(1, len(group_ids)))
    parts = mini_batches(
        len(group_ids), count, seed=seed, step=2, epoch=1, group_ids=group_ids
    )
    assert parts == drawn_one_by_one(len(group_ids), count, group_ids, f"{seed}/2/1")


def test_one_group_that_is_all_samples_is_drawn_from():
    drawn = [
        mini_batches(16, 2, seed=1, step=0, epoch=epoch, group_ids=[7] * 16)
        for epoch in range(3)
    ]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])
    with pytest.raises(
        DataError,
        match="16 samples cannot be split into 17 mini-batches; lower algorithm.num_mini",
    ):
        mini_batches(16, 17, seed=1, step=2, epoch=0, group_ids=[7] * 16)


def test_the_draw_depends_on_seed_step_and_epoch_alone():
    def draw(**changes):
        return mini_batches(32, 4, **{"seed": 0, "step": 0, "epoch": 0, **changes})

    drawn = [draw(), draw(seed=1), draw(step=1), draw(epoch=1)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])
    random.seed(5)
    assert draw() == drawn[0]
    code = (
        "from megaverl.data.batching import *\n"
        "print(mini_batches(32, 4, seed=0, step=0, epoch=0), balance([7, 7, 7, 5, 5, 1], 3), sep='\\n')"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines() == [str(drawn[0]), str(balance([7, 7, 7, 5, 5, 1], 3))]


def differencing(lengths, num_ranks, per_state):
    """Karmarkar and Karp's largest differencing, as it is written: the two most different states are joined."""
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    states = []
    for start in range(0, len(order), per_state):
        parts = [
            (lengths[sample], [sample]) for sample in order[start : start + per_state]
        ]
        states.append(parts + [(0, [])] * (num_ranks - len(parts)))
    while len(states) > 1:
        # Stable: the older one first.
        first, second = sorted(states, key=lambda parts: parts[-1][0] - parts[0][0])[:2]
        states = [
            parts for parts in states if parts is not first and parts is not second
        ]
        joined = [
            (first[i][0] + second[-1 - i][0], first[i][1] + second[-1 - i][1])
            for i in range(num_ranks)
        ]
        states.append(sorted(joined, key=lambda part: -part[0]))
    return [sorted(samples) for _, samples in states[0]]


FEW_LENGTHS = st.one_of(
    *(st.lists(st.integers(least, 9), min_size=1, max_size=20) for least in (0, 1))
)


@PROPERTY
@given(FEW_LENGTHS, st.integers(2, 6), st.booleans())
@example([0, 0, 0], 4, False)
def test_balance_is_largest_differencing(lengths, num_ranks, equal_counts):
    expected = differencing(lengths, num_ranks, num_ranks if equal_counts else 1)
    assert balance(lengths, num_ranks, equal_counts=equal_counts) == expected


def test_what_is_not_said_is_as_simple_as_can_be():
    lengths = [9, 1, 1, 1, 7]
    assert (
        balance(lengths, 2)
        == balance(lengths, 2, equal_counts=False)
        != balance(lengths, 2, equal_counts=True)
    )
    simple = MicroBatchRule(multiple_of=1, count_multiple_of=1, least=1)
    plan = plan_micro_batches(lengths, 2, 9)
    assert plan == plan_micro_batches(
        lengths, 2, 9, simple, padded=True, equal_counts=False
    )
    assert plan_micro_batches(lengths, 2, 9, equal_counts=True) != plan
    for other in (MicroBatchRule(count_multiple_of=4), MicroBatchRule(least=3)):
        assert plan_micro_batches(lengths, 2, 9, other) != plan, other
    assert micro_batches([4, 4, 3], 9) == micro_batches(
        [4, 4, 3], 9, padded=True, multiple_of=1
    )
    assert (
        plan_micro_batches([4, 4], 1, 9)
        == [[[0, 1]]]
        != plan_micro_batches([4, 4], 1, 9, MicroBatchRule(multiple_of=5))
    )
    assert (
        plan_micro_batches([5, 4], 1, 9)
        == [[[0], [1]]]
        != plan_micro_batches([5, 4], 1, 9, padded=False)
    )
    assert common_count([[[0, 1]]], [3, 3]) == [[[0, 1]]]


def test_at_least_as_many_micro_batches_where_some_rank_has_as_many_samples():
    lengths = [1] * 6
    assert [
        len(mine) for mine in common_count([[[0, 1, 2, 3]], [[4, 5]]], lengths, least=3)
    ] == [3, 3]
    assert [
        len(mine) for mine in common_count([[[0, 1, 2, 3]], [[4, 5]]], lengths, least=9)
    ] == [4, 4]
    assert common_count([[[0, 1, 2, 3]], [[4, 5]]], lengths, least=4)[1] == [
        [4],
        [5],
        [],
        [],
    ]


def test_the_costliest_is_split_and_comes_first():
    lengths = [1, 1, 1, 5, 5]
    assert common_count([[[0, 1, 2], [3, 4]]], lengths, least=3) == [
        [[3], [4], [0, 1, 2]]
    ]
    assert common_count([[[0, 1, 2], [3, 4]]], lengths, least=4) == [
        [[3], [4], [1, 2], [0]]
    ]
    # padded by its longest row, the batch of 1 and 6 costs 12; packed 7, less than the
    # other's 8
    lengths = [1, 6, 4, 4]
    assert common_count([[[0, 1], [2, 3]]], lengths, least=3) == [[[2, 3], [1], [0]]]
    assert common_count([[[0, 1], [2, 3]]], lengths, least=3, padded=False) == [
        [[0, 1], [2], [3]]
    ]


@given(st.integers(0, 40), st.integers(1, 7))
def test_rows_of_a_rank_are_runs_of_equal_length(num_samples, size):
    rows = [rows_of_rank(num_samples, rank, size) for rank in range(size)]
    assert [row for part in rows for row in part] == list(range(num_samples))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_packed_micro_batches_take_the_first_that_fits():
    assert micro_batches([7, 5, 4, 3, 2], 10, padded=False) == [[0, 3], [1, 2]] + [[4]]
    assert micro_batches([6, 3, 3], 11, padded=False, multiple_of=3) == [[0, 1], [2]], (
        "9 of the 11 can be used"
    )
    assert micro_batches([6, 3], 9, padded=False, multiple_of=3) == [[0, 1]]
    assert (
        micro_batch_tokens([6, 4], padded=False, multiple_of=4) == 12
        and micro_batch_tokens([0, 0]) == 2
    )


def test_groups_are_dealt_whole() -> None:
    groups = [0, 0, 0, 1, 2, 2, 5, 5]
    assert groups_of_ranks(groups, 2) == [range(4), range(4, 8)]
    assert groups_of_ranks(groups, 3) == [range(3), range(3, 4), range(4, 8)]
    assert groups_of_ranks([7, 7], 3) == [range(0), range(0), range(2)]
    assert groups_of_ranks([], 2) == [range(0), range(0)]
