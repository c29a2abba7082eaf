"""The published steps: they can be expressed, and the prediction is right about what is faster than what."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl.planner.simulator import Prediction
from tools.bench_simulator import PUBLISHED, Ratio, published, ratios_of, read_rows

Predicted = tuple[dict[str, Any], dict[str, Prediction]]
# Published pairs that the prediction orders wrongly. In the first one twice the GPUs are
# slower, in the second one 16 + 16 GPUs are slower in one release and faster in the next.
WRONG = {
    "NeMo-RL 0.6, Qwen3-235B-A22B, 64 GB200 -> NeMo-RL 0.6, Qwen3-235B-A22B, 128 GB200",
    "NeMo-RL, Qwen3-30B-A3B, 32 H100 -> NeMo-RL, Qwen3-30B-A3B, 16 + 16 H100, 1 step off",
}


@pytest.fixture(scope="module")
def predicted() -> Predicted:
    entries = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    found = {entry["name"]: published(entry, entries) for entry in entries["steps"]}
    return entries, found


@pytest.mark.parametrize(("half", "most"), [("fit", 0.15), ("check", 0.2)])
def test_steps_are_near_published_ones(
    half: str, most: float, predicted: Predicted
) -> None:
    entries, found = predicted
    errors = [
        abs(found[entry["name"]].step_seconds / entry["seconds"] - 1)
        for entry in entries["steps"]
        if entry["half"] == half
    ]
    assert statistics.median(errors) < most


def test_the_faster_of_two_published_steps_is_predicted(predicted: Predicted) -> None:
    entries, found = predicted
    ratios = ratios_of(entries, entries["steps"], found)
    assert {ratio.name for ratio in ratios if not ratio.has_right_sign} == WRONG
    assert statistics.median(abs(ratio.error) for ratio in ratios) < 0.2


def test_weights_are_sent_as_the_source_sends_them(predicted: Predicted) -> None:
    _, found = predicted

    def reshard(name: str) -> float:
        return found[f"NeMo-RL 0.6, DeepSeek-V3, {name}"].seconds_of("reshard")

    # 35 s by CUDA IPC and 20 s of offload, 14 s by broadcast; engines that sleep wake.
    assert reshard("512 H100") == pytest.approx(35 + 20, rel=0.05)
    assert reshard("256 + 256 H100, 1 step off") == pytest.approx(14, rel=0.1)
    # The same transfer, with a faster link to the host.
    assert reshard("256 GB200") == pytest.approx(35 + 20 * 50 / 225, rel=0.06)


def test_ratios_compare_signs_and_sizes() -> None:
    right = Ratio("asynchronous", "a -> b", predicted=0.8, measured=0.5)
    assert right.has_right_sign and right.error == pytest.approx(0.6)
    assert not Ratio("twice the GPUs", "a -> b", 0.9, 1.1).has_right_sign


def test_further_rows_are_read_from_a_file(tmp_path: Path) -> None:
    row = {
        "kind": "step",
        "name": "a step",
        "model": "llama3-8b",
        "gpus": 8,
        "value": 12.5,
        "prompt_len": 100,
        "response_len": 200,
        "longest_response": 400,
        "megaverl_keys": ["rollout.tp=2"],
        "megaverl_hardware": "gb200.yaml",
    }
    update = {"kind": "update", "unit": "s a micro-batch", "dp": 8}
    update |= {"batch_prompts": 16, "n": 2}
    others = [row | {"kind": "rate"}, row | {"kind": "reshard"}, row | update]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row, *others]))
    step, rate, update = read_rows(path)
    assert step["seconds"] == 12.5 and step["half"] == "fit"
    assert step["lengths"] == {"prompt": 100, "response": 200, "longest": 400}
    assert step["hardware"] == "gb200" and step["keys"] == ["rollout.tp=2"]
    assert rate["tflops"] == 12.5 and "seconds" not in rate
    assert update["update_seconds"] == 12.5 and update["micro_batches"] == 4
