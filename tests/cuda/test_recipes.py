"""The recipes for large models on the CUDA branch, at full size: first, middle and last ranks, without a GPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

from megaverl.planner.memory import MemoryModel
from megaverl.workers.offload import SLAB
from tests.cuda import fake_device
from tests.planner.jobs import recipe as planned

ROOT = Path(__file__).parents[2]
BUILD, STEP, RESHARD = ["build"], ["start", "step"], ["build", "reshard"]
# What others say of where their memory is cannot be made up.
NO_IPC = ["reshard.ipc=never"]
# Settings of no recipe: weights are offloaded; each engine has two nodes; FSDP2 with
# tensor parallelism.
OFFLOAD = ["actor.offload={optimizer: true, gradients: true, parameters: true}"]
WIDE_ENGINES = ["rollout.tp=16"]
FSDP_TP = ["actor.tp=2"]


class Case(NamedTuple):
    recipe: str
    world: int
    rank: int
    stages: list[str]
    overrides: list[str] = []  # noqa: RUF012 (never changed)

    def __str__(self) -> str:
        return f"{self.recipe} rank {self.rank} of {self.world}"


GRPO_8, GRPO_128 = "llama3_70b/grpo_8_nodes", "llama3_70b/grpo_128_nodes"
FP8_ROLLOUT = "llama3_70b/grpo_8_nodes_fp8_rollout"
PPO, FSDP = "llama3_70b/ppo_16_nodes", "qwen2_5_7b/grpo_fsdp_1_node"
SINKS = "gpt_oss_20b/grpo_1_node"
EXPERTS, CONTEXT_PARALLEL = (
    "qwen3_235b_a22b/grpo_64_nodes",
    "qwen3_235b_a22b/grpo_64_nodes_32k",
)
# Each recipe on the grid of its file, with the settings of its file.
OF_RECIPES = [
    Case(GRPO_8, 64, 0, [*STEP, "save", "edge"]),
    Case(GRPO_8, 64, 31, BUILD),
    # Of the last stage the rank that tells the loss.
    Case(GRPO_8, 64, 56, ["start", "later_step"]),
    Case(GRPO_8, 64, 63, BUILD),
    Case(FP8_ROLLOUT, 64, 31, RESHARD),
    Case(PPO, 128, 0, BUILD),
    Case(PPO, 128, 63, BUILD),
    Case(PPO, 128, 127, STEP),
    Case(GRPO_128, 1024, 0, BUILD),
    Case(GRPO_128, 1024, 511, [*STEP, "save"]),
    Case(GRPO_128, 1024, 1023, BUILD),
    Case(EXPERTS, 512, 0, BUILD),
    Case(EXPERTS, 512, 255, BUILD),
    Case(EXPERTS, 512, 511, BUILD),
    Case(CONTEXT_PARALLEL, 512, 0, BUILD),
    Case(CONTEXT_PARALLEL, 512, 255, STEP, NO_IPC),
    Case(CONTEXT_PARALLEL, 512, 511, BUILD),
    Case(SINKS, 8, 0, BUILD),
    Case(SINKS, 8, 3, BUILD),
    Case(SINKS, 8, 7, STEP, NO_IPC),
    Case(FSDP, 8, 0, [*STEP, "save"], NO_IPC),
    Case(FSDP, 8, 3, BUILD),
    Case(FSDP, 8, 7, BUILD),
]
# What no recipe covers, with other settings on a recipe's ranks that are not above.
OFFLOADED = Case(GRPO_8, 64, 40, [*STEP, "save"], OFFLOAD)
OF_OTHER_SETTINGS = [
    OFFLOADED,
    Case(GRPO_8, 64, 24, RESHARD, [*NO_IPC, *WIDE_ENGINES]),
    Case(FSDP, 8, 5, ["start"], [*NO_IPC, *FSDP_TP]),
]
CASES = [*OF_RECIPES, *OF_OTHER_SETTINGS]
STEPPED = [
    case for case in CASES if any(stage.endswith("step") for stage in case.stages)
]
# Recipes for such machines whose ranks are not all here, or none.
LEFT_OUT = {
    FP8_ROLLOUT: "its actor is that of grpo_8_nodes; its reshard alone is another",
    "qwen2_5_vl/grpo_geometry": "its images need a processor, and a tower that attends without our kernels",
}

DISPATCHER = (
    "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize"
)
# Where Transformer Engine is, megatron-core gives the norm as a tensor since 0.17: it
# is read where it is asked for.
NORM_OF_GRADIENTS = (
    "megaverl/workers/optimizers.py:_gradient_norm: item"
    if Version(version("megatron-core")) >= Version("0.17")
    else "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32: item"
)
# Where the host waits for the device, and how often at most in an operator of a step,
# or another stage (of one micro-batch, or two on a middle rank; 24 layers with experts,
# computed twice in an update). docs/gpu.md says why.
ALLOWED = {
    # Of each storage, and of each slab: gpt-oss's optimizer has 31 GB on a rank.
    "megaverl/workers/offload.py:store: copy to the host, not waited for": 1400,
    # Where weights, gradients and optimizer all leave.
    "megaverl/workers/offload.py:store: stream.synchronize": 3,
    "megaverl/trainer/step.py:_compared: copy to the host": 1,
    "megaverl/algorithms/loss.py:mean: copy to the host": 2,
    # Of advantages that rewards alone make.
    "megaverl/data/held_rows.py:all_reduce: copy to the host": 1,
    "megaverl/workers/policy.py:_difference: copy to the host": 1,
    "megaverl/workers/log_prob_check.py:over_ranks: copy to the host": 1,
    "megaverl/workers/trainable.py:_reduce: copy to the host": 1,
    "megaverl/models/router_replay.py:metrics: copy to the host": 1,  # of experts alone
    NORM_OF_GRADIENTS: 1,
    "megaverl/workers/optimizers.py:_gradient_norm: item": 1,
    f"{DISPATCHER}: copy to the host, not waited for": 4 * 24 * 2,
    f"{DISPATCHER}: event.synchronize": 24 * 2,
    "megaverl/platform/device.py:synchronize: torch.cuda.synchronize": 1,  # of a save
    # of the few that are written here, in a thread
    "megaverl/checkpoint/tensor_records.py:write_tensor: copy to the host": 8,
    # Of those that were not written before an update.
    "megaverl/checkpoint/background.py:copy: copy to the host": 8,
    "megaverl/weights/reshard.py:_agree: copy to the host": 1,
    "megaverl/weights/reshard.py:finished: stream.synchronize": 1,
    "megaverl/weights/transports/ipc.py:_any_rank: item": 1,
    "megaverl/weights/transports/ipc.py:_open_all: stream.synchronize": 1,
}

MICRO_BATCH = "megaverl/models/packing.py:to: copy to the device, not waited for"
# Copies to the device that wait, in an operator of a step: mostly of sums that are read
# from there next.
SENT = {
    "megaverl/workers/log_prob_check.py:over_ranks: copy to the device": 2,
    "megaverl/data/held_rows.py:all_reduce: copy to the device": 1,
    "megaverl/weights/reshard.py:_agree: copy to the device": 1,
    # Of a rank's samples, in PPO.
    "megaverl/algorithms/advantages.py:token_rewards: copy to the device": 2,
    # gpt-oss's offset of one, which megatron-core (0.16 to 0.19) sends in each of 24
    # layers
    "megatron/core/fusions/fused_bias_geglu.py:weighted_bias_quick_geglu_impl: copy to the device": 24
    * 2,
}

OPERATORS = (
    "rollout",
    "reward",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "actor_update",
    "reshard",
)
OF_PPO = ("values", "critic_update")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case's rank has done."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, for the fake device")
    if torch.version.cuda is not None:
        pytest.skip(
            "needs a build of torch without CUDA, in whose place the fake device stands"
        )
    folder = tmp_path_factory.mktemp("cuda")
    library = fake_device.build(folder)
    cases = json.dumps([case._asdict() for case in CASES])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.cuda.rank",
            str(library),
            cases,
            str(folder),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    found = [folder / f"{number}.json" for number in range(len(CASES))]
    assert all(path.exists() for path in found), ended.stdout + ended.stderr
    return {
        str(case): json.loads(path.read_text())
        for case, path in zip(CASES, found, strict=True)
    }


def test_every_recipe_for_gpus_is_here_with_its_first_middle_and_last_rank() -> None:
    """Those that come with their model's config.json: the others' models are small ones, for a CPU too."""
    recipes = {
        str(path.relative_to(ROOT / "configs").with_suffix(""))
        for path in (ROOT / "configs").glob("*/*.yaml")
        if path.stem != "base" and (path.parent / "config.json").exists()
    }
    for recipe in recipes - LEFT_OUT.keys():
        of_recipe = [case for case in OF_RECIPES if case.recipe == recipe]
        assert of_recipe, f"{recipe}: give it cases, or a reason in LEFT_OUT"
        [world] = {case.world for case in of_recipe}
        assert {0, world // 2 - 1, world - 1} <= {case.rank for case in of_recipe}, (
            recipe
        )
    # Anything else would be another run than the recipe's.
    assert all(case.overrides in ([], NO_IPC) for case in OF_RECIPES)
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {case.recipe for case in CASES} | LEFT_OUT.keys() == recipes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_of_a_recipe_runs_with_tensors_of_the_device_alone(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    found = ranks[str(case)]
    assert "error" not in found, found["error"]
    built = (found.get("build") or found["start"])["says"]
    assert built["devices"] == [f"cuda:{case.rank % 8}"]
    layer = (
        "FSDPQwen2DecoderLayer"
        if case.recipe == FSDP
        else "TELayerNormColumnParallelLinear"
    )
    assert layer in built["layers"] and built["packs"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.stages != BUILD], ids=str
)
def test_the_host_waits_for_the_device_only_where_it_must(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    for stage, of_stage in ranks[str(case)].items():
        print(f"\n{case}, {stage}:" + ("" if of_stage["reads"] else " none"))
        for read, times in of_stage["reads"].items():
            print(f"  {times:3} x {read}")
            assert read in ALLOWED, f"{stage}: {read} ({times} times)"
            assert times <= ALLOWED[read], f"{stage}: {read}: {times} times"


@pytest.mark.parametrize("case", STEPPED, ids=str)
def test_all_that_the_host_waits_for_in_a_step_is_few(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    """Whatever the sizes of model, batch and job; the dispatcher of experts alone waits in every layer."""
    stages = ranks[str(case)]
    of_step = {name: found for name, found in stages.items() if "step" in name}
    missing = {name for name in (*OPERATORS, *OF_PPO) if f"step: {name}" not in of_step}
    assert missing == {PPO: set(), SINKS: {*OF_PPO, "ref_log_probs"}}.get(
        case.recipe, {*OF_PPO}
    )
    waits = {
        read: sum(found["reads"].get(read, 0) for found in of_step.values())
        for read in ALLOWED
        if "not waited for" not in read and not read.startswith(DISPATCHER)
    }
    print(
        f"\n{case}, a step: {sum(waits.values())}",
        {read: times for read, times in waits.items() if times},
    )
    # These recipes offload the optimizer, which leaves once in an update.
    moves = 4 if case == OFFLOADED else int(case.recipe in (CONTEXT_PARALLEL, SINKS))
    assert sum(waits.values()) <= 9 + moves
    told = stages[case.stages[1]]["says"]["metrics"]
    assert {
        "actor/grad_norm",
        "reward/mean",
        "reshard/bytes_received",
        "rollout/logprob_diff_mean",
    } <= {*told}


@pytest.mark.parametrize("case", STEPPED, ids=str)
def test_what_goes_to_the_device_in_a_step_is_sent_without_a_wait(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    """Micro-batches above all: a copy that waits would end the host's being ahead at each of them."""
    sent = {
        name: found["sent"]
        for name, found in ranks[str(case)].items()
        if "step" in name
    }
    for stage, of_stage in sent.items():
        print(f"\n{case}, {stage}:" + ("" if of_stage else " none"))
        for copy, times in of_stage.items():
            print(f"  {times:3} x {copy}")
            waits = "not waited for" not in copy
            assert not waits or times <= SENT.get(copy, 0), (
                f"{stage}: {copy}: {times} times"
            )
    assert any(MICRO_BATCH in copies for copies in sent.values())


def test_rows_between_two_devices_are_on_no_host(
    ranks: dict[str, dict[str, Any]],
) -> None:
    """Of a batch's rows the host has the lengths, and what lay there: here a reward for each sample."""
    edge = ranks[f"{GRPO_8} rank 0 of 64"]["edge"]
    said = edge["says"]
    assert not edge["reads"]
    on_device = dict.fromkeys(("values", "advantages", "returns", "of"), "cuda:0")
    assert said["devices"] == on_device | {"rewards": "cpu"}
    moved = [3, 3 * 4 * said["tokens"] + 4 * said["samples"]]
    assert (
        edge["collectives"]["send (device)"],
        edge["collectives"]["recv_ (device)"],
    ) == (moved, moved)


def test_what_is_offloaded_leaves_the_device_and_is_not_looked_at_there(
    ranks: dict[str, dict[str, Any]],
) -> None:
    """The last is every operation's own business (`device_mode._check_here`)."""
    found = ranks[str(OFFLOADED)]
    # masters and two moments in float32, of a half: data-parallel ranks share them
    for stage in ("start", "step"):
        held = found[stage]["says"]["on_device"]
        wanted = 12 * found["step"]["says"]["trained"] / 2
        assert held.pop("pinned") == pytest.approx(wanted, rel=1e-3, abs=SLAB), (
            "not up to twice as much"
        )
        assert held == {"weights": 0, "gradients": 0, "optimizer": 0}
    kept = ranks[f"{GRPO_8} rank 0 of 64"]["step"]["says"]["on_device"]
    assert (
        min(kept["weights"], kept["gradients"], kept["optimizer"]) > 1e9
        and not kept["pinned"]
    )


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.stages[0] == "start" and case.recipe != FSDP],
    ids=str,
)
def test_the_planner_predicts_what_a_rank_holds(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    """On the device and, page-locked, on the host; of FSDP2 `tests/planner/test_fsdp.py` does."""
    job = planned(case.recipe, case.world, *case.overrides)
    memory = MemoryModel(job)
    start = ranks[str(case)]["start"]
    held, on_host = start["says"]["on_device"], 0
    for role in job.roles:
        if role.trained is None:
            on_host += memory.weights(role, case.rank)
            continue
        trained, offload = memory.trained(role, case.rank), role.trained.offload
        on_host += trained.optimizer * offload.optimizer
        on_host += trained.weights * offload.parameters
        if role.name == "actor":
            assert held["weights"] == trained.weights * (not offload.parameters)
            assert held["gradients"] == trained.gradients * (not offload.gradients)
            assert held["optimizer"] == trained.optimizer * (not offload.optimizer)
    assert start["page_locked"] == pytest.approx(on_host, rel=1e-3, abs=SLAB)


def test_every_wait_that_is_allowed_is_met(ranks: dict[str, dict[str, Any]]) -> None:
    met = {
        read
        for found in ranks.values()
        for of_stage in found.values()
        for read in of_stage["reads"]
    }
    sent = {
        copy
        for found in ranks.values()
        for of_stage in found.values()
        for copy in of_stage["sent"]
    }
    assert sorted((ALLOWED | SENT).keys() - met - sent) == [], (
        "docs/gpu.md would list what no rank does any more"
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.stages != BUILD], ids=str
)
def test_a_rank_is_known_to_wait_wherever_the_host_does(
    case: Case, ranks: dict[str, dict[str, Any]]
) -> None:
    """Under NCCL a rank that reads its device may wait there for others: taken for work, it would be accused."""
    for stage, of_stage in ranks[str(case)].items():
        assert not of_stage["unknown_waits"], (
            f"{stage}: no call of megaverl/distributed/heartbeat.py:_READS is there"
        )


def test_the_reshard_receives_what_the_rank_lacks_and_no_more(
    ranks: dict[str, dict[str, Any]],
) -> None:
    for case in CASES:
        of_case = ranks[str(case)]
        for moved in [
            of_case[stage]["says"] for stage in case.stages if stage == "reshard"
        ] + [
            of_case[stage]["says"]["reshard"]
            for stage in case.stages
            if stage.endswith("step")
        ]:
            assert (
                moved["received"] + moved["local"] + moved["aliased"] == moved["wanted"]
            ), case
    found = ranks[f"{GRPO_8} rank 0 of 64"]
    config = json.loads((ROOT / "configs/llama3_70b/config.json").read_text())
    # bfloat16, PP4, TP8.
    held = 2 * (config["num_hidden_layers"] // 4) * layer_elements(config) // 8
    table = 2 * config["vocab_size"] * config["hidden_size"] // 8
    moved = found["step"]["says"]["reshard"]
    assert moved["local"] == 0 and moved["aliased"] == pytest.approx(
        held + table, rel=1e-3
    )
    lacked = 3 * held + table  # the other stages' layers, and the output layer
    assert moved["received"] == pytest.approx(lacked, rel=1e-3)
    assert math.isclose(
        found["step: reshard"]["collectives"]["recv_ (device)"][1], lacked, rel_tol=1e-3
    )


def test_a_save_writes_the_ranks_share_and_gathers_nothing(
    ranks: dict[str, dict[str, Any]],
) -> None:
    for case in [case for case in CASES if "save" in case.stages]:
        found = ranks[str(case)]["save"]
        # bfloat16 weights, and a master and two moments in float32; each data-parallel
        # rank writes its share (under FSDP2 weights are the masters, and a rank has no
        # others than its own)
        share = (
            found["says"]["trained"]
            * {GRPO_8: 14 / 2, GRPO_128: 14 / 64, FSDP: 12}[case.recipe]
        )
        assert found["says"]["bytes"] == pytest.approx(share, rel=2e-3)
        assert not found["collectives"]
        assert found["says"]["tensors"] and found["says"]["files"], (
            "some of it lies on the disk, read from the device"
        )


def layer_elements(config: dict[str, Any]) -> int:
    hidden, head_dim = (
        config["hidden_size"],
        config["hidden_size"] // config["num_attention_heads"],
    )
    attention = (
        hidden
        * head_dim
        * 2
        * (config["num_attention_heads"] + config["num_key_value_heads"])
    )
    return attention + 3 * hidden * config["intermediate_size"]
