"""Megatron-core `GPTModel`s from a `ModelSpec`: the chunks of it that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import Grid
from megaverl.models.attention import (
    CausalAttention,
    LatentAttention,
    LocalLatentAttention,
    SharedKVAttention,
    is_plain,
)
from megaverl.models.context_attention import ContextAttention, Part, pack_for_engine, pack_part, pack_part_varlen
from megaverl.models.layers import BiasedRouter, RMSNorm, ValueHead, ValuesBesideLogits
from megaverl.models.options import padded_vocab_size, rope_options, uses_transformer_engine
from megaverl.models.packing import Pack, pack, pack_varlen
from megaverl.platform import flash_attention, platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec, shares_kv_heads
from megaverl.sharding.weight import Weight

platform.adapt_megatron()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

WHOLE = Part(0, 1)


def block_spec(
    spec: ModelSpec, config: TransformerConfig, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    """The layers of one chunk: Transformer Engine's where they can be used, else megatron-core's local ones with
    our parts. Layers with experts and dense ones follow `config.moe_layer_freq`."""
    with_engine = uses_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config, with_engine, normalization=config.normalization, vp_stage=vp_stage, pp_rank=pp_rank
    )
    for layer in block.layer_specs:  # the layers of one kind are one object: setting it again changes nothing
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention if with_engine else LocalLatentAttention
        elif shares_kv_heads(spec, config.tensor_model_parallel_size):
            layer.submodules.self_attention.module = SharedKVAttention
        if not with_engine:
            _use_our_parts(layer, config)
        elif not config.multi_latent_attention or config.context_parallel_size == 1:
            from megaverl.models.engine_attention import EngineAttention  # needs Transformer Engine

            layer.submodules.self_attention.submodules.core_attention = EngineAttention
        parts = _parts_of(layer.submodules.mlp)
        if spec.moe is not None and spec.moe.router_bias and hasattr(parts, "router"):
            parts.router = BiasedRouter
    if not with_engine:
        block.layer_norm = RMSNorm
    return block


def _parts_of(mlp: Any) -> Any:
    """The parts of a feed-forward layer's specification: a ModuleSpec has them (megatron-core 0.16), or a function that
    makes the layer is bound to them (0.19)."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _use_our_parts(layer: ModuleSpec, config: TransformerConfig) -> None:
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    if is_plain(config):
        attention.core_attention = CausalAttention if config.context_parallel_size == 1 else ContextAttention
    if config.multi_latent_attention:
        attention.q_layernorm = RMSNorm
        attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        # One head is normalised at a time: its weight sees the whole sequence on every rank.
        attention.q_layernorm = _HeadNorm
        attention.k_layernorm = _HeadNorm


class _HeadNorm(RMSNorm):
    """RMSNorm over one attention head; megatron-core gathers its gradient over tp by parameter name."""


class _Scale:
    """A forward hook: multiplies embeddings by sqrt(hidden), rounded to their dtype as Gemma was trained."""

    def __init__(self, hidden_size: int) -> None:
        self.factor = hidden_size**0.5

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.tensor(self.factor, dtype=output.dtype, device=output.device)


def build_model(
    spec: ModelSpec, config: TransformerConfig, grid: Grid, *, value_head: int, seed: int, beside_logits: bool = False
) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), on the platform's device.

    Args:
        value_head: a critic: the output layer gives so many values per position, and embeddings are not tied.
        beside_logits: of an actor that is its own critic: `model.value_head` stands beside the output layer.
        seed: of megatron-core's random state for initialisation and dropout, the same on every rank.
    """
    coords = grid.coords
    model_parallel_cuda_manual_seed(
        seed,
        force_reset_rng=True,
        tp_rank=coords.tp,
        ep_rank=coords.ep,
        etp_rank=coords.etp,
    )
    num_chunks = grid.shape.vpp or 1
    chunks = []
    for index in range(num_chunks):
        vp_stage = index if grid.shape.vpp else None
        is_last = grid.is_last_stage and index == num_chunks - 1
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(spec, config, vp_stage, coords.pp),
            vocab_size=padded_vocab_size(spec.vocab_size, grid.shape.tp),
            max_sequence_length=spec.max_positions,
            pre_process=grid.is_first_stage and index == 0,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tie_embeddings and (beside_logits or not value_head),
            pg_collection=grid.pg_collection,
            vp_stage=vp_stage,
            **rope_options(spec),
        )
        if beside_logits and is_last:
            model.value_head = ValuesBesideLogits(config, grid.tp_group, model.output_layer, int(value_head))
        elif value_head and is_last:
            model.output_layer = ValueHead(config, grid.tp_group, int(value_head))
        if spec.activation == "clamped_swiglu":
            _take_gates_in_turn(model)
        if spec.scale_embeddings and model.pre_process:
            model.embedding.register_forward_hook(_Scale(spec.hidden_size))
        _mark_cut_weights(model)
        _mark_experts(model, grid.shape)
        chunks.append(model.to(platform.device))
    return chunks


def _take_gates_in_turn(model: torch.nn.Module) -> None:
    """Of experts whose `linear_fc1` holds gate and up rows in turn, as gpt-oss's files do: its outputs, gates first."""

    def gates_first(module: Any, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        outputs, bias = output
        return _gates_first(outputs), None if bias is None else _gates_first(bias)

    for name, module in model.named_modules():
        if ".experts." in name and name.endswith(".linear_fc1"):
            module.register_forward_hook(gates_first)


def _gates_first(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] of pairs -> the first of all pairs, then the second."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _mark_cut_weights(model: GPTModel) -> None:
    """Say of every weight that tensor parallelism cuts that it is cut, so that the gradient's norm counts all parts.

    megatron-core (0.16 to 0.19) says so where it draws the weight, and so not with `perform_initialization: false`.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear | ColumnParallelLinear | VocabParallelEmbedding):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
        sinks = getattr(module, "softmax_offset", None)  # which megatron-core never marks
        if isinstance(sinks, torch.nn.Parameter):
            sinks.data = sinks.data.to(model.config.params_dtype)  # Transformer Engine (2.8 to 2.20) makes float32
            set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)


def _mark_experts(model: torch.nn.Module, shape: GridShape) -> None:
    """Say of routed experts' parameters which ranks add up their gradients.

    Where expert-tensor-parallel ranks are others than tensor-parallel ones, megatron-core (0.16 to 0.19) takes experts
    for layers that tensor parallelism cuts, unless `ep` is above 1. And of their biases it says that tensor-parallel
    ranks share them, of which each has its own experts.
    """
    apart = shape.ep > 1 or shape.expert_tp != shape.tp
    for name, module in model.named_modules():
        if ".experts." in name and isinstance(module, RowParallelLinear):
            # else its output is one that no bias can be added to in place, as megatron-core does
            module.explicit_expert_comm |= apart or module.bias is not None
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not apart  # type: ignore[attr-defined]
            if name.rpartition(".")[2].startswith("bias"):
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def layers_per_stage(config: TransformerConfig, shape: GridShape) -> list[int]:
    """Decoder layers of every stage in model order, as megatron-core will build them."""
    stages = shape.vpp or 1
    return [
        get_num_layers_to_build(config, chunk if shape.vpp else None, pp_rank)
        for chunk in range(stages)
        for pp_rank in range(shape.pp)
    ]


def layouts_of(
    weights: Sequence[Weight], spec: ModelSpec, config: TransformerConfig, shape: GridShape
) -> Callable[[int], Layout]:
    """rank of the grid -> where these weights lie in the chunks that `build_model` makes there."""
    return megatron_layouts(
        weights,
        spec,
        shape,
        padded_vocab_size=padded_vocab_size(spec.vocab_size, shape.tp),
        transformer_engine=uses_transformer_engine(),
        layer_split=layers_per_stage(config, shape),
    )


def packer(config: TransformerConfig, part: Part = WHOLE) -> Pack:
    """How samples are laid into a row that the model's attention reads, where nothing keeps it from it.

    Args:
        part: which context-parallel rank reads it.
    """
    engine = uses_transformer_engine()
    # FlashAttention 2 takes no values of another head size than keys have
    latent = config.multi_latent_attention
    sinks = config.softmax_type != "vanilla"
    varlen = engine or not (latent or sinks or flash_attention.why_not_for(config.params_dtype, config.kv_channels))
    if part.size == 1:
        return pack_varlen if varlen else pack
    return _of_part(pack_for_engine if engine else pack_part_varlen if varlen else pack_part, part)


@cache
def _of_part(laid: Pack, part: Part) -> Pack:
    """The same function for the same arguments: models that read the same rows know each other by it."""
    return partial(laid, part=part)


def why_not_cut(config: TransformerConfig) -> str:
    """Why sequences cannot be cut over context-parallel ranks, where they are to be; empty: they can."""
    if config.context_parallel_size == 1:
        return ""
    if uses_transformer_engine():
        from megaverl.models import engine_attention  # needs Transformer Engine

        return engine_attention.why_not_cut(config)
    if not is_plain(config):
        return (
            "attention has dropout, or a window that looks ahead: only Transformer Engine's attention, which needs a "
            "GPU and is not here, cuts its sequences"
        )
    if config.cp_comm_type is not None:
        return (
            f"megatron.cp_comm_type={config.cp_comm_type} is how Transformer Engine's attention sends keys and "
            "values; it needs a GPU and is not here, and ours gathers them. Leave cp_comm_type out"
        )
    return ""


def why_padded(config: TransformerConfig) -> str:
    """Why the model reads no packed rows; empty: it does."""
    if config.multi_latent_attention and config.context_parallel_size > 1:
        return "latent attention cuts whole sequences alone over context-parallel ranks"
    if not is_plain(config):
        return "attention has dropout, or a window that looks ahead"
    if not uses_transformer_engine():
        return ""
    from megaverl.models import engine_attention  # needs Transformer Engine

    return engine_attention.why_padded(config)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Parameters by their name in the layout: `chunk{i}.` in front where there are several chunks."""
    if len(chunks) == 1:
        return dict(chunks[0].named_parameters())
    return {f"chunk{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
