"""Islands against one island."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.coordinator.islands import Compressor, OuterOptimizer, joined_gradient
from tests.fabric.forks import Server

SPLITS = [(0, 5), (5, 6), (6, 16)]  # rows of each island


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows and targets of a regression, float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return rows, rows @ torch.arange(6, dtype=torch.float64) + 0.1 * torch.randn(16, generator=generator).double()


def loss(weight: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return (rows @ weight - targets).square().mean()


def gradient(weight: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return torch.autograd.grad(loss(weight, rows, targets), weight)[0]


def run(num_steps: int, *, split: bool, compress: bool = False) -> Tensor:
    """Adam on the whole batch, or on the joined gradients of three islands of 5, 1 and 10 rows."""
    rows, targets = problem()
    weight = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    compressors = [Compressor() for _ in SPLITS]
    for _ in range(num_steps):
        if split:
            parts = [gradient(weight, rows[a:b], targets[a:b]) for a, b in SPLITS]
            counts = [float(b - a) for a, b in SPLITS]
            if compress:
                parts = [c.compress("w", part).double() for c, part in zip(compressors, parts, strict=True)]
            weight.grad = joined_gradient(parts, counts, counts)
        else:
            weight.grad = gradient(weight, rows, targets)
        optimizer.step()
    return weight.detach()


def test_every_step_and_uncompressed_it_is_the_single_island() -> None:
    assert torch.allclose(run(100, split=True), run(100, split=False), rtol=0, atol=1e-6)


def test_sums_over_tokens_join_as_means_do() -> None:
    rows, targets = problem()
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    counts = [float(b - a) for a, b in SPLITS]
    sums = [gradient(weight, rows[a:b], targets[a:b]) * (b - a) for a, b in SPLITS]
    joined = joined_gradient(sums, counts, [1.0, 1.0, 1.0])
    assert torch.allclose(joined, gradient(weight, rows, targets), rtol=1e-12)
    with pytest.raises(ValueError, match="no mean loss"):
        joined_gradient(sums, [0.0] * 3, [1.0] * 3)


def test_compressed_it_ends_near() -> None:
    rows, targets = problem()
    plain, compressed = (float(loss(run(100, split=True, compress=c), rows, targets)) for c in (False, True))
    assert compressed == pytest.approx(plain, rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_what_rounding_takes_is_given_back(values: list[float]) -> None:
    compressor, sent = Compressor(), torch.zeros(1, dtype=torch.float64)
    for value in values:
        sent += compressor.compress("g", torch.tensor([value], dtype=torch.float64)).double()
    largest = max(abs(value) for value in values) + 1e-30
    assert abs(float(sent) - sum(values)) <= 2 * largest * 2**-8 + 1e-9


def test_an_overflow_is_not_carried_on() -> None:
    compressor = Compressor()
    assert compressor.compress("g", torch.tensor([torch.inf, 1.0]))[0] == torch.inf
    assert compressor.compress("g", torch.tensor([2.0, 1.0])).tolist() == [2.0, 1.0]


def test_the_outer_step_is_torchs_nesterov() -> None:
    weight, other = torch.ones(3, dtype=torch.float64), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    outer = OuterOptimizer({"w": weight}, every=2)
    reference = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        weight -= torch.tensor([0.1, -0.2, 0.3]) * (step + 1)  # where the inner steps lead
        way = outer.way()
        other.grad = way["w"].clone()
        outer.step(way)
        reference.step()
        assert torch.allclose(weight, other, rtol=1e-12)
    again = OuterOptimizer({"w": weight}, every=2)
    again.load_state_dict(outer.state_dict())
    assert all(torch.equal(again.state_dict()[k]["w"], v["w"]) for k, v in outer.state_dict().items())
    assert [outer.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]


def test_every_eight_steps_the_islands_learn_together() -> None:
    rows, targets = problem()
    weights = [torch.zeros(6, dtype=torch.float64, requires_grad=True) for _ in SPLITS]
    outers = [OuterOptimizer({"w": weight}, every=8) for weight in weights]
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in weights]
    before = float(loss(weights[0].detach(), rows, targets))
    for step in range(1, 161):
        for (a, b), weight, optimizer in zip(SPLITS, weights, optimizers, strict=True):
            weight.grad = gradient(weight, rows[a:b], targets[a:b])
            optimizer.step()
        if outers[0].is_due(step):
            counts = [float(b - a) for a, b in SPLITS]
            mean = joined_gradient([outer.way()["w"] for outer in outers], counts, counts)
            for outer in outers:
                outer.step({"w": mean})
            assert all(torch.equal(weight, weights[0]) for weight in weights), "all islands are where one is"
    assert float(loss(weights[0].detach(), rows, targets)) < 0.1 * before


def test_gradients_go_through_the_coordinator(forks: Server) -> None:
    ended = forks.run("tests.coordinator.ranks:islands_join", ranks=4)
    *members, coordinator = ended.check()
    for member in members:
        assert member["error"] < 1e-6 and member["tokens"] == 12.0
        assert member["compressed"] < 0.02 and member["compressed"] > 0
    assert members[0]["digest"] == members[1]["digest"] == members[2]["digest"], "the same to the bit"
    assert coordinator["joins"] == 3
    assert members[0]["refused"] == members[1]["refused"] and "islands differ" in members[0]["refused"]
