"""Islands against one island."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.trainer.islands import Compressor, OuterOptimizer
from tests.launcher import Launcher

SPLITS = [(0, 5), (5, 6), (6, 16)]  # rows of each island


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows and targets of a regression, float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return rows, rows @ torch.arange(6, dtype=torch.float64) + 0.1 * torch.randn(
        16, generator=generator
    ).double()


def loss(weight: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return (rows @ weight - targets).square().mean()


def gradient(weight: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return torch.autograd.grad(loss(weight, rows, targets), weight)[0]


def run(num_steps: int, *, compress: bool = False) -> Tensor:
    """Adam on the sum of three islands' gradients, of 5, 1 and 10 rows."""
    rows, targets = problem()
    weight = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    compressors = [Compressor() for _ in SPLITS]
    for _ in range(num_steps):
        parts = [
            gradient(weight, rows[a:b], targets[a:b]) * (b - a) / len(rows)
            for a, b in SPLITS
        ]
        if compress:
            parts = [
                c.compress("w", part).double()
                for c, part in zip(compressors, parts, strict=True)
            ]
        weight.grad = torch.stack(parts).sum(0)
        optimizer.step()
    return weight.detach()


def test_compressed_it_ends_near() -> None:
    rows, targets = problem()
    plain, compressed = (
        float(loss(run(100, compress=c), rows, targets)) for c in (False, True)
    )
    assert compressed == pytest.approx(plain, rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_what_rounding_takes_is_given_back(values: list[float]) -> None:
    compressor, sent = Compressor(), torch.zeros(1, dtype=torch.float64)
    for value in values:
        sent += compressor.compress(
            "g", torch.tensor([value], dtype=torch.float64)
        ).double()
    largest = max(abs(value) for value in values) + 1e-30
    assert abs(float(sent) - sum(values)) <= 2 * largest * 2**-8 + 1e-9


def test_what_another_grid_left_is_not_given_back() -> None:
    before, compressor = Compressor(), Compressor()
    before.compress("0", torch.tensor([1.0 + 2**-12]))
    compressor.left = dict(before.left)
    assert compressor.compress("0", torch.zeros(3)).tolist() == [0.0] * 3


def test_an_overflow_is_not_carried_on() -> None:
    compressor = Compressor()
    assert compressor.compress("g", torch.tensor([torch.inf, 1.0]))[0] == torch.inf
    assert compressor.compress("g", torch.tensor([2.0, 1.0])).tolist() == [2.0, 1.0]


def test_the_outer_step_is_torchs_nesterov() -> None:
    weight, other = (
        torch.ones(3, dtype=torch.float64),
        torch.nn.Parameter(torch.ones(3, dtype=torch.float64)),
    )
    masters = {"w": weight}
    outer = OuterOptimizer(masters)
    reference = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        # Where the inner steps lead.
        weight -= torch.tensor([0.1, -0.2, 0.3]) * (step + 1)
        change = outer.change(masters)
        other.grad = change["w"].clone()
        outer.step(masters, change)
        reference.step()
        assert torch.allclose(weight, other, rtol=1e-12)
    again = OuterOptimizer(masters)
    again.load_state_dict(outer.state_dict())
    assert all(
        torch.equal(again.state_dict()[k]["w"], v["w"])
        for k, v in outer.state_dict().items()
    )


def test_every_eight_steps_the_islands_learn_together() -> None:
    rows, targets = problem()
    weights = [torch.zeros(6, dtype=torch.float64, requires_grad=True) for _ in SPLITS]
    outers = [OuterOptimizer({"w": weight}) for weight in weights]
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in weights]
    before = float(loss(weights[0].detach(), rows, targets))
    for step in range(1, 161):
        for (a, b), weight, optimizer in zip(SPLITS, weights, optimizers, strict=True):
            weight.grad = gradient(weight, rows[a:b], targets[a:b])
            optimizer.step()
        if step % 8 == 0:
            changes = [
                outer.change({"w": weight})["w"]
                for outer, weight in zip(outers, weights, strict=True)
            ]
            for outer, weight in zip(outers, weights, strict=True):
                outer.step({"w": weight}, {"w": torch.stack(changes).mean(0)})
            assert all(torch.equal(weight, weights[0]) for weight in weights), (
                "all islands are where one is"
            )
    assert float(loss(weights[0].detach(), rows, targets)) < 0.1 * before


def test_gradients_go_through_the_coordinator(launch: Launcher) -> None:
    ended = launch.ranks(4, "tests.trainer.island_exchange_ranks:islands_join")
    *members, coordinator = ended.check()
    for member in members:
        assert member["error"] < 1e-6
        assert member["compressed"] < 0.02 and member["compressed"] > 0
    assert members[0]["digest"] == members[1]["digest"] == members[2]["digest"], (
        "the same to the bit"
    )
    assert coordinator["joins"] == 3
    assert (
        members[0]["refused"] == members[1]["refused"]
        and "islands differ" in members[0]["refused"]
    )
