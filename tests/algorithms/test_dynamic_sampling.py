from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms import keep_groups, policy_filtration
from tests.algorithms.strategies import PROPERTY


def test_by_hand():
    #         a mixed group, one all right, one all wrong, a mixed one; the groups' samples are not side by side
    groups = torch.tensor([4, 2, 4, 2, 9, 9, 1, 1])
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    kept = keep_groups(scores, groups, wanted=3)
    assert kept.rows.tolist() == [0, 2, 6, 7] and (kept.missing, kept.silent) == (1, 2)
    filled = keep_groups(scores, groups, wanted=3, last_round=True)
    assert filled.rows.tolist() == [0, 1, 2, 3, 6, 7] and filled.missing == 0
    assert keep_groups(scores, groups, wanted=1).rows.tolist() == [0, 2]
    assert keep_groups(scores, groups, wanted=9, last_round=True).missing == 5
    assert keep_groups(scores.bool(), groups, wanted=3).rows.tolist() == [0, 2, 6, 7]


def test_groups_of_one_prompt_stand_and_fall_together():
    """Two agents: prompt 0 differs for one of them, prompt 1 for none, prompt 2 for both."""
    groups, prompts = (
        torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        torch.tensor([0] * 4 + [1] * 4 + [2] * 4),
    )
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    kept = keep_groups(scores, groups, prompts, wanted=2)
    assert kept.rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11] and (
        kept.missing,
        kept.silent,
    ) == (0, 1)
    assert (
        len(keep_groups(scores, groups, prompts, wanted=3, last_round=True).rows) == 12
    )


def test_nothing_and_single_samples():
    nothing = torch.zeros(0)
    assert keep_groups(nothing, nothing.long(), wanted=2).missing == 2
    alone = keep_groups(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]), wanted=2)
    assert len(alone.rows) == 0 and (alone.missing, alone.silent) == (2, 2)


@settings(PROPERTY, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_the_first_groups_that_differ_are_kept_whole(
    samples: list[tuple[int, bool]], wanted: int
):
    groups, right = [g for g, _ in samples], [r for _, r in samples]
    mixed = [
        g for g in dict.fromkeys(groups) if len({r for h, r in samples if h == g}) == 2
    ]
    kept = keep_groups(torch.tensor(right), torch.tensor(groups), wanted=wanted)
    assert kept.rows.tolist() == [
        i for i, g in enumerate(groups) if g in mixed[:wanted]
    ]
    assert kept.missing == wanted - len(mixed[:wanted])
    assert kept.silent == len(set(groups)) - len(mixed)
    filled = keep_groups(
        torch.tensor(right), torch.tensor(groups), wanted=wanted, last_round=True
    )
    assert len({groups[i] for i in filled.rows.tolist()}) == min(
        wanted, len(set(groups))
    )
    assert set(kept.rows.tolist()) <= set(filled.rows.tolist())


def test_policy_filtration_by_hand():
    """PF-PPO's; the loss on what it keeps is in test_composed.py."""
    groups = torch.tensor([4, 2, 4, 4, 2, 9, 7])
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.5, 3.0, torch.nan])
    draws = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert policy_filtration(rewards, groups).tolist() == [
        True,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert policy_filtration(rewards, groups, draws).tolist() == [
        True,
        True,
        False,
        True,
        True,
        True,
        False,
    ]


@settings(PROPERTY)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=12),
    st.integers(0, 99),
)
def test_policy_filtration_keeps_two_of_each_group(
    samples: list[tuple[int, int]], seed: int
):
    groups = torch.tensor([group for group, _ in samples], dtype=torch.int64)
    rewards = torch.tensor([float(reward) for _, reward in samples])
    draws = torch.rand(len(samples), generator=torch.Generator().manual_seed(seed))
    for keep in (
        policy_filtration(rewards, groups),
        policy_filtration(rewards, groups, draws),
    ):
        for group in set(groups.tolist()):
            mine = groups == group
            assert int((keep & mine).sum()) == min(2, int(mine.sum()))
            assert rewards[keep & mine].max() == rewards[mine].max()
    ends = policy_filtration(rewards, groups)
    assert all(
        rewards[ends & (groups == g)].min() == rewards[groups == g].min()
        for g in groups.unique()
    )
