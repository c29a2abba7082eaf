"""Gated delta net (arXiv 2412.06464) as a layer of megatron-core: a linear attention whose heads carry a state.

megatron-core's own `GatedDeltaNet` (0.16 to 0.19) needs flash-linear-attention on a GPU
and Transformer Engine's layers, and reads packed rows from 0.19 on.

For each value head with keys k, queries q, values v, decay a and step size b, the state
S [key_head_dim, value_head_dim] starts at zero and follows

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,    output_t = S_t^T q_t

q, k and v pass a causal convolution of a few taps first. Convolution and state restart
at the first token of every sample, in packed rows as well. With context parallelism a
rank computes both for some of its heads, over whole rows (`context_heads.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.models.causal_convolution import CausalConvolution
from megaverl.models.context_heads import HeadExchange
from megaverl.models.layers import RMSNorm, sum_gradients
from megaverl.models.packing import DensePacking, Packing, VarlenPacking
from megaverl.platform import platform
from megaverl.sharding.model_spec import DeltaNetSpec

platform.adapt_megatron()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import (  # noqa: E402
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

# Parameters of the module itself, which tensor parallelism splits along axis 0.
SPLIT_PARAMETERS = ("dt_bias", "A_log")


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # megatron-core has no complete types
    """Gated delta net in place of a layer's self-attention.

    Every tensor-parallel rank has whole key heads, with the value heads that share
    them. Rows of `in_proj_qkvz` are [q, k, v, z] of one key head after the other, those
    of `in_proj_ba` [b, a], as in Qwen3-Next's files. Channels of `conv1d` are [q, k, v]
    of one key head after the other. So every parameter's part of a rank is an equal run
    of its rows.

    Args:
        net: sizes of the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        net: DeltaNetSpec,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.net = net
        self.tp_group = pg_collection.tp
        tp_size = self.tp_group.size()
        self.num_key_heads = net.num_key_heads // tp_size
        # Value heads that share a key head.
        self.num_shares = net.num_value_heads // net.num_key_heads
        convolved = 2 * net.key_width + net.value_width
        self.in_proj_qkvz = self._in_proj(convolved + net.value_width)
        self.in_proj_ba = self._in_proj(2 * net.num_value_heads)
        num_channels = convolved // tp_size
        self.conv1d = CausalConvolution(
            num_channels, net.conv_width, config.params_dtype, bias=False
        )
        self.exchange = HeadExchange(pg_collection.cp)
        # Channels of the heads that this context-parallel rank computes.
        channels = None
        if self.exchange.size > 1:
            channels = self.exchange.of_own_heads(torch.arange(num_channels))
        self.register_buffer("channels", channels, persistent=False)
        num_heads = net.num_value_heads // tp_size
        self.dt_bias = nn.Parameter(torch.ones(num_heads, dtype=config.params_dtype))
        # A random rate of decay between 0 and 16 for each head, as in transformers.
        self.A_log = nn.Parameter(
            torch.empty(num_heads).uniform_(0.01, 16).log().to(config.params_dtype)
        )
        for parameter in (self.dt_bias, self.A_log):
            _mark_split(parameter)
        self.norm = _GatedNorm(config, net.value_head_dim)
        self.out_proj = RowParallelLinear(
            net.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def _in_proj(self, output_size: int) -> ColumnParallelLinear:
        linear = ColumnParallelLinear(
            self.config.hidden_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            # `forward` gathers the sequence, and sums gradients of the hidden states,
            # once for both projections.
            disable_grad_reduce=True,
            tp_group=self.tp_group,
        )
        linear.sequence_parallel = False
        return linear

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map [s, b, hidden] to ([s, b, hidden], no bias). With sequence parallelism s is a rank's part.

        Args:
            attention_mask: None. Rows are padded on the right, where nothing reads the outputs.
            packed_seq_params: the row (b is 1) holds several sequences that share no tokens. None: each row is one.
        """
        assert attention_mask is None, "a state has no mask"
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            hidden = sum_gradients(hidden_states, self.tp_group)
        # [s, b, rows] -> [s, b, key heads, rows of a key head]
        qkvz, ba = (
            projection(hidden)[0].unflatten(-1, (self.num_key_heads, -1))
            for projection in (self.in_proj_qkvz, self.in_proj_ba)
        )
        net = self.net
        values = self.num_shares * net.value_head_dim
        qkv, z = qkvz.split([2 * net.key_head_dim + values, values], dim=-1)
        outputs = self._compute_heads(qkv, ba, packed_seq_params)
        # Every rank normalizes its own heads by the same weight.
        weight = sum_gradients(self.norm.weight, self.tp_group)
        z = z.flatten(2).unflatten(-1, (-1, net.value_head_dim))
        normed = self.norm(outputs, z, weight)
        result: torch.Tensor = self.out_proj(normed.flatten(2))[0]
        return result, None

    def _compute_heads(
        self, qkv: torch.Tensor, ba: torch.Tensor, packing: Packing | None
    ) -> torch.Tensor:
        """Apply convolution and delta rule to [s, b, key heads, ...]. Returns [s, b, value heads, d of the values].

        With context parallelism s is a rank's part of the row, before and afterwards.
        """
        net = self.net
        row = self.exchange.whole_row(packing)
        # [b, s, key heads, rows of a key head], of the whole row and of own heads.
        qkv, ba = (
            part.transpose(0, 1) for part in self.exchange.to_heads((qkv, ba), packing)
        )
        positions = None if row is None else row.positions
        convolved = self.conv1d(qkv.flatten(2), positions, self.channels)
        query, key, value = convolved.unflatten(-1, qkv.shape[-2:]).split(
            [net.key_head_dim, net.key_head_dim, self.num_shares * net.value_head_dim],
            dim=-1,
        )
        # [b, s, value heads, ...]: value heads that share a key head are neighbours.
        value = value.flatten(2).unflatten(-1, (-1, net.value_head_dim))
        query, key = (x.repeat_interleave(self.num_shares, dim=2) for x in (query, key))
        b, a = (x.flatten(2) for x in ba.chunk(2, dim=-1))
        # In float32: exp(A_log) and the sum have too few digits in 16 bits.
        rate = self.exchange.of_own_heads(self.A_log).float().exp()
        step = a.float() + self.exchange.of_own_heads(self.dt_bias)
        inputs = query, key, value, -rate * F.softplus(step), b.sigmoid()
        outputs = delta_rule(inputs, row).transpose(0, 1)
        return self.exchange.to_tokens(outputs, packing)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameters, sharded by heads."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        stored: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(SPLIT_PARAMETERS, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            if isinstance(module, CausalConvolution):
                stored |= make_sharded_tensors_for_checkpoint(
                    module.state_dict(prefix="", keep_vars=True),
                    f"{prefix}{name}.",
                    {"weight": 0},
                    sharded_offsets,
                    tp_group=self.tp_group,
                    dp_cp_group=(metadata or {}).get("dp_cp_group"),
                )
            else:
                stored |= sharded_state_dict_default(
                    module,
                    f"{prefix}{name}.",
                    sharded_offsets,
                    metadata,
                    tp_group=self.tp_group,
                )
        return stored


def _mark_split(parameter: nn.Parameter) -> None:
    """Mark a parameter that tensor parallelism splits, so that the gradient norm counts all its parts."""
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


class _GatedNorm(RMSNorm):
    """RMSNorm over each value head, multiplied by SiLU of a gate. Its weight is never stored minus 1."""

    def __init__(self, config: TransformerConfig, head_dim: int) -> None:
        super().__init__(config, head_dim, config.layernorm_epsilon)
        # Summed over ranks by `sum_gradients`, with and without sequence parallelism.
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        if self.zero_centred:
            self.zero_centred = False
            nn.init.ones_(self.weight)

    def forward(  # type: ignore[override]  # a gate is needed
        self, heads: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Normalize [..., head_dim] and apply a gate of the same shape; the result has the dtype of `heads`.

        Args:
            weight: the norm's weight.
        """
        wide = heads.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = weight * (wide * inverse).to(heads.dtype)
        return (normed * F.silu(gate.float())).to(heads.dtype)


# (queries, keys, values [b, s, heads, d]; log-decays, step sizes [b, s, heads])
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def delta_rule(inputs: Inputs, packing: Packing | None) -> torch.Tensor:
    """Return the outputs of the gated delta rule with normalized queries and keys, [b, s, heads, d of the values].

    Args:
        packing: the row (b is 1) holds several sequences, and the state restarts at each one. None: each row is one.
    """
    if packing is None:
        return _rule_of_rows(inputs)
    if isinstance(packing, VarlenPacking) and (rule := _varlen_rule()) is not None:
        query, key, value, decay, step = inputs
        outputs: torch.Tensor = rule(
            query,
            key,
            value,
            g=decay,
            beta=step,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=packing.cu_seqlens_q,
        )[0]
        return outputs
    places, index = sequences_of(packing)
    # [1, t, ...] -> [sequences, longest, ...]
    query, key, value, decay, step = (
        x[0].index_select(0, places.flatten()).unflatten(0, places.shape)
        for x in inputs
    )
    rows = _rule_of_rows((query, key, value, decay, step))
    return rows.flatten(0, 1).index_select(0, index).unsqueeze(0)


def sequences_of(packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences of a packed row as rows, and the way back.

    Returns:
        [m, longest] int64, places of each sequence's tokens, where short sequences repeat a token; and [t] int64, the
            index of each of the row's tokens in the flattened former.
    """
    if isinstance(packing, DensePacking):
        # `later_queries` lack the tokens that they share. Models with states are packed
        # without sharing (`TrainingModel.shares_tokens`).
        assert not len(packing.later_queries), "a sequence starts in another one"
        return packing.wholes, packing.place
    assert isinstance(packing, VarlenPacking) and packing.keys is None
    starts, stops = packing.cu_seqlens_q[:-1].long(), packing.cu_seqlens_q[1:].long()
    longest = packing.max_seqlen_q
    steps = torch.arange(longest, device=starts.device)
    places = (starts[:, None] + steps).minimum(stops[:, None] - 1)
    tokens = torch.arange(len(packing.positions), device=starts.device)
    sequence = torch.bucketize(tokens, stops, right=True)
    return places, sequence * longest + tokens - starts[sequence]


def _rule_of_rows(inputs: Inputs) -> torch.Tensor:
    """Return the outputs of the rule for rows that are one sequence each."""
    query, key, value, decay, step = inputs
    outputs: torch.Tensor = _rule()(
        query, key, value, g=decay, beta=step, use_qk_l2norm_in_kernel=True
    )[0]
    return outputs


@functools.cache
def _rule() -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return the chunked rule: flash-linear-attention's on a GPU that has it, else transformers' in plain PyTorch."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule: Callable[..., tuple[torch.Tensor, Any]] = (
        _varlen_rule() or modeling_qwen3_next.torch_chunk_gated_delta_rule
    )
    return rule


@functools.cache
def _varlen_rule() -> Callable[..., tuple[torch.Tensor, Any]] | None:
    """Return flash-linear-attention's rule, which takes sequences of any lengths, or None without it or a GPU."""
    if not platform.is_cuda or importlib.util.find_spec("fla") is None:
        return None
    ops = importlib.import_module("fla.ops.gated_delta_rule")
    rule: Callable[..., tuple[torch.Tensor, Any]] = ops.chunk_gated_delta_rule
    return rule
