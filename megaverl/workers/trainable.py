"""Base class of models with an optimizer.

An update computes gradients of micro-batches, reports on them, and applies them if the
decision is to do so.
"""

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
from megaverl.workers.decisions import (
    Decision,
    GradientReport,
    Rules,
    UpdateCounts,
    Verdict,
    decide,
)
from megaverl.workers.model import Loss, TrainingModel
from megaverl.workers.offload import Nowhere, Offload, Storages, place_for, storages_of

platform.adapt_megatron()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


@dataclass(frozen=True)
class UpdateReport:
    """Result of one optimizer step.

    Attributes:
        sums: the loss's sums over all micro-batches and data-parallel ranks, identical on every rank.
        grad_norm: of the whole model, before clipping.
        learning_rate: of this step.
        is_skipped: the weights were left unchanged.
    """

    sums: MetricSums
    grad_norm: float
    learning_rate: float
    is_skipped: bool


class Islands(Protocol):
    """Replica groups of the model on slowly connected nodes: `megaverl.trainer.islands.Island`.

    Each island trains on its share of a batch, and their updates are joined.

    Attributes:
        part: (index, count): this island's share of a batch.
    """

    part: tuple[int, int]

    def before_update(
        self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]
    ) -> MetricSums:
        """Return the loss sums to report. Called after this island's gradients are summed over its ranks."""

    def after_update(self) -> None:
        """Finish an update. Called after the step is taken or skipped."""


class SendsWeights(Protocol):
    """Sends new weights to the engines: `megaverl.workers.weight_sync.WeightSync`."""

    @property
    def is_under_way(self) -> bool: ...
    def begin(self) -> None:
        """Begin sending. Called before the last optimizer step of a training step.

        No weight changes after that step until the engines have it.
        """

    def final(self, number: int | None = None) -> None:
        """Report that the first `number` sets of `TrainingModel.in_order` have their new values.

        None reports all weights, and starts the transfer if `begin` was not called.
        """


class TrainableModel(ABC):
    """Base of a `TrainingModel` that takes updates, for all training backends.

        update(micro_batches, loss)
          zero gradients -> forward/backward -> sum over ranks -> gradient norm
          -> report, decide (on these ranks, or in the program) -> clip -> optimizer step -> send new weights

    Args:
        max_norm: gradients with a larger norm are clipped to it. 0: no clipping.
        gradient_accumulation: minimum number of micro-batches of an optimizer step.

    Attributes:
        name: name of the role in reports. Default: the model's role.
        rules: rules by which this rank decides about its updates.
        ask: reports to the program and returns its decision. None: this rank decides by itself.
        counts: number of updates so far.
        staleness: how many versions the oldest sample of the update is behind the engines' weights.
        before_step: called before the optimizer changes weights and its state.
        sender: sends new weights as soon as the last update of a step has written them. None: they are fetched later.
        scheduler: of learning rate and weight decay. Subclasses create it, because it needs the optimizer.
    """

    scheduler: OptimizerParamScheduler

    def __init__(
        self, model: TrainingModel, *, max_norm: float, gradient_accumulation: int = 1
    ) -> None:
        self.model, self.gradient_accumulation, self._max_norm = (
            model,
            gradient_accumulation,
            max_norm,
        )
        self.before_step: Callable[[], None] = lambda: None
        # Adapters fit only the weights that they were trained on. Checkpoints compare
        # this identity.
        adapted = model.adapters is not None
        # Collective over the grid: a digest of all weights before training.
        self.base_identity = (
            model_identity(model.layout_of, model.parameters, model.grid.world)
            if adapted
            else ""
        )
        self.name, self.rules, self.counts, self.staleness = (
            model.role,
            Rules(),
            UpdateCounts(),
            0,
        )
        self.ask: Callable[[GradientReport], Decision] | None = None
        self.islands: Islands | None = None
        self.sender: SendsWeights | None = None
        # Set during an optimizer step that sends its weights.
        self._sends_to: SendsWeights | None = None
        self._is_updating = False
        self._gradients: Offload | None = None
        self._optimizer_state: Offload | None = None

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Zero the gradients before an update."""

    @abstractmethod
    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss
    ) -> list[Mapping[str, torch.Tensor]]:
        """Accumulate gradients and sum them over the data-parallel ranks.

        Returns the sums of each micro-batch on ranks that report, see
        `TrainingModel.reports`.
        """

    @abstractmethod
    def _gradient_norm(self) -> float | None:
        """Return the norm of the whole model's gradient, or None if it overflowed (float16)."""

    @abstractmethod
    def _multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients that the optimizer is about to use."""

    @abstractmethod
    def _step(self) -> None:
        """Take the optimizer step on all weights."""

    @property
    @abstractmethod
    def trained(self) -> list[torch.Tensor]:
        """Tensors that only optimizer steps change: weights, master weights, moments."""

    @abstractmethod
    def _optimizer_storages(self) -> Storages:
        """Return the storages of master weights and moments, without those that the weights share (float32)."""

    @property
    @abstractmethod
    def _gradient_buffers(self) -> list[torch.Tensor]:
        """Tensors that hold gradients between updates."""

    @property
    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients, summed over the data-parallel ranks: flat tensors in a fixed order."""

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """Float32 tensors that the optimizer updates, in a fixed order.

        They cover all trained parameters, or only this data-parallel rank's part. With
        float32 weights they are the weights themselves. Read them inside `updating` or
        `present`.
        """
        # Master weights are read between updates, when the state may be offloaded.
        if self._optimizer_state is not None:
            self._optimizer_state.onload()  # a skipped update does not load it
        return self._masters()

    @abstractmethod
    def _masters(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def follow_masters(self) -> None:
        """Copy the master weights to the weights, after they were changed from outside."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update; NaN if this rank has nothing to train."""
        groups = self.scheduler.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else math.nan

    def _offload(self, config: OffloadConfig) -> None:
        """Offload weights, gradients and optimizer state between the stages that need them, from now on."""
        place = place_for(config.folder)
        if place is None:
            return
        if config.gradients:
            # Gradients are zeroed before each update, so their values need not be kept.
            self._gradients = Offload(
                lambda: storages_of(self._gradient_buffers), Nowhere()
            )
            self._gradients.offload()
        if config.optimizer:
            self._optimizer_state = Offload(self._optimizer_storages, place)
            self._optimizer_state.offload()
        if config.parameters:
            # A target of its own, since weights and optimizer state come and go at
            # different times.
            self.model.offload_to(place_for(config.folder) or place)

    @property
    def offloads(self) -> bool:
        """Return whether weights or optimizer state are offloaded at times."""
        return self.model.offloads or self._optimizer_state is not None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context for the updates of one stage. Weights and gradients are on the device inside it.

        The optimizer's state is loaded at the first applied step. `update` enters the
        context itself. A stage of several updates enters it once around all of them,
        which avoids moving the state in between.
        """
        # Nested contexts leave the state where it is. Only the outermost one offloads
        # it.
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
        """Return a context in which weights and optimizer state are on the device, for example to save a checkpoint."""
        with self.model.on_device, self._optimizer_state or nullcontext():
            yield

    @property
    def part(self) -> tuple[int, int]:
        """The share of a batch that this model trains on, as (index, count)."""
        return self.islands.part if self.islands is not None else (0, 1)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
        tokens: float = 1.0,
        *,
        is_last: bool = False,
    ) -> UpdateReport:
        """Take one optimizer step on this data-parallel rank's share of a mini-batch. Collective over the role's ranks.

        Args:
            tokens: number of tokens of the whole mini-batch in the loss.
            is_last: no other update follows before the next reshard.

        Raises:
            TrainingStopped: the loss or the gradient is not finite; the weights are unchanged.
            ReshardError: an earlier update was the last one of the step, and its weights are being sent.
        """
        # An engine would get a mixture of two versions.
        if self.sender is not None and self.sender.is_under_way:
            raise ReshardError(
                f"{self.model.role}: an update after the last one of its step, while the weights are being sent "
                "to the engines. Set reshard.overlap=false."
            )
        with self.updating():
            return self._update(
                micro_batches, loss, tokens, self.sender if is_last else None
            )

    def compute_gradients(
        self, micro_batches: Sequence[MicroBatch], loss: Loss
    ) -> MetricSums:
        """Compute the gradient of these micro-batches, and leave it in `gradients`. No weight changes. Collective.

        Call it inside `updating`, which keeps the gradients on the device.

        Returns:
            The loss's sums over all micro-batches and data-parallel ranks.
        """
        self._zero_gradients()
        return self._reduce(self._forward_backward(micro_batches, loss))

    def zero_gradients(self) -> None:
        """Zero `gradients`, so that gradients of other origin can be added to them."""
        self._zero_gradients()

    def apply_gradients(self, max_norm: float) -> float:
        """Take an optimizer step on `gradients`, with the optimizer's present settings. Collective.

        Nothing is decided: the caller has checked the gradients. Call it inside
        `updating`.

        Args:
            max_norm: larger gradients are clipped to this norm. 0: no clipping.

        Returns:
            The norm of the gradients before clipping. The step is not taken if it is not finite.
        """
        norm = self._gradient_norm()
        if norm is None or not math.isfinite(norm):
            return math.nan
        self._multiply_gradients(clip_factor(norm, max_norm))
        self.before_step()
        self._step()
        return norm

    def _update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
        tokens: float,
        sender: SendsWeights | None,
    ) -> UpdateReport:
        self._zero_gradients()
        reports = self._forward_backward(micro_batches, loss)
        # The reductions and the norm are collectives, so every rank reaches the same
        # decision.
        return self._finish_update(self._reduce(reports), tokens, micro_batches, sender)

    def update_from_islands(self) -> UpdateReport:
        """Take one optimizer step on gradients that `islands` provides. This model computes none itself.

        Collective over the role's ranks. Arguments and errors are otherwise those of
        `update`.
        """
        assert self.islands is not None, "the islands' gradients come through it"
        with self.updating():
            self._zero_gradients()
            return self._finish_update(MetricSums(), 1.0, (), None)

    def _finish_update(
        self,
        sums: MetricSums,
        tokens: float,
        micro_batches: Sequence[MicroBatch],
        sender: SendsWeights | None,
    ) -> UpdateReport:
        """Decide on the gradients of an update, and apply them."""
        if self.islands is not None:
            sums = self.islands.before_update(sums, tokens, micro_batches)
        norm = self._gradient_norm()
        grad_norm = math.nan if norm is None else norm
        # Without islands every rank decides by the same report. Otherwise the program
        # decides for all.
        decision = self._decide(sums, grad_norm, tokens, has_overflow=norm is None)
        self.counts = self.counts.after(decision)
        learning_rate = self.learning_rate
        if decision.applies:
            # Clipping and scaling come before the step, on gradients that all ranks
            # have summed.
            self._multiply_gradients(clip_factor(grad_norm, self._max_norm))
            if self._optimizer_state is not None:
                self._optimizer_state.onload()
            self.before_step()
        # Islands change the weights after the step, so they are sent only at its end.
        # A skipped last update is followed by a transfer too, because earlier updates have changed the weights.
        self._sends_to = sender if self.islands is None else None
        if self._sends_to is not None:
            self._sends_to.begin()
        if decision.applies:
            self._step()
            # The schedule pauses at a skipped update, as in Megatron-LM's training loop
            # (`train_step`). Otherwise a warm-up would be over before the first step,
            # while float16's loss scaling searches for its scale.
            self.move_schedule(1)
        if self.islands is not None:
            self.islands.after_update()
        if sender is not None:
            sender.final()
        return UpdateReport(sums, grad_norm, learning_rate, not decision.applies)

    def _decide(
        self, sums: MetricSums, grad_norm: float, tokens: float, *, has_overflow: bool
    ) -> Decision:
        """Decide whether to apply the gradient.

        Raises:
            TrainingStopped: the run ends here; the message gives the reason.
        """
        wrong = [
            name
            for name, value in sums.items()
            if not bool(torch.isfinite(value).all())
        ]
        report = GradientReport(
            role=self.name,
            island=self.part[0],
            counts=self.counts,
            tokens=tokens,
            # A non-finite loss counts as a non-finite norm, so that both are treated
            # alike.
            norm=math.nan if wrong else grad_norm,
            has_overflow=has_overflow,
            staleness=self.staleness,
        )
        decision = (
            decide([report], self.rules) if self.ask is None else self.ask(report)
        )
        if decision.verdict is Verdict.STOP:
            if not has_overflow:
                self._check_finite(wrong, grad_norm)  # this error is more specific
            raise TrainingStopped(
                f"update {self.counts.steps} is not made, and the run ends: {decision.culprit}: {decision.reason.text}."
            )
        return decision

    def _reduce(self, reports: list[Mapping[str, torch.Tensor]]) -> MetricSums:
        """Sum the losses' sums over micro-batches and ranks. Last stages send the metric names to the other ranks.

        The sums are copied from the device in a single blocking copy, and reduced on
        the host.
        """
        local_sums = MetricSums()
        if self.model.reports:
            for report in reports:
                local_sums = add_metrics(local_sums, report)
        # Names and sums are lists of plain numbers, which travel to the host in one
        # copy.
        names, values = sorted(local_sums), []
        if names:
            values = torch.stack([local_sums[name].double() for name in names]).tolist()
        # Collective over the grid. Ranks that do not report contribute nothing.
        total = reduce_json(
            dict(zip(names, values, strict=True)), _total, self.model.grid.world
        )
        return {
            name: torch.tensor(sums, dtype=torch.float64)
            for name, sums in total.items()
        }

    def _check_finite(self, wrong: list[str], grad_norm: float) -> None:
        if wrong or not math.isfinite(grad_norm):
            raise TrainingStopped(
                f"{self.model.role}: the update is not finite ({', '.join(wrong) or 'loss finite'}; gradient norm "
                f"{grad_norm}). The weights were not changed. Lower {self.model.role}.optimizer.lr, or look at the "
                "rewards and log-probs of this step in metrics.jsonl."
            )

    def move_schedule(self, updates: int) -> None:
        """Move the schedule of learning rate and weight decay by `updates` steps, but not below zero."""
        # The schedule must not go below zero when updates are undone.
        increment = max(updates, -self.scheduler.num_steps)
        if increment != 0:
            self.scheduler.step(increment=increment)


def _total(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the sums of every name, added in rank order."""
    total: dict[str, list[float]] = {}
    for rank_sums in ranks:
        for name, sums in rank_sums.items():
            total[name] = (
                [value + more for value, more in zip(total[name], sums, strict=True)]
                if name in total
                else sums
            )
    return total
