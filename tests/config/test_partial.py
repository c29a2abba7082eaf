"""`rollout.partial` in a configuration: what is wrong with it, told before anything starts."""

from __future__ import annotations

import pytest

from megaverl.config import Config, InvalidConfig, load_config

NEEDED = [
    "model.path=absent",
    "data.train=absent.jsonl",
    "reward=exact_match",
    "algorithm.group_size=2",
]


def load(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, *overrides], check_paths=False)


def test_it_is_true_or_its_settings() -> None:
    assert (
        load().rollout.partial is load("rollout.partial=false").rollout.partial is None
    )
    found = load("rollout.partial=true").rollout.partial
    assert (
        found is not None
        and found == load("rollout.partial={over_sample: 2}").rollout.partial
    )
    assert found.num_groups(3) == 6
    load("rollout={partial: {over_sample: 1}, max_staleness: 0}")
    load("rollout={partial: {over_sample: 9, when_stale: restart}, max_staleness: 0}")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["rollout.partial.over_sample=2.5"],
            "rollout.partial.over_sample",
            "no more than 2 groups for each",
        ),
        (
            ["rollout.max_staleness=0"],
            "rollout.partial.over_sample",
            "raise rollout.max_staleness",
        ),
        (
            ["placement={rollout: 0, actor: 1}"],
            "rollout.partial",
            "take turns on the same ranks",
        ),
        (["environment.name=guess"], "rollout.partial", "turns go on by themselves"),
        (["rollout.function=m:f"], "rollout.partial", "returns whole responses"),
        (["rollout.engine=server"], "rollout.partial", "not asked to go on"),
        (
            ["algorithm.dynamic_sampling.metric=accuracy"],
            "rollout.partial",
            "algorithm.dynamic_sampling.metric",
        ),
        (["trainer.rollout_only=true"], "rollout.partial", "no update"),
        (
            ["trainer.replay_rollouts=folder"],
            "rollout.partial",
            "stored responses are whole",
        ),
        (
            ["rollout.in_flight_updates=true"],
            "rollout.in_flight_updates",
            "not ahead of training",
        ),
        (
            ["rollout.in_flight_tokens=3"],
            "rollout.in_flight_tokens",
            "in_flight_updates is false",
        ),
        (
            ["rollout={in_flight_updates: true, function: m:f}"],
            "rollout.in_flight_updates",
            "whole responses",
        ),
        (
            ["rollout.sampling={min_tokens: 4}"],
            "rollout.sampling.min_tokens",
            "looks at a whole response",
        ),
        (
            ["rollout.sampling={presence_penalty: 1.0}"],
            "rollout.sampling.presence_penalty",
            "made in parts",
        ),
    ],
)
def test_what_does_not_go_together(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        load("rollout.partial=true", *overrides)
    assert any(
        mistake.key == key and said in mistake.message
        for mistake in raised.value.mistakes
    ), raised.value
