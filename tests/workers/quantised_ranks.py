"""What the ranks of a test world do with an actor and a quantised engine that takes its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.convert.run import ConversionRequest, convert
from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig, ReshardConfig, RolloutConfig
from megaverl.distributed.grid import GridShape
from megaverl.models.fake_quantization import quantised_locals, rounding_of
from megaverl.models.packing import MicroBatch
from megaverl.rollout import vllm_engine
from megaverl.rollout.vllm_engine import VLLMEngine
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import quantised_tensors
from megaverl.sharding.weight import shapes_of
from megaverl.weights.transports.quantised import dequantise
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.weight_sync import ActorWeights, WeightSync
from tests.models.ranks import manager
from tests.workers.reshard_ranks import GREEDY, largest_difference

PROMPTS = [[2, 7, 5], [11, 4]]


def engine(
    folder: str,
    tp: int,
    quantization: str | None,
    *,
    load_weights: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> VLLMEngine:
    return VLLMEngine(
        folder,
        RolloutConfig(
            tp=tp, vllm={"quantization": quantization} if quantization else {}
        ),
        VLLMOptions(
            seed=0,
            dtype=dtype,
            max_model_len=64,
            load_weights=load_weights,
            num_sequences=4,
        ),
    )


def bits(made: VLLMEngine) -> dict[str, torch.Tensor]:
    """All parameters of vLLM's model, numbers and scales, as bytes."""
    return {
        n: p.detach().flatten().clone().view(torch.uint8)
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


def reshard_groups(
    folder: str, out: str, shape: dict[str, int], tp: int, methods: list[str]
) -> dict[str, Any]:
    """Engines with groups take an actor's weights, the second time other ones than the first.

    Returns by method what differs from a fresh engine that loaded a compressed-tensors
    folder with the second weights, the kernel, whether the first weights gave other
    bits, and the responses of both engines.
    """
    spec = ModelSpec.from_folder(folder)
    model = MegatronModel(
        spec,
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.bfloat16, seed=0),
    )
    found = {}
    for method in methods:
        model.load(folder)
        made = engine(folder, tp, method, load_weights=False)
        layouts = made.layouts(shapes_of(model.weights))
        # Matrices arrive whole, and the rest as changes.
        sync = WeightSync(
            ActorWeights.of(model),
            layouts,
            made,
            model.grid.world,
            config=ReshardConfig(delta="on", ipc="never"),
        )
        with torch.no_grad():
            for parameter in model.parameters.values():
                parameter.mul_(3)
        sync.reshard()
        before = bits(made)
        model.load(folder)
        stats = sync.reshard()
        held = bits(made)
        responses = [g.token_ids for g in made.generate(PROMPTS, GREEDY, [0, 0])]
        kernels = {
            type(module.scheme.kernel).__name__
            for module in made.model.modules()
            if hasattr(module, "scheme")
        }
        odd = made.quantised_weights().keys() ^ quantised_tensors(model.weights).keys()
        made.close()
        target = Path(out) / method
        convert(
            ConversionRequest(
                Path(folder), target, "hugging_face", quantization=method, quiet=True
            )
        )
        fresh, expected, afresh = from_compressed(folder, target, tp)
        found[method] = {
            "differ": [
                n
                for n in expected
                # Of a fused layer, vLLM keeps the shape of one part.
                if not n.endswith("weight_shape")
                and not torch.equal(held[n], expected[n])
            ]
            + sorted(held.keys() ^ expected.keys())
            + sorted(odd),
            "kernels": sorted(kernels),
            "changed": any(not torch.equal(held[n], before[n]) for n in held),
            "compared": stats.changed_fraction is not None,
            "responses": responses,
            "afresh": afresh,
        }
        fresh.close()
    return found


def from_compressed(
    folder: str, packed: Path, tp: int
) -> tuple[VLLMEngine, dict[str, torch.Tensor], list[list[int]]]:
    """An engine that vLLM makes of a compressed-tensors folder, its parameters, and its responses.

    megaverl's own checks read `folder`, since a quantised one cannot be trained.
    """
    start = vllm_engine._start

    def start_packed(_: str, arguments: dict[str, Any]) -> Any:
        return start(str(packed), arguments)

    vllm_engine._start = start_packed
    try:
        fresh = engine(folder, tp, None, load_weights=True)
    finally:
        vllm_engine._start = start
    held = bits(fresh)
    return fresh, held, [g.token_ids for g in fresh.generate(PROMPTS, GREEDY, [0, 0])]


def train_what_is_sampled(
    folder: str, shape: dict[str, Any], tp: int, methods: list[str]
) -> dict[str, Any]:
    """Actors that round their weights, and engines in the same formats that take these weights.

    Returns by method the largest difference between log-probs of the engine's responses
    and the actor's, with and without rounding in the actor, and between gradients of
    the actor and those of a plain model with rounded weights.
    """
    found = {}
    for method in methods:
        models = [rounding_actor(folder, shape, each) for each in (method, None)]
        for model in models:
            model.load(folder)
        rounds, plain = models
        made = engine(folder, tp, method, load_weights=False, dtype=torch.float32)
        layouts = made.layouts(shapes_of(rounds.weights))
        WeightSync(ActorWeights.of(rounds), layouts, made, rounds.grid.world).reshard()
        responses = made.generate(PROMPTS, GREEDY, [0, 0])
        made.close()
        found[method] = {
            "rounded": largest_difference(rounds, PROMPTS, responses),
            "plain": largest_difference(plain, PROMPTS, responses),
        }
        if isinstance(rounds, MegatronModel) and isinstance(plain, MegatronModel):
            in_engine = quantised_tensors(plain.weights)
            names = {w.name for w in plain.weights if w.vllm in in_engine}
            held = quantised_locals(names, plain.layout_of(plain.grid.rank).by_tensor)
            rounding = rounding_of(method, plain.grid.tp_group)
            with torch.no_grad():
                for local in sorted(held):
                    plain.parameters[local].copy_(rounding(plain.parameters[local]))
            found[method]["gradients"] = max(
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip(gradients(rounds), gradients(plain), strict=True)
            )
    return found


def rounding_actor(
    folder: str, shape: dict[str, Any], method: str | None
) -> MegatronModel | FSDPModel:
    """An actor in float32 on a grid of Megatron-core, or under FSDP2."""
    options = ModelOptions(dtype=torch.float32, seed=0, fake_quantization=method)
    if "fsdp" in shape:
        grid = manager().grid(GridShape.fit(dist.get_world_size(), tp=1))
        fsdp = FsdpConfig(sharding_strategy=shape["fsdp"])
        return FSDPModel(folder, grid, manager(), options, fsdp=fsdp)
    spec = ModelSpec.from_folder(folder)
    return MegatronModel(spec, manager().grid(GridShape(**shape)), options)


def gradients(model: MegatronModel) -> list[torch.Tensor]:
    """Of some loss, for every parameter of this rank."""
    tokens = torch.tensor([[2, 7, 5, 9], [11, 4, 1, 3]])
    lengths = torch.full((2,), 3)
    batch = MicroBatch(torch.arange(2), tokens, torch.ones_like(lengths), lengths)

    def loss(output: torch.Tensor, _: Any) -> Any:
        value = output.float().logsumexp(-1).sin().sum()
        return value, {"loss": value.detach()}

    model.forward_backward(model.chunks, [batch], loss)
    return [model.parameters[name].grad for name in sorted(model.parameters)]


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
