"""How `saves` of tools/gpu_check.py judges a resumed run; the checks themselves run in tests/softcuda."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import gpu_check_models
from tools.gpu_check_models import differences, read_steps


def test_metrics_of_a_resumed_run_are_compared_by_step_and_name(tmp_path: Path) -> None:
    records = [
        {"step": 0, "reward/mean": 9.0},
        {
            "step": 1,
            "reward/mean": 0.5,
            "time/step_ms": 3.0,
            "memory/process_rss_mb": 1.0,
        },
        {"step": 1, "validation/reward": 0.25},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    whole = read_steps(path)
    assert whole == {1: {"step": 1, "reward/mean": 0.5, "validation/reward": 0.25}}

    assert set(differences(whole, whole).values()) == {0.0}
    again = {1: {"step": 1, "reward/mean": 0.75}}
    apart = {
        metric: value for metric, value in differences(whole, again).items() if value
    }
    assert apart == {(1, "reward/mean"): 0.25, (1, "validation/reward"): float("inf")}


def test_a_gpu_may_round_otherwise_only_after_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [
        (2, "actor/loss"),
        (3, "reward/mean"),
        (3, "actor/lr"),
        (3, "actor/loss"),
        (4, "reward/mean"),
    ]
    assert all(gpu_check_models._must_be_equal(*case) for case in cases)
    monkeypatch.setattr(gpu_check_models, "on_cuda", lambda: True)
    assert [gpu_check_models._must_be_equal(*case) for case in cases] == [
        True,
        True,
        True,
        False,
        False,
    ]
