"""Multi-head latent attention for megatron-core's local layer spec, on the groups that it is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402


class LatentAttention(MLASelfAttention):
    """megatron-core's, with every rank holding the down-projections whole, as under Transformer Engine's layer spec.

    In the local spec megatron-core cuts the latents over the tensor-parallel ranks, only to gather them at once,
    over a group that it takes from the global `parallel_state`, which we do not have.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        latent, hidden = config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, config.q_lora_rank)
        else:
            self.linear_q_proj = ColumnParallelLinear(
                hidden,
                config.num_attention_heads * self.q_head_dim,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                tp_group=pg_collection.tp,
            )


class ReplicatedLinear(nn.Module):
    """A linear map whose weight [out, in] is the same on every tensor-parallel rank.

    Each rank maps its own part of the sequence; the weight is marked, so that `finalize_model_grads` sums its
    gradient over the ranks.
    """

    def __init__(self, config: Any, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        config.init_method(self.weight.data)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., in] -> ([..., out], no bias), the signature of ColumnParallelLinear."""
        return F.linear(hidden, self.weight), None
