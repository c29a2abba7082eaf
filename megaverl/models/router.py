"""The router of a mixture of experts whose choice is shifted by a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402


class BiasedRouter(TopKRouter):
    """megatron-core's router with DeepSeek-V3's bias (arXiv 2412.19437, eq. 16): it takes part in choosing the
    experts, not in weighing them.

    megatron-core keeps the bias as a buffer, which it moves after every batch by the load that it saw. Here it is
    a weight like the others, loaded, resharded and saved, but held still: the engine samples with the same one, and
    the loss says nothing about it.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(bias, requires_grad=False)
