"""Global model on the coordinator's ranks (`coordinator.aggregates: gradients`).

The actor's islands are replicas without an optimizer. The coordinator's ranks hold one
more copy of the model, sharded over them, and its optimizer. They compute no gradients.

    island                                       coordinator's ranks
    forward, backward
    gradients of its samples   --- reshard --->  sum over the islands
    loss sums                  -------------->   sum over the islands, gradient norm
    report to the program      <--------------   sums, norm, learning rate
    decision of the program    -------------->   clip, optimizer step
    weights                    <--- reshard ---  weights

Both transfers are plans between the layouts of the two grids (`sharding/plan.py`). A
coordinator's rank receives each element of its shard once from each island, and a rank
of an island each element of its weights once. Weights fan out to islands on several
nodes if that relieves the busiest link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megaverl.algorithms.loss import MetricSums, add_metrics
from megaverl.config.roles import ReshardConfig
from megaverl.distributed.channels import PendingSends, receive_json, send_json
from megaverl.distributed.collectives import broadcast_json
from megaverl.distributed.job_context import JobContext, join_some
from megaverl.distributed.traffic import ISLANDS, count_received
from megaverl.models.packing import MicroBatch
from megaverl.sharding.plan import Plan, make_plan
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder, ReshardStats
from megaverl.weights.transports import TransportOptions
from megaverl.workers.decisions import Decision, GradientReport, Verdict
from megaverl.workers.gradient_replica import GlobalGradient, GradientReplica
from megaverl.workers.optimizers import MegatronGradients, MegatronTrainable
from megaverl.workers.weight_sync import LayoutOf, layouts_among, told_layouts

_SUMS = "loss sums of an island"
_GLOBAL = "norm and loss sums of the global gradient"
_DECISION = "decision about the global gradient"


class GlobalModelLink:
    """Transfers of gradients and weights between the islands of a role and the coordinator's ranks.

    Construction and both transfers are collective over these ranks.

    Args:
        role: name of the role, which names the process group.
        model: this rank's replica or global model.
        config: section `reshard`.
        timeout: how long a transfer waits for another rank.

    Example:
        link = GlobalModelLink(context, "actor", trainable, config.reshard, timeout)
        link.send_weights()      # once at the start, so that the replicas are equal
        link.sum_gradients()     # in every update
        link.send_weights()      # after every optimizer step
    """

    def __init__(
        self,
        context: JobContext,
        role: str,
        model: MegatronGradients,
        config: ReshardConfig,
        timeout: timedelta,
    ) -> None:
        self._num_bytes, self._seconds = 0, 0.0
        placement = context.placement
        self._coordinators = placement.ranks["coordinator"]
        self._members = tuple(sorted({*self._coordinators, *placement.ranks["actor"]}))
        self._group = join_some(context, f"global model of {role}", self._members)
        self._is_global = context.rank in self._coordinators
        held = model.model
        layout_of = held.held_layout_of
        global_layouts = self._share_layouts(
            layout_of if self._is_global else None, self._coordinators
        )
        island_layouts = self._share_layouts(
            None if self._is_global else layout_of, placement.islands[0]
        )
        self._options = TransportOptions(
            bucket_bytes=config.bucket_mb * 2**20,
            alias=False,
            node_of=lambda place: placement.node_of(self._members[place]),
            timeout=timeout,
            ipc=config.ipc == "auto",
        )
        at_coordinators = layouts_among(
            self._members, self._coordinators, global_layouts
        )
        weights: Mapping[str, torch.Tensor] = held.held_parameters
        at_islands = layouts_among(
            self._members,
            placement.ranks["actor"],
            lambda place: island_layouts(place % len(placement.islands[0])),
        )
        sources, dests = (weights, {}) if self._is_global else ({}, weights)
        self._weights = Resharder(
            self._plan(at_coordinators, at_islands, fan_out=config.may_fan_out),
            sources,
            dests,
            self._group,
            self._options,
        )
        self._check = ReshardCheck(
            at_coordinators, at_islands, sources, dests, self._group
        )
        # The first island's gradients arrive in their place. Those of every other island
        # arrive in `_staged` and are added there.
        self._gradients = model.whole_gradients
        self._staged: dict[str, torch.Tensor] = {}
        if self._is_global:
            # Nothing arrives for the vocabulary's padding, whose gradients stay zero.
            self._staged = {
                name: torch.zeros_like(gradient)
                for name, gradient in self._gradients.items()
            }
        self._from_islands: list[Resharder] = []
        for number, ranks in enumerate(placement.islands):
            source = layouts_among(self._members, ranks, island_layouts)
            arriving = self._staged if number else self._gradients
            transfer = Resharder(
                self._plan(source, at_coordinators),
                self._gradients if context.rank in ranks else {},
                arriving if self._is_global else {},
                self._group,
                self._options,
            )
            self._from_islands.append(transfer)

    def send_weights(self) -> None:
        """Copy the global model's weights to all islands. The first time, compare fingerprints on all ranks.

        Raises:
            ReshardError: a rank died or stalled, or weights differ after the first transfer.
        """
        is_first = self._weights.version == 0
        self._count(self._weights.run())
        if is_first:
            self._check.compare()

    def sum_gradients(self) -> None:
        """Replace the global model's gradients by the sum of the islands' gradients, in the order of the islands.

        Raises:
            ReshardError: a rank died or stalled.
        """
        for number, transfer in enumerate(self._from_islands):
            self._count(transfer.run())
            if number and self._is_global:
                with torch.no_grad():
                    for name, gradient in self._gradients.items():
                        gradient.add_(self._staged[name])

    def take_counts(self) -> dict[str, float]:
        """Return metrics of this rank's transfers since the last call.

        These are the bytes received and sent, and the seconds, in which the rank also
        waits for others.
        """
        counts = {
            "coordinator/bytes": float(self._num_bytes),
            "time/coordinator_ms": self._seconds * 1e3,
        }
        self._num_bytes, self._seconds = 0, 0.0
        return counts

    def _share_layouts(
        self, layout_of: LayoutOf | None, ranks: Sequence[int]
    ) -> LayoutOf:
        places = [self._members.index(rank) for rank in ranks]
        return told_layouts(layout_of, places, self._group)

    def _plan(self, source: LayoutOf, dest: LayoutOf, *, fan_out: bool = False) -> Plan:
        return make_plan(
            source,
            dest,
            len(self._members),
            dist.get_rank(self._group),
            self._options.node_of,
            fan_out=fan_out,
        )

    def _count(self, stats: ReshardStats) -> None:
        count_received(ISLANDS, stats.bytes_received)
        self._num_bytes += stats.bytes_received + stats.bytes_sent
        self._seconds += stats.seconds


class ReplicaIsland:
    """One role's part of an island on one rank, used as `TrainableModel.islands` of a `GradientReplica`.

    Args:
        link: transfers of this role.
    """

    def __init__(
        self, context: JobContext, trainable: GradientReplica, link: GlobalModelLink
    ) -> None:
        self.part = island_of(context)
        self._context, self._trainable, self._link = context, trainable, link

    def before_update(
        self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]
    ) -> MetricSums:
        """Send gradients and loss sums to the coordinator, and return the sums of all islands."""
        self._link.sum_gradients()
        answer = exchange_sums(self._context, sums, _GLOBAL)
        self._trainable.global_gradient = GlobalGradient(
            norm=answer["norm"], learning_rate=answer["learning_rate"]
        )
        return as_sums(answer["sums"])

    def after_update(self) -> None:
        """Pass the program's decision on to the coordinator's ranks, and receive the new weights."""
        context, is_applied = self._context, self._trainable.is_applied
        if context.rank == context.placement.islands[0][0]:
            coordinator = context.placement.coordinator
            send_json(context, _DECISION, coordinator, is_applied).wait()
        if is_applied:
            self._link.send_weights()


class GlobalModel:
    """Global model of a role on one of the coordinator's ranks, used as its `TrainableModel.islands`.

    Args:
        trainable: the model with its optimizer.
        link: transfers of this role.

    Attributes:
        link: the same transfers.
    """

    part = (0, 1)

    def __init__(
        self, context: JobContext, trainable: MegatronTrainable, link: GlobalModelLink
    ) -> None:
        self._context, self._trainable, self.link = context, trainable, link
        self._sums = MetricSums()
        self._is_applied = False
        trainable.islands, trainable.ask = self, self._ask

    def serve_update(self) -> None:
        """Take one optimizer step with the islands. Collective over the coordinator's ranks."""
        self._trainable.update_from_islands()

    def before_update(
        self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]
    ) -> MetricSums:
        """Receive the islands' gradients, and return the loss sums of all islands."""
        self.link.sum_gradients()
        total = MetricSums()
        if self._context.group_rank == 0:
            total = receive_sums(self._context)
        self._sums = as_sums(broadcast_json(as_lists(total), 0))
        return self._sums

    def after_update(self) -> None:
        """Send the new weights to the islands."""
        if self._is_applied:
            self.link.send_weights()

    def _ask(self, report: GradientReport) -> Decision:
        """Send the facts about the gradient to the islands, which report to the program, and return its decision."""
        is_applied = None
        if self._context.group_rank == 0:
            answer = {
                "sums": as_lists(self._sums),
                "norm": report.norm,
                "learning_rate": self._trainable.learning_rate,
            }
            pending = answer_islands(self._context, _GLOBAL, answer)
            first = self._context.placement.islands[0][0]
            is_applied = receive_json(self._context, _DECISION, first)
            pending.wait()
        self._is_applied = bool(broadcast_json(is_applied, 0))
        return Decision(Verdict.APPLY if self._is_applied else Verdict.SKIP)


def island_of(context: JobContext) -> tuple[int, int]:
    """Return the number of this rank's island, and the number of islands."""
    islands = context.placement.islands
    number = next(n for n, ranks in enumerate(islands) if context.rank in ranks)
    return number, len(islands)


def exchange_sums(context: JobContext, sums: MetricSums, answer_name: str) -> Any:
    """Send an island's loss sums to the coordinator, and return its answer. Collective over the island's ranks."""
    answer = None
    if context.group_rank == 0:
        coordinator = context.placement.coordinator
        sent = send_json(context, _SUMS, coordinator, as_lists(sums))
        answer = receive_json(context, answer_name, coordinator)
        sent.wait()
    return broadcast_json(answer, 0)


def receive_sums(context: JobContext) -> MetricSums:
    """Return the sum of the loss sums that all islands sent, in the order of the islands."""
    total = MetricSums()
    for ranks in context.placement.islands:
        island_sums = receive_json(context, _SUMS, ranks[0])
        total = add_metrics(total, as_sums(island_sums))
    return total


def answer_islands(context: JobContext, name: str, answer: Any) -> PendingSends:
    """Start to send the answer that `exchange_sums` returns on every island."""
    pending = PendingSends()
    for ranks in context.placement.islands:
        pending.add(send_json(context, name, ranks[0], answer))
    return pending


def as_lists(sums: MetricSums) -> dict[str, list[float]]:
    """Return loss sums as JSON-compatible values."""
    return {name: value.tolist() for name, value in sums.items()}


def as_sums(lists: Mapping[str, Sequence[float]]) -> MetricSums:
    """Return the loss sums that `as_lists` converted."""
    sums = MetricSums()
    for name, values in lists.items():
        sums[name] = torch.tensor(values, dtype=torch.float64)
    return sums
