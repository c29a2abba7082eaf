"""Plans of packed micro-batches: every sample once, under the cap, equal tokens shared as far as that pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import ANY_MICRO_BATCHES, MicroBatchRule, plan_micro_batches
from megaverl.data.prefix_packing import (
    GOOD_ENOUGH,
    plan_packed_micro_batches,
    prompt_numbers,
    sequence_lengths,
)
from megaverl.data.prefix_tree import GrowingRow, PrefixTree, limits_of
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.errors import DataError


def packed_tokens(
    samples: Sequence[int],
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
) -> int:
    """The tokens of a row, counted prompt by prompt."""
    beginnings = {prompts[sample]: shared[sample] for sample in samples}
    own = sum(lengths[sample] - shared[sample] for sample in samples)
    return own + sum(beginnings.values())


def tree_of(shared: Sequence[int], prompts: Sequence[int]) -> PrefixTree:
    """The tree of samples that share so many tokens of each prompt, which is one token longer."""
    return PrefixTree.of_prompts(prompts, [count + 1 for count in shared])


def planned(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    shared: Sequence[int],
    prompts: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    rule: MicroBatchRule = ANY_MICRO_BATCHES,
) -> list[list[list[int]]]:
    tree = tree_of(shared, prompts)
    return plan_packed_micro_batches(
        units, lengths, prompts, tree, num_ranks, max_tokens, rule
    )


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
    tree = sequence_lengths(batch).tree
    assert tree.order == [0, 2, 1, 3] and tree.shared == [0, 1, 0, 0], (
        "the last token of a prompt predicts the response, so each sample has its own"
    )


def test_a_prompt_counts_once() -> None:
    tree = tree_of([4, 4, 5], [0, 0, 1])
    assert tree.num_tokens([0, 1, 2], [10, 12, 9]) == 4 + 6 + 8 + 9


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.sampled_from([1, 256, -1]), max_size=6)),
    max_size=9,
)


@settings(max_examples=300)
@given(samples=SEQUENCES, data=st.data())
def test_a_row_has_each_beginning_once(
    samples: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """As many tokens as a trie of the same samples has nodes, for all samples and for any of them."""
    groups = [group for group, _ in samples]
    sequences = [tokens for _, tokens in samples]
    lengths = [len(tokens) for tokens in sequences]
    tree = PrefixTree.of_tokens(sequences, lengths, groups)
    everyone = range(len(samples))
    chosen = data.draw(st.permutations(everyone)) if samples else []
    chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
    for some in (list(everyone), chosen):
        nodes = {
            (groups[sample], tuple(sequences[sample][:end]))
            for sample in some
            for end in range(1, lengths[sample] + 1)
        }
        assert tree.num_tokens(some, lengths) == len(nodes)
        part = tree.subset(some)
        own = [lengths[sample] for sample in some]
        assert part.num_tokens(range(len(some)), own) == len(nodes)
        row = GrowingRow(tree, lengths)
        for sample in some:
            expected = row.num_tokens + row.growth([sample])
            row.add([sample])
            assert row.num_tokens == expected
        assert row.num_tokens == len(nodes) and row.samples == some
        for before, sample, count in zip(
            part.order, part.order[1:], part.shared[1:], strict=False
        ):
            first, second = some[before], some[sample]
            assert groups[first] == groups[second] or not count
            assert sequences[first][:count] == sequences[second][:count]


@settings(max_examples=200)
@given(samples=SEQUENCES, data=st.data())
def test_a_history_that_goes_on_comes_first(
    samples: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Whatever each may share at most: a chain of prompts saves all that its limits allow."""
    sequences = [tokens for _, tokens in samples]
    lengths = [len(tokens) for tokens in sequences]
    limits = [data.draw(st.integers(0, length)) for length in lengths]
    tree = PrefixTree.of_tokens(sequences, limits, [0] * len(samples))
    assert sorted(tree.order) == list(range(len(samples)))
    for place, (before, sample) in enumerate(
        zip(tree.order, tree.order[1:], strict=False), start=1
    ):
        count = tree.equal[place]
        assert sequences[before][:count] == sequences[sample][:count]
        assert tree.shared[place] == min(count, limits[sample])
    chain = [[1] * (3 * turn + 3) for turn in range(4)]
    prompts = [max(1, 3 * turn) for turn in range(4)]
    order = data.draw(st.permutations(range(4)))
    chained = PrefixTree.of_tokens(
        [chain[turn] for turn in order],
        limits_of([prompts[turn] for turn in order]),
        [0] * 4,
    )
    assert [order[sample] for sample in chained.order] == [0, 1, 2, 3]


def test_conversations_of_a_group_share_their_turns() -> None:
    """Not only prompts, and not those of another group; with images equal prompts alone."""
    batch = RolloutBatch(
        # Two conversations of one episode, the second after its first turn; another group.
        input_ids=torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 0, 0]]),
        prompt_lengths=torch.tensor([2, 4, 2]),
        generated_ids=torch.tensor([[3, 4, 9], [5, 0, 0], [3, 4, 0]]),
        response_mask=torch.tensor(
            [[True, True, True], [True, False, False], [True, True, False]]
        ),
        episode_ids=torch.tensor([0, 0, 1]),
        group_ids=torch.tensor([7, 7, 3]),
    )
    lengths = sequence_lengths(batch)
    assert lengths.prompts == [0, 0, 1]
    tree = lengths.tree
    assert tree.order == [0, 1, 2] and tree.shared == [0, 3, 0]
    assert tree.num_tokens([0, 1, 2], lengths.lengths) == 5 + 2 + 4
    images = sequence_lengths(batch.with_columns(images=[None, None, None])).tree
    assert images.order == [0, 2, 1] and images.shared == [0, 1, 0]


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
            planned(units, lengths, shared, prompts, num_ranks, max_tokens, rule)
        return
    plan = planned(units, lengths, shared, prompts, num_ranks, max_tokens, rule)
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
    plan = planned([[i] for i in range(64)], [96] * 64, [31] * 64, prompts, 2, 4000)
    assert [
        sum(packed_tokens(micro, [96] * 64, [31] * 64, prompts) for micro in mine)
        for mine in plan
    ] == [2204, 2204]


def test_groups_are_cut_where_there_are_more_ranks_than_prompts() -> None:
    prompts = [i // 8 for i in range(16)]
    plan = planned([[i] for i in range(16)], [96] * 16, [31] * 16, prompts, 8, 4000)
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
    plan = planned(units, lengths, shared, prompts, 2, 1000)
    assert sorted(map(sorted, (sum(mine, []) for mine in plan))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert busiest(plan, lengths, shared, prompts) == 50
    # on one rank nothing is gained
    assert planned(units, lengths, shared, prompts, 1, 1000) == [[list(range(8))]]
    # nor where a whole prompt each is within a little of the mean: 90 + 90 and 90 + 88
    prompts, shared = [i // 8 for i in range(32)], [10] * 32
    lengths = [20] * 31 + [18]
    plan = planned([[i] for i in range(32)], lengths, shared, prompts, 2, 1000)
    assert all(len({prompts[i] for i in sum(mine, [])}) == 2 for mine in plan)
    assert busiest(plan, lengths, shared, prompts) == 180 < GOOD_ENOUGH * 179


def test_a_prompt_whose_samples_do_not_fit_one_row_is_cut_where_they_do_not() -> None:
    """10 shared and 10 own tokens each: a row of 35 holds two of them."""
    plan = planned([[i] for i in range(5)], [20] * 5, [10] * 5, [0] * 5, 1, 35)
    assert sorted(plan[0]) == [[0, 1], [2, 3], [4]]
    plan = planned(
        [[i] for i in range(5)],
        [20] * 5,
        [10] * 5,
        [0] * 5,
        1,
        35,
        MicroBatchRule(multiple_of=8),
    )
    assert sorted(plan[0]) == [[0, 1], [2, 3], [4]], "32 of the 35 tokens can be used"
    plan = planned(
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
        plan = planned(units, [20] * 8, [10] * 8, [0] * 8, 1, 1000, rule)
        assert len(plan[0]) == expected and all(plan[0])


@pytest.mark.parametrize(
    ("first", "second", "whole"), [(101, 99, True), (102, 98, True), (103, 97, False)]
)
def test_whole_prompts_are_kept_where_they_fill_the_ranks_well_enough(
    first: int, second: int, whole: bool
) -> None:
    """Two prompts that share nothing, so that a cut costs nothing and is always a little more even."""
    prompts = [0] * first + [1] * second
    plan = planned([[i] for i in range(200)], [10] * 200, [0] * 200, prompts, 2, 4000)
    assert all(len({prompts[i] for i in mine[0]}) == 1 for mine in plan) == whole
    assert max(len(mine[0]) for mine in plan) == (first if whole else 100)
