"""Plans of packed micro-batches: every sample once, under the cap, prompts shared as far as that pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.batch import RolloutBatch
from megaverl.data.sharing import packed_tokens, plan_packed_micro_batches, prompt_numbers, shared_tokens
from megaverl.errors import DataError


def test_prompts_are_the_same_token_for_token() -> None:
    batch = RolloutBatch(
        input_ids=torch.tensor([[5, 6, 0], [5, 6, 6], [5, 6, 9], [6, 5, 0]]),
        prompt_lengths=torch.tensor([2, 3, 2, 2]),
        generated_ids=torch.ones(4, 1, dtype=torch.int64),
        response_mask=torch.ones(4, 1, dtype=torch.bool),
    )
    assert prompt_numbers(batch) == [0, 1, 0, 2], "what stands in the padding does not count"
    assert shared_tokens([2, 0, 1]) == [1, 0, 0]


def test_a_prompt_counts_once() -> None:
    assert packed_tokens([0, 1, 2], [10, 12, 9], [4, 4, 5], [0, 0, 1]) == 4 + 6 + 8 + 9


SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=24)


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
    samples: list[tuple[int, int]], num_ranks: int, max_tokens: int, multiple_of: int, least: int, unit: int
) -> None:
    samples = [sample for sample in samples for _ in range(unit)]
    prompts = [prompt for prompt, _ in samples]
    shared = [3 * prompt for prompt in prompts]
    lengths = [common + own for common, (_, own) in zip(shared, samples, strict=True)]
    units = [list(range(i, i + unit)) for i in range(0, len(samples), unit)]
    cost = lambda rows: packed_tokens(rows, lengths, shared, prompts)  # noqa: E731
    if any(-(-cost(rows) // multiple_of) * multiple_of > max_tokens for rows in units):
        with pytest.raises(DataError, match=r"^sample \d+ has \d+ tokens, more than actor.micro_batch_tokens="):
            plan_packed_micro_batches(
                units, lengths, shared, prompts, num_ranks, max_tokens, multiple_of=multiple_of, least=least
            )
        return
    plan = plan_packed_micro_batches(
        units, lengths, shared, prompts, num_ranks, max_tokens, multiple_of=multiple_of, least=least
    )
    assert len(plan) == num_ranks and len({len(mine) for mine in plan}) == 1
    assert sorted(row for mine in plan for micro in mine for row in micro) == list(range(len(samples)))
    for mine in plan:
        for micro in mine:
            assert -(-cost(micro) // multiple_of) * multiple_of <= max_tokens
            for first, *others in units:
                assert len({row in micro for row in (first, *others)}) == 1, "a unit is never split"
    assert len(plan[0]) >= min(least, len(units) // num_ranks)


def test_groups_stay_together_where_ranks_are_evenly_filled() -> None:
    """8 prompts of 32 tokens, 8 responses of 64, two ranks: whole groups, so that each prompt is read once."""
    prompts = [i // 8 for i in range(64)]
    plan = plan_packed_micro_batches([[i] for i in range(64)], [96] * 64, [31] * 64, prompts, 2, 4000)
    assert [sum(packed_tokens(micro, [96] * 64, [31] * 64, prompts) for micro in mine) for mine in plan] == [2204, 2204]


def test_groups_are_cut_where_there_are_more_ranks_than_prompts() -> None:
    prompts = [i // 8 for i in range(16)]
    plan = plan_packed_micro_batches([[i] for i in range(16)], [96] * 16, [31] * 16, prompts, 8, 4000)
    assert [sorted(len(micro) for micro in mine) for mine in plan] == [[2]] * 8
    assert all(len({prompts[i] for i in micro}) == 1 for mine in plan for micro in mine)
