"""A plan of roles on nodes of their own: who holds what, who sends to whom, and a picture of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.capacity.machine import Machine
from megaverl.capacity.picture import draw
from megaverl.capacity.report import as_dict, as_text, survey
from megaverl.config import InvalidConfig
from tests.capacity.jobs import make
from tests.layout.specs import make_spec

PLACED = "placement={rollout: {nodes: 0}, critic: 4-5, coordinator: 7, actor: rest}"
MACHINE = Machine(gpus_per_node=4)


def test_what_each_rank_holds_and_sends(tmp_path: Path) -> None:
    found = make(make_spec(), 8, PLACED, machine=MACHINE)
    capacity = survey(found)
    assert [role.ranks for role in found.roles] == [(6,), (4, 5)]
    assert found.rollout.ranks == (0, 1, 2, 3) and not found.aliases
    parts = [set(rank.parts) for rank in capacity.memory]
    assert parts == [{"rollout", "reshard"}] * 4 + [{"critic"}] * 2 + [{"actor", "reshard"}, set()]
    for rank in capacity.traffic.ranks:
        assert set(rank.from_rank) <= {0, 1, 2, 3, 6} and rank.received["local"] == rank.received["alias"] == 0
        assert bool(rank.from_rank) == (rank.rank < 4)
    told = as_dict(capacity)["roles"]
    assert {name: role["ranks"] for name, role in told.items()} == {
        "actor": "6",
        "critic": "4-5",
        "rollout": "0-3",
        "reward": "0-3",
        "coordinator": "7",
    }
    assert "ranks 0-3, 4 engines" in as_text(capacity)
    assert draw(capacity, tmp_path / "plan.svg").stat().st_size > 10_000


def test_what_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        make(make_spec(), 8, "placement={rollout: 0-3, critic: 4-9}", machine=MACHINE)
    text = str(caught.value)
    assert "placement.critic" in text and "ranks 8-9 are not there" in text
