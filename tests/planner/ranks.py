"""What the ranks of a test world measure: bytes that a real actor or critic holds, and that a real reshard moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.training_state import sharded_state
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import LoraConfig
from megaverl.data.prefix_tree import PrefixTree
from megaverl.distributed.grid import GridShape
from megaverl.models.mamba import Mamba2Mixer
from megaverl.models.options import transformer_config
from megaverl.planner.layer_parts import LayerParts
from megaverl.planner.stages import LayerShape, layer_bytes, mamba_bytes
from megaverl.platform import platform
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions
from megaverl.workers.critic import Critic
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import MegatronTrainable, single_optimizers
from megaverl.workers.policy import Actor
from tests.models.ranks import manager
from tests.sharding.specs import make_spec
from tests.workers.ranks import experience

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica  # noqa: E402

MOMENTS = ("exp_avg", "exp_avg_sq", "master_param", "momentum_buffer")


def kept_by_mamba(**changes: Any) -> tuple[float, float]:
    """Bytes per token that a Mamba-2 layer keeps of a packed row, and those that the planner counts."""
    spec = make_spec("FalconH1ForCausalLM", hidden_size=64)
    assert spec.mamba is not None
    mamba = replace(spec.mamba, head_dim=32, state_size=64, **changes)
    config = transformer_config(spec, GridShape(), torch.bfloat16)
    groups = manager().grid(GridShape()).pg_collection
    mixer = Mamba2Mixer(config, mamba, groups, has_in_norm=False)
    num_tokens = 512
    row = SimpleNamespace(positions=torch.arange(num_tokens) % 100)
    hidden = torch.randn(num_tokens, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with keeping(mixer) as kept:
        mixer(hidden, packed_seq_params=row)
    return sum(kept.values()) / num_tokens, mamba_bytes(LayerShape(spec), mamba)


def kept_by_layers_of_one_part() -> list[tuple[str, float, float]]:
    """Of each layer its kind, the bytes per token that it keeps, and those that the planner counts."""
    spec = make_spec(
        "NemotronHForCausalLM",
        hidden_size=256,
        ffn_hidden_size=1024,
        num_layers=3,
        layer_kinds=("mamba", "mlp", "mamba"),
    )
    model = MegatronModel(
        spec,
        manager().grid(GridShape()),
        ModelOptions(dtype=torch.bfloat16, seed=0),
    )
    lengths = [100, 200, 212]
    assert model.pack is not None
    row = model.pack(lengths, PrefixTree.apart(3), width=212, multiple_of=1)
    found = []
    for kind, layer in zip(spec.layer_kinds, model.decoder_layers, strict=True):
        hidden = torch.randn(512, 1, 256, dtype=torch.bfloat16, requires_grad=True)
        with keeping(layer) as kept:
            layer(hidden, attention_mask=None, packed_seq_params=row)
        counted = layer_bytes(LayerShape(spec), max(lengths), LayerParts(**{kind: 1.0}))
        found.append((kind, sum(kept.values()) / sum(lengths), counted))
    return found


@contextmanager
def keeping(layer: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each storage that the operators inside keep for the backward pass, without the layer's weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def trained(
    folder: str,
    shape: dict[str, int],
    dtype: str,
    *,
    critic: bool = False,
    ddp: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer on this rank, after one real update."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shape)),
        ModelOptions(
            dtype=getattr(torch, dtype),
            seed=0,
            value_head=critic,
            role="critic" if critic else "actor",
            lora=None if lora is None else LoraConfig(**lora),
        ),
        overrides=megatron,
    )
    trainable = MegatronTrainable(
        model,
        optimizer={"lr": 1e-3} | (optimizer or {}),
        scheduler={},
        ddp=ddp or {},
        total_updates=2,
    )
    if critic:
        Critic(trainable, AlgorithmConfig(), micro_batch_tokens=64, seed=0).update(
            experience(), step=0
        )
    else:
        actor = Actor(
            trainable, AlgorithmConfig(), temperature=1.0, micro_batch_tokens=64, seed=0
        )
        actor.update(experience(), step=0, kl_coef=0.0)
    buffers = [
        b
        for chunk in trainable.chunks
        for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.held
    }
    return {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(map(optimizer_bytes, single_optimizers(trainable.optimizer))),
        **(saved_bytes(trainable) if lora is None else {}),
    }


def saved_bytes(trainable: MegatronTrainable) -> dict[str, int]:
    """What this rank writes of a checkpoint.

    Nothing where it holds padding alone: without Transformer Engine, megatron-core
    (0.16) then lacks a step to store.
    """
    if not all(
        single.optimizer.state for single in single_optimizers(trainable.optimizer)
    ):
        return {}
    state, found = (
        sharded_state({"actor": trainable}),
        {"saved_weights": 0, "saved_optimizer": 0},
    )
    for each in nested_values(state):
        if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id):
            found[
                "saved_optimizer" if ".optimizer." in each.key else "saved_weights"
            ] += each.data.nbytes
    return found


def optimizer_bytes(optimizer: Any) -> int:
    """Master weights and moments; a counter of steps is no state of a parameter."""
    masters = [
        p
        for groups in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(optimizer, groups, [])
        for p in group
    ]
    moments = [
        tensor
        for state in optimizer.optimizer.state.values()
        for name, tensor in state.items()
        if torch.is_tensor(tensor) and name in MOMENTS
    ]
    return sum(tensor.nbytes for tensor in (*masters, *moments))


def resharded(
    folder: str, shape: dict[str, int], tp: int, gpus_per_node: int
) -> dict[str, int]:
    """What a real reshard from a Megatron model into tensors of vLLM's shapes counted on this rank."""
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape(**shape)),
        ModelOptions(dtype=torch.bfloat16, seed=0),
    )
    layouts = vllm_layouts(model.weights, model.spec, tp)
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = layouts(rank).local_shapes
    dest = {
        name: torch.empty(size, dtype=torch.bfloat16) for name, size in shapes.items()
    }
    plan = make_plan(
        model.layout_of, layouts, world, rank, node_of=lambda r: r // gpus_per_node
    )
    stats = Resharder(
        plan, model.parameters, dest, options=TransportOptions(alias=True)
    ).run()
    return {
        "alias": stats.bytes_aliased,
        "local": stats.bytes_local,
        "sent": stats.bytes_sent,
        "received": stats.bytes_received,
    }
