"""Islands of the actor: replica groups on slowly connected nodes, and how their updates are joined.

Every island plans the same micro-batches of a mini-batch and trains on its share. The loss weights each token as in the
whole mini-batch.

`coordinator.islands_every` = 1: the islands add up their gradients in every update, and all take the same step, that
of a single island.

`coordinator.islands_every` = K > 1 (DiLoCo, arXiv 2311.08105): each island takes K steps of its own, on the mean loss
over its share. Then the mean of the islands' changes is the gradient of an outer optimizer, SGD with Nesterov momentum.
The outer optimizer steps on the float32 weights that the inner optimizer keeps: in a bfloat16 model most of the change
would round to nothing.

In both cases the data goes through the coordinator in buckets: each island sends a bucket and receives the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from megaverl.algorithms.loss import MetricSums, add_metrics
from megaverl.config import Config
from megaverl.config.roles import CoordinatorConfig
from megaverl.coordinator import Participant, Progress
from megaverl.distributed.collectives import broadcast_json, reduce_json
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.worlds import Channel, Fabric, PendingSends, receive_json, send_json
from megaverl.errors import CheckpointError, TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.trainer.roles import REWARD_MODEL
from megaverl.workers.trainable import TrainableModel

# Elements of a bucket: what the coordinator holds of each island at a time.
BUCKET = 1 << 22
_NAME = "joining the islands' gradients"


class Compressor:
    """bfloat16 with error feedback (arXiv 1901.09847): what rounding takes away is added to the next one.

    So what was sent, added up over time, is never further from what was meant than one rounding. What was left of
    values of another shape, from before a resume on another grid, is dropped.
    """

    def __init__(self) -> None:
        self._left: dict[str, Tensor] = {}

    def compress(self, name: str, values: Tensor) -> Tensor:
        """`values` and what was left of the last of this name, in bfloat16."""
        left = self._left.get(name)
        whole = values if left is None or left.shape != values.shape else values + left
        rounded = whole.to(torch.bfloat16)
        left = whole - rounded.to(values.dtype)
        self._left[name] = torch.where(torch.isfinite(left), left, 0.0)  # an inf is skipped, not carried on
        return rounded

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._left)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._left = dict(state)


class OuterOptimizer:
    """SGD with Nesterov momentum on the mean of the islands' changes, DiLoCo's outer step.

    Args:
        masters: this rank's weights in float32, by name; their values now are where the islands start from.
        lr, momentum: DiLoCo's 0.7 and 0.9.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self._start = {name: master.detach().clone() for name, master in masters.items()}
        self._buffer = {name: torch.zeros_like(start) for name, start in self._start.items()}

    def change(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far this island went, as a gradient: where it started less where it is. To be averaged over islands."""
        return {name: start - masters[name].detach() for name, start in self._start.items()}

    @torch.no_grad()
    def step(self, masters: Mapping[str, Tensor], mean_change: Mapping[str, Tensor]) -> None:
        """Put the masters where the outer step leads; the next inner steps start from there."""
        for name, start in self._start.items():
            gradient, buffer = mean_change[name], self._buffer[name]
            buffer.mul_(self.momentum).add_(gradient)
            start.sub_(self.lr * (gradient + self.momentum * buffer))
            masters[name].copy_(start)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"start": self._start, "buffer": self._buffer}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name in self._start:
            self._start[name].copy_(state["start"][name])
            self._buffer[name].copy_(state["buffer"][name])


class IslandMember:
    """A rank of an island. The ranks at the same place of every island hold the same part of the model.

    Args:
        compress: send bfloat16 with error feedback; what comes back is float32.
    """

    def __init__(self, fabric: Fabric, *, compress: bool = False, bucket: int = BUCKET) -> None:
        self._fabric, self._bucket = fabric, bucket
        self._compressor = Compressor() if compress else None

    def state_dict(self) -> dict[str, Tensor]:
        """What rounding has taken away and not given back yet."""
        return self._compressor.state_dict() if self._compressor else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._compressor is not None:
            self._compressor.load_state_dict(state)

    def join(self, gradients: Mapping[str, Tensor], *, tokens: float, divided_by: float) -> float:
        """Turn this island's gradients, in place, into those of the mean loss over the tokens of all islands.

        Every rank of every island takes part, with tensors of the same shapes in the same order, and the coordinator
        with `serve_join`.

        Args:
            tokens: of this island's loss. divided_by: what that loss was divided by.

        Returns: the tokens of all islands.

        Raises:
            TrainingStopped: islands that do not fit together, or a coordinator that is lost.
        """
        fabric, channel, coordinator = self._fabric, Channel(self._fabric, _NAME), self._fabric.placement.coordinator
        count = sum(tensor.numel() for tensor in gradients.values())
        numbers = torch.tensor([count, tokens, self._bucket, self._compressor is not None], dtype=torch.float64)
        channel.send_to([coordinator], numbers).wait()
        numbers = channel.receive_from(coordinator)[0].view(torch.float64)
        if numbers[0] != count:
            raise TrainingStopped(
                f"the actor's islands differ: {fabric.describe(fabric.rank)} has {count} elements of gradient, and the "
                f"first island's rank {int(numbers[0])}, or another bucket or compression. All islands need one grid."
            )
        total = float(numbers[1])
        if total <= 0:
            raise TrainingStopped("no island has a token to train on.")
        for number, views in enumerate(_buckets(gradients, self._bucket)):
            flat = torch.cat([view.float() for view in views]) * (divided_by / total)
            wire = self._compressor.compress(str(number), flat) if self._compressor else flat
            if fabric.has_device(coordinator):
                channel.send(fabric.group, {coordinator: wire}).wait()
                answer = torch.empty_like(flat)
                channel.receive(fabric.group, {coordinator: answer})
            else:
                channel.send_to([coordinator], wire.cpu()).wait()
                answer = channel.receive_from(coordinator)[0].view(flat.dtype)
            for view, part in zip(views, answer.split([view.numel() for view in views]), strict=True):
                view.copy_(part)
        return total


def serve_join(fabric: Fabric) -> None:
    """The coordinator's part of one `join`: adds up what comes, island by island in their order, in float64.

    Its memory is a bucket of each island, whatever the model's size. With K > 1 it serves every K-th step.

    Raises:
        TrainingStopped: islands that do not fit together (their ranks raise as well), or one that is lost.
    """
    channel, islands = Channel(fabric, _NAME), fabric.placement.islands
    numbers = {rank: channel.receive_from(rank)[0].view(torch.float64) for ranks in islands for rank in ranks}
    places = list(zip(*islands, strict=True))
    answers = PendingSends()
    shapes = {rank: found[[0, 2, 3]].tolist() for rank, found in numbers.items()}  # count, bucket, compressed
    differ = [ranks for ranks in places if any(shapes[rank] != shapes[ranks[0]] for rank in ranks)]
    tokens = sum(float(numbers[ranks[0]][1]) for ranks in islands)
    for ranks in places:
        answer = numbers[ranks[0]].clone()
        answer[0], answer[1] = -1.0 if differ else answer[0], tokens
        answers.add(channel.send_to(ranks, answer))
    answers.wait()
    if differ:
        raise TrainingStopped(f"the actor's islands differ at the ranks {differ}: all islands need one grid.")
    if tokens <= 0:
        raise TrainingStopped("no island has a token to train on.")
    sizes = {ranks: [int(number) for number in shapes[ranks[0]]] for ranks in places}
    longest = max((-(-count // bucket) for count, bucket, _ in sizes.values()), default=0)
    for start in range(longest):  # the first bucket of all places before the second of any
        for ranks, (count, bucket, compressed) in sizes.items():
            if (size := min(bucket, count - start * bucket)) > 0:
                _join_bucket(fabric, ranks, size, torch.bfloat16 if compressed else torch.float32)


def _join_bucket(fabric: Fabric, ranks: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    channel = Channel(fabric, _NAME)
    on_device = fabric.has_device(fabric.rank)
    joined = torch.zeros(size, dtype=torch.float64, device=platform.device)
    if on_device:
        parts = {rank: torch.empty(size, dtype=dtype, device=platform.device) for rank in ranks}
        channel.receive(fabric.group, parts)
    else:
        parts = {rank: channel.receive_from(rank)[0].view(dtype) for rank in ranks}
    for part in parts.values():
        joined += part
    answer = joined.float()
    sent = channel.send(fabric.group, dict.fromkeys(ranks, answer)) if on_device else channel.send_to(ranks, answer)
    sent.wait()


def _buckets(gradients: Mapping[str, Tensor], bucket: int) -> Iterator[list[Tensor]]:
    """Views of all elements in their order, `bucket` of them at a time, the last ones fewer."""
    views: list[Tensor] = []
    free = bucket
    for tensor in gradients.values():
        flat = tensor.view(-1)
        start = 0
        while start < flat.numel():
            view = flat[start : start + free]
            views.append(view)
            start, free = start + view.numel(), free - view.numel()
            if free == 0:
                yield views
                views, free = [], bucket
    if views:
        yield views


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
