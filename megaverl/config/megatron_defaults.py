"""Defaults of Megatron's gradients that differ from megatron-core's own, for the run and for the planner alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ddp_defaults(given: Mapping[str, Any], *, replicas: int, on_gpus: bool) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig that a run uses: what is given, and defaults for the rest.

    - The optimizer is sharded over the data-parallel ranks.
    - Gradients accumulate and are reduced in float32. megatron-core would use the model's dtype: in bfloat16 a sum of
      many micro-batches loses what is smaller than 1/256 of it. With float32 weights nothing changes.
    - On GPUs each bucket of gradients is reduced while the backward pass goes on. gloo's threads would compete with
      it for the processor's cores.

    Args:
        given: `{role}.ddp`.
        replicas: data-parallel ranks times context-parallel ranks of the role's grid.
        on_gpus: the role's ranks compute on GPUs.
    """
    defaults = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": on_gpus and replicas > 1,
    }
    return defaults | dict(given)
