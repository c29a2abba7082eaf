"""The share of a GPU that an engine gets beside other roles, where nobody named one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.distributed.placement import Node
from megaverl.planner.advice import shortages
from megaverl.planner.job import Machine, PlannedJob
from megaverl.planner.memory import MemoryModel
from megaverl.planner.placed_run import (
    LEAST,
    MOST,
    derive_share,
    with_engine_share,
    with_share,
)
from megaverl.planner.report import as_dict, as_text, survey
from megaverl.sharding.model_spec import ModelSpec
from megaverl.trainer.job import place
from tests.planner.jobs import CONFIGS, NEEDED, make

LAYOUT = (
    "model.dtype=bfloat16",
    "actor.tp=2",
    "rollout.tp=2",
    "rollout.sampling.max_tokens=2048",
)
ON_8 = (*LAYOUT, "algorithm={name: grpo, group_size: 8}", "algorithm.kl={coef: 0}")
QWEN = ModelSpec.from_config(
    json.loads((CONFIGS / "qwen2_5_7b" / "config.json").read_text())
)


def fits(job: PlannedJob) -> bool:
    return not shortages(job, MemoryModel(job).ranks())


@pytest.mark.parametrize(
    "more",
    [
        ["rollout.sleep=true"],
        ["rollout.sleep=true", "rollout.tp=1"],
        ["rollout.sleep=false"],
    ],
)
def test_the_most_that_fits(more: list[str]) -> None:
    """vLLM's own 0.92 does not, and the next step upwards would not either."""
    job = make(QWEN, 8, *ON_8, *more)
    share = derive_share(job)
    assert (
        share is not None
        and LEAST < share < MOST
        and share * 20 == pytest.approx(round(share * 20))
    )
    assert not fits(with_share(job, 0.92)) and fits(with_share(job, share))
    tight = with_share(job, share + 0.05)
    assert shortages(tight, MemoryModel(tight).ranks(), 0.97), (
        "0.05 more leaves less than 3 % of the GPU"
    )


@pytest.mark.parametrize(
    "keys",
    [
        ["rollout.vllm.gpu_memory_utilization=0.3"],
        ["rollout.vllm.kv_cache_memory_bytes=1000000000"],
        ["rollout.engine=hf", "rollout.tp=1"],
        ["placement={rollout: 0-3, actor: 4-7}"],
    ],
)
def test_what_is_given_and_engines_of_their_own_stay(keys: list[str]) -> None:
    assert derive_share(make(QWEN, 8, *ON_8, *keys)) is None


def test_a_processor_has_no_share() -> None:
    assert derive_share(make(QWEN, 8, *ON_8, machine=Machine(on_gpus=False))) is None


def test_where_nothing_fits_the_least_is_taken_and_what_is_missing_is_told() -> None:
    job = make(
        QWEN,
        8,
        *LAYOUT,
        "algorithm.name=ppo",
        "rollout.sleep=true",
        machine=Machine(memory=80e9),
    )
    assert derive_share(job) == LEAST and not fits(with_share(job, LEAST))


def test_a_plan_says_what_it_chose() -> None:
    capacity = survey(make(QWEN, 8, *ON_8, "rollout.sleep=true"))
    share = capacity.job.config.rollout.vllm["gpu_memory_utilization"]
    assert (
        f"rollout.vllm.gpu_memory_utilization: {share:.2f}, the most that leaves room"
        in as_text(capacity)
    )
    assert (
        "actor.ddp: use_distributed_optimizer=true, grad_reduce_in_fp32=true, overlap_grad_reduce=true"
        in as_text(capacity)
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS: 1 up to Hopper" in as_dict(capacity)["derived"]


def test_a_run_takes_the_same_on_the_gpus_that_it_meets(tmp_path: Path) -> None:
    """And names it among its choices; on nodes without a GPU nothing changes."""
    (tmp_path / "config.json").write_text(
        (CONFIGS / "qwen2_5_7b" / "config.json").read_text()
    )
    given = [*NEEDED, *ON_8, f"model.path={tmp_path}", "rollout.sleep=true"]
    config = load_config(None, given, check_paths=False, world_size=8)
    for memory in (85e9, 150e9):
        met = with_engine_share(
            config, place(config, "train", 8, (Node("a", 8, memory=memory),))
        )
        share = met.rollout.vllm["gpu_memory_utilization"]
        assert share == derive_share(
            make(QWEN, 8, *ON_8, "rollout.sleep=true", machine=Machine(memory=memory))
        )
        assert met.choices[-1].startswith(
            f"rollout.vllm.gpu_memory_utilization: {share:.2f}"
        )
        assert (
            "gpu_memory_utilization" not in config.rollout.vllm and not config.choices
        )
    assert (
        with_engine_share(config, place(config, "train", 8, (Node("a", 8),))) is config
    )


def test_of_a_model_that_is_not_here_half_is_taken() -> None:
    config = load_config(None, [*NEEDED, *ON_8], check_paths=False, world_size=8)
    met = with_engine_share(
        config, place(config, "train", 8, (Node("a", 8, memory=80e9),))
    )
    assert (
        met.rollout.vllm["gpu_memory_utilization"] == 0.5
        and "cannot count" in met.choices[-1]
    )
