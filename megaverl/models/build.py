"""Megatron-core `GPTModel`s from a `ModelSpec`: the chunks of it that this rank holds."""

from __future__ import annotations

import importlib.util
from typing import Any

from megaverl.models.attention import CausalAttention, is_plain
from megaverl.models.heads import ValueHead
from megaverl.models.norm import RMSNorm
from megaverl.models.options import padded_vocab_size, rope_options
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape
from megaverl.parallel.groups import Grid
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def uses_transformer_engine() -> bool:
    """Transformer Engine's layers are used where it is installed and a GPU is there."""
    return platform.is_cuda and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(
    config: TransformerConfig, vp_stage: int | None, pp_rank: int
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layer spec where it can be used, else megatron-core's local one with our parts."""
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    if is_plain(config):
        spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if config.qk_layernorm:
        # One head is normalised at a time: its weight sees the whole sequence on every rank.
        spec.submodules.self_attention.submodules.q_layernorm = _HeadNorm
        spec.submodules.self_attention.submodules.k_layernorm = _HeadNorm
    num_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


class _HeadNorm(RMSNorm):
    """RMSNorm over one attention head; megatron-core gathers its gradient over tp by parameter name."""


def build_model(spec: ModelSpec, config: TransformerConfig, grid: Grid, *, value_head: bool, seed: int) -> list[Any]:
    """This rank's model chunks (one, or one per virtual pipeline stage), on the platform's device.

    Args:
        value_head: a critic: the output layer gives one value per position, and embeddings are not tied.
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
            transformer_layer_spec=layer_spec(config, vp_stage, coords.pp),
            vocab_size=padded_vocab_size(spec.vocab_size, grid.shape.tp),
            max_sequence_length=spec.max_positions,
            pre_process=grid.is_first_stage and index == 0,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tie_embeddings and not value_head,
            pg_collection=grid.pg_collection,
            vp_stage=vp_stage,
            **rope_options(spec),
        )
        if value_head and is_last:
            model.output_layer = ValueHead(config, grid.tp_group)
        chunks.append(model.to(platform.device))
    return chunks


def layers_per_stage(config: TransformerConfig, shape: GridShape) -> list[int]:
    """Decoder layers of every stage in model order, as megatron-core will build them."""
    stages = shape.vpp or 1
    return [
        get_num_layers_to_build(config, chunk if shape.vpp else None, pp_rank)
        for chunk in range(stages)
        for pp_rank in range(shape.pp)
    ]


def named_parameters(chunks: list[Any]) -> dict[str, Any]:
    """Parameters by their name in the layout: `chunk{i}.` in front where there are several chunks."""
    if len(chunks) == 1:
        return dict(chunks[0].named_parameters())
    return {f"chunk{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
