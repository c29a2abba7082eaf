"""Muon on megatron-core, with its state sharded over the data-parallel ranks by whole parameters.

Muon replaces the momentum of each matrix by a nearby orthogonal matrix (Jordan 2024,
kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982). Embeddings,
output layers, norms and biases are updated by Adam. The arithmetic is that of
megatron-core's `TensorParallelMuon` and emerging-optimizers.

The iteration needs whole matrices, so megatron-core's DistributedOptimizer, which cuts
buffers at any element, cannot shard Muon's state. Its LayerWiseDistributedOptimizer
gives each data-parallel rank whole parameters instead:

    buffer of matrices   | rank 0: W1, W4 | rank 1: W2, W3, padding |   Muon
    buffer of the rest   | rank 0: elements 0..n | rank 1: n..2n    |   Adam, sharded as usual

This module adds what that class lacks: training in float32, and gradient norms over a
role's own process groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from megaverl.config.field_needs import MUON_NEEDS_TEXT
from megaverl.errors import ConfigError
from megaverl.platform import platform

platform.adapt_megatron()

import megatron.core.optimizer as core_optimizers  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32  # noqa: E402
from megatron.core.optimizer.layer_wise_optimizer import (  # noqa: E402
    LayerWiseDistributedOptimizer,
)
from megatron.core.optimizer.optimizer import FP32Optimizer  # noqa: E402


def is_muon(optimizer: Mapping[str, Any]) -> bool:
    """Return whether a role's `optimizer` mapping asks for Muon."""
    return str(optimizer.get("optimizer", "adam")) == "muon"


def require_muon(role: str) -> None:
    """Raise ConfigError unless the installed megatron-core can build Muon."""
    if not getattr(core_optimizers, "HAVE_EMERGING_OPTIMIZERS", False):
        raise ConfigError(
            f"{role}.optimizer.optimizer=muon needs {MUON_NEEDS_TEXT}. Install it, or use adam."
        )


def refuse_small_expert_parameters(
    role: str, chunks: Iterable[torch.nn.Module]
) -> None:
    """Raise ConfigError if experts with replicas of their own have parameters that Muon leaves to Adam.

    megatron-core (0.19.2) has no sharded Adam for such biases, and would fail by an
    assertion.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_of_experts = not getattr(parameter, "allreduce", True)
            if is_of_experts and parameter.requires_grad and parameter.dim() != 2:
                raise ConfigError(
                    f"{role}.optimizer.optimizer=muon: megatron-core does not shard the biases of experts ({name}). "
                    f"Set {role}.ddp.use_distributed_optimizer: false, or {role}.ep: 1."
                )


def whole_parameter_layout(
    chunk: torch.nn.Module,
    ddp_config: DistributedDataParallelConfig,
    groups: Any,
    *,
    disable_bucketing: bool,
) -> Any:
    """Return the layout of a model chunk's buffers in which no matrix crosses the border of two ranks' shards.

    The parameters are marked with the buffer that they belong to, which megatron-core's
    DistributedDataParallel reads. It expects the layout as `full_param_layout`.

    Args:
        groups: process groups of the role's grid.
        disable_bucketing: whether each buffer is one bucket, as for all chunks but the first.
    """
    # Only megatron-core 0.19 and later has this function.
    from megatron.core.optimizer.layer_wise_optimizer import (
        tag_params_for_buffer_routing,
    )

    tag_params_for_buffer_routing([chunk])
    replicas = groups.intra_dp_cp.size()
    # The rules of DistributedDataParallel, which must come to the same buckets.
    bucket_size = ddp_config.bucket_size or max(40_000_000, 1_000_000 * replicas)
    one_bucket = (
        not ddp_config.overlap_grad_reduce or disable_bucketing or groups.pp.rank() > 0
    )
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        None if one_bucket else bucket_size,
        replicas,
        ddp_config,
        expert_data_parallel_world_size=groups.intra_expt_dp.size(),
    )


class WholeParameterOptimizer(LayerWiseDistributedOptimizer):  # type: ignore[misc]
    """LayerWiseDistributedOptimizer that also trains float32 weights, and reduces norms over the grid's groups.

    megatron-core (0.19.2) wraps the optimizers of this rank's parameters for bfloat16
    only, and reduces gradient norms over the default process group.
    """

    def __init__(
        self,
        optimizers: list[Any],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: list[Callable[..., None] | None] | None = None,
        model_chunks: list[Any] | None = None,
    ) -> None:
        # `shard_params`, which the base class calls, reads them.
        self._optimizer_config = config
        self._init_state_fns = init_state_fn_list or [None] * len(optimizers)
        super().__init__(
            optimizers, config, pg_collection, init_state_fn_list, model_chunks
        )
        # A chain around this one asks it, and not its links, for the gradients of a norm.
        for optimizer in (self, *self.chained_optimizers):
            optimizer.grad_stats_parallel_group = pg_collection.intra_dist_opt
            optimizer.tp_group = pg_collection.tp
            optimizer.expert_tp_group = pg_collection.expt_tp

    def shard_params(
        self, optimizers: list[Any], full_param_layouts: Any = None
    ) -> None:
        """Keep only this rank's parameters in `optimizers`, which is changed in place."""
        super().shard_params(optimizers, full_param_layouts)
        if not self._optimizer_config.bf16:
            optimizers[:] = [
                FP32Optimizer(optimizer, self._optimizer_config, init_state)
                for optimizer, init_state in zip(
                    optimizers, self._init_state_fns, strict=True
                )
            ]

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm of the gradients of all matrices. Collective over the grid."""
        return get_grad_norm_fp32(
            self.get_grads_for_grad_norm(),
            grad_stats_parallel_group=self.pg_collection.intra_dist_opt,
        )


@contextlib.contextmanager
def whole_parameter_optimizers() -> Iterator[None]:
    """Let megatron-core's `get_megatron_optimizer` build `WholeParameterOptimizer` inside."""
    original = core_optimizers.LayerWiseDistributedOptimizer
    core_optimizers.LayerWiseDistributedOptimizer = WholeParameterOptimizer
    try:
        yield
    finally:
        core_optimizers.LayerWiseDistributedOptimizer = original


def whole_parameters(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (model parameter, float32 tensor that Muon updates) for the parameters of one optimizer on this rank."""
    if isinstance(optimizer, FP32Optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter
        return
    pairs = (
        (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
        (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
    )
    for of_model, masters in pairs:
        for parameters, tensors in zip(of_model, masters, strict=True):
            yield from zip(parameters, tensors, strict=True)
