"""Build the chunks of a Megatron-core `GPTModel` that this rank holds, from a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    largest_chunk,
    needs_our_attention,
    softcap_of,
)
from megaverl.models.context_attention import (
    ContextAttention,
    Part,
    own_places,
    pack_for_engine,
    pack_part,
    pack_part_varlen,
)
from megaverl.models.gated_delta_net import GatedDeltaNet
from megaverl.models.layers import (
    BiasedRouter,
    BiasedSoftmaxRouter,
    CentredNorm,
    KeyProjectionNorm,
    LayerNorm,
    NormAfterRope,
    ProjectionNorm,
    QueryProjectionNorm,
    RMSNorm,
    SharedNormOutput,
    ValueHead,
    ValuesBesideLogits,
    l2_normalize,
    scale_queries,
)
from megaverl.models.mamba import Mamba2Mixer
from megaverl.models.options import (
    padded_vocab_size,
    rope_options,
    uses_transformer_engine,
)
from megaverl.models.packing import Pack, pack, pack_varlen
from megaverl.models.vision_tower import VisionTower, check_deepstack
from megaverl.platform import flash_attention, platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import (
    DeltaNetSpec,
    LayerKind,
    ModelSpec,
    QueryScaling,
    shares_kv_heads,
)
from megaverl.sharding.weight import Weight

platform.adapt_megatron()

from megatron.core.models.common.embeddings import RotaryEmbedding  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import (  # noqa: E402
    get_transformer_layer_offset,
)

WHOLE = Part(0, 1)
# `ModelSpec.norm` -> class of the norms over hidden states.
NORMS: dict[str, type[torch.nn.Module]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "centred": CentredNorm,
}


def block_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    vp_stage: int | None,
    pp_rank: int,
) -> TransformerBlockSubmodules:
    """Return the layer specification of one chunk.

    Layers are Transformer Engine's if it can be used, else megatron-core's local ones
    with parts of this package. `config.moe_layer_freq` decides which layers have
    experts.
    """
    with_engine = uses_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config,
        with_engine,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    # Layers of one kind share one specification object, so setting a part twice is
    # harmless.
    for layer in block.layer_specs:
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = (
                LatentAttention if with_engine else LocalLatentAttention
            )
        elif shares_kv_heads(spec, config.tensor_model_parallel_size):
            layer.submodules.self_attention.module = SharedKVAttention
        if not with_engine:
            _use_our_parts(layer, config, NORMS[spec.norm])
        elif not attends_with_engine(config):
            _use_our_attention(layer, config)
        elif not config.multi_latent_attention or config.context_parallel_size == 1:
            # Imported here because the module needs Transformer Engine.
            from megaverl.models.engine_attention import EngineAttention

            layer.submodules.self_attention.submodules.core_attention = EngineAttention
        if spec.qk_norm_spans_heads:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = QueryProjectionNorm
            attention.k_layernorm = KeyProjectionNorm
        elif spec.qk_norm_after_rope:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = NormAfterRope
            attention.k_layernorm = NormAfterRope
        if spec.has_mamba_beside_attention:
            # The Mamba layer reads the norm's output as well.
            _place_norms(layer, NORMS[spec.norm], NORMS[spec.norm], with_engine)
        elif spec.parallel_layers:
            _place_norms(layer, NORMS[spec.norm], SharedNormOutput, with_engine)
        elif not spec.norms_before:
            _place_norms(layer, IdentityOp, IdentityOp, with_engine)
        parts = _parts_of(layer.submodules.mlp)
        # Layers without experts have no router.
        if spec.moe is not None and spec.moe.router_bias and hasattr(parts, "router"):
            parts.router = (
                BiasedRouter if spec.moe.router == "sigmoid" else BiasedSoftmaxRouter
            )
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    if spec.delta_net is not None:
        block.layer_specs = [
            _as_delta_net(layer, spec.delta_net, NORMS[spec.norm])
            if spec.delta_net.layers[first + index]
            else layer
            for index, layer in enumerate(block.layer_specs)
        ]
    if spec.layer_kinds:
        block.layer_specs = [
            _with_one_part(layer, kind, spec)
            for layer, kind in zip(
                block.layer_specs, spec.layer_kinds[first:], strict=False
            )
        ]
    # Transformer Engine's LayerNorm always has a bias.
    if not with_engine or spec.norm == "centred":
        block.layer_norm = NORMS[spec.norm]
    return block


def _as_delta_net(
    layer: ModuleSpec, net: DeltaNetSpec, norm: type[torch.nn.Module]
) -> ModuleSpec:
    """Return a layer's specification with a gated delta net in place of attention."""
    # Its linear layers fuse no norm, whose name in checkpoints is then the module's.
    stored_names = {
        name: stored
        for name, stored in layer.submodules.sharded_state_dict_keys_map.items()
        if not name.startswith("input_layernorm.")
    }
    parts = {
        "input_layernorm": norm,
        "sharded_state_dict_keys_map": stored_names,
        "self_attention": ModuleSpec(GatedDeltaNet, params={"net": net}),
    }
    return _with_parts(layer, parts)


def _with_one_part(layer: ModuleSpec, kind: LayerKind, spec: ModelSpec) -> ModuleSpec:
    """Return a specification of a layer that has attention, an MLP, experts or a Mamba-2 layer alone.

    A part that is left out returns its input, and nothing is added to it.
    """
    parts: dict[str, Any]
    if kind in ("mlp", "moe"):
        parts = {
            "input_layernorm": IdentityOp,
            "self_attention": IdentityOp,
            "self_attn_bda": IdentityFuncOp,
        }
    else:
        parts = {
            "pre_mlp_layernorm": IdentityOp,
            "mlp": IdentityOp,
            "mlp_bda": IdentityFuncOp,
        }
    if kind == "mamba":
        # The mixer has its norm inside.
        parts |= {
            "input_layernorm": IdentityOp,
            "self_attention": ModuleSpec(Mamba2Mixer, params={"mamba": spec.mamba}),
        }
    return _with_parts(layer, parts)


def _with_parts(layer: ModuleSpec, parts: Mapping[str, Any]) -> ModuleSpec:
    """Return a copy of a layer's specification with other parts. Layers of one kind share one specification."""
    return replace(layer, submodules=replace(layer.submodules, **parts))


def _place_norms(
    layer: ModuleSpec,
    before_attention: type[torch.nn.Module],
    before_mlp: type[torch.nn.Module],
    with_engine: bool,
) -> None:
    """Set the norms before attention and MLP of a dense layer's specification.

    Transformer Engine fuses these norms into the linear layers that follow them. Its
    linear layers without a norm replace these.
    """
    layer.submodules.input_layernorm = before_attention
    layer.submodules.pre_mlp_layernorm = before_mlp
    if with_engine:
        # Imported here because the module needs Transformer Engine.
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv = TEColumnParallelLinear
        _parts_of(layer.submodules.mlp).linear_fc1 = TEColumnParallelLinear


def _parts_of(mlp: Any) -> Any:
    """Return the submodules of a feed-forward layer's specification.

    megatron-core 0.16 has a ModuleSpec there, 0.19 a function bound to the submodules.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _use_our_parts(
    layer: ModuleSpec, config: TransformerConfig, norm: type[torch.nn.Module]
) -> None:
    """Replace norms and attention of a local layer specification by this package's."""
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    if is_plain(config):
        _use_our_attention(layer, config)
    if config.multi_latent_attention:
        attention.q_layernorm = RMSNorm
        attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        # A norm per head normalizes one head at a time, so on every rank its weight
        # sees the whole sequence.
        attention.q_layernorm = _HeadNorm
        attention.k_layernorm = _HeadNorm


def _use_our_attention(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Replace the attention of a layer specification by this package's."""
    layer.submodules.self_attention.submodules.core_attention = (
        CausalAttention if config.context_parallel_size == 1 else ContextAttention
    )


class _HeadNorm(RMSNorm):
    """RMSNorm over one attention head. megatron-core sums its gradient over tp, found by the parameter's name."""


class _Scale:
    """Forward hook that multiplies embeddings by a factor.

    Args:
        is_rounded: round the factor to the dtype of the embeddings first, as in Gemma's training.
    """

    def __init__(self, factor: float, *, is_rounded: bool) -> None:
        self.factor = factor
        self.is_rounded = is_rounded

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not self.is_rounded:
            return output * self.factor
        return output * torch.tensor(
            self.factor, dtype=output.dtype, device=output.device
        )


def build_model(
    spec: ModelSpec,
    config: TransformerConfig,
    grid: Grid,
    *,
    value_head: int,
    seed: int,
    beside_logits: bool = False,
) -> list[GPTModel]:
    """Build this rank's model chunks on the platform's device: one, or one per virtual pipeline stage.

    Args:
        value_head: number of values per position. Above 0, the model is a critic: a value head replaces the output
            layer, and embeddings are not tied.
        beside_logits: keep the output layer and add the value head as `model.value_head`, for an actor that is its own
            critic.
        seed: seed of megatron-core's random state for initialization and dropout, equal on every rank.
    """
    check_deepstack(
        spec,
        layers_per_stage(config, grid.shape)[0],
        recomputes=config.recompute_granularity == "full",
    )
    coords = grid.coords
    # Parts of one tensor must differ between ranks, and replicas must agree:
    # megatron-core keeps a random state for each case.
    # Reset, so that the weights depend on the seed and not on models that were built
    # before.
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
        # With virtual stages, the last chunk of the last rank has the output layer.
        is_last = grid.is_last_stage and index == num_chunks - 1
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(spec, config, vp_stage, coords.pp),
            vocab_size=padded_vocab_size(spec.vocab_size, grid.shape.tp),
            max_sequence_length=spec.max_positions,
            pre_process=grid.is_first_stage and index == 0,
            post_process=is_last,
            parallel_output=True,
            # A critic's head has another shape than the embeddings, so nothing can be
            # shared with it.
            share_embeddings_and_output_weights=spec.tie_embeddings
            and (beside_logits or not value_head),
            pg_collection=grid.pg_collection,
            vp_stage=vp_stage,
            **rope_options(spec),
        )
        if beside_logits and is_last:
            model.value_head = ValuesBesideLogits(
                config, grid.tp_group, model.output_layer, int(value_head)
            )
        elif value_head and is_last:
            model.output_layer = ValueHead(config, grid.tp_group, int(value_head))
        if spec.activation == "clamped_swiglu":
            _take_gates_in_turn(model)
        _change_outputs(model, spec)
        if spec.has_mamba_beside_attention:
            _add_mamba(model, spec, grid)
        if spec.parallel_layers:
            _share_norms(model)
        if spec.qk_norm_after_rope:
            _normalize_after_rope(model)
        if spec.qk_l2_norm or spec.query_scaling is not None:
            _change_queries(model, spec)
        if (spec.rope_scaling or {}).get("rope_type") == "llama3":
            _scale_like_llama3(model.rotary_pos_emb, spec)
        if spec.local_rope_theta is not None:
            _rotate_by_layer(model, spec, spec.local_rope_theta)
        for module in model.modules():
            if isinstance(module, ProjectionNorm):
                module.group = grid.tp_group
        if spec.embedding_scale != 1.0 and model.pre_process:
            # Granite and Falcon-H1 multiply by the factor as it is.
            is_rounded = spec.architecture.startswith("Gemma")
            scale = _Scale(spec.embedding_scale, is_rounded=is_rounded)
            model.embedding.register_forward_hook(scale)
        if spec.vision is not None and model.pre_process:
            # Left uninitialized like all weights that will be loaded.
            tower_seed = seed if config.perform_initialization else None
            model.vision_tower = VisionTower(model, spec, grid, seed=tower_seed)
        if spec.logit_scale != 1.0 and is_last and (beside_logits or not value_head):
            # Scaling the hidden states instead of logits reaches every way in which
            # log-probs are computed from them. A value head beside the logits has seen
            # the states before: its hook was registered first.
            model.output_layer.register_forward_pre_hook(
                partial(_scale_hidden, spec.logit_scale)
            )
        for layer in model.decoder.layers:
            # megatron-core would also run a part that is left out again.
            if isinstance(layer.mlp, IdentityOp):
                layer.recompute_mlp = False
        _mark_cut_weights(model)
        _mark_experts(model, grid.shape)
        # Built on the host in the same order on every rank, then moved.
        chunks.append(model.to(platform.device))
    return chunks


def _change_outputs(model: GPTModel, spec: ModelSpec) -> None:
    """Normalize or scale the outputs of attention and MLP, which megatron-core's layers cannot do (0.16 to 0.19).

    A layer adds the output of its `self_attention`, and later that of its `mlp`, to the
    hidden states. Hooks change these outputs. Norms are modules of the layer, so that
    checkpoints and the optimizer know them.
    """

    def hook(
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[..., tuple[torch.Tensor, None]]:
        def change_output(
            module: Any, args: Any, output: tuple[torch.Tensor, None]
        ) -> tuple[torch.Tensor, None]:
            hidden, bias = output
            assert bias is None, "a bias would have to be added before the change"
            return change(hidden), None

        return change_output

    config = model.config
    for layer in model.decoder.layers:
        if spec.norms_after:
            for name, module in (
                ("post_self_attn_layernorm", layer.self_attention),
                ("post_mlp_layernorm", layer.mlp),
            ):
                norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
                layer.add_module(name, norm)
                module.register_forward_hook(hook(norm))
        for factor, module in (
            (spec.attention_out_scale, layer.self_attention),
            (spec.mlp_out_scale, layer.mlp),
        ):
            if factor != 1.0:
                module.register_forward_hook(hook(partial(torch.mul, other=factor)))


def _add_mamba(model: GPTModel, spec: ModelSpec, grid: Grid) -> None:
    """Add a Mamba-2 layer beside each layer's attention. Both read the same norm's output.

    A hook adds its output to attention's, which other hooks have scaled before.
    """

    def add_output(
        mixer: Mamba2Mixer,
        module: Any,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, Any],
        output: tuple[torch.Tensor, None],
    ) -> tuple[torch.Tensor, None]:
        attended, bias = output
        assert bias is None, "a bias would have to be added before"
        mixed, _ = mixer(args[0], packed_seq_params=kwargs["packed_seq_params"])
        return attended + mixed, None

    for layer in model.decoder.layers:
        assert spec.mamba is not None
        mixer = Mamba2Mixer(
            model.config, spec.mamba, grid.pg_collection, has_in_norm=False
        )
        # A module of the layer, so that checkpoints and the optimizer know it.
        layer.add_module("mamba", mixer)
        layer.self_attention.register_forward_hook(
            partial(add_output, mixer), with_kwargs=True
        )


def _scale_hidden(
    factor: float, module: Any, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Multiply the first argument, the hidden states."""
    return args[0] * factor, *args[1:]


def _share_norms(model: GPTModel) -> None:
    """Give the output of each layer's norm before attention to its MLP as well."""
    for layer in model.decoder.layers:
        layer.input_layernorm.register_forward_hook(layer.pre_mlp_layernorm.keep)


def _normalize_after_rope(model: GPTModel) -> None:
    """Normalize queries and keys between their rotary embedding and attention."""

    def normalize(
        attention: Any, module: Any, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        query, key, *others = args
        return (
            attention.q_layernorm.normalize(query),
            attention.k_layernorm.normalize(key),
            *others,
        )

    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.core_attention.register_forward_pre_hook(
            partial(normalize, attention)
        )


def _change_queries(model: GPTModel, spec: ModelSpec) -> None:
    """Normalize rotated queries and keys, and scale the queries of layers without rotary embeddings (Llama 4).

    megatron-core's attention (0.16 to 0.19) normalizes before the rotary embedding, in
    all layers or in none, and has no such scaling.
    """
    cp_group = model.pg_collection.cp
    part = Part(cp_group.rank(), cp_group.size())

    def normalize(
        module: Any, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        query, key, *others = args
        eps = spec.norm_eps
        return l2_normalize(query, eps), l2_normalize(key, eps), *others

    def scale(
        scaling: QueryScaling,
        module: Any,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        query, *others = args
        packing = kwargs.get("packed_seq_params")
        if packing is not None:
            positions = packing.positions
        # Each row of a padded micro-batch is one sample.
        elif part.size == 1:
            positions = torch.arange(len(query), device=query.device)
        else:
            length = len(query) * part.size
            positions = own_places(length, part).to(query.device)
        return (scale_queries(query, positions, *scaling), *others), kwargs

    for layer in model.decoder.layers:
        core_attention = layer.self_attention.core_attention
        if spec.rotates(layer.layer_number - 1):
            if spec.qk_l2_norm:
                core_attention.register_forward_pre_hook(normalize)
        elif spec.query_scaling is not None:
            core_attention.register_forward_pre_hook(
                partial(scale, spec.query_scaling), with_kwargs=True
            )


def _scale_like_llama3(rotary: RotaryEmbedding, spec: ModelSpec) -> None:
    """Scale rotary frequencies like Llama 3.1, with the numbers of the model.

    megatron-core's own option (0.16 to 0.19) has fixed all of them but the factor. High
    frequencies stay, low ones are divided by the factor, and those between are
    interpolated.
    """
    scaling = spec.rope_scaling
    assert scaling is not None
    factor, low, high = (
        float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    # Turns over the context of the model before it was extended.
    original = scaling["original_max_position_embeddings"]
    turns = original * rotary.inv_freq / (2 * math.pi)
    # Llama 4 has equal bounds, so that nothing lies between them.
    kept = (
        ((turns - low) / (high - low)).clamp(0.0, 1.0)
        if high > low
        else (turns >= high).float()
    )
    rotary.inv_freq = rotary.inv_freq * (kept + (1 - kept) / factor)


def _rotate_by_layer(model: GPTModel, spec: ModelSpec, local_theta: float) -> None:
    """Give layers with `local_rope_layers` rotary embeddings of another base.

    GPTModel has one rotary embedding, whose table all layers receive (megatron-core 0.16
    to 0.19). A hook appends the table of the other base along the last axis, and a hook
    before each layer's attention takes its half. Later hooks choose rows of both tables
    by positions (`layers.AtPositions`).
    """
    local = RotaryEmbedding(
        kv_channels=spec.head_dim,
        rotary_percent=spec.rotary_fraction,
        rotary_interleaved=spec.rotary_pairs,
        rotary_base=local_theta,
        use_cpu_initialization=model.config.use_cpu_initialization,
        cp_group=model.pg_collection.cp,
    )

    def append_local(
        module: Any, args: Any, kwargs: dict[str, Any], table: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat([table, local(*args, **kwargs)], dim=-1)

    def take_half(
        half: int, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        table = kwargs["rotary_pos_emb"].chunk(2, dim=-1)[half].contiguous()
        return args, {**kwargs, "rotary_pos_emb": table}

    model.rotary_pos_emb.register_forward_hook(append_local, with_kwargs=True)
    for layer in model.decoder.layers:
        half = int(spec.local_rope_layers[layer.layer_number - 1])
        layer.self_attention.register_forward_pre_hook(
            partial(take_half, half), with_kwargs=True
        )


def _take_gates_in_turn(model: torch.nn.Module) -> None:
    """Register a hook that puts gates first, on experts whose `linear_fc1` alternates gate and up rows.

    gpt-oss's files store them this way.
    """

    # A hook reorders the output instead of the weights, so that exports and layouts keep
    # the order of the files.
    def gates_first(
        module: Any, args: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        outputs, bias = output
        return _gates_first(outputs), None if bias is None else _gates_first(bias)

    # Names tell experts from shared experts, which keep megatron-core's order.
    for name, module in model.named_modules():
        if ".experts." in name and name.endswith(".linear_fc1"):
            module.register_forward_hook(gates_first)


def _gates_first(x: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 n] of alternating pairs with the first elements of all pairs before the second ones."""
    # [..., 2 n] -> [..., n, 2] -> [..., 2, n]: a transposition puts all gates first.
    pairs: torch.Tensor = x.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)


def _mark_cut_weights(model: GPTModel) -> None:
    """Mark every weight that tensor parallelism splits, so that the gradient norm counts all its parts.

    megatron-core (0.16 to 0.19) marks a weight when it initializes it, and so not with
    `perform_initialization: false`.
    """
    for module in model.modules():
        if isinstance(
            module, RowParallelLinear | ColumnParallelLinear | VocabParallelEmbedding
        ):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                # Row-parallel weights are split along the inputs, all others along the
                # outputs.
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(
                    weight, is_parallel=True, dim=dim, stride=1
                )
        # megatron-core never marks the sinks.
        sinks = getattr(module, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter):
            # Transformer Engine (2.8 to 2.20) creates the sinks in float32.
            sinks.data = sinks.data.to(model.config.params_dtype)
            set_tensor_model_parallel_attributes(
                sinks, is_parallel=True, dim=0, stride=1
            )


def _mark_experts(model: torch.nn.Module, shape: GridShape) -> None:
    """Mark parameters of routed experts with the ranks that reduce their gradients.

    If the expert-tensor-parallel size differs from the tensor-parallel size,
    megatron-core (0.16 to 0.19) treats experts like layers split by tensor parallelism,
    unless `ep` is above 1. It also marks biases as shared by tensor-parallel ranks,
    though each rank has its own experts.
    """
    # Experts are then reduced over groups of their own.
    have_own_groups = shape.ep > 1 or shape.expert_tp != shape.tp
    for name, module in model.named_modules():
        if ".experts." in name and isinstance(module, RowParallelLinear):
            # With a bias, the output of the implicit path is a view that megatron-core
            # cannot add the bias to in place.
            module.explicit_expert_comm |= have_own_groups or module.bias is not None
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not have_own_groups  # type: ignore[attr-defined]
            if name.rpartition(".")[2].startswith("bias"):
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def layers_per_stage(config: TransformerConfig, shape: GridShape) -> list[int]:
    """Return the number of decoder layers of every stage, in model order, as megatron-core builds them."""
    stages = shape.vpp or 1
    return [
        get_num_layers_to_build(config, chunk if shape.vpp else None, pp_rank)
        # Model order: chunk by chunk, and within a chunk stage by stage.
        for chunk in range(stages)
        for pp_rank in range(shape.pp)
    ]


def layouts_of(
    weights: Sequence[Weight],
    spec: ModelSpec,
    config: TransformerConfig,
    shape: GridShape,
) -> Callable[[int], Layout]:
    """Return a function from a rank of the grid to the layout of these weights there.

    The layout describes the chunks that `build_model` creates.
    """
    return megatron_layouts(
        weights,
        spec,
        shape,
        padded_vocab_size=padded_vocab_size(spec.vocab_size, shape.tp),
        transformer_engine=uses_transformer_engine(),
        layer_split=layers_per_stage(config, shape),
    )


def attends_with_engine(config: TransformerConfig) -> bool:
    """Return whether Transformer Engine computes attention. It has no soft cap and no chunks (2.3 to 2.18)."""
    return uses_transformer_engine() and not needs_our_attention(config)


def packer(
    config: TransformerConfig, part: Part = WHOLE, *, with_states: bool = False
) -> Pack:
    """Return the function that packs samples into rows for the model's attention.

    Call it only if `why_padded` returns "".

    Args:
        part: context-parallel rank that reads the rows.
        with_states: layers carry a state along whole rows.
    """
    engine = attends_with_engine(config)
    # FlashAttention 2 supports no values with another head size than the keys.
    latent = config.multi_latent_attention
    sinks = config.softmax_type != "vanilla"
    varlen = engine or not (
        latent
        or sinks
        or flash_attention.why_not_for(
            config.params_dtype, config.kv_channels, softcap_of(config)
        )
    )
    chunk = largest_chunk(config) if varlen else None
    chunks: dict[str, int] = {} if chunk is None else {"chunk": chunk}
    if part.size == 1:
        return _bind(pack_varlen if varlen else pack, **chunks)
    cut = {"part": part} | ({"with_whole": True} if with_states else {})
    if engine:
        return _bind(pack_for_engine, **cut)
    return _bind(pack_part_varlen if varlen else pack_part, **cut, **chunks)


@cache
def _bind(pack_rows: Pack, **arguments: Any) -> Pack:
    """Return a packing function with further arguments, such as that of a context-parallel rank.

    Cached: equal arguments give the same object, by which models find out that they
    read rows the same way.
    """
    return partial(pack_rows, **arguments) if arguments else pack_rows


def why_not_cut(config: TransformerConfig) -> str:
    """Return why sequences cannot be split over context-parallel ranks, or "" if they can or need not be."""
    if config.context_parallel_size == 1:
        return ""
    if attends_with_engine(config):
        # Imported here because the module needs Transformer Engine.
        from megaverl.models import engine_attention

        return engine_attention.why_not_cut(config)
    if not is_plain(config):
        return (
            "attention has dropout, or a window that looks ahead: only Transformer Engine's attention, which needs a "
            "GPU and is not here, cuts its sequences"
        )
    if config.cp_comm_type is not None:
        absence = (
            "it needs a GPU and is not here"
            if not needs_our_attention(config)
            else "it has no soft cap on scores and no chunks, one of which this model needs"
        )
        return (
            f"megatron.cp_comm_type={config.cp_comm_type} is how Transformer Engine's attention sends keys and "
            f"values; {absence}, and ours gathers them. Leave cp_comm_type out"
        )
    return ""


def why_padded(config: TransformerConfig) -> str:
    """Return why the model cannot read packed rows, or "" if it can."""
    if config.multi_latent_attention and config.context_parallel_size > 1:
        return "latent attention cuts whole sequences alone over context-parallel ranks"
    if not is_plain(config):
        return "attention has dropout, or a window that looks ahead"
    if not attends_with_engine(config):
        return ""
    # Imported here because the module needs Transformer Engine.
    from megaverl.models import engine_attention

    return engine_attention.why_padded(config)


def named_parameters(
    chunks: Sequence[torch.nn.Module],
) -> dict[str, torch.nn.Parameter]:
    """Return parameters by their names in the layout, which start with `chunk{i}.` if there are several chunks."""
    if len(chunks) == 1:
        return dict(chunks[0].named_parameters())
    return {
        f"chunk{i}.{name}": p
        for i, chunk in enumerate(chunks)
        for name, p in chunk.named_parameters()
    }
