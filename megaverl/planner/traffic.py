"""Bytes that one reshard moves on every rank, from the same plans that the ranks make in a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import attrgetter

from megaverl.models.lora import with_landed_factors, with_trained_factors
from megaverl.planner.job import Machine, PlannedJob
from megaverl.sharding.boxes import carry, intersect
from megaverl.sharding.deltas import AUTO_ITEMSIZE
from megaverl.sharding.layout import EMPTY, Layout, Piece
from megaverl.sharding.plan import Plans, Volume, make_plans
from megaverl.sharding.vllm import matrices

# Share of bfloat16 weights that one step of Adam changes at learning rates of RL.
# Published: about 1 % (PULSE, arXiv 2602.03839). tools/bench_delta.py measures a run's.
CHANGED = 0.01
# Bytes of a changed element's position at that share (`transports.changes`).
POSITION_BYTES = 1.1

KINDS = ("alias", "local", "nvlink", "network")


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank moves in one reshard.

    Attributes:
        received: kind -> bytes: aliased (nothing moves), copied within the rank, from the same node, from another node.
        sent: kind -> bytes to the same node and to other nodes.
        from_rank: peer -> bytes received from it.
        to_rank: peer -> bytes sent to it.
    """

    rank: int
    received: dict[str, int]
    sent: dict[str, int]
    from_rank: dict[int, int] = field(repr=False)
    to_rank: dict[int, int] = field(repr=False)

    def seconds(self, machine: Machine) -> float:
        """Return the seconds with all links busy at once, each at its bandwidth in both directions."""
        return max(self.seconds_by_link(machine).values())

    def seconds_by_link(self, machine: Machine) -> dict[str, float]:
        """Return link -> seconds. A local copy both reads and writes memory; a link
        sends and receives at the same time.
        """
        return {
            "local": 2 * self.received["local"] / machine.hbm,
            "nvlink": max(self.received["nvlink"], self.sent["nvlink"])
            / machine.nvlink,
            "network": max(self.received["network"], self.sent["network"])
            / machine.network,
        }


@dataclass(frozen=True)
class FanOutTraffic:
    """Savings of a fan-out on the links between nodes.

    Attributes:
        copies: copies of a weight that the ranks that hold it send to other nodes, as a mean over the weights.
        copies_without: copies that they would send without fan-out.
        busiest: bytes of the busiest link between nodes.
        busiest_without: bytes of the busiest link without fan-out.
    """

    copies: float
    copies_without: float
    busiest: int
    busiest_without: int


@dataclass(frozen=True)
class DeltaTraffic:
    """Expected bytes of a reshard that sends changes only (`reshard.delta`), on the links between nodes.

    Attributes:
        changed: expected share of the elements that change in a step.
        bytes_share: bytes of the changes, as a share of the bytes of all elements.
        busiest: bytes of the busiest link.
    """

    changed: float
    bytes_share: float
    busiest: int


@dataclass(frozen=True)
class ReshardTraffic:
    """Traffic of one reshard on all ranks, if it sends whole weights.

    Attributes:
        fan_out: None if every rank fetches its weights from ranks that hold them.
        delta: None if nothing is sent as changes.
    """

    ranks: tuple[RankTraffic, ...]
    fan_out: FanOutTraffic | None = None
    delta: DeltaTraffic | None = None

    def spread(self, direction: str, kind: str) -> tuple[int, float, int]:
        """Return (least, median, most) bytes over the ranks.

        Args:
            direction: "received" or "sent".
        """
        values = [getattr(rank, direction)[kind] for rank in self.ranks]
        return min(values), statistics.median(values), max(values)

    def busiest(self, kind: str, direction: str = "sent") -> float:
        """Return the busiest rank's bytes divided by the mean: 1 if balanced, or if nothing moves."""
        values = [getattr(rank, direction)[kind] for rank in self.ranks]
        mean = sum(values) / len(values)
        return max(values) / mean if mean else 1.0

    def seconds(self, machine: Machine) -> tuple[float, float]:
        """Return the seconds of (the slowest rank, the mean rank)."""
        values = [rank.seconds(machine) for rank in self.ranks]
        return max(values), sum(values) / len(values)


def make_traffic(job: PlannedJob) -> ReshardTraffic:
    """Make every rank's plan, as the ranks do in a run, and add up its bytes."""
    source, dest = _sides(job)
    plans, adapters = reshard_plans(job), job.actor.adapters
    ranks = []
    for rank in range(job.world):
        aliased = (
            aliased_elements(source(rank), dest(rank), frozenset(adapters))
            if job.aliases
            else 0
        )
        ranks.append(
            rank_traffic(rank, plans.volume(rank), aliased, job.itemsize, job.machine)
        )
    fan_out = _fan_out_traffic(plans, ranks, job.itemsize)
    return ReshardTraffic(tuple(ranks), fan_out, _delta_traffic(job, ranks))


def compared_share(job: PlannedJob) -> float:
    """Return the share of an engine's elements that ranks compare with the last version before they send them.

    Matrices of quantised engines are sent whole: the engine does not hold the elements that have not changed.
    """
    if not _compares_weights(job):
        return 0.0
    layout = job.rollout.layout_of(0)
    return 1.0 - sum(matrices(layout).values()) / layout.numel


def _compares_weights(job: PlannedJob) -> bool:
    """Return whether ranks send changes at all, as `WeightSync` and `Resharder` decide."""
    config = job.config
    # Adapters are merged into the engine's weights, and an engine that sleeps on the
    # actor's ranks drops its own.
    if job.actor.adapters or (job.placement.is_colocated and config.rollout.sleep):
        return False
    if config.reshard.delta == "auto":
        return job.itemsize == AUTO_ITEMSIZE and not config.actor.offload.parameters
    return config.reshard.delta == "on"


def _delta_traffic(
    job: PlannedJob, ranks: Sequence[RankTraffic]
) -> DeltaTraffic | None:
    network = max(max(rank.sent["network"], rank.received["network"]) for rank in ranks)
    compared = compared_share(job)
    if not network or not compared:
        return None
    # A changed element takes its value and about one byte for its position.
    of_changes = CHANGED * (job.itemsize + POSITION_BYTES) / job.itemsize
    share = compared * of_changes + 1.0 - compared
    return DeltaTraffic(CHANGED, share, round(network * share))


def _fan_out_traffic(
    plans: Plans, ranks: Sequence[RankTraffic], itemsize: int
) -> FanOutTraffic | None:
    fan_out, direct = plans.fan_out, plans.direct
    if fan_out is None or direct is None:
        return None
    busiest = max(max(rank.sent["network"], rank.received["network"]) for rank in ranks)
    return FanOutTraffic(
        fan_out.copies,
        fan_out.copies_without,
        busiest,
        round(direct.busiest * itemsize),
    )


def reshard_plans(job: PlannedJob) -> Plans:
    """Return a sequence of all ranks' plans of a reshard. Each plan is made when it is first read."""
    return _plans_between(
        *_sides(job), job.world, job.machine, job.config.reshard.may_fan_out
    )


# A search for settings that fit leaves most grids unchanged, so it asks for the same
# plans again.
@lru_cache(maxsize=16)
def _plans_between(
    source: Callable[[int], Layout],
    dest: Callable[[int], Layout],
    world: int,
    machine: Machine,
    may_fan_out: bool,
) -> Plans:
    return make_plans(source, dest, world, node_of=machine.node_of, fan_out=may_fan_out)


def _sides(job: PlannedJob) -> tuple[Callable[[int], Layout], Callable[[int], Layout]]:
    """Return functions from a global rank to the actor's layout and to its engine's layout."""
    source, dest = job.weight_source.layout_of, job.rollout.layout_of
    if not job.placement.is_colocated:
        has_global_model = job.weight_source is not job.actor
        holders = (
            job.weight_source.ranks if has_global_model else job.placement.islands[0]
        )
        source, dest = (
            _on(holders, source),
            _on(job.rollout.ranks, dest),
        )
    if adapters := job.actor.adapters:
        source, dest = (
            with_trained_factors(source, adapters),
            with_landed_factors(dest, adapters),
        )
    return source, dest


@dataclass(frozen=True)
class UpdateTraffic:
    """Traffic of one update of a role whose optimizer is on the coordinator's ranks.

    Attributes:
        gradients: transfer from each island to the coordinator's ranks, one after the other.
        weights: transfer from the coordinator's ranks to all islands.
    """

    gradients: tuple[ReshardTraffic, ...]
    weights: ReshardTraffic

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of all transfers, each as long as its slowest rank takes."""
        return sum(
            transfer.seconds(machine)[0] for transfer in (*self.gradients, self.weights)
        )


def make_update_traffic(job: PlannedJob, name: str) -> UpdateTraffic:
    """Make the plans of all transfers in one update of a role with a global model, and add up their bytes.

    Args:
        name: the role on the islands, such as "actor".
    """
    in_fp32 = job.role(name).ddp.get("grad_reduce_in_fp32", True)
    gradient_itemsize = 4 if in_fp32 else job.itemsize
    *gradients, weights = update_plans(job, name)

    def traffic_of(plans: Plans, itemsize: int) -> ReshardTraffic:
        ranks = [
            rank_traffic(rank, plans.volume(rank), 0, itemsize, job.machine)
            for rank in range(job.world)
        ]
        return ReshardTraffic(tuple(ranks), _fan_out_traffic(plans, ranks, itemsize))

    return UpdateTraffic(
        tuple(traffic_of(plans, gradient_itemsize) for plans in gradients),
        traffic_of(weights, job.itemsize),
    )


def update_plans(job: PlannedJob, name: str) -> list[Plans]:
    """Return the plans of the gradients of each island, then of the weights, as `trainer.global_model` makes them."""
    replica, model = job.role(name), job.global_models[name]
    holders, islands = _on(model.ranks, model.layout_of), job.placement.islands
    world, machine = job.world, job.machine
    gradients = [
        make_plans(
            _on(ranks, replica.layout_of), holders, world, node_of=machine.node_of
        )
        for ranks in islands
    ]
    size = replica.grid.world_size
    replicas = _on(replica.ranks, lambda place: replica.layout_of(place % size))
    may_fan_out = job.config.reshard.may_fan_out
    weights = make_plans(
        holders, replicas, world, node_of=machine.node_of, fan_out=may_fan_out
    )
    return [*gradients, weights]


def _on(
    ranks: Sequence[int], layout_of: Callable[[int], Layout]
) -> Callable[[int], Layout]:
    """Return a function from a global rank to a role's layout, empty on ranks outside the role."""
    places = {rank: number for number, rank in enumerate(ranks)}
    return lambda rank: layout_of(places[rank]) if rank in places else EMPTY


def rank_traffic(
    rank: int, volume: Volume, aliased: int, itemsize: int, machine: Machine
) -> RankTraffic:
    """Convert the elements of a rank's plan to bytes over each kind of link.

    Args:
        aliased: elements that share storage and need no copy.
        itemsize: bytes of an element on the wire, in the smaller of the two dtypes.
    """
    node = machine.node_of(rank)
    from_rank = {peer: itemsize * numel for peer, numel in volume.received.items()}
    to_rank = {peer: itemsize * numel for peer, numel in volume.sent.items()}

    def over(peers: dict[int, int], near: bool) -> int:
        return sum(
            nbytes
            for peer, nbytes in peers.items()
            if (machine.node_of(peer) == node) is near
        )

    received = {
        "alias": itemsize * aliased,
        "local": itemsize * (volume.copied - aliased),
        "nvlink": over(from_rank, True),
        "network": over(from_rank, False),
    }
    sent = {"nvlink": over(to_rank, True), "network": over(to_rank, False)}
    return RankTraffic(rank, received, sent, from_rank, to_rank)


@lru_cache(maxsize=4096)
def aliased_elements(
    source: Layout, dest: Layout, adapted: frozenset[str] = frozenset()
) -> int:
    """Count the elements of `dest` that can share the source's storage, so that nothing moves.

    The conditions are those of the alias transport: the whole local tensor lies in one
    tensor of the source in the same order, and differs only by a range of rows. Both
    sides must also have the same dtype, which the caller checks.

    Args:
        adapted: weights that adapters are merged into; they cannot share storage.
    """
    held = source.by_tensor
    total = 0
    for shape, pieces, numel in _whole_locals(dest, adapted):
        # A rank of a pipeline or of experts holds a small part of what its engine
        # needs, so most tensors end here.
        if all(piece.tensor in held for piece in pieces) and _is_run_of_rows(
            source, shape, pieces, numel
        ):
            total += numel
    return total


@lru_cache(maxsize=256)
def _whole_locals(
    dest: Layout, adapted: frozenset[str]
) -> tuple[tuple[tuple[int, ...], tuple[Piece, ...], int], ...]:
    """Return (shape, pieces, elements) of each local tensor that could share storage, whatever the source is."""
    by_local: dict[str, list[Piece]] = {}
    for piece in dest.pieces:
        by_local.setdefault(piece.local, []).append(piece)
    # A model with 100,000 pieces has a few dozen boxes.
    numel_of = cache(attrgetter("numel"))
    candidates = []
    for local, pieces in by_local.items():
        if local in dest.quantised or local in dest.views:
            continue
        if any(piece.tensor in adapted or ".lora_" in piece.tensor for piece in pieces):
            continue
        if numel := sum(numel_of(piece.box) for piece in pieces):
            candidates.append((dest.local_shapes[local], tuple(pieces), numel))
    return tuple(candidates)


def _is_run_of_rows(
    source: Layout, shape: tuple[int, ...], pieces: Sequence[Piece], numel: int
) -> bool:
    places: set[tuple[str, tuple[int, ...]]] = set()
    covered = 0
    for piece in pieces:
        for held in source.by_tensor.get(piece.tensor, ()):
            common = intersect(held.box, piece.box)
            if common is None:
                continue
            origin, target = (
                carry(common, held.box, held.local_box),
                carry(common, piece.box, piece.local_box),
            )
            if origin.shape != target.shape:
                return False
            places.add(
                (
                    held.local,
                    tuple(
                        a - b for a, b in zip(origin.start, target.start, strict=True)
                    ),
                )
            )
            covered += common.numel
    if covered != numel or len(places) != 1:
        return False
    name, shift = places.pop()
    if name in source.views:
        return False
    outer = source.local_shapes[name]
    return (
        not any(shift[1:])
        and outer[1:] == shape[1:]
        and 0 <= shift[0] <= outer[0] - shape[0]
    )
