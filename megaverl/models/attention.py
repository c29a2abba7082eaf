"""Causal attention for megatron-core's local layer spec, on PyTorch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v under a causal mask (arXiv 1706.03762, eq. 1), without the [s, s] matrices.

    megatron-core's own `DotProductAttention` builds the scores of all heads in memory, masks and normalises them
    in separate passes, and repeats keys and values for grouped queries. At 288 tokens on a CPU that takes four
    times as long, and more than the linear layers beside it.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(head_dim)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, heads / tp, head_dim].
            key, value: [s, b, kv_heads / tp, head_dim].
            attention_mask: [b, 1, s, s] bool, True where a query must not look; None: causal.

        Returns:
            [s, b, heads / tp * head_dim], dtype of `query`.
        """
        assert attention_bias is None and packed_seq_params is None, "Transformer Engine's attention has these"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, head_dim], no copies
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def is_plain(config: Any) -> bool:
    """Whether `config` asks for attention that `CausalAttention` computes: no dropout, window or softmax offset."""
    return config.attention_dropout == 0.0 and config.window_size is None and config.softmax_type == "vanilla"
