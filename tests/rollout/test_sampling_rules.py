"""Which rule a prompt's length falls under, and what a batch says of how it was drawn."""

from __future__ import annotations

import pytest
import torch

from megaverl.config.roles import RolloutConfig
from megaverl.rollout.engine import SamplingOptions, drawing, of_each, sampling_of
from megaverl.workers.responses import Draws


@pytest.mark.parametrize(
    ("length", "temperature", "top_k"),
    [(1, 0.0, 0), (63, 0.0, 0), (64, 1.2, 0), (512, 1.2, 0), (513, 0.7, 50), (9000, 0.7, 50)],
)
def test_the_default_rules(length: int, temperature: float, top_k: int) -> None:
    """Short prompts greedy, long ones narrow, the rest as configured."""
    config = RolloutConfig(adaptive_sampling=True, sampling={"temperature": 1.2, "max_tokens": 7})
    [way] = of_each(sampling_of(config, [length]), 1)
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
    ways = of_each(draws.ways([narrow] * 4 + [wide] * 4, 8), 8)
    assert [way.reference_share for way in ways] == [0.0, 0.0, 0.25, 0.25] * 2
    assert [way.temperature for way in ways] == [0.5] * 4 + [1.0] * 4
    assert ways[0] is narrow and ways[2] is ways[3], "those that are drawn alike are drawn together"
    assert Draws(run_seed=0, step=0, group_size=4).ways(wide, 8) is wide
