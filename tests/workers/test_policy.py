"""State of an adaptive entropy bonus."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.algorithms import AdaptiveEntropy, FixedKL
from megaverl.trainer.roles import Roles
from megaverl.workers import RemoteWorker


def test_an_adaptive_entropy_bonus_goes_on_where_it_was() -> None:
    def roles(bonus: AdaptiveEntropy | None, actor: Any = None) -> Roles:
        own = actor or SimpleNamespace(entropy=bonus)
        return Roles(
            actor=own,
            rollout=None,
            reward=None,
            critic=None,
            reference=None,
            kl=FixedKL(0.1),
        )

    first = roles(AdaptiveEntropy(0.01, target=0.5, step=0.005))
    first.actor.entropy.update(0.1)
    state = json.loads(json.dumps(first.kl_state()))
    second = roles(AdaptiveEntropy(0.01, target=0.5, step=0.005))
    second.load_kl_state(state)
    assert second.actor.entropy.weight == pytest.approx(0.015)
    for without in (roles(None), roles(None, RemoteWorker("actor"))):
        without.load_kl_state(state)
        assert without.kl_state() == FixedKL(0.1).state_dict()
    agents = Roles(
        actor=first.actor,
        rollout=None,
        reward=None,
        critic=None,
        reference=None,
        kl=FixedKL(0.1),
    )
    agents.agents = {"a": first, "b": roles(None)}
    assert set(agents.kl_state()) == {"a", "b"}
    agents.load_kl_state(json.loads(json.dumps(agents.kl_state())))
