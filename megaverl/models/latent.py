"""Multi-head latent attention of megatron-core, on the groups that it is given."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402


class LatentAttention(MLASelfAttention):
    """megatron-core's, on the groups that it is given where it asks the global `parallel_state`, which we do not have.

    That is so of the queries' projection where there is no query latent, which it would not cut, and of the
    down-projections that Transformer Engine holds whole: each copy of them would be saved as the first, and all would
    count in the gradient's norm, for Transformer Engine marks every linear layer's weight as cut (0.16 to 0.19).
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        queries = ModuleSpec(submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        submodules = dataclasses.replace(submodules, linear_q_proj=queries)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if (linear := getattr(self, name, None)) is not None:
                linear._tp_group = pg_collection.tp
                linear.weight.tensor_model_parallel = False


class LocalLatentAttention(LatentAttention):
    """That of the local layer spec, with every rank holding the down-projections whole, as Transformer Engine does.

    In the local spec megatron-core cuts the latents over the tensor-parallel ranks, only to gather them at once,
    over a group that it takes from the global `parallel_state`.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        latent, hidden = config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, config.q_lora_rank)


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
