"""What the ranks of a test world do with an actor and the engine that takes its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig, RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.grid import GridShape
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import shapes_of
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import TrainingModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.policy import Policy
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.models.ranks import manager

GREEDY = SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True)


def engine(
    folder: str,
    tp: int,
    *,
    load_weights: bool,
    dtype: torch.dtype = torch.float32,
    **vllm: Any,
) -> VLLMEngine:
    return VLLMEngine(
        folder,
        RolloutConfig(tp=tp, vllm=vllm),
        VLLMOptions(
            seed=0,
            dtype=dtype,
            max_model_len=128,
            load_weights=load_weights,
            num_sequences=16,
        ),
    )


def reshard_and_generate(
    old_folder: str,
    new_folder: str,
    shapes: list[dict[str, Any]],
    exports: list[str],
    tp: int,
    vllm: dict[str, Any],
    prompts: list[list[int]],
    adapter: str | None = None,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """One engine without weights of its own; for each grid an actor that gives it the old weights, then the new.

    With an `adapter` (rank 4, alpha 8) that makes the old weights the new ones, the
    last grid's actor has it. Returns for each grid the greedy responses with the old
    and the new weights, and the largest difference between the engine's log-probs of
    the new ones and the actor's. The new weights are exported by each grid.
    """
    computes = getattr(torch, dtype)
    made = engine(old_folder, tp, load_weights=False, dtype=computes, **vllm)
    found = []
    for shape, export in zip(shapes, exports, strict=True):
        lora = (
            LoraConfig(rank=4, alpha=8.0) if adapter and export == exports[-1] else None
        )
        model = actor_of(old_folder, shape, lora, computes)
        sync = WeightSync(
            ActorWeights.of(model),
            made.layouts(shapes_of(model.weights)),
            made,
            model.grid.world,
        )
        rollout = Rollout(made, model.grid.world, sync)
        responses = []
        for folder in (old_folder, new_folder):
            sync.source_changes()
            if lora is None or folder == old_folder:
                model.load(folder)
            else:
                before = {
                    name: parameter.detach().clone()
                    for name, parameter in model.parameters.items()
                }
                model.load_adapters(str(adapter))
            first = sync.reshard()
            if lora is not None and folder == new_folder:
                # Merged anew into what arrives, not into what was there.
                again = sync.reshard()
                # with the adapters' weights known to be there, embeddings and norms
                # stay where they are
                assert again.bytes_local == first.bytes_local < rollout_bytes(made)
                assert all(
                    torch.equal(before[name], p) for name, p in model.parameters.items()
                )
            responses.append(rollout.generate(prompts, GREEDY, [0] * len(prompts)))
        found.append(
            {
                "old": [each.token_ids for each in responses[0]],
                "new": [each.token_ids for each in responses[1]],
                "difference": largest_difference(model, prompts, responses[1]),
            }
        )
        model.export(export, source_folder=old_folder)
    made.close()
    return found


def actor_of(
    folder: str, shape: dict[str, Any], lora: LoraConfig | None, dtype: torch.dtype
) -> TrainingModel:
    """On a grid of Megatron-core; or, where `shape` says `fsdp`, under FSDP2, cut so."""
    if "fsdp" in shape:
        return FSDPModel(
            folder,
            manager().grid(GridShape.fit(dist.get_world_size(), tp=shape.get("tp", 1))),
            manager(),
            ModelOptions(
                dtype=dtype, seed=0, trained=True, lora=lora, initialize=False
            ),
            fsdp=FsdpConfig(sharding_strategy=shape["fsdp"]),
        )
    grid = manager().grid(GridShape(**shape))
    return MegatronModel(
        ModelSpec.from_folder(folder),
        grid,
        ModelOptions(dtype=dtype, seed=0, lora=lora),
    )


def rollout_bytes(made: VLLMEngine) -> int:
    """Of an engine's weights on this rank."""
    return sum(parameter.nbytes for parameter in made.named_parameters().values())


def largest_difference(
    model: TrainingModel, prompts: list[list[int]], responses: list[Generation]
) -> float:
    """Between the engine's log-probs of its responses and the actor's of the same tokens."""
    longest = max(map(len, prompts))
    batch = RolloutBatch(
        {
            "input_ids": torch.tensor(
                [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
            ),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "generated_ids": torch.tensor([each.token_ids for each in responses]),
            "response_mask": torch.ones(
                len(prompts), GREEDY.max_tokens, dtype=torch.bool
            ),
        }
    )
    # the engine's greedy log-probs are those at temperature 1
    policy = Policy(model, temperature=1.0, micro_batch_tokens=128)
    theirs = torch.tensor([each.log_probs for each in responses])
    return float((policy.log_probs(batch) - theirs).abs().max())


def generate_afresh(
    folder: str,
    tp: int,
    vllm: dict[str, Any],
    prompts: list[list[int]],
    dtype: str = "float32",
) -> list[list[int]]:
    """The greedy responses of a new engine that loaded `folder` itself."""
    computes = getattr(torch, dtype)
    made = engine(folder, tp, load_weights=True, dtype=computes, **vllm)
    responses = made.generate(prompts, GREEDY, [0] * len(prompts))
    made.close()
    return [each.token_ids for each in responses]
