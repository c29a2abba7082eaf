"""Islands of the actor in a run: how their updates are joined, and what the coordinator does meanwhile.

Every island plans the same micro-batches of a mini-batch and trains on its share, with the weights in the loss that the
whole mini-batch gives its tokens. With one exchange an update the gradients are added up, and all islands take the same
step, that of a single island. With several updates between exchanges each takes its own steps, of the mean loss over
its share; then the mean of their changes is the gradient of an outer optimizer (DiLoCo). It steps on the float32
weights that the inner optimizer keeps: in a model's bfloat16 most of that change would round to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from megaverl.algorithms.loss import MetricSums, add_metrics
from megaverl.config import Config
from megaverl.config.roles import CoordinatorConfig
from megaverl.coordinator import Participant, Progress
from megaverl.coordinator.islands import IslandMember, OuterOptimizer, serve_join
from megaverl.distributed.collectives import broadcast_json, reduce_json
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.worlds import Fabric, receive_json, send_json
from megaverl.errors import CheckpointError
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.trainer.roles import REWARD_MODEL
from megaverl.workers.trainable import TrainableModel

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
            with trainable.present():
                self._outer = OuterOptimizer(trainable.masters, lr=config.outer_lr, momentum=config.outer_momentum)

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
        """After every so many updates the islands join theirs."""
        self._done += 1
        if self._outer is not None and self._done % self._every == 0:
            masters = self._trainable.masters
            change = self._outer.change(masters)
            self._member.join(change, tokens=1.0, divided_by=1.0)
            self._outer.step(masters, change)
            self._trainable.follow_masters()

    def state(self) -> bytes:
        """What a checkpoint must hold of this rank: a safetensors file."""
        tensors = {f"left.{name}": tensor for name, tensor in self._member.state_dict().items()}
        if self._outer is not None:
            for part, held in self._outer.state_dict().items():
                tensors |= {f"{part}.{name}": tensor for name, tensor in held.items()}
        return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})

    def load_state(self, path: Path) -> None:
        """Undo `state`, from the file that it was written to.

        Raises:
            CheckpointError: islands that take steps of their own were elsewhere, or of another grid: where they met
                last is not known here, and without it they would never be at one place again.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {"left": {}, "start": {}, "buffer": {}}
        for key, tensor in (load_file(path, str(platform.device)) if path.exists() else {}).items():
            part, _, name = key.partition(".")
            parts[part][name] = tensor
        if self._outer is not None:
            if _shapes(parts["start"]) != _shapes(self._outer.state_dict()["start"]):
                what = "does not hold this rank's part of the model" if path.exists() else "is not there"
                raise CheckpointError(
                    f"{path}: it {what}. With coordinator.islands_every above 1 a run goes on with the placement, "
                    "actor_islands, grids and lora that it was saved with."
                )
            self._outer.load_state_dict(parts)
        self._member.load_state_dict(parts["left"])

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> float:
        mine = sum(int((batch.fields["weights"] != 0).sum()) for batch in micro_batches)
        coords = self._trainable.model.grid.coords
        speaks = coords.tp == coords.cp == coords.pp == 0  # the others of its replica have the same micro-batches
        return float(reduce_json(mine if speaks else 0, sum, self._trainable.model.grid.world))

    def _join_sums(self, sums: MetricSums) -> MetricSums:
        """The islands' first ranks give theirs, and get those of all."""
        fabric, whole = self._fabric, None
        if fabric.world_rank == 0:
            mine = {name: value.tolist() for name, value in sums.items()}
            coordinator = fabric.placement.coordinator
            sent = send_json(fabric, _SUMS, coordinator, mine)
            whole = receive_json(fabric, _SUMS, coordinator)
            sent.wait()
        return _as_sums(broadcast_json(whole, 0))


class IslandUpdates:
    """The coordinator's part of updates that islands join.

    Args:
        progress: where the run stands.
    """

    def __init__(self, config: Config, fabric: Fabric, progress: Progress) -> None:
        self._config, self._fabric, self._joined = config, fabric, dict(progress.steps)

    def serve(self, step: int) -> None:
        """Everything that the islands join in this step, in the order of their updates; elsewhere nothing."""
        config, placement = self._config, self._fabric.placement
        if self._fabric.rank != placement.coordinator or len(placement.islands) == 1:
            return
        updates = config.algorithm.num_epochs * config.algorithm.num_mini_batches
        roles = ["critic"] if config.uses_critic and placement.colocated("critic", "actor") else []
        roles += ["actor"] if step >= config.algorithm.critic_warmup_steps else []
        for role in roles:
            done = self._joined.get(role, 0)
            self._joined[role] = done + updates
            for in_update in exchanges(updates, config.coordinator, done):
                if in_update:
                    serve_update(self._fabric)
                else:
                    serve_join(self._fabric)


def serve_update(fabric: Fabric) -> None:
    """The coordinator's part of an update that the islands join: gradients, then the sums of their losses."""
    serve_join(fabric)
    firsts = [ranks[0] for ranks in fabric.placement.islands]
    total = MetricSums()
    for rank in firsts:
        total = add_metrics(total, _as_sums(receive_json(fabric, _SUMS, rank)))
    answer = {name: value.tolist() for name, value in total.items()}
    for sent in [send_json(fabric, _SUMS, rank, answer) for rank in firsts]:
        sent.wait()


def exchanges(updates: int, config: CoordinatorConfig, done: int) -> Iterator[bool]:
    """For each of a role's next updates: whether the islands join it (True), or in an outer step behind it."""
    for number in range(done + 1, done + updates + 1):
        if config.islands_every == 1:
            yield True
        elif number % config.islands_every == 0:
            yield False


def participants(config: Config, placement: ResolvedPlacement) -> tuple[list[str], list[Participant]]:
    """The roles that are trained, and who reports their updates: the first rank of each, and of each island."""
    alone = config.coordinator.islands_every > 1  # islands that take steps of their own decide by themselves
    roles = [
        "actor",
        *(["critic"] if config.uses_critic else []),
        *([REWARD_MODEL] if config.trains_reward_model else []),
    ]
    found = [
        Participant(island_name(role, number) if alone else role, world.ranks[0], number)
        for role in roles
        for number, world in enumerate(world for world in placement.worlds if place_of(role) in world.roles)
    ]
    return roles, found


def place_of(role: str) -> str:
    """The role whose ranks a trained one has: a reward model that the run trains is beside the actor."""
    return "actor" if role == REWARD_MODEL else role


def island_name(role: str, number: int) -> str:
    """What an island's part of a role is called, where it is not that of all."""
    return f"{role}.{number}" if number else role


def island_file(role: str, rank: int) -> str:
    return f"island_{role}_{rank}.safetensors"


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _as_sums(found: Mapping[str, Sequence[float]]) -> MetricSums:
    sums = MetricSums()
    for name, value in found.items():
        sums[name] = torch.tensor(value, dtype=torch.float64)
    return sums
