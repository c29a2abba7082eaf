"""What the ranks of a test world do with models that have experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.grid import GridShape
from megaverl.distributed.job_context import default_group
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.export import ShardedModel, save_folder
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import MegatronTrainable
from megaverl.workers.policy import Actor
from megaverl.workers.rollout import Rollout
from tests.models.ranks import manager


def equal_lengths(num_samples: int = 4) -> RolloutBatch:
    """Samples of 4 + 8 tokens: cut into micro-batches of one, every grid pads and averages alike."""
    generator = torch.Generator().manual_seed(11)
    shape = (num_samples, 8)
    return RolloutBatch(
        {
            "input_ids": torch.randint(0, 100, (num_samples, 4), generator=generator),
            "prompt_lengths": torch.full((num_samples,), 4),
            "generated_ids": torch.randint(0, 100, shape, generator=generator),
            "response_mask": torch.ones(shape, dtype=torch.bool),
            "rollout_log_probs": torch.randn(shape, generator=generator) * 0.1 - 4.6,
            "old_log_probs": torch.randn(shape, generator=generator) * 0.1 - 4.6,
            "advantages": torch.randn(shape, generator=generator),
        }
    )


def update_equal_lengths(
    folder: str, shape: dict[str, int], output: str, megatron: dict[str, Any]
) -> dict[str, float]:
    """One actor update with the user's TransformerConfig fields; the weights go to `output`."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.float32, seed=0),
        overrides=megatron,
    )
    model.load(folder)
    optimizer = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}
    trainable = MegatronTrainable(
        model, optimizer=optimizer, scheduler={}, ddp={}, total_updates=10
    )
    actor = Actor(
        trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=12, seed=0
    )
    metrics = actor.update(equal_lengths(), step=0)
    save_folder(
        ShardedModel(model.weights, model.layout_of, model.parameters),
        output,
        sources=[folder],
        group=model.grid.world,
    )
    return metrics


def generate_with_experts(
    folder: str, prompts: list[list[int]]
) -> list[tuple[list[int], list[Any]]]:
    """Of an engine over the world: each response, and the experts that it says its tokens took, as they come round."""
    made = VLLMEngine(
        folder,
        RolloutConfig(tp=dist.get_world_size()),
        VLLMOptions(
            seed=0,
            dtype=torch.float32,
            max_model_len=64,
            num_sequences=len(prompts),
            routed_experts=True,
        ),
    )
    sampling = SamplingOptions(12, temperature=1.0, ignore_eos=True)
    found = Rollout(made, default_group()).generate(
        prompts, sampling, list(range(len(prompts))), group_size=2
    )
    made.close()
    return [
        (each.token_ids, each.routed_experts.tolist())
        for each in found
        if each.routed_experts is not None
    ]
