"""Whole runs through the CUDA branch, with values: metrics, samples and weights are those of the CPU branch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice
from tests.softcuda.runs import PLAIN, differences
from tests.trainer.conftest import MODEL, command_arguments
from tests.trainer.test_images import image_arguments

COMMON = [
    "model.dtype=float32",
    "rollout.engine=hf",
    "trainer.steps=2",
    "trainer.validate_every=0",
    "run.log_with=jsonl",
    "run.timeout_minutes=2",
]
MEGATRON = [f"actor.megatron={PLAIN}", f"critic.megatron={PLAIN}"]
GRPO = "algorithm={name: grpo, group_size: 4, kl: {in: loss, coef: 0.01}}"
PPO = (
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}"
)
CRITIC = "critic={tp: 1, optimizer: {lr: 1.0e-3}}"
MOVES = "parameters: true, optimizer: true, gradients: true"
BUCKETS = "actor.ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 20000}"


class Case(NamedTuple):
    """A run.

    Attributes:
        model: which model and prompts it has.
        without: beginning of the names of metrics that differ by design.
        sends_less: whether its last reshard sends changes of the weights, and so less than the weights.
        steppers: ranks that take optimizer steps and compute nothing else.
    """

    overrides: list[str]
    num_ranks: int = 2
    model: Literal["dense", "experts", "images"] = "dense"
    without: str = ""
    sends_less: bool = False
    steppers: tuple[int, ...] = ()


RUNS = {
    "grpo": Case([*MEGATRON, GRPO]),
    "ppo": Case([PPO, CRITIC, *MEGATRON]),
}
# The same for every other part that has a CUDA branch; minutes, so they run where
# MEGAVERL_TEST_SOFTCUDA is set.
MORE_RUNS = {
    "lora": Case([*MEGATRON, GRPO, "actor.lora={rank: 4, alpha: 8}"]),
    "fsdp2": Case(
        [
            PPO,
            "actor={engine: fsdp, tp: 1}",
            "critic={engine: fsdp, tp: 1, optimizer: {lr: 1.0e-3}}",
        ]
    ),
    "experts": Case([*MEGATRON, GRPO, "actor={tp: 1, ep: 2}"], model="experts"),
    "tp2 pp2": Case(
        [PPO, CRITIC, *MEGATRON, "actor={tp: 2, pp: 2}", "run.nproc=4"], num_ranks=4
    ),
    "split roles": Case(
        [GRPO, *MEGATRON, "actor.tp=1", "placement={rollout: 0, actor: 1}"]
    ),
    # on a CPU nothing moves, and the engine may share the actor's storage; of an actor
    # that moves it must not
    "offload": Case(
        [
            PPO,
            CRITIC,
            *MEGATRON,
            f"actor.offload={{{MOVES}}}",
            "critic.offload={optimizer: true}",
        ],
        without="reshard/bytes_",
    ),
    "overlap": Case(
        [*MEGATRON, PPO, CRITIC, BUCKETS, "reshard={overlap: true, check_every: 1}"]
    ),
    "context parallel": Case([*MEGATRON, GRPO, "actor={tp: 1, cp: 2}"]),
    "fsdp2 on the host": Case(
        [
            GRPO,
            "actor={engine: fsdp, tp: 1, fsdp: {cpu_offload: true}}",
        ]
    ),
    "context parallel fsdp2": Case(
        [PPO, "actor={engine: fsdp, tp: 1, cp: 2}", "critic.optimizer.lr=1.0e-3"]
    ),
    # In 16 bits, steps of this size change a part of the weights.
    "deltas": Case(
        [
            GRPO,
            *MEGATRON,
            "model.dtype=bfloat16",
            "actor={tp: 1, optimizer: {lr: 1.0e-5}}",
            "placement={rollout: 0, actor: 1}",
            # Messages carry deltas; within a node memory would be read instead.
            "reshard={delta: on, check_every: 1, ipc: never}",
        ],
        sends_less=True,
    ),
    "global model": Case(
        [
            PPO,
            CRITIC,
            *MEGATRON,
            "actor.tp=1",
            "placement={rollout: 0, actor: 1-2, coordinator: 3, actor_islands: 2}",
            "coordinator.aggregates=gradients",
        ],
        num_ranks=4,
        steppers=(3,),
    ),
    "asynchronous": Case(
        [
            "algorithm={name: grpo, group_size: 4, correction: {kind: token_truncate}}",
            *MEGATRON,
            "actor.tp=1",
            "placement={rollout: 0, actor: 1}",
            "rollout={async_rollout: true, max_staleness: 1}",
            "trainer.steps=3",
        ]
    ),
    # vLLM reads the images, since the engine `hf` reads text only.
    "images": Case(
        [
            "rollout={engine: vllm, vllm: {enforce_eager: true}}",
            "checkpoint.save_interval=0",
        ],
        model="images",
    ),
}
CHOSEN = RUNS | (MORE_RUNS if os.environ.get("MEGAVERL_TEST_SOFTCUDA") else {})
LOOKS_FOR_FAULTS = Options(
    shares_generator=True, tracks_order=True, poisons=True, strict_device=True
)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:  # noqa: F811
    """A folder with a small model that has experts, and the tokenizer of `inputs`."""
    from megaverl.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(inputs / "model")
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {
        name: value for name, value in MODEL.items() if name != "intermediate_size"
    }
    folder = make_tiny_folder(
        tmp_path_factory.mktemp("experts"), "Qwen3MoeForCausalLM", **sizes, **special
    )
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_is_that_of_the_cpu_to_the_bit(
    launch: Launcher,
    device: SoftwareDevice,
    inputs: Path,
    experts: Path,
    tmp_path: Path,
    name: str,
) -> None:
    """No access is unordered, no memory is used again too early, and no fresh memory is read."""
    case = CHOSEN[name]
    if case.model == "images":
        of_model = image_arguments(tmp_path / "inputs")
    else:
        of_model = ["train", *command_arguments(inputs, tmp_path)]
    if case.model == "experts":
        of_model.append(f"model.path={experts}")

    def arguments(where: str) -> list[str]:
        return [*of_model, f"run.dir={tmp_path / where}", *COMMON, *case.overrides]

    launch.ranks(
        case.num_ranks, "tests.softcuda.runs:plain_command", arguments=arguments("cpu")
    ).check()
    options = replace(LOOKS_FOR_FAULTS, devices=case.num_ranks)
    ended = device.command(
        arguments("device"),
        ranks=case.num_ranks,
        logs=tmp_path / "logs",
        options=options,
    )
    ended.check()
    for rank in range(case.num_ranks):
        if rank in case.steppers:
            assert ended.kernels[rank]["aten::sqrt"] > 100
        else:
            assert ended.matrix_products(rank) > 100
    lines = (tmp_path / "device" / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # in `actor_gpu_mem_mb` a CPU's run has the memory of the process
    assert all(record["memory/actor_gpu_reserved_mb"] > 0 for record in records)
    if case.sends_less:
        last = records[-1]
        assert 0 < last["reshard/bytes_sent"] < last["reshard/bytes_sent_whole"]
    assert (
        differences(tmp_path / "device" / "run", tmp_path / "cpu" / "run", case.without)
        == []
    )


RESUMED = [PPO, CRITIC, *MEGATRON, f"actor.offload={{{MOVES}}}"]


@pytest.mark.parametrize(
    "in_background", ["false", "true"] if MORE_RUNS.keys() <= CHOSEN.keys() else []
)
def test_a_run_that_is_cut_goes_on_to_the_same_bits(
    device: SoftwareDevice, inputs: Path, tmp_path: Path, in_background: str
) -> None:
    def run(where: str, *more: str) -> None:
        arguments = [
            "train",
            *command_arguments(inputs, tmp_path / where),
            *COMMON,
            *RESUMED,
            *more,
        ]
        arguments.append(f"checkpoint.async_save={in_background}")
        device.command(
            arguments, logs=tmp_path / f"logs {where}", options=LOOKS_FOR_FAULTS
        ).check()

    run("whole", "trainer.steps=3", "checkpoint={save_interval: 1, resume: auto}")
    run("cut", "trainer.steps=1", "checkpoint={save_interval: 1, resume: auto}")
    run("cut", "trainer.steps=3", "checkpoint={save_interval: 1, resume: auto}")
    assert differences(tmp_path / "cut" / "run", tmp_path / "whole" / "run") == []
