"""Synchronises the actor's weights to the engines in place, on ranks that have an actor, an engine, or both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megaverl.config.roles import LoraConfig, ReshardConfig
from megaverl.distributed.collectives import broadcast_json, together
from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.models.build import layouts_of
from megaverl.models.hf_shards import module_without_data, sharded_weights, tensor_cuts
from megaverl.models.lora import (
    LowRank,
    low_ranks,
    with_landed_factors,
    with_trained_factors,
    written_to,
)
from megaverl.models.lora.adapter_set import Merge
from megaverl.models.lora.adapters import layer_factors
from megaverl.models.options import transformer_config
from megaverl.platform import platform
from megaverl.rollout.engine import ReceivesWeights, Shapes
from megaverl.sharding.layout import EMPTY, Layout, padded_tensors
from megaverl.sharding.load_balance import RankLayouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import Plan, make_plan
from megaverl.sharding.vllm import landing_parts
from megaverl.sharding.weight import Weight, shapes_of
from megaverl.weights.fingerprint import ReshardCheck, ViewOf
from megaverl.weights.reshard import FinalParts, Resharder, ReshardStats
from megaverl.weights.transports import (
    DeltaMode,
    TransportOptions,
    view,
    viewed,
)
from megaverl.weights.transports.local import adopt
from megaverl.weights.transports.quantised import QuantisedDestination
from megaverl.workers.model import TrainingModel

LayoutOf = Callable[[int], Layout]
NodeOf = Callable[[int], int]


@dataclass(frozen=True)
class ActorWeights:
    """Source of a synchronisation: the actor's layout on every rank, and this rank's tensors.

    Attributes:
        layout_of: rank of the synchronisation -> the actor's layout there, including factors of adapters.
        tensors: this rank's tensors by local name; empty if the actor lives on other ranks.
        dtype: of the weights.
        on_device: context in which `tensors` may be read.
        offloads: the tensors are offloaded outside `on_device`.
        low_ranks: the actor's adapters by the weight that they change. None: no adapters.
        scaling: alpha / rank of the adapters.
        factors: this rank's factors of the adapters.
        in_order: sets of `tensors` that get their new values together, in the order of an optimizer step.
    """

    layout_of: LayoutOf
    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    on_device: AbstractContextManager[object] = nullcontext()
    offloads: bool = False
    low_ranks: Mapping[str, LowRank] | None = None
    scaling: float = 1.0
    factors: Mapping[str, torch.Tensor] | None = None
    in_order: Sequence[Collection[str]] = ()

    @classmethod
    def of(cls, model: TrainingModel) -> ActorWeights:
        """Return the weights of an actor on this rank."""
        held = cls(
            model.layout_of,
            model.parameters,
            model.dtype,
            model.on_device,
            model.offloads,
        )
        if (adapters := model.adapters) is None:
            return replace(held, in_order=model.in_order)
        return replace(
            held,
            layout_of=adapters.beside(model.layout_of),
            low_ranks=adapters.low_ranks,
            scaling=adapters.scaling,
            factors=adapters.parameters,
        )

    @classmethod
    def elsewhere(
        cls,
        spec: ModelSpec,
        shape: GridShape,
        dtype: torch.dtype,
        options: Mapping[str, Any],
        lora: LoraConfig | None,
    ) -> ActorWeights:
        """Return the weights of an actor on other ranks: layouts of a `TrainingModel` on this grid, without tensors."""
        weights, config = (
            weights_of(spec),
            transformer_config(spec, shape, dtype, options),
        )
        layout_of = layouts_of(weights, spec, config, shape)
        held = cls(layout_of, {}, config.params_dtype)
        if lora is None:
            return held
        adapters = low_ranks(weights, lora.targets, lora.rank, "actor.lora")
        return replace(
            held,
            layout_of=with_trained_factors(layout_of, adapters),
            low_ranks=adapters,
            scaling=lora.alpha / lora.rank,
            factors={},
        )

    @classmethod
    def fsdp_elsewhere(
        cls,
        folder: Path,
        spec: ModelSpec,
        # Computed from config.json alone: the layouts of a module need no data.
        num_shards: int,
        tp: int,
        dtype: torch.dtype,
        lora: LoraConfig | None,
        *,
        trust_remote_code: bool,
    ) -> tuple[ActorWeights, list[Weight]]:
        """Return the weights of an `FSDPModel` on other ranks: its layouts without tensors, and its list of weights."""
        model = module_without_data(folder, trust_remote_code=trust_remote_code)
        weights = sharded_weights(
            model, spec, num_shards, cuts=tensor_cuts(model, tp, "actor")
        )
        held = cls(weights.layout_of, {}, dtype)
        if lora is not None:
            chosen = layer_factors(model, weights, lora, "actor")
            held = replace(
                held,
                layout_of=chosen.beside(weights.layout_of, num_shards),
                low_ranks=chosen.low_ranks,
                scaling=lora.alpha / lora.rank,
                factors={},
            )
        return held, weights.weights

    def sides(self, layout_of: LayoutOf) -> tuple[LayoutOf, LayoutOf]:
        """Return the layouts of actor and engines, with the factors of adapters, which the engines merge."""
        if self.low_ranks is None:
            return self.layout_of, layout_of
        return self.layout_of, with_landed_factors(layout_of, self.low_ranks)

    def plan(
        self,
        layout_of: LayoutOf,
        group: dist.ProcessGroup,
        node_of: NodeOf | None,
        *,
        fan_out: bool = False,
    ) -> Plan:
        """Return the copy plan of this rank of `group`, from the actor's layout to the engines' `layout_of`.

        Args:
            node_of: node of a rank. None: all on one node.
            fan_out: as in `make_plan`.

        Raises:
            ReshardError: see `make_plan`.
        """
        # Size and own rank in the group.
        place = dist.get_world_size(group), dist.get_rank(group)
        # Engines ignore some weights of a folder, so the actor may have weights that no
        # engine takes.
        return make_plan(
            *self.sides(layout_of), *place, node_of, allow_unused=True, fan_out=fan_out
        )


def layouts_among(
    members: Sequence[int], ranks: Sequence[int], layout_of: LayoutOf
) -> LayoutOf:
    """Return the layouts of one side by rank of the group, if actor and engines live on different ranks.

    Ranks of the group that are not on this side have an empty layout.

    Args:
        members: all ranks of the group.
        ranks: those of the actor or of the engines, in the order of `layout_of`.
        layout_of: index in `ranks` -> layout.
    """
    places = {members.index(rank): number for number, rank in enumerate(ranks)}
    return lambda place: layout_of(places[place]) if place in places else EMPTY


def told_layouts(
    layout_of: LayoutOf | None, engines: Sequence[int], group: dist.ProcessGroup
) -> LayoutOf:
    """Broadcast the engines' layouts to every rank of `group`, because an actor on other ranks has no engine to ask.

    Args:
        layout_of: index of an engine rank -> layout, on ranks with an engine. None: this rank has no engine.
        engines: ranks in the group of all engines.

    Returns:
        Index of an engine rank -> layout.
    """
    encoded = None
    # Ranks with equal layouts share one, so that the message has few distinct layouts.
    if layout_of is not None and dist.get_rank(group) == engines[0]:
        held = RankLayouts(layout_of, len(engines))
        encoded = [held.class_of, [layout.to_json() for layout in held.layouts]]
    class_of, distinct = broadcast_json(encoded, engines[0], group)
    layouts = [Layout.from_json(layout) for layout in distinct]
    return lambda rank: layouts[class_of[rank]]


class SynchronisesWeights(Protocol):
    """This rank's part in filling the engines: a `WeightSync`, or several that take turns."""

    weight_version: int

    def source_changes(self) -> None:
        """Mark the engines' weights as outdated. Call it before the actor's weights change."""

    def reshard(self) -> ReshardStats:
        """Copy the actor's weights to the engines."""


class WeightSync:
    """Copies weights from the actor's layout to the engines' after every change. Every rank of both sides takes part.

    An engine that can sleep has memory only while it needs it, and only this class
    switches it: its cache exists from `wake` to `sleep`, its weights from `start` to
    `sleep`. So no cache is allocated while a reshard uses its buckets.

                  start        finish       wake        sleep
        weights     |-- copied --|------------|-----------|
        cache                                 |-----------|

    If actor and engines share their ranks, `sleep` drops the weights instead of copying
    them to host memory. `start` writes them again, and so does `wake` if something is
    generated before the next reshard.

    Args:
        source: the actor's weights.
        layout_of: rank -> the engine's layout there.
        engine: this rank's engine or the draft model in it, or None.
        world: the ranks of this rank's role.
        node_of: node of a rank. None: all on one node.
        config: the `reshard` section.
        timeout: how long a reshard waits for another rank. None: the group's timeout.
        group: the ranks of actor and engines if these differ; layouts and `node_of` use its ranks. None: `world`.
        plan: this rank's plan if `Adopting` has computed it. None: computed here.
        background: second group of the same ranks, in which weights move from `begin` on (`reshard.overlap`).

    Attributes:
        weight_version: number of times that the engines' weights have changed.

    Example:
        sync.source_changes()
        actor.update(batch, step=step)
        sync.reshard()
        sync.wake()
        engine.generate(prompts, sampling, seeds)
        sync.sleep()
    """

    def __init__(
        self,
        source: ActorWeights,
        layout_of: LayoutOf,
        engine: ReceivesWeights | None,
        world: dist.ProcessGroup,
        *,
        node_of: NodeOf | None = None,
        config: ReshardConfig | None = None,
        timeout: timedelta | None = None,
        group: dist.ProcessGroup | None = None,
        plan: Plan | None = None,
        background: dist.ProcessGroup | None = None,
    ) -> None:
        self.config, self.world, self.weight_version = (
            config or ReshardConfig(),
            world,
            0,
        )
        self._engine, self._actor, self._reading = engine, source, ExitStack()
        self._merge: Merge | None = None
        # The last parts of weights that are being sent in the background.
        self._final: FinalParts | None = None
        # Without other ranks, the weights can be copied again at any time, so sleeping
        # may drop them.
        # Others would have to take part in a second copy.
        self._refills = engine is not None and group is None and not self.config.overlap
        self._lost = self._source_changed = False
        group = group or world
        tensors = {**source.tensors, **(source.factors or {})}
        self._dest = engine.named_parameters() if engine is not None else {}
        held = self._held = layout_of(dist.get_rank(group))
        # Tensors that a reshard writes completely. All others, such as padded ones,
        # must survive sleeping.
        self._written = frozenset(self._dest) - frozenset(padded_tensors(held))
        if source.low_ranks is not None:
            self._merge = Merge(
                held, source.low_ranks, source.scaling, source.dtype, platform.device
            )
            self._dest |= self._merge.factors
        options = TransportOptions(
            bucket_bytes=self.config.bucket_mb * 2**20,
            alias=self.config.alias == "auto" and not source.offloads,
            may_rebind=engine is None or engine.may_rebind,
            node_of=node_of,
            timeout=timeout,
            # Engines on other nodes may read weights from a folder that both see.
            folder=None if self.config.folder is None else Path(self.config.folder),
            ipc=self.config.ipc == "auto",
            # Merging adapters writes to these tensors, so they must not share storage
            # with the actor.
            never_alias=self._merge.written if self._merge is not None else frozenset(),
            delta=self._delta_mode(),
        )
        # Weights of 8-bit engines arrive in parts, in a buffer.
        self._quantised = self._landing(layout_of, group)
        self._resharder = Resharder(
            plan
            or source.plan(layout_of, group, node_of, fan_out=self.config.may_fan_out),
            tensors,
            self._dest,
            group,
            options,
            background=background,
            in_order=source.in_order,
            changing=self._merge.brought if self._merge is not None else None,
            quantised=self._quantised,
        )
        # Negative: never compared.
        self._check: ReshardCheck | None = None
        if self.config.check_every >= 0:
            self._check = ReshardCheck(
                *source.sides(layout_of), tensors, self._dest, group
            )

    def _delta_mode(self) -> DeltaMode:
        """Return whether this rank can send or receive changes only."""
        # Adapters are merged into the weights that a reshard has brought, so the engine
        # does not hold the last version any more.
        if self._actor.low_ranks is not None:
            return "off"
        # Weights are offloaded because memory is short, so there is none for copies either.
        if self._actor.offloads and self.config.delta == "auto":
            return "off"
        return self.config.delta

    def _landing(
        self, layout_of: LayoutOf, group: dist.ProcessGroup
    ) -> QuantisedDestination | None:
        """Return the destination of weights for quantised engines, or None if no engine quantises."""
        # Parts are sized for the bucket, in elements of the transfer's dtype. Computed
        # alike on every rank.
        layouts = RankLayouts(layout_of, dist.get_world_size(group)).layouts
        max_numel = self.config.bucket_mb * 2**20 // self._actor.dtype.itemsize
        if not (parts := landing_parts(layouts, max_numel)):
            return None
        weights = self._engine.quantised_weights() if self._engine is not None else {}
        return QuantisedDestination(parts, weights, self._landed)

    def _landed(self, tensors: frozenset[str], view_of: ViewOf) -> None:
        """Compare weights that have arrived but are not quantised yet, and merge adapters into them."""
        # The comparison comes first, because merging changes the weights.
        if self._check is not None and self._check_is_due(self._resharder.version):
            self._check.compare(tensors, view_of)
        if self._merge is not None:
            self._merge.apply(view_of, tensors)

    def reshard(self) -> ReshardStats:
        """Copy the actor's weights to the engine in place, and drop its prefix cache. Collective.

        Raises:
            ReshardError: see `finish`.
        """
        # Unless the last optimizer step has started it already.
        if self._final is None:
            self.start()
        return self.finish()

    @property
    def is_under_way(self) -> bool:
        """Return whether weights are being sent. The actor's weights must not change meanwhile."""
        return self._final is not None

    def begin(self) -> None:
        """Start sending weights in the background while the last optimizer step before the next reshard runs.

        `final` reports which weights have their new values. The engines must no longer
        use the old weights.
        """
        # All weights must move, so `reshard` sends them when all are final.
        if self._resharder.brings_all:
            return
        self._final = FinalParts(
            self._resharder.num_parts, max(1, len(self._actor.in_order))
        )
        self.start()

    def final(self, number: int | None = None) -> None:
        """Report that the first `number` sets of `ActorWeights.in_order` have their new values. None: all weights have.

        The call starts the transfer if `begin` was not called.
        """
        if self._final is None:
            self.begin()
        if self._final is not None:
            self._final.after(number)

    def start(self) -> None:
        """Start sending the actor's weights, which must not change until `finish`."""
        if self._engine is not None:
            if self._refills:
                self.sleep()  # the cache is outdated, and the buckets need its memory
            # The engine's weights need memory before anything can arrive.
            self._engine.wake_weights()
        # The actor's weights stay on the device until `finish`, because they may be
        # sent in the background.
        self._reading.enter_context(self._actor.on_device)
        self._resharder.start(self._final)

    def finish(self) -> ReshardStats:
        """Wait until the engine has all new weights, and return statistics. Collective.

        Raises:
            ReshardError: a rank died or stalled, or the weights differ from the actor's.
        """
        stats = self._finish()
        self._source_changed, self._final = False, None
        self.weight_version += 1
        return stats

    def _finish(self) -> ReshardStats:
        # The actor's weights may be offloaded again when the copies are compared.
        with self._reading:
            stats = self._resharder.finish()
            self._compare()
        # All ranks of the role raise if merging fails on one of them.
        with together(self.world):
            stats = replace(stats, seconds=stats.seconds + self._merge_adapters())
            if self._engine is not None:
                # The prefix cache is keyed by tokens and would answer with the old
                # weights' states.
                self._engine.reset_prefix_cache()
        self._lost = False
        return stats

    def sleep(self) -> None:
        """Free the memory of this rank's engine, if the engine can sleep."""
        assert self._engine is not None
        if not self._refills:
            self._engine.sleep()
        # Weights that a reshard writes completely need not be copied to the host.
        elif self._engine.sleep_without(self._written):
            self._resharder.destination_lost()
            self._lost = True

    def wake(self) -> None:
        """Prepare this rank's engine to generate. Collective over the role's ranks.

        Raises:
            ReshardError: the engine dropped its weights, and the actor's have changed since or are incomplete.
        """
        assert self._engine is not None
        # The actor still has the version that the engine dropped, so the same reshard
        # is repeated.
        if self._lost:
            with together(self.world):
                if self._source_changed:
                    raise ReshardError(
                        f"the engine slept without its weights, and the actor's have changed since version "
                        f"{self.weight_version}. Reshard before the next generate()."
                    )
                self.check_whole()
            self.start()
            self._finish()
        self._engine.wake_up()

    def source_changes(self) -> None:
        """Mark the engine's weights as outdated. Call it before the actor's weights change.

        Tensors that the engine shares with the actor change too, so nothing may be
        generated before the next reshard. An actor that trains adapters shares only
        weights that never change.
        """
        self._source_changed = True
        # An actor with adapters shares only weights that never change.
        if self._merge is None:
            self._resharder.source_changes()

    def check_whole(self) -> None:
        """Check that the engine holds one version of the weights. Called before anything is generated.

        Raises:
            ReshardError: the engine holds parts of two versions.
        """
        self._resharder.check_whole()

    def _merge_adapters(self) -> float:
        """Merge the actor's adapters, if any, into the weights that have just arrived. Return the seconds it took."""
        if self._merge is None:
            return 0.0
        start, resharder = perf_counter(), self._resharder
        # If merging fails, the engine holds half-merged weights and must not generate.
        resharder.inconsistent = f"the adapters of version {resharder.version} are being merged into its weights"
        landed = self._quantised.tensors if self._quantised is not None else frozenset()
        dest = viewed(self._held, self._dest)
        self._merge.apply(
            lambda local, box: view(dest[local], box), self._merge.brought - landed
        )
        # Merging runs on the device. Its time counts as part of the reshard.
        if platform.is_cuda:
            torch.cuda.current_stream().synchronize()
        resharder.inconsistent = None
        return perf_counter() - start

    def _check_is_due(self, before: int) -> bool:
        """Return whether the version after `before` is compared."""
        every = self.config.check_every
        # Every `check_every`-th version, and the first one if it is zero.
        return not (before % every if every else before)

    def _compare(self) -> None:
        """Compare fingerprints of both sides if `reshard.check_every` asks for it.

        Raises:
            ReshardError: they differ.
        """
        if self._check is None or not self._check_is_due(self._resharder.version - 1):
            return
        rest = None  # quantised tensors were compared in `_landed`
        if self._quantised is not None:
            rest = self._check.tensors - self._quantised.tensors
        try:
            self._check.compare(rest)
        except ReshardError as error:
            self._resharder.inconsistent = (
                f"version {self._resharder.version} did not arrive as it left ({error})"
            )
            raise


class Adopting:
    """`make_engine`'s `on_load`: lets the engine's weights take over the actor's storage.

    This must happen before the engine captures the addresses of its weights. The
    `WeightSync` of both then finds the tensors aliased, and uses the same plan.

    Attributes:
        plan: this rank's plan, set when the engine has been loaded.
    """

    def __init__(
        self,
        model: TrainingModel,
        world: dist.ProcessGroup,
        node_of: NodeOf | None,
        *,
        fan_out: bool,
    ) -> None:
        self._model, self._world, self._node_of, self._fan_out = (
            model,
            world,
            node_of,
            fan_out,
        )
        self.plan: Plan | None = None

    def __call__(
        self,
        parameters: Mapping[str, torch.Tensor],
        layouts: Callable[[Shapes], LayoutOf],
    ) -> None:
        # Factors of adapters are part of the plan, but not of what engine and actor
        # share.
        source = ActorWeights.of(self._model)
        layout_of = layouts(shapes_of(self._model.weights))
        self.plan = source.plan(
            layout_of, self._world, self._node_of, fan_out=self._fan_out
        )
        never_alias = written_to(
            layout_of(dist.get_rank(self._world)), source.low_ranks or {}
        )
        adopt(self.plan, source.tensors, parameters, never_alias)


def adopting(
    model: TrainingModel,
    world: dist.ProcessGroup,
    node_of: NodeOf | None,
    config: ReshardConfig,
) -> Adopting | None:
    """Return an `Adopting`, or None if `reshard.alias` or offloading rules out shared storage."""
    if config.alias != "auto" or model.offloads:
        return None
    return Adopting(model, world, node_of, fan_out=config.may_fan_out)
