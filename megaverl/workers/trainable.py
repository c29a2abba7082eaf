"""A model with its optimizer: one update from micro-batches and a loss, as the coordinator decides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from megaverl.algorithms.loss import MetricSums, add_metrics, clip_factor
from megaverl.config.roles import OffloadConfig
from megaverl.distributed.collectives import reduce_json
from megaverl.errors import ReshardError, TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.weights.fingerprint import model_identity
from megaverl.workers.model import Loss, TrainingModel
from megaverl.workers.offload import Nowhere, Offload, Storages, place_for, storages_of

platform.adapt_megatron()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


@dataclass(frozen=True)
class UpdateReport:
    """What one optimizer step did.

    Attributes:
        sums: the loss's sums, added over all micro-batches and data-parallel ranks, equal on every rank.
        grad_norm: of the whole model, before clipping.
        is_skipped: the weights were left as they were.
    """

    sums: MetricSums
    grad_norm: float
    learning_rate: float
    is_skipped: bool


class UpdateDecision(Protocol):
    """What is to become of a gradient: `megaverl.coordinator.decide.Decision`.

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


class SendsWeights(Protocol):
    """Takes new weights to where they are used: `megaverl.workers.weight_sync.WeightSync`."""

    @property
    def is_under_way(self) -> bool: ...
    def begin(self) -> None:
        """The optimizer step begins behind which no weight changes until these are used."""

    def final(self, number: int | None = None) -> None:
        """So many sets of `TrainingModel.in_order` have their new values; None: all weights have, begun or not."""


class TrainableModel(ABC):
    """A `TrainingModel` that takes updates: what is the same whoever computes gradients and steps.

    Args:
        max_norm: gradients of a larger norm are clipped to it. 0: never.
        gradient_accumulation: micro-batches of an optimizer step, at least.

    Attributes:
        before_step: called when the optimizer is about to change weights and its state.
        sender: new weights go from here, as soon as the last update of a step has made them. None: they are fetched.
        scheduler: of the learning rate and the weight decay; a subclass makes it, as it needs the optimizer.
    """

    scheduler: OptimizerParamScheduler

    def __init__(self, model: TrainingModel, *, max_norm: float, gradient_accumulation: int = 1) -> None:
        self.model, self.gradient_accumulation, self._max_norm = model, gradient_accumulation, max_norm
        self.before_step: Callable[[], None] = lambda: None
        # adapters are of use with the weights that they were trained on, and no others
        adapted = model.adapters is not None
        self.base_identity = model_identity(model.layout_of, model.parameters, model.grid.world) if adapted else ""
        self.coordinator: DecidesUpdates | None = None
        self.islands: Islands | None = None
        self.sender: SendsWeights | None = None
        self._sends_to: SendsWeights | None = None  # in an optimizer step, as its weights are made
        self._is_updating = False
        self._gradients: Offload | None = None
        self._optimizer_state: Offload | None = None

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Before an update."""

    @abstractmethod
    def _forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> list[Mapping[str, torch.Tensor]]:
        """Accumulate gradients, and add them up over the data-parallel ranks; each micro-batch's sums where the model
        reports."""

    @abstractmethod
    def _gradient_norm(self) -> float | None:
        """Of the whole model's gradient; None where it overflowed (float16)."""

    @abstractmethod
    def _multiply_gradients(self, factor: float) -> None:
        """Those that the optimizer is about to step on."""

    @abstractmethod
    def _step(self) -> None:
        """The optimizer's, on all weights."""

    @property
    @abstractmethod
    def trained(self) -> list[torch.Tensor]:
        """The memory that only optimizer steps change: weights, masters, moments."""

    @abstractmethod
    def _optimizer_storages(self) -> Storages:
        """Master weights and moments, where they are not views of the weights (as in float32)."""

    @property
    @abstractmethod
    def _gradient_buffers(self) -> list[torch.Tensor]:
        """Where gradients lie between updates."""

    @property
    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the gradients, added up over the data-parallel ranks: flat, in a fixed order."""

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """What the optimizer steps on: float32 of what is trained, of all of it or of this data-parallel rank's part
        alone, in a fixed order. In float32 they are the weights themselves.

        To be read inside `updating` or `present`.
        """
        if self._optimizer_state is not None:
            self._optimizer_state.onload()  # a skipped update has left it where it was
        return self._masters()

    @abstractmethod
    def _masters(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def follow_masters(self) -> None:
        """The masters were changed from outside: the weights become these, as after an optimizer step."""

    @property
    def learning_rate(self) -> float:
        """Of the next update; NaN where this rank has nothing to train."""
        groups = self.scheduler.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else math.nan

    def _offload(self, config: OffloadConfig) -> None:
        """From now on, weights, gradients and the optimizer's state are away between the stages that need them."""
        place = place_for(config.folder)
        if place is None:
            return
        if config.gradients:
            self._gradients = Offload(lambda: storages_of(self._gradient_buffers), Nowhere())
            self._gradients.offload()
        if config.optimizer:
            self._optimizer_state = Offload(self._optimizer_storages, place)
            self._optimizer_state.offload()
        if config.parameters:
            self.model.offload_to(place_for(config.folder) or place)

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

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, tokens: float = 1.0, *, is_last: bool = False
    ) -> UpdateReport:
        """One optimizer step on this data-parallel rank's share of a mini-batch. Every rank takes part.

        Args:
            tokens: of the whole mini-batch, that the loss is taken over.
            is_last: no other update comes before the next reshard.

        Raises:
            TrainingStopped: the loss or the gradient is not finite; the weights are left as they were.
            ReshardError: the weights are on their way since the update that was the last.
        """
        if self.sender is not None and self.sender.is_under_way:
            raise ReshardError(
                f"{self.model.role}: an update after the last of its step, whose weights are on their way to the "
                "engines. Set reshard.overlap=false."
            )
        with self.updating():
            return self._update(micro_batches, loss, tokens, self.sender if is_last else None)

    def _update(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, tokens: float, sender: SendsWeights | None
    ) -> UpdateReport:
        self._zero_gradients()
        reports = self._forward_backward(micro_batches, loss)
        sums = self._reduce(reports)
        if self.islands is not None:
            sums = self.islands.before_update(sums, tokens, micro_batches)
        norm = self._gradient_norm()
        grad_norm = math.nan if norm is None else norm
        decision = self._decide(sums, grad_norm, tokens, norm is None)
        self._take_schedule_to(decision.schedule_step)
        learning_rate = self.learning_rate
        if decision.applies:
            self._multiply_gradients(decision.scale * decision.clip)
            if self._optimizer_state is not None:
                self._optimizer_state.onload()
            self.before_step()
        self._sends_to = sender if self.islands is None else None  # islands change weights after the step
        if self._sends_to is not None:
            self._sends_to.begin()
        if decision.applies:
            self._step()
        self._take_schedule_to(decision.schedule_step + decision.applies)
        if self.islands is not None:
            self.islands.after_update()
        if sender is not None:
            sender.final()
        return UpdateReport(sums, grad_norm, learning_rate, not decision.applies)

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

    def move_schedule(self, updates: int) -> None:
        """Move the schedule of learning rate and weight decay by so many updates, but not before its beginning."""
        self._take_schedule_to(max(0, self.scheduler.num_steps + updates))

    def _take_schedule_to(self, steps: int) -> None:
        """The learning rate and the weight decay after so many applied updates; the coordinator counts them."""
        if steps != self.scheduler.num_steps:
            self.scheduler.step(increment=steps - self.scheduler.num_steps)


def _total(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Every name's sums, added up in the order of the ranks."""
    total: dict[str, list[float]] = {}
    for found in ranks:
        for name, sums in found.items():
            total[name] = [one + more for one, more in zip(total[name], sums, strict=True)] if name in total else sums
    return total
