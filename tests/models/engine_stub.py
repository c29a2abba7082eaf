"""Transformer Engine's PyTorch modules in plain PyTorch: what megatron-core's classes over them build and compute.

It cannot be installed without CUDA. Names, shapes, marks of parameters and what is
asserted of arguments are those of Transformer Engine 2.20 (pytorch/module/linear.py,
layernorm_linear.py, grouped_linear.py, rmsnorm.py, layernorm.py,
pytorch/attention/dot_product_attention/dot_product_attention.py,
pytorch/attention/rope.py); what is computed is what their docstrings say, on any
device, without an operation whose shape depends on data. No FP8 or dropout.
Its optimizers and its raw matrix products are not here: megatron-core then takes
PyTorch's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VERSION = "2.20.2"  # that of requirements/cuda-py312.lock, which a test compares
ABSENT = (
    "transformer_engine.pytorch.optimizers",
    "transformer_engine.pytorch.cpp_extensions",
)


class _Exchange(torch.autograd.Function):
    """One exchange between tensor-parallel ranks forward, and its transpose backward; along the first dimension."""

    TRANSPOSE = {"sum": "copy", "copy": "sum", "gather": "scatter", "scatter": "gather"}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, kind: str) -> torch.Tensor:
        ctx.group, ctx.kind = group, kind
        return _Exchange.of(x, group, kind)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (
            _Exchange.of(grads[0], ctx.group, _Exchange.TRANSPOSE[ctx.kind]),
            None,
            None,
        )

    @staticmethod
    def of(x: torch.Tensor, group: Any, kind: str) -> torch.Tensor:
        if kind == "copy":
            return x.view_as(x)
        if kind == "gather":
            parts = [
                torch.empty_like(x, memory_format=torch.contiguous_format)
                for _ in range(dist.get_world_size(group))
            ]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return (
            total
            if kind == "sum"
            else total.chunk(dist.get_world_size(group))[
                dist.get_rank(group)
            ].contiguous()
        )


class Module(nn.Module):
    fp8, fp8_calibration = False, False
    fp8_meta: Mapping[str, Any] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # outside of FP8

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def parameter(
    *shape: int, value: float, dtype: torch.dtype | None, device: Any
) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value, dtype=dtype, device=device))


class Linear(Module):
    """y = x W^T + b; a "column" of the weight's rows on each rank, or a "row" of its columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **_: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_group, self.tp_size = (
            parallel_mode,
            tp_group,
            tp_size,
        )
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.in_features, self.out_features = columns, rows
        self.weight = parameter(
            rows, columns, value=0.0, dtype=params_dtype, device=device
        )
        if init_method is not None:
            init_method(self.weight.data)
        # Whatever the mode.
        mark_as_cut(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = parameter(rows, value=0.0, dtype=params_dtype, device=device)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif parallel_mode == "column":
                mark_as_cut(self.bias, 0)
        else:
            self.bias = torch.empty(0, dtype=params_dtype, device=device)  # type: ignore[assignment]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = self._linear(inp)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        cut = self.tp_size > 1
        if cut and self.parallel_mode == "column":
            x = _Exchange.apply(
                x, self.tp_group, "gather" if self.sequence_parallel else "copy"
            )
        out = F.linear(x, self.weight)
        if cut and self.parallel_mode == "row":
            out = _Exchange.apply(
                out, self.tp_group, "scatter" if self.sequence_parallel else "sum"
            )
        return out


def mark_as_cut(weight: torch.Tensor, dim: int) -> None:
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        setattr(weight, name, value)


def normed(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm, or layer norm where there is a bias, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = weight.to(wide.dtype) + (1.0 if zero_centered else 0.0)
    if bias is not None:
        shift = bias.to(wide.dtype)
        return F.layer_norm(wide, weight.shape, factor, shift, eps).to(x.dtype)
    return (
        wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * factor
    ).to(x.dtype)


class LayerNormLinear(Linear):
    """`Linear` of the normed input; each rank norms its part of the sequence."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            params_dtype=params_dtype,
            device=device,
            **options,
        )
        assert normalization in ("RMSNorm", "LayerNorm"), normalization
        self.eps, self.normalization, self.zero_centered_gamma = (
            eps,
            normalization,
            zero_centered_gamma,
        )
        self.return_layernorm_output = self.return_layernorm_output_gathered = False
        start = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = parameter(
            in_features, value=start, dtype=params_dtype, device=device
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = parameter(
                in_features, value=0.0, dtype=params_dtype, device=device
            )
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Behind the output, and the bias where that is returned, the normed input where that is."""
        x = normed(
            inp,
            self.layer_norm_weight,
            self.eps,
            self.zero_centered_gamma,
            self.layer_norm_bias,
        )
        out = super().forward(x)
        if not self.return_layernorm_output:
            return out
        return (*out, x) if self.return_bias else (out, x)


class GroupedLinear(Module):
    """One `Linear` for each of several groups of rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.return_bias = options.pop("return_bias", False)
        one_tensor = [
            options.pop(name, False)
            for name in ("single_grouped_weight", "single_grouped_bias")
        ]
        assert not any(one_tensor), (
            "weights of all groups in one tensor: layouts know each by itself"
        )
        for number in range(num_gemms):
            linear = Linear(in_features, out_features, bias=bias, **options)
            self.register_parameter(f"weight{number}", linear.weight)
            if bias:
                self.register_parameter(f"bias{number}", linear.bias)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int],
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        biases = (
            [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
            if self.use_bias
            else []
        )
        added = (
            biases
            if self.use_bias and not self.return_bias
            else [None] * self.num_gemms
        )
        out = torch.cat(
            [
                F.linear(part, getattr(self, f"weight{number}"), bias)
                for number, (part, bias) in enumerate(
                    zip(inp.split(list(m_splits)), added, strict=True)
                )
            ]
        )
        return (
            (out, [bias.to(inp.dtype) for bias in biases]) if self.return_bias else out
        )


class RMSNorm(nn.Module):
    """`hidden_size` is the name that megatron-core 0.16 gives, `normalized_shape` that of 0.19: TE takes both."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = 0.0 if zero_centered_gamma else 1.0
        size = normalized_shape if normalized_shape is not None else hidden_size
        assert size is not None
        self.weight = parameter(size, value=start, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        return normed(x, self.weight, self.eps, self.zero_centered_gamma, bias)


class LayerNorm(RMSNorm):
    """With a bias."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = self.weight.sequence_parallel  # type: ignore[attr-defined]


class DotProductAttention(nn.Module):
    """softmax(q k^T * scale) v in formats "sbhd" and "thd", under the masks that causal models ask for."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        **_: Any,
    ) -> None:
        super().__init__()
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.qkv_format, self.attn_mask_type, self.window_size = (
            qkv_format,
            attn_mask_type,
            window_size,
        )
        self.head_dims = (
            kv_channels
            if isinstance(kv_channels, tuple)
            else (kv_channels, kv_channels)
        )
        self.num_gqa_groups_per_partition = (
            num_gqa_groups or num_attention_heads
        ) // tp_size
        self.softmax_scale = softmax_scale or self.head_dims[0] ** -0.5
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type != "vanilla":
            assert softmax_type == "learnable", softmax_type
            # of torch's default dtype, whatever the model's
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.softmax_offset = nn.Parameter(
                torch.zeros(num_attention_heads // tp_size, device=device)
            )

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        pad_between_seqs: bool | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[s, b, heads, d] -> [s, b, heads * d]; [t, heads, d] -> [t, heads * d], for
        queries beyond the last sequence not a number, where the real kernels leave what
        was in memory.
        """
        q, k, v = query_layer, key_layer, value_layer
        mask_type, window = (
            attn_mask_type or self.attn_mask_type,
            window_size or self.window_size,
        )
        assert key_layer.shape[:-1] == value_layer.shape[:-1], "keys and values differ"
        assert (q.shape[-1], v.shape[-1]) == self.head_dims, "another head size"
        assert k.shape[-2] == self.num_gqa_groups_per_partition, (
            "another number of key-value heads"
        )
        if self.cp_group is not None and dist.get_world_size(self.cp_group) > 1:
            q, k, v, own = self.whole_rows(
                (q, k, v),
                (qkv_format or self.qkv_format) == "thd",
                cu_seqlens_q,
                mask_type,
            )
            given = {
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_kv": cu_seqlens_kv,
                "attn_mask_type": mask_type,
            }
            given |= {
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
                "window_size": window,
            }
            group, self.cp_group = self.cp_group, None
            whole = DotProductAttention.forward(
                self, q, k, v, attention_mask, qkv_format, **given
            )
            self.cp_group = group
            return whole.index_select(0, own)
        if (qkv_format or self.qkv_format) == "sbhd":
            assert mask_type == "causal" and q.dim() == 4, (mask_type, q.shape)
            seen = causal(len(q), len(k), q.device, window)
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            return (
                attend(q, k, v, seen, self.softmax_scale, self.softmax_offset)
                .permute(2, 0, 1, 3)
                .flatten(2)
            )
        assert q.dim() == 3 and mask_type in (
            "padding_causal",
            "padding_causal_bottom_right",
        ), (mask_type, q.shape)
        assert (
            cu_seqlens_q is not None
            and cu_seqlens_kv is not None
            and cu_seqlens_q.shape == cu_seqlens_kv.shape
        )
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None, (
            "the device would be asked"
        )
        assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_kv, int), (
            "the device would be asked"
        )
        assert max_seqlen_q <= max_seqlen_kv, "cuDNN refuses"
        bottom_right = mask_type.endswith("bottom_right")
        assert bottom_right or max_seqlen_q == max_seqlen_kv, "FlashAttention refuses"
        seen = within(
            cu_seqlens_q,
            cu_seqlens_kv,
            len(q),
            len(k),
            window,
            bottom_right=bottom_right,
        )
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (
            attend(q, k, v, seen, self.softmax_scale, self.softmax_offset)
            .transpose(0, 1)
            .flatten(1)
        )

    def whole_rows(
        self,
        local: Sequence[torch.Tensor],
        packed: bool,
        cu_seqlens: torch.Tensor | None,
        mask_type: str,
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of all context-parallel ranks in order, and where
        this rank's are: each sequence is cut into two chunks a rank. What is asserted
        is what `attn_forward_func_with_cp` does.
        """
        size, rank = dist.get_world_size(self.cp_group), dist.get_rank(self.cp_group)
        count, device = len(local[0]), local[0].device
        assert count % 2 == 0, "Sequence length per GPU needs to be divisible by 2!"
        assert self.window_size is None or self.cp_comm_type in ("a2a", "all_gather")
        assert self.head_dims[0] == self.head_dims[1] or self.cp_comm_type == "p2p"
        assert self.softmax_offset is None or self.cp_comm_type == "a2a"
        if not packed:
            cu_seqlens = torch.tensor([0, count * size], device=device)
        else:
            assert (
                cu_seqlens is not None
                and self.cp_comm_type == "p2p"
                and mask_type == "padding_causal"
            )
            assert device.type != "cpu" or not (cu_seqlens % (2 * size)).any()
        at = torch.arange(count, device=device)
        of = torch.searchsorted(cu_seqlens[1:] // size, at, right=True).clamp(
            max=len(cu_seqlens) - 2
        )
        within_own, chunk = (
            at - cu_seqlens[of] // size,
            (cu_seqlens[of + 1] - cu_seqlens[of]) // (2 * size),
        )
        places = [
            cu_seqlens[of]
            + within_own
            + torch.where(within_own < chunk, number, 2 * size - 2 - number) * chunk
            for number in range(size)
        ]
        order = torch.cat(places).argsort()
        return *(
            _Exchange.apply(x, self.cp_group, "gather").index_select(0, order)
            for x in local
        ), places[rank]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., heads, q, d], keys and values [..., kv_heads, k, d], `seen` [q, k] bool,
    `offset` [heads], of each head one more score in its softmax -> [..., heads, q, d].
    """
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    if offset is not None:
        scores = torch.cat(
            [
                scores,
                offset.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1),
            ],
            dim=-1,
        )
    weights = scores.softmax(
        dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)
    ).to(q.dtype)
    return weights[..., : k.shape[-2]] @ v


def causal(
    queries: int, keys: int, device: torch.device, window: tuple[int, int] | None
) -> torch.Tensor:
    """[queries, keys] bool: a query sees its own key, and as many before it as the window says."""
    behind = torch.arange(queries, device=device)[:, None] - torch.arange(
        keys, device=device
    )
    return (behind >= 0) & (behind <= left_of(window, keys))


def left_of(window: tuple[int, int] | None, keys: int) -> int:
    return keys if window is None or window[0] == -1 else window[0]


def within(
    cu_q: torch.Tensor,
    cu_kv: torch.Tensor,
    queries: int,
    keys: int,
    window: tuple[int, int] | None,
    *,
    bottom_right: bool,
) -> torch.Tensor:
    """The same in each of several sequences end to end, where the last query stands at
    the last key, or the first at the first.
    """
    q, k = (torch.arange(count, device=cu_q.device) for count in (queries, keys))
    of_q, of_k = (
        torch.searchsorted(cu[1:], at, right=True) for cu, at in ((cu_q, q), (cu_kv, k))
    )
    edge = int(bottom_right)
    last = len(cu_q) - 2
    to_edge_q = q - cu_q[of_q.clamp(max=last) + edge]
    to_edge_k = k - cu_kv[of_k.clamp(max=last) + edge]
    behind = to_edge_q[:, None] - to_edge_k
    known = (of_q[:, None] == of_k) & (of_q[:, None] <= last)
    return known & (behind >= 0) & (behind <= left_of(window, keys))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention's own (2.8.3, flash_attn/flash_attn_interface.py): [t, heads, d],
    the last query at the last key.
    """
    assert (
        causal
        and q.dtype.itemsize == 2
        and isinstance(max_seqlen_q, int)
        and isinstance(max_seqlen_k, int)
    )
    seen = within(
        cu_seqlens_q, cu_seqlens_k, len(q), len(k), window_size, bottom_right=True
    )
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return attend(q, k, v, seen, softmax_scale or q.shape[-1] ** -0.5).transpose(0, 1)


flash_attn = SimpleNamespace(
    __version__="2.8.3", flash_attn_varlen_func=flash_attn_varlen_func
)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    **_: Any,
) -> torch.Tensor:
    """[s, b, heads, d], turned by [s or more, 1, 1, up to d] in float32."""
    assert tensor_format == "sbhd" and not interleaved and len(freqs) >= len(t)
    freqs = freqs[: len(t)].float()
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    out = turned * freqs.cos().to(t.dtype) + torch.cat(
        [-second, first], dim=-1
    ) * freqs.sin().to(t.dtype)
    return torch.cat([out, rest], dim=-1)


class _SplitAlongDim:
    @staticmethod
    def apply(
        x: torch.Tensor, dim: int, sizes: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        return x.split(list(sizes), dim)


def get_attention_backend(asked: Any) -> tuple[Any, ...]:
    """As on an H100 with flash-attn and cuDNN 9.18, but in any dtype."""
    sinks = getattr(asked, "softmax_type", "vanilla") != "vanilla"
    by_flash = max(asked.head_dim_qk, asked.head_dim_v) <= 256 and not sinks
    return by_flash, "2.8.3", sinks, None, False, [by_flash, sinks, False]


# transformer_engine.pytorch.attention.dot_product_attention.utils
utils = SimpleNamespace(
    AttentionParams=SimpleNamespace, get_attention_backend=get_attention_backend
)


def get_cpu_offload_context(
    *_: Any, **__: Any
) -> tuple[AbstractContextManager[None], Callable[[Any], Any]]:
    return nullcontext(), lambda each: each


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Unused(metaclass=_Anything):
    """Whatever else is named on the way, by an import or in a class body."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


NAMED = {
    each.__name__: each
    for each in (
        Linear,
        LayerNormLinear,
        GroupedLinear,
        RMSNorm,
        LayerNorm,
        DotProductAttention,
        apply_rotary_pos_emb,
        _SplitAlongDim,
        get_cpu_offload_context,
    )
} | {"utils": utils, "__version__": VERSION}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of the package has every name."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (
            fullname.partition(".")[0]
            not in ("transformer_engine", "transformer_engine_torch")
            or fullname in ABSENT
        ):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def name_of(name: str) -> Any:
            if name in NAMED:
                return NAMED[name]
            if name.startswith("__"):
                raise AttributeError(name)
            return Unused

        module.__getattr__ = name_of  # type: ignore[method-assign]


def install() -> None:
    """Before megatron-core is imported."""
    sys.meta_path.insert(0, Finder())
