"""What counts as the algorithm's share of a step: the loss without the model in it, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from tools import bench_algorithms
from tools.bench_algorithms import Clock


def test_the_models_part_of_a_loss_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that moves on by one second whenever it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(
        bench_algorithms.time, "perf_counter", lambda: float(next(ticks))
    )
    clock, weight = Clock(), torch.ones(3, requires_grad=True)
    log_probs = clock.model(lambda: (weight * 2.0, torch.zeros(3)))
    value, _ = clock.loss(lambda: (log_probs()[0].sum(), {}))()
    assert clock.seconds == 2.0, "of the three seconds one was the model's"
    value.backward()
    assert clock.seconds == 3.0, (
        "and one more from the loss's gradient to that of the log-probs"
    )
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 3
    clock.timed(lambda: None)()
    assert clock.seconds == 4.0
