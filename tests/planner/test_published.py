"""Configurations that others publish, and that ran: the plan says that they fit, and that one does not that cannot.

A grid, tokens of a micro-batch, what is recomputed and offloaded, the engine's share of
the memory and its parallelism are those of the source, at the commit that it names.
Where a project puts everything of the trainer on the host while the engine works
(verl's *_offload, NeMo-RL's refit, slime's --colocate), that is `actor.offload` here,
and an engine that gives its memory back is `rollout.sleep`.

    python -m tests.planner.test_published     # the table of docs/planning.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from megaverl.planner.advice import Shortage, shortages
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import GB, Machine, PlannedJob
from megaverl.planner.memory import MemoryModel
from megaverl.sharding.model_spec import ModelSpec
from tests.planner.jobs import CONFIGS, make

VERL = "verl-project/verl@b178a3c"
NEMO = "NVIDIA-NeMo/RL@7ea279a"
SLIME = "THUDM/slime@624b824"


def _dense(
    architecture: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv: int,
    vocab: int,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    }


QWEN3_235B = json.loads((CONFIGS / "qwen3_235b_a22b" / "config.json").read_text())
MODELS = {  # sizes of the Hugging Face folders' config.json
    "Qwen2-7B": _dense("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-32B": _dense("Qwen2ForCausalLM", 64, 5120, 27648, 40, 8, 152064),
    "Qwen3-4B": _dense("Qwen3ForCausalLM", 36, 2560, 9728, 32, 8, 151936)
    | {"tie_word_embeddings": True},
    "Qwen3-32B": _dense("Qwen3ForCausalLM", 64, 5120, 25600, 64, 8, 151936),
    "Qwen3-30B-A3B": QWEN3_235B
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": QWEN3_235B,
}


# GB, as CUDA shows them to programs
H100, H20 = (Hardware.read(name).memory_gb for name in ("h100", "h20"))

AWAY = "actor.offload={parameters: true, optimizer: true, gradients: true}"
CPU_ADAM = (
    "actor.optimizer={optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}"
)
FP32_GRADIENTS = "actor.ddp.grad_reduce_in_fp32=true"
FULL = "actor.activation_checkpointing=full"
SLEEP = "rollout.sleep=true"
REFERENCE = ("algorithm.kl={in: loss, kind: k3, coef: 0.001}", "reference.offload=true")


@dataclass(frozen=True)
class Published:
    """A configuration of someone else's.

    Attributes:
        source: where it stands.
        gpus, memory: their number, and GB of each.
        lengths: tokens of prompts and of responses.
        batch: prompts of a step, responses of each, mini-batches.
        grid: of actor and reference.
        tokens: of a micro-batch.
        engine: its tp and its share of the memory.
        keys: whatever else, in megaverl's words.
    """

    model: str
    source: str
    gpus: int
    memory: float
    lengths: tuple[int, int]
    batch: tuple[int, int, int]
    grid: dict[str, int]
    tokens: int
    engine: tuple[int, float]
    keys: tuple[str, ...]

    def job(self, *more: str) -> PlannedJob:
        prompts, group, mini_batches = self.batch
        sizes = {**self.grid, "micro_batch_tokens": self.tokens}
        return make(
            ModelSpec.from_config(MODELS[self.model]),
            self.gpus,
            "model.dtype=bfloat16",
            f"data={{train: absent.jsonl, max_prompt_tokens: {self.lengths[0]}, prompts_per_step: {prompts}}}",
            f"rollout.sampling.max_tokens={self.lengths[1]}",
            f"algorithm={{name: grpo, group_size: {group}, num_mini_batches: {mini_batches}}}",
            *(
                f"{role}.{key}={value}"
                for role in ("actor", "reference")
                for key, value in sizes.items()
            ),
            f"rollout.tp={self.engine[0]}",
            f"rollout.vllm.gpu_memory_utilization={self.engine[1]}",
            *self.keys,
            *more,
            machine=Machine(memory=self.memory * GB),
        )


RAN = {
    # A log of the whole run: docs/algo/baseline.md, "GRPO (Megatron)"; GPUs of 80 GB
    # are assumed.
    "verl 7B": Published(
        "Qwen2-7B",
        f"{VERL}: examples/grpo_trainer/run_qwen2-7b_math_megatron.sh",
        gpus=8,
        memory=H100,
        lengths=(1024, 1024),
        batch=(1024, 5, 4),
        grid={"tp": 2, "pp": 2},
        tokens=4 * 2048,
        engine=(2, 0.6),
        keys=(
            "actor.megatron.sequence_parallel=true",
            "actor.chunked_logits=true",
            "rollout.vllm.max_num_seqs=256",
            "rollout.vllm.max_num_batched_tokens=8192",
            FP32_GRADIENTS,
            SLEEP,
            "algorithm.kl={in: loss, kind: k3, coef: 0.001}",
        ),
    ),
    # "tested in NNODES=1~4 * 96G H20 GPU" (the script's first line)
    "verl 30B-A3B": Published(
        "Qwen3-30B-A3B",
        f"{VERL}: examples/grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh",
        gpus=8,
        memory=H20,
        lengths=(2048, 8192),
        batch=(512, 16, 4),
        grid={"ep": 8, "etp": 1},
        tokens=10240,
        engine=(4, 0.7),
        keys=(
            AWAY,
            CPU_ADAM,
            FP32_GRADIENTS,
            SLEEP,
            "rollout.vllm.enforce_eager=true",
            "rollout.vllm.max_num_batched_tokens=10240",
            "rollout.vllm.max_num_seqs=256",
        ),
    ),
    # "it can run on [...] as few as 32 H20 (96GB) GPUs": docs/perf/dpsk.md, of the same
    # commit as this script
    "verl 235B-A22B": Published(
        "Qwen3-235B-A22B",
        "verl-project/verl@65c59c7: examples/grpo_trainer/run_qwen3-235b_megatron_96gb.sh",
        gpus=32,
        memory=H20,
        lengths=(2048, 9632),
        batch=(32, 8, 2),
        grid={"tp": 4, "pp": 8, "ep": 4, "etp": 1},
        tokens=11680,
        engine=(8, 0.85),
        keys=(
            AWAY,
            CPU_ADAM,
            FP32_GRADIENTS,
            SLEEP,
            *REFERENCE,
            FULL,
            "actor.megatron.num_layers_in_last_pipeline_stage=10",
            "reference.megatron.num_layers_in_last_pipeline_stage=10",
            "rollout.vllm={enforce_eager: true, enable_expert_parallel: true, gpu_memory_utilization: 0.85}",
            "rollout.vllm.max_num_batched_tokens=11680",
            "rollout.vllm.max_num_seqs=256",
        ),
    ),
    # Measured on DGX-H100: docs/about/performance-summary.md, "NeMo RL v0.6", 32 GPUs,
    # 1,102 tokens/s a GPU
    "NeMo-RL 30B-A3B": Published(
        "Qwen3-30B-A3B",
        f"{NEMO}: examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml",
        gpus=32,
        memory=H100,
        lengths=(1024, 3072),
        batch=(64, 32, 1),
        grid={"ep": 8, "etp": 1},
        tokens=4096,
        engine=(2, 0.6),
        keys=(AWAY, SLEEP, *REFERENCE, "reference.micro_batch_tokens=8192"),
    ),
    # Measured on DGX-H100: the same table, 256 GPUs, "1-step Off", 58.7 tokens/s a GPU
    "NeMo-RL 235B-A22B": Published(
        "Qwen3-235B-A22B",
        f"{NEMO}: examples/configs/recipes/llm/performance/grpo-qwen3-235b-32n8g-async-1off.yaml",
        gpus=256,
        memory=H100,
        lengths=(1024, 7168),
        batch=(16, 32, 1),
        grid={"tp": 4, "pp": 8, "ep": 16, "etp": 1},
        tokens=8192,
        engine=(8, 0.88),
        keys=(
            "placement={rollout: 128-255, actor: rest}",
            "actor.megatron.num_layers_in_first_pipeline_stage=11",
            "actor.megatron.num_layers_in_last_pipeline_stage=11",
            "reference.megatron.num_layers_in_first_pipeline_stage=11",
            "reference.megatron.num_layers_in_last_pipeline_stage=11",
            FULL,
            *REFERENCE,
        ),
    ),
    "NeMo-RL 32B": Published(
        "Qwen3-32B",
        f"{NEMO}: examples/configs/recipes/llm/performance/grpo-qwen3-32b-4n8g.yaml",
        gpus=32,
        memory=H100,
        lengths=(1024, 3072),
        batch=(64, 32, 1),
        grid={"tp": 4, "pp": 4},
        tokens=4096,
        engine=(4, 0.6),
        keys=(
            AWAY,
            SLEEP,
            *REFERENCE,
            "reference.micro_batch_tokens=16384",
            "actor.megatron.sequence_parallel=true",
            "reference.megatron.sequence_parallel=true",
        ),
    ),
    # "Qwen3-4B with 8xH100": docs/en/examples/qwen3-4B.md
    "slime 4B": Published(
        "Qwen3-4B",
        f"{SLIME}: scripts/run-qwen3-4B.sh",
        gpus=8,
        memory=H100,
        lengths=(1024, 8192),
        batch=(32, 8, 1),
        grid={"tp": 2},
        tokens=9216,
        engine=(2, 0.7),
        keys=(
            AWAY,
            SLEEP,
            FULL,
            FP32_GRADIENTS,
            *REFERENCE,
            "actor.megatron.sequence_parallel=true",
        ),
    ),
    # "Qwen3-30B-A3B with 8xH100": docs/en/examples/qwen3-30B-A3B.md
    "slime 30B-A3B": Published(
        "Qwen3-30B-A3B",
        f"{SLIME}: scripts/run-qwen3-30B-A3B.sh",
        gpus=8,
        memory=H100,
        lengths=(1024, 8192),
        batch=(32, 8, 1),
        grid={"tp": 4, "ep": 8, "etp": 1},
        tokens=20480,
        engine=(8, 0.7),
        keys=(AWAY, CPU_ADAM, SLEEP, FULL, FP32_GRADIENTS, *REFERENCE),
    ),
    "slime 32B": Published(
        "Qwen3-32B",
        f"{SLIME}: scripts/run-qwen3-32B.sh",
        gpus=8,
        memory=H100,
        lengths=(1024, 8192),
        batch=(32, 8, 1),
        grid={"tp": 8},
        tokens=20480,
        engine=(8, 0.7),
        keys=(
            AWAY,
            CPU_ADAM,
            SLEEP,
            FULL,
            FP32_GRADIENTS,
            *REFERENCE,
            "actor.megatron.sequence_parallel=true",
        ),
    ),
}


@pytest.mark.parametrize("name", RAN)
def test_what_ran_fits(name: str) -> None:
    assert [str(shortage) for shortage in plan(RAN[name].job())[1]] == []


def test_what_cannot_run_does_not_fit() -> None:
    """235B on 32 GPUs with the optimizer's state on them: 132 GiB a GPU (THUDM/slime
    issue 280), which is why OFFLOAD_FRACTION=1 is said to lower the minimum to 32
    (docs/perf/dpsk.md of verl).
    """
    job = RAN["verl 235B-A22B"].job("actor.optimizer={optimizer_cpu_offload: false}")
    [missing] = plan(job)[1]
    assert missing.phase == "actor update" and missing.needed > 132 * 2**30


def plan(job: PlannedJob) -> tuple[float, list[Shortage]]:
    """Bytes on the fullest rank, and what does not fit."""
    memory = MemoryModel(job).ranks(job.stage_ranks())
    return max(rank.peak for rank in memory), shortages(job, memory)


if __name__ == "__main__":
    print(
        "| configuration | GPUs | planned peak, GB | source |\n| --- | --- | --- | --- |"
    )
    for each in RAN.values():
        where = f"{each.gpus} of {each.memory:g} GB"
        print(
            f"| {each.model} | {where} | {plan(each.job())[0] / GB:.0f} | {each.source} |"
        )
