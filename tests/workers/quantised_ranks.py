"""What the ranks of a test world do with an actor and a quantised engine that takes its weights."""

from __future__ import annotations

from typing import Any

import torch

from megaverl.config.roles import LoraConfig, RolloutConfig
from megaverl.distributed.grid import GridShape
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import quantised_tensors
from megaverl.sharding.weight import shapes_of
from megaverl.weights.transports.quantised import dequantise
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.models.ranks import manager
from tests.workers.reshard_ranks import GREEDY

PROMPTS = [[2, 7, 5], [11, 4]]


def engine(
    folder: str, tp: int, quantization: str, *, load_weights: bool
) -> VLLMEngine:
    return VLLMEngine(
        folder,
        RolloutConfig(tp=tp, vllm={"quantization": quantization}),
        VLLMOptions(
            seed=0,
            dtype=torch.bfloat16,
            max_model_len=64,
            load_weights=load_weights,
            num_sequences=4,
        ),
    )


def bits(made: VLLMEngine) -> dict[str, torch.Tensor]:
    """All parameters of vLLM's model, numbers and scales, as bytes."""
    return {
        n: p.detach().contiguous().clone().view(torch.uint8)
        for n, p in made.model.named_parameters()
    }


def reshard_and_generate(
    folder: str, shape: dict[str, int], tp: int, quantization: str, *, load_too: bool
) -> dict[str, Any]:
    """A quantised engine takes an actor's weights, then another's with adapters.

    Returns what differs from an engine that loaded the folder itself and quantised it
    (if `load_too`), which tensors are quantised and should not be or the other way
    round, the responses, and how far the weights with merged adapters are from what
    they should be, relative to their norm.
    """
    spec = ModelSpec.from_folder(folder)
    model = MegatronModel(
        spec,
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.bfloat16, seed=0),
    )
    model.load(folder)
    made = engine(folder, tp, quantization, load_weights=False)
    layouts = made.layouts(shapes_of(model.weights))
    WeightSync(ActorWeights.of(model), layouts, made, model.grid.world).reshard()
    found = {
        "odd": sorted(
            made.quantised_weights().keys() ^ quantised_tensors(model.weights).keys()
        ),
        "responses": [
            each.token_ids for each in made.generate(PROMPTS, GREEDY, [0, 0])
        ],
        "merged": merged_error(folder, shape, made),
    }
    WeightSync(ActorWeights.of(model), layouts, made, model.grid.world).reshard()
    again = bits(made)
    made.close()
    if load_too:
        fresh = engine(folder, tp, quantization, load_weights=True)
        expected = bits(fresh)
        differ = [
            name for name in expected if not torch.equal(again[name], expected[name])
        ]
        found["differ"] = differ + sorted(again.keys() ^ expected.keys())
        found["afresh"] = [
            each.token_ids for each in fresh.generate(PROMPTS, GREEDY, [0, 0])
        ]
        fresh.close()
    return found


def merged_error(folder: str, shape: dict[str, int], made: VLLMEngine) -> float:
    """Of the engine's down-projections, relative to their norm, after adapters of one of them have been merged."""
    spec = ModelSpec.from_folder(folder)
    lora = LoraConfig(rank=4, alpha=8.0, targets=["down_proj"])
    model = MegatronModel(
        spec,
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.bfloat16, seed=0, lora=lora),
    )
    model.load(folder)
    sync = WeightSync(
        ActorWeights.of(model),
        made.layouts(shapes_of(model.weights)),
        made,
        model.grid.world,
    )
    assert model.adapters is not None
    factors = model.adapters.parameters
    sync.reshard()
    with torch.no_grad():
        for name, parameter in factors.items():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    sync.reshard()
    worst, layouts = 0.0, model.layout_of(model.grid.rank)
    for layer in range(spec.num_layers):
        local = f"decoder.layers.{layer}.mlp.linear_fc2"
        if f"{local}.weight" not in layouts.local_shapes:
            continue
        a, b = (
            factors[f"{local}.adapter.lora_{which}.down_proj"].float() for which in "AB"
        )
        right = model.parameters[f"{local}.weight"].float() + 2.0 * b @ a
        held = dequantise(
            made.quantised_weights()[f"model.layers.{layer}.mlp.down_proj.weight"]
        )
        worst = max(worst, float((held - right).norm() / right.norm()))
    return worst
