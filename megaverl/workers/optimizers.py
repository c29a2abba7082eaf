"""Trainable models on Megatron-core and FSDP2: gradients, optimizers and learning-rate schedules.

Megatron-core models use its DistributedDataParallel and optimizer, FSDP2 models torch's
AdamW on their shards. Both use megatron-core's parameter scheduler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megaverl.config.megatron_defaults import MUON_DEFAULTS, ddp_defaults
from megaverl.config.moment_dtypes import MOMENT_FIELDS, moment_dtypes
from megaverl.config.passthrough import coerce
from megaverl.config.roles import OffloadConfig
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import ConfigError
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model import Loss
from megaverl.workers.muon import (
    is_muon,
    refuse_small_expert_parameters,
    require_muon,
    whole_parameter_layout,
    whole_parameter_optimizers,
)
from megaverl.workers.offload import Storages, storages_of
from megaverl.workers.small_moments import SmallMomentAdamW
from megaverl.workers.trainable import TrainableModel

platform.adapt_megatron()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


class MegatronGradients(TrainableModel):
    """`MegatronModel` wrapped in megatron-core's DistributedDataParallel: what has an optimizer and what has none.

    Args:
        shards_whole_parameters: whether shards of the data-parallel ranks consist of whole matrices, as Muon needs.
    """

    model: MegatronModel

    def __init__(
        self,
        model: MegatronModel,
        ddp_config: DistributedDataParallelConfig,
        *,
        max_norm: float,
        gradient_accumulation: int,
        shards_whole_parameters: bool = False,
    ) -> None:
        super().__init__(
            model, max_norm=max_norm, gradient_accumulation=gradient_accumulation
        )
        self.chunks = []
        for index, chunk in enumerate(model.chunks):
            # As in Megatron-LM's training loop: later chunks communicate while others
            # compute, without buckets.
            disable_bucketing = index > 0
            options: dict[str, Any] = {}
            if shards_whole_parameters:
                options["full_param_layout"] = whole_parameter_layout(
                    chunk,
                    ddp_config,
                    model.grid.pg_collection,
                    disable_bucketing=disable_bucketing,
                )
            self.chunks.append(
                DistributedDataParallel(
                    config=model.config,
                    ddp_config=ddp_config,
                    module=chunk,
                    disable_bucketing=disable_bucketing,
                    pg_collection=model.grid.pg_collection,
                    **options,
                )
            )
        model.config.finalize_model_grads_func = _finalize
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss
    ) -> list[Mapping[str, torch.Tensor]]:
        return self.model.forward_backward(self.chunks, micro_batches, loss)

    @property
    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients in the shapes and under the local names of `model.held_parameters`.

        With a distributed optimizer on several data-parallel ranks, only this rank's
        shard of each buffer is summed over these ranks.
        """
        parameters: Mapping[str, Any] = self.model.held_parameters
        return {name: parameter.main_grad for name, parameter in parameters.items()}

    @property
    def _buffers(self) -> list[Any]:
        return [
            buffer
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    @property
    def _gradient_buffers(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self._buffers]


class MegatronTrainable(MegatronGradients):
    """`MegatronModel` wrapped in megatron-core's DistributedDataParallel, optimizer and scheduler.

    Args:
        total_updates: number of optimizer steps of the run, over which the learning rate decays. Skipped steps do not
            count.
        gradient_accumulation: minimum number of micro-batches of an optimizer step.
        offload: which state is offloaded while it is not needed.
    """

    def __init__(
        self,
        model: MegatronModel,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any],
        ddp: Mapping[str, Any],
        total_updates: int,
        gradient_accumulation: int = 1,
        offload: OffloadConfig | None = None,
    ) -> None:
        grid = model.grid
        # megatron-core reduces gradients over data-parallel and context-parallel ranks
        # together.
        replicas = grid.shape.dp * grid.shape.cp
        config, ddp_config = optimizer_configs(
            model.role, optimizer, ddp, model.config.params_dtype, replicas
        )
        # megatron-core before 0.19 has neither the field nor the optimizer.
        shards_whole_parameters = bool(
            getattr(config, "use_layer_wise_distributed_optimizer", False)
        )
        if shards_whole_parameters:
            refuse_small_expert_parameters(model.role, model.chunks)
        super().__init__(
            model,
            ddp_config,
            max_norm=float(config.clip_grad),
            gradient_accumulation=gradient_accumulation,
            shards_whole_parameters=shards_whole_parameters,
        )
        self._overlap_param_gather = ddp_config.overlap_param_gather
        if self._overlap_param_gather:
            # Names of parameters by identity, because megatron-core's buckets hold the
            # parameters themselves.
            names = {
                id(parameter): name for name, parameter in model.parameters.items()
            }
            model.in_order = [
                frozenset(
                    names[id(p)]
                    for bucket in group.buckets
                    for p in bucket.params
                    if id(p) in names
                )
                for group in self._gathered_groups
            ]
        self._is_distributed = ddp_config.use_distributed_optimizer
        with (
            whole_parameter_optimizers()
            if shards_whole_parameters
            else contextlib.nullcontext()
        ):
            self.optimizer = get_megatron_optimizer(
                config,
                self.chunks,
                use_gloo_process_groups=False,
                pg_collection=grid.pg_collection,
            )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, **scheduler_options(config, scheduler, total_updates)
        )
        # megatron-core asks the model's configuration for the functions of its
        # schedule.
        model.config.grad_scale_func = self.optimizer.scale_loss
        for single in single_optimizers(self.optimizer):
            create_state(single)
        self._offload(offload or OffloadConfig())

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        self.optimizer.zero_grad()

    def _gradient_norm(self) -> float | None:
        return (
            # True if float16's scaling found an overflow, in which case there is no
            # norm.
            None
            if self.optimizer.prepare_grads()
            else float(self.optimizer.get_grad_norm())
        )

    def _step(self) -> None:
        self.optimizer.step_with_ready_grads()
        if self._overlap_param_gather:
            for number, group in enumerate(self._gathered_groups, start=1):
                # Collective over the data-parallel ranks of each group.
                # Gather group by group, so that one can be sent to the engines while
                # the next is gathered.
                group.start_param_sync(force_sync=True)
                if self._sends_to is not None:
                    self._sends_to.final(number)

    @property
    def _gathered_groups(self) -> list[Any]:
        """Bucket groups, each gathered together, in the order of DistributedDataParallel.start_param_sync."""
        return [
            g
            for chunk in self.chunks
            for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]

    @property
    def trained(self) -> list[torch.Tensor]:
        return [*self.model.held, *optimizer_tensors(self.optimizer)]

    def _optimizer_storages(self) -> Storages:
        # Some optimizers keep views of weights or gradients, which move with those.
        shared = [*self.model.held, *self._gradient_buffers]
        return storages_of(optimizer_tensors(self.optimizer), without=shared)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        gradients: dict[str, torch.Tensor] = {}
        for number, chunk in enumerate(self.chunks):
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            for bucket_group in groups:
                for bucket in bucket_group.buckets:
                    flat = bucket.grad_data
                    # Keep only this rank's shard.
                    if bucket_group.ddp_config.use_distributed_optimizer:
                        # The reduce-scattered gradient of this rank is one of `size`
                        # equal parts of the bucket.
                        size = bucket_group.intra_distributed_optimizer_instance_size
                        flat = flat.view(size, -1)[
                            bucket_group.intra_distributed_optimizer_instance_rank
                        ]
                    gradients[f"{number}.{len(gradients)}"] = flat
        return gradients

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that hold the state of this rank's parameters, one for each optimizer of megatron-core's chain."""
        inner = (single.optimizer for single in single_optimizers(self.optimizer))
        return [optimizer for optimizer in inner if optimizer is not None]

    def _masters(self) -> dict[str, torch.Tensor]:
        optimizers = enumerate(single_optimizers(self.optimizer))
        masters = (
            (number, tensor)
            for number, single in optimizers
            for tensor in _stepped_on(single)
        )
        return {
            f"{number}.{index}": tensor.detach()
            for index, (number, tensor) in enumerate(masters)
        }

    def follow_masters(self) -> None:
        for single in single_optimizers(self.optimizer):
            # Optimizers in float32 step on the weights themselves and have nothing to
            # copy.
            if (
                isinstance(single, MixedPrecisionOptimizer)
                and not single.is_stub_optimizer
            ):
                single._copy_main_params_to_model_params()
        if self._is_distributed:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients that the optimizer is about to use, as megatron-core's clipping does."""
        if factor == 1.0:
            return
        for optimizer in single_optimizers(self.optimizer):
            parameters = (
                []
                if getattr(optimizer, "is_stub_optimizer", False)
                else optimizer.get_parameters()
            )
            # Precision-aware optimizers keep gradients beside the parameter.
            of_precision_aware = (
                getattr(parameter, "decoupled_grad", None) for parameter in parameters
            )
            for parameter, decoupled in zip(
                parameters, of_precision_aware, strict=True
            ):
                gradient = decoupled if decoupled is not None else parameter.grad
                if gradient is not None:
                    gradient.mul_(factor)


def optimizer_configs(
    role: str,
    optimizer: Mapping[str, Any],
    ddp: Mapping[str, Any],
    dtype: torch.dtype,
    replicas: int = 1,
) -> tuple[OptimizerConfig, DistributedDataParallelConfig]:
    """Build megatron-core's optimizer and DistributedDataParallel configurations from a role's mappings.

    Args:
        dtype: of the model's parameters.
        replicas: data-parallel ranks times context-parallel ranks of the role's grid.

    Raises:
        ConfigError: megatron-core refuses a value; the message quotes its reason.
    """
    ddp_config = ddp_config_of(role, ddp, replicas)
    is_sharded = ddp_config.use_distributed_optimizer
    try:
        defaults = {
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "use_distributed_optimizer": is_sharded,
            "min_lr": 0.0,
        }
        if is_muon(optimizer):
            require_muon(role)
            defaults |= MUON_DEFAULTS | {
                "use_distributed_optimizer": False,
                "use_layer_wise_distributed_optimizer": is_sharded,
                "overlap_param_gather": ddp_config.overlap_param_gather,
            }
            # With Muon this field of both classes means the one in `ddp`, which the
            # configuration's checks have compared with it.
            optimizer = {
                name: value
                for name, value in optimizer.items()
                if name != "use_distributed_optimizer"
            }
        config = OptimizerConfig(
            **(defaults | coerce(OptimizerConfig, optimizer, f"{role}.optimizer"))
        )
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{role}.optimizer or {role}.ddp: megatron-core refuses it: {error}"
        ) from error
    return config, ddp_config


def ddp_config_of(
    role: str, ddp: Mapping[str, Any], replicas: int = 1
) -> DistributedDataParallelConfig:
    """Build megatron-core's DistributedDataParallel configuration from a role's mapping.

    For arguments and errors, see `optimizer_configs`.
    """
    try:
        given_ddp = coerce(DistributedDataParallelConfig, ddp, f"{role}.ddp")
        fields = ddp_defaults(given_ddp, replicas=replicas, on_gpus=platform.is_cuda)
        return DistributedDataParallelConfig(**fields)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{role}.ddp: megatron-core refuses it: {error}") from error


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that megatron-core's optimizers update and their state, over all optimizers of a chain."""
    for single in single_optimizers(optimizer):
        # State exists after the first step only.
        yield from _stepped_on(single)
        for state in (
            single.optimizer.state.values() if single.optimizer is not None else ()
        ):
            yield from (
                value for value in state.values() if isinstance(value, torch.Tensor)
            )


def single_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, whose links may be chains.

    Megatron-core uses several if experts have their own process groups, or with Muon.
    """
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [
        single
        for link in optimizer.chained_optimizers
        for single in single_optimizers(link)
    ]


def create_state(optimizer: MegatronOptimizer) -> None:
    """Create the initial state of one of megatron-core's optimizers, unless it exists.

    Nothing happens on a rank without trainable parameters, and for optimizers whose
    state megatron-core cannot create before a step.

    The first step would create the state too, but next to the activations of an update.
    Blocks of torch's allocator that hold both cannot be given back to the device, where
    the cache of an engine on the same GPU needs their memory when it wakes. A run whose
    state does not fit also fails before its first step, not after it.
    """
    inner = optimizer.optimizer
    if inner is None or optimizer.init_state_fn is None:
        return
    optimizer.init_state_fn(inner, optimizer.config)
    # Includes AdamW. Transformer Engine's Adam keeps its step per group instead.
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state.setdefault("step", torch.tensor(0.0))


def create_adam_state(
    optimizer: torch.optim.AdamW | SmallMomentAdamW, parameters: Iterable[torch.Tensor]
) -> None:
    """Create the initial state of an optimizer under FSDP2, unless it exists; see `create_state`."""
    for parameter in parameters:
        if isinstance(optimizer, SmallMomentAdamW):
            optimizer.allocated(parameter)
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)


def _stepped_on(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    inner = optimizer.optimizer
    if inner is not None:  # None if this rank has no trainable parameter
        yield from (
            parameter for group in inner.param_groups for parameter in group["params"]
        )


def scheduler_options(
    config: OptimizerConfig, overrides: Mapping[str, Any], total_updates: int
) -> dict[str, Any]:
    """Return arguments of megatron-core's OptimizerParamScheduler; `overrides` overrides a constant learning rate."""
    peak = config.lr if config.lr is not None else 1e-6
    weight_decay = config.weight_decay
    return {
        "init_lr": 0.0 if overrides.get("lr_warmup_steps") else peak,
        "max_lr": peak,
        "min_lr": config.min_lr,
        "lr_warmup_steps": 0,
        "lr_decay_steps": max(total_updates, 1),
        "lr_decay_style": "constant",
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_steps": max(total_updates, 1),
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": True,
    } | dict(overrides)


def _finalize(chunks: list[Any], num_tokens: Any, **groups: Any) -> None:
    """Reduce gradients over the ranks without scaling, because losses are already normalised over the global batch."""
    finalize_model_grads(chunks, None, **groups)


class FSDPTrainable(TrainableModel):
    """`FSDPModel` whose float32 shards are updated by AdamW.

    Args:
        optimizer: fields of megatron-core's OptimizerConfig, with the same defaults. As in megatron-core, parameters
            with one axis (biases, norms) have no weight decay. Dtypes of moments: `config.moment_dtypes`.
        scheduler: arguments of megatron-core's OptimizerParamScheduler.

    For the other arguments, see `MegatronTrainable`.

    Raises:
        ConfigError: a value is refused, or the model computes in float16.
    """

    model: FSDPModel

    def __init__(
        self,
        model: FSDPModel,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any],
        total_updates: int,
        gradient_accumulation: int = 1,
        offload: OffloadConfig | None = None,
    ) -> None:
        dtypes = moment_dtypes(optimizer)
        # megatron-core's class would demand Transformer Engine for them.
        optimizer = {
            name: value
            for name, value in optimizer.items()
            if name not in MOMENT_FIELDS
        }
        try:
            fields = {"min_lr": 0.0} | coerce(
                OptimizerConfig, optimizer, f"{model.role}.optimizer"
            )
            config = OptimizerConfig(**fields)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(f"{model.role}.optimizer: {error}") from error
        if model.dtype == torch.float16:
            raise ConfigError(
                f"{model.role}: engine: fsdp trains in float32 or bfloat16; float16 would need its loss scaled. Set "
                "model.dtype=bfloat16."
            )
        super().__init__(
            model,
            max_norm=float(config.clip_grad),
            gradient_accumulation=gradient_accumulation,
        )
        parameters = [
            parameter
            for parameter in model.module.parameters()
            if parameter.requires_grad
        ]
        # A rank may hold no row of a small parameter.
        self.parameters = [p for p in parameters if local(p).numel()]
        # As in megatron-core: biases and norms, which have one axis, do not decay.
        groups = [
            {"params": [p for p in self.parameters if p.dim() != 1], "wd_mult": 1.0},
            {"params": [p for p in self.parameters if p.dim() == 1], "wd_mult": 0.0},
        ]
        hyperparameters: dict[str, Any] = {
            "lr": config.lr or 1e-6,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
        }
        self.optimizer: torch.optim.AdamW | SmallMomentAdamW
        if set(dtypes.values()) == {"float32"}:
            self.optimizer = torch.optim.AdamW(groups, **hyperparameters)
        else:
            self.optimizer = SmallMomentAdamW(
                groups,
                **hyperparameters,
                dtypes={name: getattr(torch, dtype) for name, dtype in dtypes.items()},
            )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, **scheduler_options(config, scheduler, total_updates)
        )
        create_adam_state(self.optimizer, self.parameters)
        self._offload(offload or OffloadConfig())

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss
    ) -> list[Mapping[str, torch.Tensor]]:
        return self.model.forward_backward(micro_batches, loss)

    def _gradient_norm(self) -> float | None:
        """Return the norm over all shards, each counted once.

        Squares are added in float64, in the order of parameters and ranks, so that the
        result is reproducible.
        """
        square_sum = 0.0
        gradients = [
            local(p.grad)
            for p in self.parameters
            if p.grad is not None and self.model.speaks_for(p)
        ]
        if gradients:
            # One kernel for all norms, and a single blocking copy.
            square_sum = float(
                torch.stack(torch._foreach_norm(gradients)).double().square().sum()
            )
        return math.sqrt(reduce_json(square_sum, sum, self.model.grid.world))

    def _multiply_gradients(self, factor: float) -> None:
        if factor != 1.0 and (gradients := list(self.gradients.values())):
            torch._foreach_mul_(gradients, factor)

    def _step(self) -> None:
        self.optimizer.step()
        self._zero_gradients()  # free their memory between updates

    @property
    def trained(self) -> list[torch.Tensor]:
        return [*self.model.held, *self._state]

    @property
    def _state(self) -> list[torch.Tensor]:
        """Moments and step counts of the optimizer."""
        values = (
            value for state in self.optimizer.state.values() for value in state.values()
        )
        return [local(value) for value in values if isinstance(value, torch.Tensor)]

    def _optimizer_storages(self) -> Storages:
        return storages_of(self._state)

    @property
    def _gradient_buffers(self) -> list[torch.Tensor]:
        return []

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = (
            (number, parameter.grad) for number, parameter in enumerate(self.parameters)
        )
        return {
            str(number): local(gradient)
            for number, gradient in gradients
            if gradient is not None
        }

    def _masters(self) -> dict[str, torch.Tensor]:
        return {
            str(number): local(parameter).detach()
            for number, parameter in enumerate(self.parameters)
        }

    def follow_masters(self) -> None:
        """Do nothing: the optimizer updates the weights themselves."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
