"""Causal attention on PyTorch's fused kernels, and megatron-core's latent attention without global process groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megaverl.models.layers import AtPositions
from megaverl.models.packing import DensePacking, Packing, VarlenPacking, Window
from megaverl.platform import batch_invariant, flash_attention, platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    all_gather_last_dim_from_tensor_parallel_region,
)  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import (  # noqa: E402
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

# Capped scores that are computed at a time: 256 MiB in float32.
LARGEST_SCORES = 1 << 26


def softcap_of(config: TransformerConfig) -> float | None:
    """Return the soft cap on attention's scores, an attribute that `transformer_config` sets. None: no cap."""
    softcap: float | None = getattr(config, "attention_softcap", None)
    return softcap


def chunk_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the tokens of a chunk of a layer, counted from 1, within which it attends. None: it has no chunks.

    `transformer_config` sets the attribute.
    """
    chunks: tuple[int | None, ...] = getattr(config, "attention_chunks", ())
    return chunks[layer_number - 1] if chunks else None


def largest_chunk(config: TransformerConfig) -> int | None:
    """Return the tokens of a chunk, which all layers with chunks agree on. None: no layer has chunks."""
    chunks = filter(None, getattr(config, "attention_chunks", ()))
    return max(chunks, default=None)


def needs_our_attention(config: TransformerConfig) -> bool:
    """Return whether only `CausalAttention` computes the model: scores have a soft cap, or layers have chunks."""
    return softcap_of(config) is not None or largest_chunk(config) is not None


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v under a causal mask (arXiv 1706.03762, eq. 1), without materializing [s, s] matrices.

    With sinks (`softmax_offset`, [heads / tp]) the softmax of each head has one more
    score, whose value is zero (arXiv 2508.10925, section 2.2). With a soft cap c each
    score s becomes c tanh(s / c) before the mask (arXiv 2408.00118, section 2).

    megatron-core's own `DotProductAttention` stores the scores of all heads, masks and
    normalizes them in separate passes, and repeats keys and values for grouped queries.
    At 288 tokens on a CPU that takes four times as long, which is more than the linear
    layers beside it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        # None stands for 1 / sqrt(head_dim).
        self.softmax_scale = softmax_scale
        self.softcap = softcap_of(config)
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        chunk = chunk_of(config, layer_number)
        self.window: Window | None = None
        if has_window:
            self.window = Window(config.window_size[0] + 1)
        elif chunk is not None:
            self.window = Window(chunk, in_chunks=True)
        self._tp_group = None if pg_collection is None else pg_collection.tp
        self.softmax_offset: torch.Tensor | None = None
        # One sink per head of this rank. "off-by-one" has constant sinks of 0.
        if config.softmax_type != "vanilla":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset = torch.zeros(heads, dtype=config.params_dtype)
            self.softmax_offset = (
                nn.Parameter(offset) if config.softmax_type == "learnable" else offset
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> torch.Tensor:
        """Compute attention over rows or a packed row.

        Args:
            query: [s, b, heads / tp, head_dim].
            key, value: [s, b, kv_heads / tp, head_dim]. Values may have another head_dim.
            attention_mask: [b, 1, s, s] bool, True where a query must not look. None: causal, within the window if
                there is one.
            packed_seq_params: the row (b is 1) holds several sequences, as a `DensePacking`, or as a `VarlenPacking`
                for FlashAttention.

        Returns:
            [s, b, heads / tp * head_dim of the values], dtype of `query`.
        """
        assert attention_bias is None, "Transformer Engine's attention has these"
        key, value = self._whole_row(key, value)
        if packed_seq_params is not None:
            assert attention_mask is None
            q, k, v = (x.squeeze(1) for x in (query, key, value))
            # megaverl's packed rows are one row, so the batch axis is removed and added
            # back.
            return self._attend_packed_row(q, k, v, packed_seq_params).unsqueeze(1)
        look = None if attention_mask is None else ~attention_mask
        # [b, heads, s, head_dim]: views without copies.
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend_rows(q, k, v, look).permute(2, 0, 1, 3).flatten(2)

    def _whole_row(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens that the queries may attend to.

        Context parallelism gathers them here.
        """
        return key, value

    def _attend_packed_row(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        return attend_packed(
            q,
            k,
            v,
            packing,
            self.softmax_scale,
            self.window,
            self.softmax_offset,
            self.softcap,
        )

    def _attend_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        look: torch.Tensor | None,
    ) -> torch.Tensor:
        return attend_rows(
            q,
            k,
            v,
            look,
            self.softmax_scale,
            self.window,
            self.softmax_offset,
            self.softcap,
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sinks, sharded by heads, as megatron-core's attention stores them."""
        state = self.state_dict(prefix="", keep_vars=True)
        stored: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return stored


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    scale: float | None,
    window: Window | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention within the sequences of a packed row.

    Args:
        q: [t, heads, head_dim].
        k, v: [t, kv_heads, head_dim].
        scale: factor on the scores. None: 1 / sqrt(head_dim).
        window: keys that a query sees. None: all before it.
        sinks: [heads]: one more score per head with a value of zero. Not supported with a `VarlenPacking`.
        softcap: cap of the scores. None: no cap. Not supported with sinks.

    Returns:
        [t, heads * head_dim of the values].
    """
    if isinstance(packing, VarlenPacking):
        assert sinks is None, "FlashAttention 2 has none"
        if window is not None and window.in_chunks:
            # A chunk is a sequence of its own for the kernel.
            packing, window = packing.chunked or packing, None
        return flash_attention.attend_varlen(
            q,
            packing.gather_segments(k),
            packing.gather_segments(v),
            flash_attention.Segments(packing.cu_seqlens_q, packing.max_seqlen_q),
            flash_attention.Segments(packing.cu_seqlens_kv, packing.max_seqlen_kv),
            scale=scale,
            window=None if window is None else window.size,
            softcap=softcap,
        ).flatten(1)
    assert isinstance(packing, DensePacking)
    return packing.attend(
        functools.partial(_attend, scale=scale, sinks=sinks, softcap=softcap),
        q,
        k,
        v,
        window,
    )


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor | None,
    scale: float | None,
    window: Window | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention of rows that are one sequence each.

    Args:
        q: [b, heads, s, head_dim].
        k, v: [b, kv_heads, s, head_dim].
        look: as in `_attend`.
        scale, window, sinks, softcap: as in `attend_packed`.

    Returns:
        [b, heads, s, head_dim].
    """
    # A window as long as the sequence changes nothing, and without a mask the kernel's
    # faster causal path is taken.
    if look is None and window is not None and window.size < q.shape[2]:
        look = _inside_window(q.shape[2], window, q.device)
    return _attend(q, k, v, look, scale, sinks, softcap)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention with PyTorch's fused kernel, or inside `batch_invariant` or with a soft cap without it.

    Args:
        q: [b, heads, q, head_dim].
        k, v: [b, kv_heads, k, head_dim].
        look: [b or 1, 1, q, k] bool, True where a query may look. None: causal.
        sinks: [heads].
        softcap: cap of the scores.

    Returns:
        [b, heads, q, head_dim].
    """
    if softcap is not None:
        assert sinks is None, "no model has both"
        return _attend_capped(q, k, v, look, scale, softcap)
    # The actor has no sinks then (`sharding/model_spec.py:why_not_batch_invariant`). A reference may have.
    is_invariant = batch_invariant.is_batch_invariant() and sinks is None
    if is_invariant and q.device.type == "cpu":
        if look is None:
            look = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[
                None, None
            ]
        out: torch.Tensor = _InvariantAttention.apply(q, k, v, look, scale)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
        return out
    return _attend_fused(q, k, v, look, scale, sinks)


class _InvariantAttention(torch.autograd.Function):
    """Attention that is invariant to the batch, with the gradient of the fused kernel.

    The backward pass runs the fused kernel forward as well, since it needs the kernel's own intermediate results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        look: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, look)
        ctx.scale = scale
        return batch_invariant.attend(q, k, v, look, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, look = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in saved)
            out = _attend_fused(q, k, v, look, ctx.scale)
        return *torch.autograd.grad(out, (q, k, v), grad), None, None


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor | None,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Compute `_attend` with a soft cap on the scores, which PyTorch's fused kernel does not have."""
    # FlashAttention keeps scores in float32 too.
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide = [x.to(dtype) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _CappedAttention.apply(*wide, look, scale, softcap)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return out.to(q.dtype)


class _CappedAttention(torch.autograd.Function):
    """Attention with capped scores, for a block of queries at a time.

    The backward pass computes each block again, so that only the scores of one block
    exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        look: torch.Tensor | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, look)
        ctx.options = scale, softcap
        outputs = [
            _capped_block(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], seen, scale, softcap
            )
            for rows, keys, seen in _blocks(q, k, look)
        ]
        return torch.cat(outputs, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, look = ctx.saved_tensors
        scale, softcap = ctx.options
        totals = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, keys, seen in _blocks(q, k, look):
            places = (rows, keys, keys)
            with torch.enable_grad():
                parts = [
                    x[:, :, place].detach().requires_grad_()
                    for x, place in zip((q, k, v), places, strict=True)
                ]
                queries, part_keys, values = parts
                out = _capped_block(queries, part_keys, values, seen, scale, softcap)
            grads = torch.autograd.grad(out, parts, grad[:, :, rows])
            for total, place, part in zip(totals, places, grads, strict=True):
                total[:, :, place] += part
        return *totals, None, None, None


def _blocks(
    q: torch.Tensor, k: torch.Tensor, look: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield adjacent queries, the keys that they may see, and a mask that broadcasts to [b, heads, queries, keys]."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    scores_per_query = q.shape[0] * q.shape[1] * num_keys
    step = max(1, LARGEST_SCORES // max(1, scores_per_query))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        if look is None:
            # Causal: no query of the block sees a key behind the block's last one.
            places = torch.arange(stop, device=q.device)
            seen = places <= places[start:, None]
            yield slice(start, stop), slice(0, stop), seen
        else:
            yield slice(start, stop), slice(0, num_keys), look[..., start:stop, :]


def _capped_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return [b, heads, queries, head_dim] of a block of queries."""
    batch, heads, num_queries, dim = q.shape
    # Queries of all heads that share a key-value head are multiplied at once:
    # [b, kv_heads, heads / kv_heads * queries, head_dim].
    products = q.reshape(batch, k.shape[1], -1, dim) @ k.transpose(-1, -2)
    scores = softcap * torch.tanh(products * (scale / softcap))
    scores = scores.view(batch, heads, num_queries, -1)
    # Not -inf: a padded query sees no key, and NaN times a gradient of 0 is NaN.
    masked = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = masked.softmax(dim=-1)
    return (weights.view(products.shape) @ v).view(batch, heads, num_queries, -1)


def _attend_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `_attend` with PyTorch's kernel."""
    dtype = q.dtype
    if sinks is not None:
        # The fused kernel has no sinks. They become one more key, which every query
        # sees.
        q, k, v, look, scale = _with_sinks(q, k, v, look, scale, sinks)
    if q.device.type == "cpu" and dtype == torch.bfloat16:
        # On CPUs the backward kernel for bfloat16 takes up to four times as long as
        # that for float32.
        q = q.float()
        k = k.float()
        v = v.float()
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=look,
        is_causal=look is None,
        scale=scale,
        # Grouped queries: the kernel repeats keys and values without copies.
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.to(dtype)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    look: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return arguments for `_attend` that express the sinks without its `sinks`.

    One more key, visible to all queries, has the value zero. Heads get one more
    dimension in which only this key is not zero, so its score is the sink for every
    query.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if look is None:
        look = torch.ones(
            q.shape[2], k.shape[2], dtype=torch.bool, device=q.device
        ).tril()
    # Divided by the scale, which the kernel multiplies all scores by.
    per_head = (sinks.to(q.dtype) / scale).view(1, -1, 1, 1)
    # One more dimension carries the sink's score: 1 in the added key, 0 in all others.
    # The added value is 0, so that the sink only takes weight away.
    score = per_head.expand(q.shape[0], -1, q.shape[2], 1)
    at_sink = k.new_zeros(*k.shape[:2], 1, k.shape[-1] + 1)
    at_sink[..., -1] = 1.0
    return (
        # [b, heads, q, d + 1] and [b, kv_heads, k + 1, d + 1]; values get a key's worth
        # of zeros.
        torch.cat([q, score], dim=-1),
        torch.cat([F.pad(k, (0, 1)), at_sink], dim=2),
        F.pad(v, (0, 0, 0, 1)),
        F.pad(look, (0, 1), value=True),
        scale,
    )


def _inside_window(length: int, window: Window, device: torch.device) -> torch.Tensor:
    """Return a [length, length] mask in which a query sees its own key and those before it inside the window."""
    places = torch.arange(length, device=device)
    queries = places[:, None]
    return (places <= queries) & (places >= window.first_key(queries))


def is_plain(config: TransformerConfig) -> bool:
    """Return whether `CausalAttention` supports `config`: no dropout, and no window that looks ahead."""
    return config.attention_dropout == 0.0 and (
        config.window_size is None or config.window_size[1] == 0
    )


class SharedKVAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no complete types
    """megatron-core's attention for the case that several tensor-parallel ranks share a key-value head.

    The rows of `linear_qkv`, [q heads of group 0, k 0, v 0, q heads of group 1, ...],
    with output gates behind the q heads of each group, are split evenly over the ranks.
    The projections are gathered, and each rank takes its query heads and the key-value
    head that they share. megatron-core would take the process group from the global
    `parallel_state`, which megaverl does not set up.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Project [s, b, hidden] to query [s, b, heads / tp, head_dim] and key, value [s, b, 1, head_dim].

        With `output_gate` a gate of the query's shape follows.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        group = self.pg_collection.tp
        num_groups = self.config.num_query_groups
        # Several ranks share a key-value head, and are neighbours.
        ranks_per_group = group.size() // num_groups
        group_number, place_in_group = divmod(group.rank(), ranks_per_group)
        # Shared heads do not fit megatron-core's split of the projection's rows, so the
        # output is gathered and split again here.
        all_heads = all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
        group_heads = all_heads.chunk(num_groups, dim=-1)[group_number].unflatten(
            -1, (-1, self.hidden_size_per_attention_head)
        )
        # [s, b, query heads of this rank, head_dim] and their gates, then the group's
        # one key and its one value. Copies let the gathered tensor be freed.
        query, *gate = (
            heads.chunk(ranks_per_group, dim=2)[place_in_group].contiguous()
            for heads in group_heads[:, :, :-2].chunk(1 + output_gate, dim=2)
        )
        key, value = (
            part.contiguous() for part in group_heads[:, :, -2:].chunk(2, dim=2)
        )
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value, *gate


# transformers normalizes DeepSeek-V3's latents with this eps, whatever `rms_norm_eps`
# is (modeling_deepseek_v3.py).
LATENT_NORM_EPS = 1e-6


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron-core has no complete types
    """megatron-core's latent attention with positions of packed rows, and with explicit process groups.

    megatron-core applies rotary embeddings inside this module, so the positions must be
    set here. It also takes some process groups from the global `parallel_state`, which
    megaverl does not set up: for the query projection without a latent, which it would
    not split, and for the down-projections that Transformer Engine keeps whole on every
    rank. Transformer Engine marks every linear weight as split (0.16 to 0.19). Each
    copy of a down-projection would then be saved as the first, and all copies would
    count in the gradient norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        # The specification's class gets the process group, because megatron-core would
        # look it up in its global state.
        queries = ModuleSpec(
            submodules.linear_q_proj, params={"tp_group": pg_collection.tp}
        )
        submodules = dataclasses.replace(submodules, linear_q_proj=queries)
        super().__init__(
            config, submodules, *args, pg_collection=pg_collection, **kwargs
        )
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if (linear := getattr(self, name, None)) is not None:
                linear._tp_group = pg_collection.tp
                linear.weight.tensor_model_parallel = False
        # Transformer Engine keeps these norms inside the linear layers that follow
        # them.
        for name in (
            "q_layernorm",
            "kv_layernorm",
            "linear_q_up_proj",
            "linear_kv_up_proj",
        ):
            module = getattr(self, name, None)
            if module is not None and hasattr(module, "eps"):
                module.eps = LATENT_NORM_EPS
        self._positions = AtPositions()
        self._positions.attach(self.rotary_pos_emb)
        # The fused kernels read these tables of cosines and sines in place of the
        # embedding.
        if (
            original := getattr(self.rotary_pos_emb, "get_cached_cos_sin", None)
        ) is not None:

            def at_positions(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                # The table has one row per position: cosines and sines are selected for
                # the tokens of the row.
                return tuple(
                    self._positions(None, None, table)
                    for table in original(*args, **kwargs)
                )

            self.rotary_pos_emb.get_cached_cos_sin = at_positions

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Resolve the norms of queries and keys from the specification, as megatron-core 0.19 does.

        For queries without a latent it would add a norm fused with their projection,
        which no published model has, or fail without Transformer Engine.
        """
        if self.config.q_lora_rank is not None:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

        resolver = QKNormConfigResolver(self.config, submodules)
        # With this set it decides about keys and values only.
        resolver.has_q_lora = True
        queries = {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "q_layernorm": IdentityOp,
        }
        return {**resolver.resolve(), **queries}

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
        inference_context: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Project [s, b, hidden] to query, key and value [s, b, heads / tp, ...], and the latents.

        megatron-core treats a packed row as one sequence with other positions. They
        come with the row, so recomputed layers have them too.
        """
        # Positions travel with the row, so a layer that is recomputed in the backward
        # pass finds them.
        positions = None if packed_seq_params is None else packed_seq_params.positions
        with self._positions.at(positions):
            projected: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, **kwargs
            )
            return projected


class LocalLatentAttention(LatentAttention):
    """`LatentAttention` of the local layer spec, with whole down-projections on every rank, as in Transformer Engine.

    In the local spec megatron-core splits the latents over tensor-parallel ranks and
    gathers them right away, over a group from the global `parallel_state`.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        hidden = config.hidden_size
        # Both latents of keys and the rotary part are projected together.
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(
                config, hidden, config.q_lora_rank
            )


class ReplicatedLinear(nn.Module):
    """Linear map whose weight [out, in] is the same on every tensor-parallel rank.

    Each rank maps its own part of the sequence. The weight is marked so that
    `finalize_model_grads` sums its gradient over the ranks.
    """

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        config.init_method(self.weight.data)
        # `finalize_model_grads` sums gradients of weights with this mark over
        # tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [..., in] to ([..., out], no bias). Signature of ColumnParallelLinear."""
        return F.linear(hidden, self.weight), None
