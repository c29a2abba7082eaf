"""The recipes for large models on the CUDA branch, at full size: first, middle and last ranks, without a GPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cuda import fake_device

ROOT = Path(__file__).parents[2]
BUILD, STEP, RESHARD = ["build"], ["build", "log_probs", "update"], ["build", "reshard"]


class Case(NamedTuple):
    recipe: str
    world: int
    rank: int
    stages: list[str]

    def __str__(self) -> str:
        return f"{self.recipe} rank {self.rank} of {self.world}"


GRPO_8, GRPO_128 = "llama3_70b/grpo_8_nodes", "llama3_70b/grpo_128_nodes"
FP8_ROLLOUT = "llama3_70b/grpo_8_nodes_fp8_rollout"
PPO, EXPERTS = "llama3_70b/ppo_16_nodes", "qwen3_235b_a22b/grpo_64_nodes"
CASES = [
    Case(GRPO_8, 64, 0, ["build", "reference", "log_probs", "update", "reshard", "save"]),
    Case(GRPO_8, 64, 31, BUILD),
    Case(GRPO_8, 64, 56, STEP),  # of the last stage the rank that tells the loss
    Case(GRPO_8, 64, 63, BUILD),
    Case(PPO, 128, 0, BUILD),
    Case(FP8_ROLLOUT, 64, 31, RESHARD),
    Case(PPO, 128, 63, RESHARD),
    Case(PPO, 128, 127, [*STEP, "critic"]),
    Case(GRPO_128, 1024, 0, BUILD),
    Case(GRPO_128, 1024, 511, ["build", "reference", "log_probs", "update"]),
    Case(GRPO_128, 1024, 1023, BUILD),
    Case(EXPERTS, 512, 0, BUILD),
    Case(EXPERTS, 512, 255, STEP),
    Case(EXPERTS, 512, 511, RESHARD),
]

DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize"
# Where the host waits for the device in a step, and how often at most (of a stage with one micro-batch, or two on a
# middle rank; 12 layers with experts, computed twice in an update). docs/gpu.md says why.
ALLOWED = {
    "megaverl/workers/offload.py:store: copy to the host, not waited for": 200,
    "megaverl/workers/offload.py:store: stream.synchronize": 1,
    "megaverl/workers/model.py:score: copy to the host": 1,
    "megaverl/workers/trainable.py:_reduce: copy to the host": 1,
    "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32: item": 1,
    f"{DISPATCHER}: copy to the host, not waited for": 4 * 12 * 2,
    f"{DISPATCHER}: event.synchronize": 12 * 2,
    "megaverl/platform/device.py:synchronize: torch.cuda.synchronize": 1,  # of a save
    "megaverl/checkpoint/items.py:write_tensor: copy to the host": 8,  # of the few that are written here, in a thread
    "megaverl/checkpoint/background.py:copy: copy to the host": 8,  # of those that were not written before an update
    "megaverl/weights/reshard.py:_agree: copy to the host": 1,
    "megaverl/weights/reshard.py:_finish_transports: stream.synchronize": 1,
    "megaverl/weights/transports/ipc.py:_any_rank: item": 1,
    "megaverl/weights/transports/cuda_ipc.py:_open_all: stream.synchronize": 1,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case's rank has done."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, for the fake device")
    folder = tmp_path_factory.mktemp("cuda")
    library = fake_device.build(folder)
    cases = json.dumps([case._asdict() for case in CASES])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.rank", str(library), cases, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [folder / f"{number}.json" for number in range(len(CASES))]
    assert all(path.exists() for path in found), ended.stdout + ended.stderr
    return {str(case): json.loads(path.read_text()) for case, path in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_of_a_recipe_runs_with_tensors_of_the_device_alone(case: Case, ranks: dict[str, dict[str, Any]]) -> None:
    found = ranks[str(case)]
    assert "error" not in found, found["error"]
    built = found["build"]["says"]
    assert built["devices"] == [f"cuda:{case.rank % 8}"]
    assert "TELayerNormColumnParallelLinear" in built["layers"] and built["packs"]


@pytest.mark.parametrize("case", [case for case in CASES if case.stages != BUILD], ids=str)
def test_the_host_waits_for_the_device_only_where_it_must(case: Case, ranks: dict[str, dict[str, Any]]) -> None:
    for stage, of_stage in ranks[str(case)].items():
        print(f"\n{case}, {stage}:" + ("" if of_stage["reads"] else " none"))
        for read, times in of_stage["reads"].items():
            print(f"  {times:3} x {read}")
            assert read in ALLOWED, f"{stage}: {read} ({times} times)"
            assert times <= ALLOWED[read] * (2 if stage == "critic" else 1), f"{stage}: {read}: {times} times"


def test_every_wait_that_is_allowed_is_met(ranks: dict[str, dict[str, Any]]) -> None:
    met = {read for found in ranks.values() for of_stage in found.values() for read in of_stage["reads"]}
    assert not ALLOWED.keys() - met, "docs/gpu.md would list what no rank does any more"


@pytest.mark.parametrize("case", [case for case in CASES if case.stages != BUILD], ids=str)
def test_a_rank_is_known_to_wait_wherever_the_host_does(case: Case, ranks: dict[str, dict[str, Any]]) -> None:
    """Under NCCL a rank that reads its device may wait there for others: taken for work, it would be accused."""
    for stage, of_stage in ranks[str(case)].items():
        assert not of_stage["unknown_waits"], f"{stage}: no call of megaverl/distributed/heartbeat.py:_READS is there"


def test_the_reshard_receives_what_the_rank_lacks_and_no_more(ranks: dict[str, dict[str, Any]]) -> None:
    for case in CASES:
        if "reshard" in case.stages:
            moved = ranks[str(case)]["reshard"]["says"]
            assert moved["received"] + moved["local"] == moved["wanted"], case
    found = ranks[f"{GRPO_8} rank 0 of 64"]["reshard"]
    config = json.loads((ROOT / "configs/llama3_70b/config.json").read_text())
    held = 2 * (config["num_hidden_layers"] // 4) * layer_elements(config) // 8  # bfloat16, PP4, TP8
    table = 2 * config["vocab_size"] * config["hidden_size"] // 8
    assert found["says"]["local"] == pytest.approx(held + table, rel=1e-3)
    lacked = 3 * held + table  # the other stages' layers, and the output layer
    assert found["says"]["received"] == pytest.approx(lacked, rel=1e-3)
    assert math.isclose(found["collectives"]["recv_ (device)"][1], lacked, rel_tol=1e-3)


def test_a_save_writes_the_ranks_share_and_gathers_nothing(ranks: dict[str, dict[str, Any]]) -> None:
    [case] = [case for case in CASES if "save" in case.stages]
    found = ranks[str(case)]["save"]
    # bfloat16 weights, and a master and two moments in float32; of two data-parallel ranks each writes half
    assert found["says"]["bytes"] == pytest.approx(found["says"]["trained"] * (2 + 12) / 2, rel=1e-3)
    assert not found["collectives"]
    assert found["says"]["tensors"] and found["says"]["files"], "some of it lies on the disk, read from the device"


def layer_elements(config: dict[str, Any]) -> int:
    hidden, head_dim = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    attention = hidden * head_dim * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    return attention + 3 * hidden * config["intermediate_size"]
