"""A Megatron-core model with its optimizer: one update from micro-batches and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megaverl.algorithms.loss import clip_factor
from megaverl.algorithms.metrics import MetricSums, add_metrics
from megaverl.config.passthrough import coerce
from megaverl.config.roles import OffloadConfig
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import ConfigError, TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.weights.fingerprint import model_identity
from megaverl.workers.megatron_model import Loss, MegatronModel
from megaverl.workers.offload import Nowhere, Offload, Storages, place_for, storages_of

platform.adapt_megatron()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


@dataclass(frozen=True)
class UpdateReport:
    """What one optimizer step did.

    Attributes:
        sums: the loss's sums, added over all micro-batches and data-parallel ranks, equal on every rank.
        grad_norm: of the whole model, before clipping.
    """

    sums: MetricSums
    grad_norm: float
    learning_rate: float


class UpdateDecision(Protocol):
    """What is to become of a gradient: `megaverl.coordinator.Decision`.

    It is multiplied by `scale` (its loss is then the mean over all tokens) and by `clip`; `schedule_step` updates were
    applied before this one.
    """

    @property
    def applies(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def schedule_step(self) -> int: ...


class DecidesUpdates(Protocol):
    """Who decides over updates: `megaverl.coordinator.CoordinatorClient`.

    Attributes:
        oldest, newest: versions of the engines' weights: that of the oldest sample, and that which they have now.
    """

    oldest: int
    newest: int

    def __call__(
        self, sums: MetricSums, norm: float, tokens: float, *, overflow: bool, max_norm: float
    ) -> UpdateDecision: ...


@dataclass(frozen=True)
class OwnDecision:
    """Where nobody else decides: a supervised stage, a stage on pairs."""

    applies: bool
    clip: float
    schedule_step: int
    scale: float = 1.0


class Islands(Protocol):
    """The same model elsewhere, trained on other samples: `megaverl.trainer.islands.Island`."""

    part: tuple[int, int]

    def before_update(self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """When this island's gradients are added up over its ranks; the sums of the loss that are to be reported."""

    def after_update(self) -> None:
        """When the step is taken, or skipped."""


class TrainableModel:
    """Wraps a `MegatronModel` in megatron-core's DistributedDataParallel, optimizer and scheduler.

    Args:
        total_updates: how many optimizer steps the run will take; the learning rate decays over them. A skipped one
            does not count.
        gradient_accumulation: micro-batches of an optimizer step, at least.
        offload: what is away while it is not needed.

    Attributes:
        before_step: called when the optimizer is about to change weights and its state.
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
        self.model, self.gradient_accumulation = model, gradient_accumulation
        self.before_step: Callable[[], None] = lambda: None
        grid = model.grid
        # adapters are of use with the weights that they were trained on, and no others
        adapted = model.adapters is not None
        self.base_identity = model_identity(model.layout_of, model.parameters, grid.world) if adapted else ""
        try:
            of_ddp = coerce(DistributedDataParallelConfig, ddp, f"{model.role}.ddp")
            ddp_config = DistributedDataParallelConfig(**({"use_distributed_optimizer": True} | of_ddp))
            given = {
                "params_dtype": model.config.params_dtype,
                "bf16": model.config.bf16,
                "fp16": model.config.fp16,
                "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
                "min_lr": 0.0,
            }
            config = OptimizerConfig(**(given | coerce(OptimizerConfig, optimizer, f"{model.role}.optimizer")))
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{model.role}.optimizer or {model.role}.ddp: megatron-core refuses it: {error}"
            ) from error
        self.chunks = [
            DistributedDataParallel(
                config=model.config,
                ddp_config=ddp_config,
                module=chunk,
                disable_bucketing=index > 0,
                pg_collection=grid.pg_collection,
            )
            for index, chunk in enumerate(model.chunks)
        ]
        self._max_norm = float(config.clip_grad)
        self._overlap_param_gather = ddp_config.overlap_param_gather
        self._is_distributed = ddp_config.use_distributed_optimizer
        self.optimizer = get_megatron_optimizer(
            config, self.chunks, use_gloo_process_groups=False, pg_collection=grid.pg_collection
        )
        self.scheduler = OptimizerParamScheduler(self.optimizer, **scheduler_options(config, scheduler, total_updates))
        model.config.grad_scale_func = self.optimizer.scale_loss
        model.config.finalize_model_grads_func = _finalize
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.coordinator: DecidesUpdates | None = None
        self.islands: Islands | None = None
        self._is_updating = False
        self._gradients: Offload | None = None
        self._optimizer_state: Offload | None = None
        self._offload(offload or OffloadConfig())

    def _offload(self, config: OffloadConfig) -> None:
        """From now on, weights, gradients and the optimizer's state are away between the stages that need them."""
        place = place_for(config.folder)
        if place is None:
            return
        if config.gradients:
            self._gradients = Offload(lambda: storages_of(b.grad_data for b in self._buffers), Nowhere())
            self._gradients.offload()
        if config.optimizer:
            self._optimizer_state = Offload(self._optimizer_storages, place)
            self._optimizer_state.offload()
        if config.parameters:
            self.model.offload_to(place_for(config.folder) or place)

    @property
    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _optimizer_storages(self) -> Storages:
        """Master weights and moments, where they are not views of the weights (as in float32)."""
        shared = [*self.model.held, *(buffer.grad_data for buffer in self._buffers)]
        return storages_of(optimizer_tensors(self.optimizer), without=shared)

    @property
    def offloads(self) -> bool:
        """Whether any of its state is away at times."""
        return self.model.offloads or self._optimizer_state is not None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the updates of one stage: weights and gradients are here, and the optimizer's state from its first
        step on. `update` is inside one by itself; a stage of several updates is inside one for all of them."""
        outermost, self._is_updating = not self._is_updating, True
        with self.model.on_device, self._gradients or nullcontext():
            try:
                yield
            finally:
                self._is_updating = not outermost
                if outermost and self._optimizer_state is not None:
                    self._optimizer_state.offload()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Around what looks at the weights and the optimizer's state, such as a checkpoint's saving and loading."""
        with self.model.on_device, self._optimizer_state or nullcontext():
            yield

    @property
    def part(self) -> tuple[int, int]:
        """(which, of how many): the share of a batch that this model trains on."""
        return self.islands.part if self.islands is not None else (0, 1)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the gradients, added up over the data-parallel ranks: flat, in a fixed order."""
        found: dict[str, torch.Tensor] = {}
        for number, chunk in enumerate(self.chunks):
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            for bucket_group in groups:
                for bucket in bucket_group.buckets:
                    flat = bucket.grad_data
                    if bucket_group.ddp_config.use_distributed_optimizer:  # each rank has its shard alone
                        size = bucket_group.intra_distributed_optimizer_instance_size
                        flat = flat.view(size, -1)[bucket_group.intra_distributed_optimizer_instance_rank]
                    found[f"{number}.{len(found)}"] = flat
        return found

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """What the optimizer steps on: float32 of what is trained, of all of it or of this data-parallel rank's part
        alone (under the distributed optimizer), in a fixed order. In float32 they are the weights themselves.

        To be read inside `updating` or `present`.
        """
        if self._optimizer_state is not None:
            self._optimizer_state.onload()  # a skipped update has left it where it was
        optimizers = enumerate(_chain(self.optimizer))
        found = ((number, tensor) for number, single in optimizers for tensor in _stepped_on(single))
        return {f"{number}.{index}": tensor.detach() for index, (number, tensor) in enumerate(found)}

    def follow_masters(self) -> None:
        """The masters were changed from outside: the weights become these, as after an optimizer step."""
        for single in _chain(self.optimizer):
            if isinstance(single, MixedPrecisionOptimizer) and not single.is_stub_optimizer:
                single._copy_main_params_to_model_params()
        if self._is_distributed:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else math.nan

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, tokens: float = 1.0) -> UpdateReport:
        """One optimizer step on this data-parallel rank's share of a mini-batch. Every rank takes part.

        Args:
            tokens: of the whole mini-batch, that the loss is taken over.

        Raises:
            TrainingStopped: the loss or the gradient is not finite; the weights are left as they were.
        """
        with self.updating():
            return self._update(micro_batches, loss, tokens)

    def _update(self, micro_batches: Sequence[MicroBatch], loss: Loss, tokens: float) -> UpdateReport:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.model.forward_backward(self.chunks, micro_batches, loss)
        sums = self._reduce(reports)
        if self.islands is not None:
            sums = self.islands.before_update(sums, tokens, micro_batches)
        found_inf = self.optimizer.prepare_grads()
        grad_norm = math.nan if found_inf else float(self.optimizer.get_grad_norm())
        decision = self._decide(sums, grad_norm, tokens, found_inf)
        self._take_schedule_to(decision.schedule_step)
        learning_rate = self.learning_rate
        if decision.applies:
            self._multiply_gradients(decision.scale * decision.clip)
            if self._optimizer_state is not None:
                self._optimizer_state.onload()
            self.before_step()
            self.optimizer.step_with_ready_grads()
            if self._overlap_param_gather:
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
        self._take_schedule_to(decision.schedule_step + decision.applies)
        if self.islands is not None:
            self.islands.after_update()
        return UpdateReport(sums, grad_norm, learning_rate)

    def _decide(self, sums: MetricSums, grad_norm: float, tokens: float, found_inf: bool) -> UpdateDecision:
        """Whether to take the step, and with which factors: as the coordinator says, if there is one."""
        wrong = [name for name, value in sums.items() if not bool(torch.isfinite(value).all())]
        if self.coordinator is None:
            if not found_inf:
                self._check_finite(wrong, grad_norm)
            return OwnDecision(not found_inf, clip_factor(grad_norm, self._max_norm), self.scheduler.num_steps)
        norm = math.nan if wrong else grad_norm
        try:
            return self.coordinator(sums, norm, tokens, overflow=found_inf, max_norm=self._max_norm)
        except TrainingStopped:
            if not found_inf:
                self._check_finite(wrong, grad_norm)  # where it is this role's fault, it can say more
            raise

    def _reduce(self, reports: list[Mapping[str, torch.Tensor]]) -> MetricSums:
        """Add the losses' sums over micro-batches and ranks. All ranks learn the names from the last stages.

        Of an update this is what the host reads of the loss, in one copy; from there on no device takes part.
        """
        mine = MetricSums()
        if self.model.reports:
            for report in reports:
                mine = add_metrics(mine, report)
        names, values = sorted(mine), []
        if names:
            values = torch.stack([mine[name].double() for name in names]).tolist()
        total = reduce_json(dict(zip(names, values, strict=True)), _total, self.model.grid.world)
        return {name: torch.tensor(sums, dtype=torch.float64) for name, sums in total.items()}

    def _check_finite(self, wrong: list[str], grad_norm: float) -> None:
        if wrong or not math.isfinite(grad_norm):
            raise TrainingStopped(
                f"{self.model.role}: the update is not finite ({', '.join(wrong) or 'loss finite'}; gradient norm "
                f"{grad_norm}). The weights were not changed. Lower {self.model.role}.optimizer.lr, or look at the "
                "rewards and log-probs of this step in metrics.jsonl."
            )

    def _take_schedule_to(self, steps: int) -> None:
        """The learning rate and the weight decay after so many applied updates; the coordinator counts them."""
        if steps != self.scheduler.num_steps:
            self.scheduler.step(increment=steps - self.scheduler.num_steps)

    def _multiply_gradients(self, factor: float) -> None:
        """Those that the optimizer is about to step on, as megatron-core's clipping multiplies them."""
        if factor == 1.0:
            return
        for optimizer in _chain(self.optimizer):
            parameters = [] if getattr(optimizer, "is_stub_optimizer", False) else optimizer.get_parameters()
            of_precision_aware = (getattr(parameter, "decoupled_grad", None) for parameter in parameters)
            for parameter, decoupled in zip(parameters, of_precision_aware, strict=True):
                gradient = decoupled if decoupled is not None else parameter.grad
                if gradient is not None:
                    gradient.mul_(factor)


def _total(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Every name's sums, added up in the order of the ranks."""
    total: dict[str, list[float]] = {}
    for found in ranks:
        for name, sums in found.items():
            total[name] = [one + more for one, more in zip(total[name], sums, strict=True)] if name in total else sums
    return total


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What megatron-core's optimizers step on, and their state: all tensors of all optimizers in a chain."""
    for single in _chain(optimizer):
        yield from _stepped_on(single)
        for state in single.optimizer.state.values() if single.optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """megatron-core has several optimizers in one where experts have groups of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _stepped_on(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    inner = optimizer.optimizer
    if inner is not None:  # else there is no trainable parameter on this rank
        yield from (parameter for group in inner.param_groups for parameter in group["params"])


def scheduler_options(config: OptimizerConfig, given: Mapping[str, Any], total_updates: int) -> dict[str, Any]:
    """Arguments of megatron-core's OptimizerParamScheduler: constant learning rate unless `given` says more."""
    peak = config.lr if config.lr is not None else 1e-6
    weight_decay = config.weight_decay
    return {
        "init_lr": 0.0 if given.get("lr_warmup_steps") else peak,
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
    } | dict(given)


def _finalize(chunks: list[Any], num_tokens: Any, **groups: Any) -> None:
    """Reduce gradients over the ranks without scaling: losses are already normalised over the global batch."""
    finalize_model_grads(chunks, None, **groups)
