"""Reshards that ranks relay, on real processes over gloo: the engines' bits and the plan's bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher

# Two nodes of trainers, with one rank each, and three of engines, with two each.
NODES = [0, 1, 2, 2, 3, 3, 4, 4]
QWEN2, MOE, DEEPSEEK = (
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)
ODD = {
    "hidden_size": 10,
    "ffn_hidden_size": 14,
    "num_heads": 6,
    "head_dim": 3,
    "vocab_size": 51,
    "num_layers": 3,
}

CASES: dict[str, dict[str, Any]] = {
    "TP2 to six replicas": {
        "grid": {"tp": 2},
        "engine_tp": 1,
        "spec": {"architecture": QWEN2},
    },
    "TP2 to three at TP2": {
        "grid": {"tp": 2},
        "engine_tp": 2,
        "spec": {"architecture": QWEN2},
        "ipc": True,
    },
    "stages to three at TP2": {
        "grid": {"pp": 2},
        "engine_tp": 2,
        "spec": {"architecture": QWEN2},
        "bucket_bytes": 64,
    },
    "experts to six replicas": {
        "grid": {"dp": 2, "ep": 2},
        "engine_tp": 1,
        "spec": {"architecture": MOE},
        "dtypes": ("float32", "bfloat16"),
    },
    "experts to three with experts": {
        "grid": {"dp": 2, "ep": 2},
        "engine_tp": 2,
        "spec": {"architecture": DEEPSEEK},
        "num_experts": 6,
        "expert_parallel": True,
        "background": True,
    },
    "odd shapes, a wider engine": {
        "grid": {"tp": 2},
        "engine_tp": 2,
        "spec": ODD | {"architecture": QWEN2},
        "dtypes": ("bfloat16", "float32"),
        "bucket_bytes": 2**20,
    },
    "engines on the trainers too": {
        "grid": {"tp": 2},
        "engine_tp": 2,
        "spec": {"architecture": QWEN2, "vocab_size": 64},
        "first_engine": 0,
        "alias": True,
        "ipc": True,
    },
    "whole replicas on the trainers too": {
        "grid": {"tp": 2},
        "engine_tp": 1,
        "spec": {"architecture": QWEN2},
        "first_engine": 0,
        "alias": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_relayed_weights_are_those_that_come_directly(
    launch: Launcher, name: str
) -> None:
    case = CASES[name]
    results = launch.world(
        8, "tests.weights.fan_out_ranks:relayed", nodes=NODES, **case
    )
    assert [(result["wrong"], result["differs"]) for result in results] == [
        ([], [])
    ] * 8
    for way in ("direct", "relayed"):
        for result in (each[way] for each in results):
            assert [result["sent"], result["received"]] == result["planned"]
            assert result["busiest"] == max(each[way]["sent"] for each in results)
    assert sum(result["forwards"] for result in results) > 0
    # A rank that relays has no memory but its buckets, of four messages each way.
    assert max(result["relayed"]["buckets"] for result in results) <= case.get(
        "bucket_bytes", 512
    )
    busiest = {
        way: max(max(result[way]["far"]) for result in results)
        for way in ("direct", "relayed")
    }
    assert busiest["relayed"] * 1.1 < busiest["direct"], (
        "links between nodes carry less"
    )
