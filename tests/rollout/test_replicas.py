"""Dealing prompts to replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megaverl.rollout import split_prompts

lengths_of_groups = st.lists(st.integers(1, 500), max_size=40)


@given(lengths_of_groups, st.integers(1, 9), st.integers(1, 6))
def test_every_prompt_once_and_counts_even(
    groups: list[int], num_replicas: int, group_size: int
) -> None:
    lengths = [length for length in groups for _ in range(group_size)]
    shares = split_prompts(lengths, num_replicas, group_size)
    assert len(shares) == num_replicas
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@given(lengths_of_groups, st.integers(1, 9), st.integers(2, 6))
def test_groups_stay_together_but_for_the_last(
    groups: list[int], num_replicas: int, group_size: int
) -> None:
    lengths = [length for length in groups for _ in range(group_size)]
    shares = split_prompts(lengths, num_replicas, group_size)
    replica_of = {i: replica for replica, share in enumerate(shares) for i in share}
    for group in range(len(groups) // num_replicas * num_replicas):
        assert (
            len(
                {
                    replica_of[i]
                    for i in range(group * group_size, (group + 1) * group_size)
                }
            )
            == 1
        )


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 6))
def test_tokens_are_even_to_within_the_longest_prompt_per_round(
    lengths: list[int], num_replicas: int
) -> None:
    totals = [
        sum(lengths[i] for i in share) for share in split_prompts(lengths, num_replicas)
    ]
    assert max(totals) - min(totals) <= max(lengths)


def test_a_conversation_stays_where_it_was() -> None:
    assert split_prompts([5] * 6, 2, conversations=[0, 0, 1, 1, 2, 3]) == [
        [0, 1, 4],
        [2, 3, 5],
    ]
    assert split_prompts([9, 7, 8], 2, conversations=[1, 2, 3]) == [[1], [0, 2]], (
        "also when others are over"
    )


def test_example() -> None:
    assert split_prompts([9, 9, 1, 1, 5, 5], 2, group_size=2) == [[0, 1, 5], [2, 3, 4]]
    assert split_prompts([], 2) == [[], []]
