"""Defaults for Megatron's gradients and optimizers unlike megatron-core's own, shared by training and planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# megatron-core's default, blockwise, orthogonalises each tensor-parallel rank's part of
# a matrix by itself, so that a run would depend on its grid.
MUON_DEFAULTS = {"muon_tp_mode": "duplicated"}


def ddp_defaults(
    overrides: Mapping[str, Any], *, replicas: int, on_gpus: bool
) -> dict[str, Any]:
    """Return the DistributedDataParallelConfig fields of a run: megaverl's defaults, overridden by `overrides`.

    - The optimizer is sharded over the data-parallel ranks.
    - Gradients accumulate and are reduced in float32. megatron-core would use the model's dtype, and in bfloat16 a sum
      over many micro-batches loses every addend smaller than 1/256 of it. With float32 weights nothing changes.
    - On GPUs each gradient bucket is reduced during the backward pass. On CPUs it is not, because gloo's threads would
      compete with the backward pass for cores.

    Args:
        overrides: the mapping `{role}.ddp` of the configuration.
        replicas: data-parallel ranks times context-parallel ranks of the role's grid.
        on_gpus: whether the role's ranks compute on GPUs.
    """
    defaults = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": on_gpus and replicas > 1,
    }
    return defaults | dict(overrides)
