"""Mamba-2 layers (arXiv 2405.21060) for megatron-core: tensor-parallel over heads, and on packed rows.

megatron-core's own layer (0.16 to 0.19, `ssm/mamba_mixer.py`) needs mamba-ssm and
causal-conv1d, which need a GPU. Here PyTorch computes the scan, and mamba-ssm on a GPU
if it is installed.

In a packed row the convolution and the state start again at the first token of each
sample, which is a token at position 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megaverl.models.causal_convolution import CausalConvolution
from megaverl.models.context_heads import HeadExchange
from megaverl.models.layers import RMSNorm, sum_gradients, sum_values, widened
from megaverl.models.packing import Packing
from megaverl.platform import platform
from megaverl.sharding.model_spec import MambaSpec
from megaverl.sharding.weight import MambaRows, Split, mamba_rows

platform.adapt_megatron()

from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import (  # noqa: E402
    make_sharded_tensors_for_checkpoint,
)

logger = logging.getLogger(__name__)

# Range of the initial time steps (arXiv 2312.00752, section 3.6).
FIRST_STEPS = (1e-3, 1e-1)


class Mamba2Mixer(nn.Module):
    """Mamba-2 layer in place of a transformer layer's attention, or beside it (`models/build.py`).

    Tensor-parallel ranks divide heads and groups. Each rank has the gate, x, B, C and
    time steps of its own heads, so nothing but the two projections communicates.

    If there are fewer groups than ranks, the ranks that share a group divide its rows of
    B and C as well. They gather B and C behind the convolution, and sum the squares of
    the group's norm.

    Context-parallel ranks divide the heads of a tensor-parallel rank once more, but only
    for the convolution and the scan of whole rows (`context_heads.py`).

    Args:
        mamba: sizes of the whole layer, over all ranks.
        has_in_norm: the layer contains the norm over its input. False: its input is normalized already.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mamba: MambaSpec,
        pg_collection: Any,
        layer_number: int = 1,
        has_in_norm: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.tp_group = pg_collection.tp
        tp_size = self.tp_group.size()
        self.mamba = mamba
        self.num_heads = mamba.num_heads // tp_size
        self.num_groups = max(1, mamba.num_groups // tp_size)
        self.inner_size = mamba.inner_size // tp_size
        self.group_rows = mamba.group_rows // tp_size
        self.conv_rows = mamba.conv_rows // tp_size
        # Ranks that share a group, and the number of this rank's group among all.
        self.num_sharing = max(1, tp_size // mamba.num_groups)
        self.shared_group = self.tp_group.rank() // self.num_sharing
        dtype = config.params_dtype
        # A name of its own, whether Transformer Engine's layers are used or not.
        self.in_norm: nn.Module = nn.Identity()
        if has_in_norm:
            self.in_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            mamba.in_rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        self.conv1d = CausalConvolution(
            self.conv_rows, mamba.conv_size, dtype, bias=mamba.conv_bias
        )
        self.exchange = HeadExchange(pg_collection.cp)
        self.register_buffer("channels", self._own_channels(), persistent=False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.D = nn.Parameter(torch.ones(self.num_heads, dtype=dtype))
        self.norm: GatedGroupNorm | None = None
        if mamba.has_norm:
            self.norm = GatedGroupNorm(
                self.inner_size, self.num_groups, config.layernorm_epsilon, dtype
            )
        self._add_part_scales(dtype)
        self.out_proj = RowParallelLinear(
            mamba.inner_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        for parameter in (
            *self.parameters(recurse=False),
            *(() if self.norm is None else self.norm.parameters()),
        ):
            set_tensor_model_parallel_attributes(
                parameter, is_parallel=True, dim=0, stride=1
            )
        if config.perform_initialization:
            self._initialize()

    def _own_channels(self) -> torch.Tensor | None:
        """Return the convolution's channels of the heads that this context-parallel rank computes. None: all."""
        if self.exchange.size == 1:
            return None
        x, b, c = torch.arange(self.conv_rows).split(
            [self.inner_size, self.group_rows, self.group_rows]
        )
        b, c = (
            self.exchange.repeat_groups(rows.view(self.num_groups, -1))
            for rows in (b, c)
        )
        own = (self.exchange.of_own_heads(rows).flatten() for rows in (x, b, c))
        return torch.cat([*own])

    def _add_part_scales(self, dtype: torch.dtype) -> None:
        """Add the factor of each row of the input projection, [rows / tp], or None if all are 1.

        They are rounded to the dtype, as in transformers and in vLLM.
        """
        scales = None
        if any(scale != 1.0 for scale in self.mamba.part_scales):
            parts = mamba_rows(Split.MAMBA_IN, self.mamba)
            scales = torch.cat(
                [
                    torch.full((part.rows // self.tp_group.size(),), scale, dtype=dtype)
                    for part, scale in zip(parts, self.mamba.part_scales, strict=True)
                ]
            )
        self.register_buffer("part_scales", scales, persistent=False)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set the first time steps and decays, which differ between heads."""
        first = self.tp_group.rank() * self.num_heads
        heads = torch.arange(first, first + self.num_heads)
        self.A_log.copy_(torch.log(heads + 1.0))
        low, high = map(torch.tensor, FIRST_STEPS)
        part = heads / max(1, self.mamba.num_heads - 1)
        steps = torch.exp(torch.lerp(low.log(), high.log(), part))
        # Inverse of softplus.
        self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute the layer's output, and no bias.

        Args:
            hidden_states: [s, b, hidden], or [s / tp, b, hidden] with sequence parallelism.
            attention_mask: ignored, since the layer is causal and rows are padded on the right.
            packed_seq_params: the row (b is 1) holds several samples that share no tokens. None: each row is one.

        Returns:
            The shape of `hidden_states`.
        """
        projected, _ = self.in_proj(
            _scaled(self.in_norm(hidden_states), self.mamba.in_scale)
        )
        if self.part_scales is not None:
            projected = projected * self.part_scales
        gate, channels, steps = projected.split(
            [self.inner_size, self.conv_rows, self.num_heads], dim=-1
        )
        scanned = self._compute_heads(channels, steps, packed_seq_params)
        if self.norm is None:
            out = gated(scanned, gate).to(gate.dtype)
        elif self.num_sharing == 1:
            out = self.norm(scanned, gate)
        else:
            out = self.norm(scanned, gate, self._average_over_group)
        result, _ = self.out_proj(out)
        return _scaled(result, self.mamba.out_scale), None

    def _average_over_group(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the average of `mean` [..., 1, 1] over the tensor-parallel ranks that share this rank's group."""
        own = self.shared_group
        # All ranks take part, each with a place for every group.
        means = F.pad(mean, (own, self.mamba.num_groups - 1 - own))
        # Every rank's heads depend on the sum, so its gradients are summed as well.
        total = sum_gradients(sum_values(means, self.tp_group), self.tp_group)
        average: torch.Tensor = total[..., own : own + 1] / self.num_sharing
        return average

    def _gather_group(
        self, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather rows of B and C, [b, s, rows / tp], from the ranks that share this rank's group.

        Returns:
            Each [b, s, state].
        """
        # All ranks take part, and each keeps its group. B and C travel together.
        rows = all_gather_last_dim_from_tensor_parallel_region(
            torch.stack([b, c]), group=self.tp_group
        )
        own = rows.unflatten(-1, (self.mamba.num_groups, -1))[..., self.shared_group, :]
        return own[0], own[1]

    def _compute_heads(
        self, channels: torch.Tensor, steps: torch.Tensor, packing: Packing | None
    ) -> torch.Tensor:
        """Apply convolution and scan to [s, b, channels]. Returns [s, b, inner / tp], at least float32.

        With context parallelism s is a rank's part of the row, before and afterwards.

        Args:
            steps: [s, b, heads], time steps before their bias.
        """
        row = self.exchange.whole_row(packing)
        positions = None if row is None else row.positions
        if self.exchange.size > 1:
            channels, steps = self._exchange_for_heads(channels, steps, packing)
        # [b, s, ...], as mamba-ssm reads them.
        mixed = self.conv1d(channels.transpose(0, 1), positions, self.channels)
        y = self._scan(mixed, steps.transpose(0, 1), positions).transpose(0, 1)
        if self.exchange.size > 1:
            # In 16 bits if the layer's inputs have as many.
            y = self.exchange.to_tokens(y.to(channels.dtype), packing)
        return widened(y).flatten(2)

    def _exchange_for_heads(
        self, channels: torch.Tensor, steps: torch.Tensor, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return channels and time steps of the whole row, [s, b, ...], for this context-parallel rank's heads."""
        x, b, c = channels.split(
            [self.inner_size, self.group_rows, self.group_rows], dim=-1
        )
        x = x.unflatten(-1, (self.num_heads, -1))
        b, c = (
            self.exchange.repeat_groups(y.unflatten(-1, (self.num_groups, -1)))
            for y in (b, c)
        )
        parts = self.exchange.to_heads((x, b, c, steps.unsqueeze(-1)), packing)
        x, b, c, steps = (part.flatten(2) for part in parts)
        return torch.cat([x, b, c], dim=-1), steps

    def _scan(
        self, mixed: torch.Tensor, steps: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the state space model over [b, s, channels]. Returns [b, s, heads, head_dim], at least float32."""
        # A context-parallel rank has some of the heads, and their groups.
        num_heads = steps.shape[-1]
        inner_size = num_heads * self.mamba.head_dim
        group_rows = (mixed.shape[-1] - inner_size) // 2
        x, b, c = mixed.split([inner_size, group_rows, group_rows], dim=-1)
        if self.num_sharing > 1:
            b, c = self._gather_group(b, c)
        x = x.unflatten(-1, (num_heads, self.mamba.head_dim))
        b, c = (y.unflatten(-1, (-1, self.mamba.state_size)) for y in (b, c))
        decay_logs, biases, factors = (
            self.exchange.of_own_heads(values)
            for values in (self.A_log, self.dt_bias, self.D)
        )
        decay = -torch.exp(widened(decay_logs))
        # Sample of each token of a packed row, [s].
        sample = None if positions is None else (positions == 0).cumsum(0)
        inputs = (x, steps, decay, b, c)
        size = self.mamba.chunk_size
        fused = fused_scan(x.device.type)
        if fused is None:
            dt = F.softplus(widened(steps) + widened(biases))
            # The backward pass runs the scan again: within chunks it has `size` weights
            # for each token and head.
            y = checkpoint(
                scan,
                x,
                dt,
                decay,
                b,
                c,
                size,
                sample,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            y = y + widened(x) * widened(factors)[:, None]
        else:
            y = fused(
                *(value.contiguous() for value in inputs),
                size,
                D=widened(factors),
                dt_bias=widened(biases),
                dt_softplus=True,
                seq_idx=None if sample is None else sample.to(torch.int32)[None],
            )
        return widened(y)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the layer's sharded parameters. Parts of fused rows have keys of their own, as in megatron-core."""
        state = self.state_dict(prefix="", keep_vars=True)
        axes = dict.fromkeys(state, 0)
        axes.pop("in_norm.weight", None)
        axes["out_proj.weight"] = 1
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        splits = {
            "in_proj.weight": Split.MAMBA_IN,
            "conv1d.weight": Split.MAMBA_CONV,
            "conv1d.bias": Split.MAMBA_CONV,
        }
        for name, split in splits.items():
            if name in state:
                key = prefix + name
                parts = mamba_rows(split, self.mamba)
                described[key] = self._in_parts(described[key], parts, sharded_offsets)
        return described

    def _in_parts(
        self,
        tensor: ShardedTensor,
        parts: list[MambaRows],
        sharded_offsets: tuple[Any, ...],
    ) -> ShardedTensorFactory:
        """Return a description of a parameter with a key for each part of its rows."""
        rank, size = self.tp_group.rank(), self.tp_group.size()
        rows = [part.rows // size for part in parts]
        axis = len(sharded_offsets)

        def build(
            key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None
        ) -> list[ShardedTensor]:
            assert flattened_range is None, "checkpoint/rank_shards.py describes boxes"
            return [
                ShardedTensor.from_rank_offsets(
                    f"{key}.{part.name}",
                    of_part,
                    *sharded_offsets,
                    (axis, rank, size),
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
                for part, of_part in zip(parts, data.split(rows), strict=True)
            ]

        def merge(data: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(data)

        return ShardedTensorFactory(
            tensor.key, tensor.data, build, merge, tensor.replica_id
        )


class GatedGroupNorm(nn.Module):
    """RMSNorm over each group of a gated output (arXiv 2405.21060, section 7.1).

    Args:
        width: width of this rank's groups together.
        num_groups: number of groups on this rank.
    """

    def __init__(
        self, width: int, num_groups: int, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps, self.num_groups = eps, num_groups
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(
        self,
        out: torch.Tensor,
        gate: torch.Tensor,
        average: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Gate and normalize [..., width]. The result has the dtype of `gate`.

        Args:
            average: averages mean squares, [..., 1, 1], over the ranks that share a group. None: each group is on one
                rank.
        """
        groups: torch.Tensor = gated(out, gate).unflatten(-1, (self.num_groups, -1))
        mean = groups.square().mean(dim=-1, keepdim=True)
        if average is not None:
            mean = average(mean)
        normed = (groups * torch.rsqrt(mean + self.eps)).flatten(-2)
        return (normed * widened(self.weight)).to(gate.dtype)


def gated(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply by SiLU of the gate, in float32 or wider."""
    return widened(out) * F.silu(widened(gate))


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x * scale, or `x` itself if `scale` is 1."""
    return x if scale == 1.0 else x * scale


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    sample: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run h_t = exp(dt_t decay) h_(t-1) + dt_t B_t x_t and y_t = C_t h_t, chunk by chunk (arXiv 2405.21060, section 6).

    Within a chunk outputs are computed as in attention, with decays in place of a
    softmax. The states at the ends of chunks connect them.

    Args:
        x: [n, s, heads, head_dim].
        dt: [n, s, heads], time steps above 0.
        decay: [heads], below 0.
        b, c: [n, s, groups, state].
        chunk_size: tokens of a chunk.
        sample: [s] int64: number of each token's sample in a packed row, ascending. The state starts at zero in each.
            None: each row is one sample.

    Returns:
        [n, s, heads, head_dim], float32 or wider.
    """
    length, num_groups = x.shape[1], b.shape[2]
    padding = -length % chunk_size
    # [n, s, ...] -> [n, chunks, chunk, groups, ...]. Padding has steps of 0, which leave
    # the state as it is.
    x, dt, b, c = (
        F.pad(widened(value), (0, 0) * (value.dim() - 2) + (0, padding)).unflatten(
            1, (-1, chunk_size)
        )
        for value in (x, dt, b, c)
    )
    x, dt = (value.unflatten(3, (num_groups, -1)) for value in (x, dt))
    x = x * dt.unsqueeze(-1)
    # [n, chunks, groups, heads of a group, chunk]: log of the decay since the chunk's
    # start, including the token's own.
    logs = (dt * decay.view(num_groups, -1)).cumsum(2).permute(0, 1, 3, 4, 2)
    x = x.permute(0, 1, 3, 4, 2, 5)
    b, c = (value.transpose(2, 3) for value in (b, c))
    same = _same_sample(sample, length, chunk_size, x.device)

    # Within the chunks, [n, chunks, groups, heads, chunk, chunk].
    weights = torch.exp(
        (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(~same.within, -torch.inf)
    )
    weights = weights * (c @ b.transpose(-1, -2)).unsqueeze(3)
    y = weights @ x

    # Between chunks: the state that each chunk adds, [n, chunks, groups, heads, state,
    # head_dim], and the state in front of each.
    to_end = torch.exp(logs[..., -1:] - logs) * same.with_last
    added = b.unsqueeze(3).transpose(-1, -2) @ (x * to_end.unsqueeze(-1))
    through = torch.exp(logs[..., -1]) * same.of_lasts
    state = torch.zeros_like(added[:, 0])
    entering = []
    for chunk in range(added.shape[1]):
        entering.append(state)
        state = through[:, chunk, ..., None, None] * state + added[:, chunk]
    from_start = torch.exp(logs) * same.with_previous
    y = y + (c.unsqueeze(3) @ torch.stack(entering, 1)) * from_start.unsqueeze(-1)
    # [n, chunks, groups, heads, chunk, head_dim] -> [n, s, heads, head_dim]
    rows: torch.Tensor = y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    return rows[:, :length]


class _SameSample:
    """Masks of tokens that belong to the same sample, broadcast over [chunks, groups, heads, ...].

    Attributes:
        within: [chunks, 1, 1, chunk, chunk]: two tokens of a chunk, the second one not behind the first.
        with_last: [chunks, 1, 1, chunk]: a token and the last one of its chunk.
        with_previous: [chunks, 1, 1, chunk]: a token and the last one of the chunk before.
        of_lasts: [chunks, 1, 1]: the last token of a chunk, and that of the chunk before.
    """

    def __init__(self, sample: torch.Tensor) -> None:
        chunk_size = sample.shape[1]
        last = sample[:, -1:]
        # Nothing is in front of the first chunk.
        previous = F.pad(last[:-1], (0, 0, 1, 0), value=-1)
        causal = torch.ones(
            chunk_size, chunk_size, dtype=torch.bool, device=sample.device
        ).tril()
        within = (sample[:, :, None] == sample[:, None, :]) & causal
        self.within = within[:, None, None]
        self.with_last = (sample == last)[:, None, None]
        self.with_previous = (sample == previous)[:, None, None]
        self.of_lasts = (last == previous)[:, None]


def _same_sample(
    sample: torch.Tensor | None, length: int, chunk_size: int, device: torch.device
) -> _SameSample:
    """Return the masks of a row of `length` tokens. Padding belongs to its last sample."""
    if sample is None:
        sample = torch.zeros(length, dtype=torch.int64, device=device)
    padded = torch.cat([sample, sample[-1:].expand(-length % chunk_size)])
    return _SameSample(padded.view(-1, chunk_size))


@cache
def fused_scan(device_type: str) -> Any:
    """Return mamba-ssm's kernel of the scan, or None if it is not installed or cannot run on the device."""
    if device_type != "cuda":
        return None
    if importlib.util.find_spec("mamba_ssm") is None:
        logger.warning(
            "mamba-ssm is not installed: PyTorch computes the scan of Mamba layers, which is slower"
        )
        return None
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    return kernels.mamba_chunk_scan_combined
