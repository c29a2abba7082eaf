"""Plans of packed micro-batches: every sample once, under the cap, prompts shared as far as that pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import MicroBatchRule, plan_micro_batches
from megaverl.data.prefix_packing import (
    GOOD_ENOUGH,
    packed_tokens,
    plan_packed_micro_batches,
    prompt_numbers,
    sequence_lengths,
    shared_tokens,
)
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.errors import DataError


def test_prompts_are_the_same_token_for_token() -> None:
    batch = RolloutBatch(
        input_ids=torch.tensor([[5, 6, 0], [5, 6, 6], [5, 6, 9], [6, 5, 0]]),
        prompt_lengths=torch.tensor([2, 3, 2, 2]),
        generated_ids=torch.ones(4, 1, dtype=torch.int64),
        response_mask=torch.ones(4, 1, dtype=torch.bool),
    )
    assert prompt_numbers(batch) == [0, 1, 0, 2], (
        "what stands in the padding does not count"
    )
    assert shared_tokens([2, 0, 1]) == [1, 0, 0]


def test_a_prompt_counts_once() -> None:
    assert packed_tokens([0, 1, 2], [10, 12, 9], [4, 4, 5], [0, 0, 1]) == 4 + 6 + 8 + 9


SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=24
)


@settings(max_examples=150)
@given(
    samples=SAMPLES,
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(32, 90),
    multiple_of=st.sampled_from([1, 2, 4]),
    least=st.integers(1, 3),
    unit=st.sampled_from([1, 2]),
)
def test_plans(
    samples: list[tuple[int, int]],
    num_ranks: int,
    max_tokens: int,
    multiple_of: int,
    least: int,
    unit: int,
) -> None:
    samples = [sample for sample in samples for _ in range(unit)]
    prompts = [prompt for prompt, _ in samples]
    shared = [3 * prompt for prompt in prompts]
    lengths = [common + own for common, (_, own) in zip(shared, samples, strict=True)]
    units = [list(range(i, i + unit)) for i in range(0, len(samples), unit)]
    cost = lambda rows: packed_tokens(rows, lengths, shared, prompts)  # noqa: E731
    rule = MicroBatchRule(multiple_of=multiple_of, least=least)
    if any(-(-cost(rows) // multiple_of) * multiple_of > max_tokens for rows in units):
        with pytest.raises(
            DataError,
            match=r"^sample \d+ has \d+ tokens, more than actor.micro_batch_tokens=",
        ):
            plan_packed_micro_batches(
                units, lengths, shared, prompts, num_ranks, max_tokens, rule
            )
        return
    plan = plan_packed_micro_batches(
        units, lengths, shared, prompts, num_ranks, max_tokens, rule
    )
    assert len(plan) == num_ranks and len({len(mine) for mine in plan}) == 1
    assert sorted(row for mine in plan for micro in mine for row in micro) == list(
        range(len(samples))
    )
    for mine in plan:
        for micro in mine:
            assert -(-cost(micro) // multiple_of) * multiple_of <= max_tokens
            for first, *others in units:
                assert len({row in micro for row in (first, *others)}) == 1, (
                    "a unit is never split"
                )
    assert len(plan[0]) >= min(least, len(units) // num_ranks)
    assert plan == planned_by_counting_anew(
        units,
        lengths,
        shared,
        prompts,
        num_ranks,
        max_tokens,
        multiple_of=multiple_of,
        least=least,
    )


def planned_by_counting_anew(
    units: list[list[int]],
    lengths: list[int],
    shared: list[int],
    prompts: list[int],
    num_ranks: int,
    max_tokens: int,
    *,
    multiple_of: int,
    least: int,
) -> list[list[list[int]]]:
    """The same with the tokens of every row counted from its samples, whenever they are asked for."""

    def cost(samples: list[int]) -> int:
        return packed_tokens(samples, lengths, shared, prompts)

    alike: dict[int, list[list[int]]] = {}
    for unit in units:
        alike.setdefault(prompts[unit[0]], []).append(unit)
    mean = -(
        -sum(cost([row for unit in same for row in unit]) for same in alike.values())
        // num_ranks
    )
    plans, most = [], max(map(len, alike.values()))
    for parts in (2**power for power in range((most - 1).bit_length() + 1)):
        bundles: list[list[int]] = []
        for same in alike.values():
            size = -(-len(same) // parts)
            for start in range(0, len(same), size):
                bundles.append([])
                for unit in same[start : start + size]:
                    if (
                        bundles[-1]
                        and cost(bundles[-1] + unit)
                        > max_tokens - max_tokens % multiple_of
                    ):
                        bundles.append([])
                    bundles[-1] = bundles[-1] + unit
        costs = [cost(bundle) for bundle in bundles]
        rule = MicroBatchRule(multiple_of=multiple_of, least=least)
        plan = plan_micro_batches(costs, num_ranks, max_tokens, rule, padded=False)
        found = [
            [
                sorted(row for number in micro for row in bundles[number])
                for micro in mine
            ]
            for mine in plan
        ]
        most_tokens = max(sum(map(cost, mine)) for mine in found)
        idle = any(not micro for mine in found for micro in mine)
        plans.append(
            ((-min(least, len(found[0])), idle, most_tokens, len(found[0])), found)
        )
        if len(found[0]) >= least and not idle and most_tokens <= GOOD_ENOUGH * mean:
            break
    return min(plans, key=lambda plan: plan[0])[1]


def test_groups_stay_together_where_ranks_are_evenly_filled() -> None:
    """8 prompts of 32 tokens, 8 responses of 64, two ranks: whole groups, so that each prompt is read once."""
    prompts = [i // 8 for i in range(64)]
    plan = plan_packed_micro_batches(
        [[i] for i in range(64)], [96] * 64, [31] * 64, prompts, 2, 4000
    )
    assert [
        sum(packed_tokens(micro, [96] * 64, [31] * 64, prompts) for micro in mine)
        for mine in plan
    ] == [2204, 2204]


def test_groups_are_cut_where_there_are_more_ranks_than_prompts() -> None:
    prompts = [i // 8 for i in range(16)]
    plan = plan_packed_micro_batches(
        [[i] for i in range(16)], [96] * 16, [31] * 16, prompts, 8, 4000
    )
    assert [sorted(len(micro) for micro in mine) for mine in plan] == [[2]] * 8
    assert all(len({prompts[i] for i in micro}) == 1 for mine in plan for micro in mine)


def test_an_outline_says_how_long_all_are_and_which_prompts_are_the_same() -> None:
    batch = RolloutBatch(
        input_ids=torch.tensor([[5, 6, 0], [5, 6, 6], [5, 6, 0]]),
        prompt_lengths=torch.tensor([2, 3, 2]),
        generated_ids=torch.ones(3, 2, dtype=torch.int64),
        response_mask=torch.tensor([[True, True], [True, False], [False, False]]),
    )
    outline = sequence_lengths(batch)
    assert outline == SequenceLengths([2, 3, 2], [2, 1, 0], [0, 1, 0])
    assert outline.lengths == [4, 4, 2] and len(outline) == 3
    # a rank that has some of the samples is told which prompts are the same
    assert sequence_lengths(
        batch.with_(prompt_numbers=torch.tensor([3, 4, 5]))
    ).prompts == [3, 4, 5]


def busiest(
    plan: list[list[list[int]]],
    lengths: list[int],
    shared: list[int],
    prompts: list[int],
) -> int:
    return max(
        sum(packed_tokens(micro, lengths, shared, prompts) for micro in mine)
        for mine in plan
    )


def test_a_prompt_is_cut_only_as_far_as_ranks_are_more_evenly_filled() -> None:
    """One prompt of 11 tokens, 8 responses of 10: whole it fills one rank of two, in two parts both."""
    prompts, shared, lengths = [0] * 8, [10] * 8, [20] * 8
    units = [[i] for i in range(8)]
    plan = plan_packed_micro_batches(units, lengths, shared, prompts, 2, 1000)
    assert sorted(map(sorted, (sum(mine, []) for mine in plan))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert busiest(plan, lengths, shared, prompts) == 50
    # on one rank nothing is gained
    assert plan_packed_micro_batches(units, lengths, shared, prompts, 1, 1000) == [
        [list(range(8))]
    ]
    # nor where a whole prompt each is within a little of the mean: 90 + 90 and 90 + 88
    prompts, shared = [i // 8 for i in range(32)], [10] * 32
    lengths = [20] * 31 + [18]
    plan = plan_packed_micro_batches(
        [[i] for i in range(32)], lengths, shared, prompts, 2, 1000
    )
    assert all(len({prompts[i] for i in sum(mine, [])}) == 2 for mine in plan)
    assert busiest(plan, lengths, shared, prompts) == 180 < GOOD_ENOUGH * 179


def test_a_prompt_whose_samples_do_not_fit_one_row_is_cut_where_they_do_not() -> None:
    """10 shared and 10 own tokens each: a row of 35 holds two of them."""
    plan = plan_packed_micro_batches(
        [[i] for i in range(5)], [20] * 5, [10] * 5, [0] * 5, 1, 35
    )
    assert sorted(plan[0]) == [[0, 1], [2, 3], [4]]
    plan = plan_packed_micro_batches(
        [[i] for i in range(5)],
        [20] * 5,
        [10] * 5,
        [0] * 5,
        1,
        35,
        MicroBatchRule(multiple_of=8),
    )
    assert sorted(plan[0]) == [[0, 1], [2, 3], [4]], "32 of the 35 tokens can be used"
    plan = plan_packed_micro_batches(
        [[i] for i in range(3)],
        [20] * 3,
        [10] * 3,
        [0] * 3,
        1,
        29,
        MicroBatchRule(multiple_of=8),
    )
    assert sorted(plan[0]) == [[0], [1], [2]]


def test_as_many_micro_batches_as_are_asked_for() -> None:
    units = [[i] for i in range(8)]
    for least, count_multiple_of, expected in (
        (1, 1, 1),
        (3, 1, 3),
        (3, 2, 4),
        (1, 4, 4),
    ):
        rule = MicroBatchRule(least=least, count_multiple_of=count_multiple_of)
        plan = plan_packed_micro_batches(
            units, [20] * 8, [10] * 8, [0] * 8, 1, 1000, rule
        )
        assert len(plan[0]) == expected and all(plan[0])


@pytest.mark.parametrize(
    ("first", "second", "whole"), [(101, 99, True), (102, 98, True), (103, 97, False)]
)
def test_whole_prompts_are_kept_where_they_fill_the_ranks_well_enough(
    first: int, second: int, whole: bool
) -> None:
    """Two prompts that share nothing, so that a cut costs nothing and is always a little more even."""
    prompts = [0] * first + [1] * second
    plan = plan_packed_micro_batches(
        [[i] for i in range(200)], [10] * 200, [0] * 200, prompts, 2, 4000
    )
    assert all(len({prompts[i] for i in mine[0]}) == 1 for mine in plan) == whole
    assert max(len(mine[0]) for mine in plan) == (first if whole else 100)
