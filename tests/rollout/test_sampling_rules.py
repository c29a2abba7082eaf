"""Which rule a prompt's length falls under, and what a batch says of how it was drawn."""

from __future__ import annotations

import pytest
import torch

from megaverl.config.roles import RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.rollout.engine import (
    Generation,
    SamplingOptions,
    drawing,
    options_by_prompt,
)
from megaverl.rollout.sampling_rules import sampling_of
from megaverl.workers.responses import (
    Draws,
    own_rows,
    rollout_metrics,
    without_opponents,
)


@pytest.mark.parametrize(
    ("length", "temperature", "top_k"),
    [
        (1, 0.0, 0),
        (63, 0.0, 0),
        (64, 1.2, 0),
        (512, 1.2, 0),
        (513, 0.7, 50),
        (9000, 0.7, 50),
    ],
)
def test_the_default_rules(length: int, temperature: float, top_k: int) -> None:
    """Short prompts greedy, long ones narrow, the rest as configured."""
    config = RolloutConfig(
        adaptive_sampling=True, sampling={"temperature": 1.2, "max_tokens": 7}
    )
    [way] = options_by_prompt(sampling_of(config, [length]), 1)
    assert (way.temperature, way.top_k, way.max_tokens) == (temperature, top_k, 7)


def test_what_a_batch_says_of_how_it_was_drawn() -> None:
    """Greedy tokens have the log-probs of temperature 1; two agents' samples follow one another."""
    config = RolloutConfig(adaptive_sampling=True)
    said = drawing(sampling_of(config, [5, 100, 600]), 6)
    assert torch.equal(said["temperatures"], torch.tensor([1.0, 1.0, 0.7] * 2))
    assert said["top_ks"].tolist() == [0, 0, 50] * 2
    assert drawing(SamplingOptions(4, temperature=0.5), 3) == {}
    assert drawing(SamplingOptions(4, top_k=9), 2)["top_ks"].tolist() == [9, 9]


def test_the_second_half_of_each_group_are_opponents() -> None:
    narrow, wide = SamplingOptions(4, temperature=0.5), SamplingOptions(4)
    draws = Draws(run_seed=0, step=0, group_size=4, opponent_beta=0.25)
    ways = options_by_prompt(draws.ways([narrow] * 4 + [wide] * 4, 8), 8)
    assert [way.reference_share for way in ways] == [0.0, 0.0, 0.25, 0.25] * 2
    assert [way.temperature for way in ways] == [0.5] * 4 + [1.0] * 4
    assert ways[0] is narrow and ways[2] is ways[3], (
        "those that are drawn alike are drawn together"
    )
    assert Draws(run_seed=0, step=0, group_size=4).ways(wide, 8) is wide


def test_of_lengths_ends_and_rewards_only_the_policys_own_are_shown() -> None:
    """Two groups of two, an opponent second; the policy's second response is empty, and so no opponent."""
    generations = [
        Generation([7] * n, [-1.0] * n, end)
        for n, end in ((2, "stop"), (6, "length"), (0, "stop"), (4, "stop"))
    ]
    draws = Draws(run_seed=0, step=0, group_size=2, opponent_beta=0.25)
    batch = RolloutBatch.from_generations(
        [[5]] * 4,
        generations,
        columns={"finish_reason": [g.finish_reason for g in generations]},
    )
    batch = without_opponents(
        batch.with_(group_ids=torch.tensor([0, 0, 1, 1])), range(4), draws
    )
    assert own_rows(batch) == [0, 2]
    found = rollout_metrics(batch, 2.0, 0, draws)
    assert (
        found["rollout/response_length_mean"],
        found["rollout/response_length_max"],
    ) == (1.0, 2.0)
    assert (
        found["rollout/finished_fraction"] == 1.0
        and found["rollout/throughput_tokens_per_sec"] == 6.0
    )
