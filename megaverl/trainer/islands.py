"""Islands of the actor in a run: how each one's updates meet the others', and what the coordinator does meanwhile.

Every island plans the same micro-batches of a mini-batch and trains on its share, with the weights in the loss that the
whole mini-batch gives its tokens. With one meeting an update the gradients are added up, and all islands take the same
step, that of a single island. With more between meetings each takes its own steps, of the mean loss over its share;
then the mean way that they went is the gradient of an outer optimizer (DiLoCo).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from megaverl.algorithms.metrics import MetricSums, add_metrics
from megaverl.config.coordinator import CoordinatorConfig
from megaverl.coordinator.island_exchange import IslandMember, serve_join
from megaverl.coordinator.islands import OuterOptimizer
from megaverl.fabric import Fabric
from megaverl.fabric.post import receive_json, send_json
from megaverl.parallel.collectives import gather_json
from megaverl.platform import platform
from megaverl.roles.megatron_model import MicroBatch
from megaverl.roles.trainable import TrainableModel

_SUMS = "sums of the islands' losses"


class Island:
    """One role's part of an island, on one rank; `TrainableModel.islands`.

    Args:
        done: updates that were taken before this start.
    """

    def __init__(self, fabric: Fabric, trainable: TrainableModel, config: CoordinatorConfig, done: int) -> None:
        islands = fabric.placement.islands
        self.number = next(n for n, ranks in enumerate(islands) if fabric.rank in ranks)
        self.part = (self.number, len(islands))
        self._fabric, self._trainable, self._every, self._done = fabric, trainable, config.islands_every, done
        self._member = IslandMember(fabric, compress=config.islands_compress == "bfloat16")
        self._outer: OuterOptimizer | None = None
        if self._every > 1:
            parameters = {name: parameter.data for name, parameter in trainable.model.held_parameters.items()}
            self._outer = OuterOptimizer(
                parameters, every=self._every, lr=config.outer_lr, momentum=config.outer_momentum
            )

    def before_update(self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]) -> MetricSums:
        """All islands' gradients and sums; or this one's, of the mean loss over its own tokens."""
        if self._outer is None:
            count = float(self.part[1])
            self._member.join(self._trainable.gradients, tokens=1.0, divided_by=count)
            return self._join_sums(sums)
        own = self._own_tokens(micro_batches)
        for gradient in self._trainable.gradients.values():
            gradient.mul_(tokens / max(own, 1.0))
        return sums

    def after_update(self) -> None:
        """After every so many updates the islands meet."""
        self._done += 1
        if self._outer is not None and self._done % self._every == 0:
            way = self._outer.way()
            self._member.join(way, tokens=1.0, divided_by=1.0)
            self._outer.step(way)
            self._trainable.reread_weights()

    def state(self) -> bytes:
        """What a checkpoint must hold of this rank: a safetensors file."""
        tensors = {f"left.{name}": tensor for name, tensor in self._member.state_dict().items()}
        if self._outer is not None:
            for part, held in self._outer.state_dict().items():
                tensors |= {f"{part}.{name}": tensor for name, tensor in held.items()}
        return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})

    def load_state(self, data: bytes) -> None:
        """Undo `state`."""
        parts: dict[str, dict[str, torch.Tensor]] = {"left": {}, "start": {}, "buffer": {}}
        for key, tensor in load(data).items():
            part, _, name = key.partition(".")
            parts[part][name] = tensor.to(platform.device)
        self._member.load_state_dict(parts["left"])
        if self._outer is not None:
            self._outer.load_state_dict(parts)

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> float:
        mine = sum(int((batch.fields["weights"] != 0).sum()) for batch in micro_batches)
        total = torch.tensor(float(mine), device=platform.device)
        dist.all_reduce(total, group=self._trainable.model.grid.dp_group)
        return float(total)

    def _join_sums(self, sums: MetricSums) -> MetricSums:
        """The islands' first ranks give theirs, and get those of all."""
        fabric, whole = self._fabric, None
        if fabric.world_rank == 0:
            mine = {name: value.tolist() for name, value in sums.items()}
            coordinator = fabric.placement.coordinator
            sent = send_json(fabric, _SUMS, coordinator, mine)
            whole = receive_json(fabric, _SUMS, coordinator)
            sent.wait()
        return _as_sums(gather_json(whole)[0])


def serve_update(fabric: Fabric) -> None:
    """The coordinator's part of an update in which the islands meet: gradients, then the sums of their losses."""
    serve_join(fabric)
    firsts = [ranks[0] for ranks in fabric.placement.islands]
    total = MetricSums()
    for rank in firsts:
        total = add_metrics(total, _as_sums(receive_json(fabric, _SUMS, rank)))
    answer = {name: value.tolist() for name, value in total.items()}
    for sent in [send_json(fabric, _SUMS, rank, answer) for rank in firsts]:
        sent.wait()


def meetings(updates: int, config: CoordinatorConfig, done: int) -> Iterator[bool]:
    """For each of a role's next updates: whether the islands meet in it (True), or in an outer step behind it."""
    for number in range(done + 1, done + updates + 1):
        if config.islands_every == 1:
            yield True
        elif number % config.islands_every == 0:
            yield False


def _as_sums(found: Mapping[str, Sequence[float]]) -> MetricSums:
    sums = MetricSums()
    for name, value in found.items():
        sums[name] = torch.tensor(value, dtype=torch.float64)
    return sums
