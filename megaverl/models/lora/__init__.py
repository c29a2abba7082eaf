"""Low-rank adapters (LoRA, arXiv 2106.09685): their layouts, modules for both engines, and storage in peft's format.

`low_rank` decides which weights have an adapter and how its factors are laid out over
ranks. `adapters` adds the modules to a model, and `adapter_set` merges, loads and saves
what they train.
"""

from megaverl.models.lora.low_rank import (
    ADAPTER,
    LowRank,
    factor_weights,
    follow,
    low_ranks,
    trained_factors,
    with_landed_factors,
    with_trained_factors,
    written_to,
)

__all__ = [
    "ADAPTER",
    "LowRank",
    "factor_weights",
    "follow",
    "low_ranks",
    "trained_factors",
    "with_landed_factors",
    "with_trained_factors",
    "written_to",
]
