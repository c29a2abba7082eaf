"""The state that an optimizer has before its first step is what the step would create."""

from __future__ import annotations

import pytest
import torch

from megaverl.workers.optimizers import create_adam_state


@pytest.mark.parametrize("foreach", [False, True])
def test_updates_are_those_of_state_that_a_step_creates(foreach: bool) -> None:
    models, optimizers = [], []
    for is_created_early in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
        if is_created_early:
            create_adam_state(optimizer, model.parameters())
            assert len(optimizer.state) == 2
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
        models.append(model)
        optimizers.append(optimizer)
    early, late = (list(model.parameters()) for model in models)
    assert all(torch.equal(*pair) for pair in zip(early, late, strict=True))
    for parameter, other in zip(early, late, strict=True):
        state, expected = (
            optimizers[0].state[parameter],
            optimizers[1].state[other],
        )
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)


def test_state_that_exists_stays() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"]
    create_adam_state(optimizer, [parameter])
    assert optimizer.state[parameter]["exp_avg"] is before
    assert float(optimizer.state[parameter]["step"]) == 1
