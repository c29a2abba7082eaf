"""Attention over packed rows with Transformer Engine. Import it only where Transformer Engine is installed.

Transformer Engine takes sequences of any lengths end to end, in the format "thd". A
segment after a shared prompt has more keys than queries, so its mask is
`padding_causal_bottom_right`: the last query sees the last key. Backends that support
that in "thd", with or without a window, in 16 bits, according to Transformer Engine 2.3
to 2.18 (pytorch/attention/dot_product_attention/utils.py, `get_attention_backend`;
common/fused_attn/fused_attn.cpp, `nvte_get_fused_attn_backend`):

- FlashAttention 2, up to 2.8.3: compute capability 8.0 or higher, up to 256 dimensions per head, the same for values.
- FlashAttention 3: compute capability 9.0, up to 256 dimensions per head; latent attention's 192 with values of 128.
- FusedAttention (cuDNN): compute capability 9.0 or higher, never 8.x. cuDNN 9.7 or later (9.6: lengths divisible by
  64), except 9.10.0 and 9.10.1. Up to 128 dimensions per head, on 9.0 up to 256.
- UnfusedDotProductAttention: Transformer Engine 2.11 or later, also in 32 bits. It keeps all scores in memory.

Attention with sinks (`softmax_type`, from 2.8 on) is not supported by FlashAttention.
cuDNN supports it in "thd" from 9.18 on with Transformer Engine newer than 2.9; under
context parallelism only with cp_comm_type "a2a".

A `padding_causal` mask would align the first query with the first key. FlashAttention
refuses it if the longest segment has different numbers of queries and keys, and other
backends compute something else. Transformer Engine 2.1 treats `bottom_right` the same
way if the longest segment has equal numbers, even if other segments differ
(common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu: `is_bottom_right && s_q ==
s_kv`), so it is refused here.

Context parallelism supports no `bottom_right` mask in any of these versions, so its
sequences share no prompts (`context_attention.pack_for_engine`). In "thd" it supports
only "p2p"; the other communication types need the newest versions. Windows and latent
attention are refused with some types, as in `attn_forward_func_with_cp`
(pytorch/attention/dot_product_attention/context_parallel.py). All this is checked
without querying the device.

Nothing here synchronizes with the device. Transformer Engine reads lengths from the
device only if `max_seqlen_*` are missing. Up to 2.17 it compares `cu_seqlens_*_padded`
with `cu_seqlens_*` there only if both are given. A packed row has no padding between
its segments, so the padded ones are not given.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from megaverl.models.packing import VarlenPacking
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_te_version, is_te_min_version  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention import utils  # noqa: E402

LOWEST_ENGINE = "2.3.0"


class _MaskType(enum.Enum):
    """Mask type that megatron-core's `AttnMaskType` lacks (0.16 to 0.19). Only its name is read."""

    padding_causal_bottom_right = "padding_causal_bottom_right"


class EngineAttention(TEDotProductAttention):  # type: ignore[misc]  # megatron-core has no complete types
    """Transformer Engine's attention, which also reads a `VarlenPacking` as sequences in "thd"."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: VarlenPacking | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute attention over rows or a packed row.

        Args:
            query: [s, b, heads / tp, head_dim].
            key, value: [s, b, kv_heads / tp, head_dim].
            packed_seq_params: the row (b is 1) holds several sequences. Under context parallelism its lengths are those
                of the whole row.

        Returns:
            [s, b, heads / tp * head_dim], dtype of `query`.
        """
        if packed_seq_params is None:
            of_rows: torch.Tensor = super().forward(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type,
                attention_bias,
                **options,
            )
            return of_rows
        assert attention_mask is None and attention_bias is None
        packing = packed_seq_params
        out: torch.Tensor = super().forward(
            # The batch axis is removed: "thd" has tokens, heads and dimensions.
            query.squeeze(1),
            packing.gather_segments(key.squeeze(1)),
            packing.gather_segments(value.squeeze(1)),
            None,
            _mask_type(self.config),
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=packing.cu_seqlens_q,
                cu_seqlens_kv=packing.cu_seqlens_kv,
                max_seqlen_q=packing.max_seqlen_q,
                max_seqlen_kv=packing.max_seqlen_kv,
            ),
            **options,
        )
        return out.reshape(len(query), 1, -1)


def _mask_type(config: TransformerConfig) -> enum.Enum:
    """Return the mask type for packed rows."""
    whole = config.context_parallel_size == 1
    return (
        _MaskType.padding_causal_bottom_right if whole else AttnMaskType.padding_causal
    )


def _kinds(config: TransformerConfig) -> set[str]:
    """Return the types of communication between context-parallel ranks, over all layers."""
    kinds = config.cp_comm_type
    return set(kinds) if isinstance(kinds, list) else {kinds or "p2p"}


def why_not_cut(config: TransformerConfig) -> str:
    """Return why Transformer Engine cannot split sequences over context-parallel ranks, or "" if it can."""
    kinds = _kinds(config)
    tp_size = config.tensor_model_parallel_size
    cp_size = config.context_parallel_size
    if unknown := kinds - {"p2p", "a2a", "all_gather"}:
        return f"megatron.cp_comm_type={', '.join(sorted(unknown))} is not among p2p, a2a and all_gather"
    if config.softmax_type != "vanilla" and kinds != {"a2a"}:
        return (
            "attention has sinks, which megatron.cp_comm_type=a2a alone takes. Set it"
        )
    if config.window_size is not None and "p2p" in kinds:
        return "attention has a window, which megatron.cp_comm_type=p2p does not take. Set it to all_gather or a2a"
    if config.multi_latent_attention and kinds != {"p2p"}:
        return "latent attention takes megatron.cp_comm_type=p2p alone. Leave it out"
    heads = (
        config.num_attention_heads // tp_size,
        max(1, config.num_query_groups // tp_size),
    )
    # "a2a" exchanges heads for tokens, so the heads must divide the ranks.
    if "a2a" in kinds and any(number % cp_size for number in heads):
        return (
            f"megatron.cp_comm_type=a2a spreads heads over the ranks, and {heads[0]} heads with {heads[1]} for keys "
            f"and values on each are not multiples of {cp_size}. Use p2p, or a smaller tp or cp"
        )
    return ""


def why_padded(config: TransformerConfig) -> str:
    """Return why Transformer Engine cannot use packed rows here, or "" if it can, as its own selection says.

    Its unfused attention does not count, because it would keep the scores of all pairs
    of tokens in memory.
    """
    if not is_te_min_version(LOWEST_ENGINE):
        return f"Transformer Engine {LOWEST_ENGINE} or later is needed, and {get_te_version()} is installed"
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        return "attention is in FP8 (megatron.fp8_dot_product_attention, megatron.fp8_multi_head_attention)"
    tp_size = config.tensor_model_parallel_size
    is_cut = config.context_parallel_size > 1
    if is_cut and _kinds(config) != {"p2p"}:
        return "Transformer Engine takes packed rows cut over ranks with megatron.cp_comm_type=p2p alone"
    groups = config.num_query_groups
    keys = values = config.kv_channels
    if config.multi_latent_attention:
        keys = config.qk_head_dim + config.qk_pos_emb_head_dim
        values = config.v_head_dim
        groups = config.num_attention_heads
    sinks = (
        {}
        if config.softmax_type == "vanilla"
        else {"softmax_type": config.softmax_type}
    )
    # Some layers may have a window and others none. Every kind of layer must be
    # supported.
    windows = [
        config.window_size or (-1, 0),
        *([(-1, 0)] if config.window_attn_skip_freq else []),
    ]
    backends = [
        utils.get_attention_backend(
            utils.AttentionParams(
                qkv_dtype=config.params_dtype,
                qkv_layout="thd_thd_thd",
                batch_size=2,
                num_heads=config.num_attention_heads // tp_size,
                num_gqa_groups=max(1, groups // tp_size),
                # An odd length stands for all lengths: some kernels take only multiples
                # of 64.
                max_seqlen_q=65,
                max_seqlen_kv=65 if is_cut else 129,
                head_dim_qk=keys,
                head_dim_v=values,
                attn_mask_type=_mask_type(config).name,
                window_size=window,
                deterministic=config.deterministic_mode,
                context_parallel=is_cut,
                **sinks,
            )
        )
        for window in windows
    ]
    if all(by_flash or by_cudnn for by_flash, _, by_cudnn, *_ in backends):
        return ""
    return (
        "neither FlashAttention nor cuDNN's attention takes them in Transformer Engine here (megatron."
        f"attention_backend={config.attention_backend.name}, {config.params_dtype}, heads of {keys} "
        f"dimensions{f', values of {values}' if values != keys else ''}"
        f"{', with sinks' if sinks else ''}); NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why"
    )
