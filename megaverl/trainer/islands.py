"""Islands of the actor: replica groups on slowly connected nodes, and how their updates are combined.

Every island plans the same micro-batches of a mini-batch and trains on its share. The
loss weights each token as in the whole mini-batch.

`coordinator.islands_every` = 1: the islands sum their gradients in every update and all
take the same step, which equals the step of a single island.

`coordinator.islands_every` = K > 1 (DiLoCo, arXiv 2311.08105): each island takes K
local steps on the mean loss over its share. The mean of the islands' weight changes is
then the gradient of an outer optimizer, SGD with Nesterov momentum. The outer optimizer
updates the inner optimizer's float32 weights, because most of the change would be lost
to rounding in a bfloat16 model.

In both cases the data goes through the coordinator in buckets: each island sends a
bucket and receives the sum. With `coordinator.aggregates: gradients`, the islands have
no optimizer, and `global_model.py` replaces this exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from megaverl.algorithms.loss import MetricSums
from megaverl.config import Config
from megaverl.config.roles import CoordinatorConfig
from megaverl.distributed.channels import Channel, PendingSends, receive_json, send_json
from megaverl.distributed.collectives import reduce_json
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.traffic import ISLANDS, count_received
from megaverl.errors import CheckpointError, TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.trainer.global_model import (
    GlobalModel,
    answer_islands,
    as_lists,
    as_sums,
    exchange_sums,
    island_of,
    receive_sums,
)
from megaverl.trainer.roles import BESIDE_ACTOR
from megaverl.workers.decisions import UpdateCounts
from megaverl.workers.trainable import TrainableModel

# Elements of a bucket. The coordinator holds one bucket of each island at a time.
BUCKET = 1 << 22
_NAME = "joining the islands' gradients"


class Compressor:
    """bfloat16 compression with error feedback (arXiv 1901.09847): each rounding error is added to the next values.

    The sum of all sent values therefore differs from the exact sum by at most one
    rounding error. Errors are dropped if their shape differs from the values, as after
    a resume on another grid.

    Attributes:
        left: rounding errors that have not been sent yet, by name.
    """

    def __init__(self) -> None:
        self.left: dict[str, Tensor] = {}

    def compress(self, name: str, values: Tensor) -> Tensor:
        """Return the values plus the last rounding error of this name, in bfloat16."""
        left = self.left.get(name)
        whole = values if left is None or left.shape != values.shape else values + left
        rounded = whole.to(torch.bfloat16)
        left = whole - rounded.to(values.dtype)
        # The coordinator skips an update with an infinite gradient. A kept inf would
        # spoil the next update as well.
        self.left[name] = torch.where(torch.isfinite(left), left, 0.0)
        return rounded


class OuterOptimizer:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the mean of the islands' weight changes.

    Args:
        masters: this rank's float32 weights by name. Their current values are the starting point of the islands.
        lr, momentum: learning rate and momentum, 0.7 and 0.9 in DiLoCo.
    """

    def __init__(
        self, masters: Mapping[str, Tensor], *, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.lr, self.momentum = lr, momentum
        self._start = {
            name: master.detach().clone() for name, master in masters.items()
        }
        self._buffer = {
            name: torch.zeros_like(start) for name, start in self._start.items()
        }

    def change(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this island's weight change as a gradient: starting point minus current weights.

        The caller averages it over the islands.
        """
        return {
            name: start - masters[name].detach() for name, start in self._start.items()
        }

    @torch.no_grad()
    def step(
        self, masters: Mapping[str, Tensor], mean_change: Mapping[str, Tensor]
    ) -> None:
        """Apply the outer step to the masters in place. The next local steps start from the result.

        Args:
            mean_change: mean of `change` over the islands.
        """
        for name, start in self._start.items():
            gradient, buffer = mean_change[name], self._buffer[name]
            buffer.mul_(self.momentum).add_(gradient)
            start.sub_(self.lr * (gradient + self.momentum * buffer))
            masters[name].copy_(start)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the starting point and the momentum buffer, by weight."""
        return {"start": self._start, "buffer": self._buffer}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state from `state_dict` in place."""
        for name in self._start:
            self._start[name].copy_(state["start"][name])
            self._buffer[name].copy_(state["buffer"][name])


class IslandMember:
    """Rank of an island. Ranks at the same position of every island hold the same part of the model.

    Args:
        compress: send bfloat16 with error feedback. The sums are received in float32.
        bucket: elements of a bucket.

    Attributes:
        compressor: None without compression.
    """

    def __init__(
        self, context: JobContext, *, compress: bool = False, bucket: int = BUCKET
    ) -> None:
        self._context, self._bucket = context, bucket
        self.compressor = Compressor() if compress else None

    def join(self, tensors: Mapping[str, Tensor], *, mean: bool = False) -> None:
        """Replace this island's tensors, in place, by their sum or mean over all islands.

        Collective over every rank of every island, with tensors of the same shapes in
        the same order. The coordinator takes part with `serve_join`.

        Raises:
            TrainingStopped: the islands have different grids, bucket sizes or compression, or the coordinator was lost.
        """
        context, channel, coordinator = (
            self._context,
            Channel(self._context, _NAME),
            self._context.placement.coordinator,
        )
        count = sum(tensor.numel() for tensor in tensors.values())
        shape = [count, self._bucket, self.compressor is not None]
        send_json(context, _NAME, coordinator, shape).wait()
        # The coordinator returns -1 if the islands do not match.
        first_count = receive_json(context, _NAME, coordinator)
        if first_count != count:
            raise TrainingStopped(
                f"the actor's islands differ: {context.describe(context.rank)} has {count} elements of gradient, and "
                f"the first island's rank {first_count}, or another bucket or compression. All islands need one "
                "grid."
            )
        share = 1.0 / len(context.placement.islands) if mean else 1.0
        for number, views in enumerate(_buckets(tensors, self._bucket)):
            flat = torch.cat([view.float() for view in views]) * share
            wire = (
                self.compressor.compress(str(number), flat) if self.compressor else flat
            )
            if context.has_device(coordinator):
                channel.send(context.group, {coordinator: wire}).wait()
                answer = torch.empty_like(flat)
                channel.receive(context.group, {coordinator: answer})
            else:
                channel.send_to([coordinator], wire.cpu()).wait()
                answer = channel.receive_from(coordinator)[0].view(flat.dtype)
            count_received(ISLANDS, answer.numel() * answer.element_size())
            for view, part in zip(
                views, answer.split([view.numel() for view in views]), strict=True
            ):
                view.copy_(part)


def serve_join(context: JobContext) -> None:
    """Serve one `join` on the coordinator: sum the islands' buckets in float64, in the order of the islands.

    The coordinator needs memory for one bucket of each island, independent of the
    model's size. With K > 1 it serves one join every K steps.

    Raises:
        TrainingStopped: the islands do not match (their ranks raise as well), or an island was lost.
    """
    islands = context.placement.islands
    # Count, bucket, compressed.
    shapes = {
        rank: receive_json(context, _NAME, rank) for ranks in islands for rank in ranks
    }
    places = list(zip(*islands, strict=True))
    differ = [
        ranks
        for ranks in places
        if any(shapes[rank] != shapes[ranks[0]] for rank in ranks)
    ]
    answers = PendingSends()
    for ranks in places:
        for rank in ranks:
            first_count = -1 if differ else shapes[ranks[0]][0]
            answers.add(send_json(context, _NAME, rank, first_count))
    answers.wait()
    if differ:
        raise TrainingStopped(
            f"the actor's islands differ at the ranks {differ}: all islands need one grid."
        )
    sizes = {ranks: shapes[ranks[0]] for ranks in places}
    # Number of buckets of the longest part, rounded up.
    longest = max(
        (-(-count // bucket) for count, bucket, _ in sizes.values()), default=0
    )
    # The first buckets of all positions are joined before the second bucket of any, so
    # that all ranks progress together.
    for start in range(longest):
        for ranks, (count, bucket, compressed) in sizes.items():
            if (size := min(bucket, count - start * bucket)) > 0:
                _join_bucket(
                    context,
                    ranks,
                    size,
                    torch.bfloat16 if compressed else torch.float32,
                )


def _join_bucket(
    context: JobContext, ranks: tuple[int, ...], size: int, dtype: torch.dtype
) -> None:
    channel = Channel(context, _NAME)
    on_device = context.has_device(context.rank)
    joined = torch.zeros(size, dtype=torch.float64, device=platform.device)
    if on_device:
        parts = {
            rank: torch.empty(size, dtype=dtype, device=platform.device)
            for rank in ranks
        }
        channel.receive(context.group, parts)
    else:
        parts = {rank: channel.receive_from(rank)[0].view(dtype) for rank in ranks}
    for part in parts.values():
        count_received(ISLANDS, part.numel() * part.element_size())
        joined += part
    answer = joined.float()
    sent = (
        channel.send(context.group, dict.fromkeys(ranks, answer))
        if on_device
        else channel.send_to(ranks, answer)
    )
    sent.wait()


def _buckets(gradients: Mapping[str, Tensor], bucket: int) -> Iterator[list[Tensor]]:
    """Yield views of all elements in order, `bucket` elements at a time. The last list has fewer."""
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
    """One role's part of an island on one rank, used as `TrainableModel.islands`.

    Args:
        done: number of updates before this start of the run.
    """

    def __init__(
        self,
        context: JobContext,
        trainable: TrainableModel,
        config: CoordinatorConfig,
        done: int,
    ) -> None:
        self.part = island_of(context)
        self._context, self._trainable, self._every, self._done = (
            context,
            trainable,
            config.islands_every,
            done,
        )
        self._member = IslandMember(
            context, compress=config.islands_compress == "bfloat16"
        )
        self._outer: OuterOptimizer | None = None
        if self._every > 1:
            with trainable.present():
                self._outer = OuterOptimizer(
                    trainable.masters,
                    lr=config.outer_lr,
                    momentum=config.outer_momentum,
                )

    def before_update(
        self, sums: MetricSums, tokens: float, micro_batches: Sequence[MicroBatch]
    ) -> MetricSums:
        """Sum gradients and loss sums over the islands, or scale this island's gradients to its own mean loss.

        Args:
            sums: loss sums of this island.
            tokens: number of tokens of the whole mini-batch.
            micro_batches: this rank's micro-batches of the update.

        Returns:
            The sums of all islands if they join every update, otherwise `sums`.
        """
        if self._outer is None:
            # A plain sum, because the loss was divided by the tokens of the whole
            # mini-batch.
            self._member.join(self._trainable.gradients)
            return as_sums(exchange_sums(self._context, sums, _SUMS))
        # The loss was divided by the tokens of the whole mini-batch. Divide by the
        # tokens of this island instead.
        island_tokens = self._own_tokens(micro_batches)
        for gradient in self._trainable.gradients.values():
            gradient.mul_(tokens / max(island_tokens, 1.0))
        return sums

    def after_update(self) -> None:
        """Take the outer step with the other islands if K local updates are complete."""
        self._done += 1
        if self._outer is not None and self._done % self._every == 0:
            masters = self._trainable.masters
            change = self._outer.change(masters)
            self._member.join(change, mean=True)
            self._outer.step(masters, change)
            self._trainable.follow_masters()

    def state(self) -> bytes:
        """Return this rank's state for a checkpoint, as a safetensors file."""
        compressor = self._member.compressor
        tensors = {
            f"left.{name}": tensor
            for name, tensor in (compressor.left if compressor else {}).items()
        }
        if self._outer is not None:
            for part, held in self._outer.state_dict().items():
                tensors |= {f"{part}.{name}": tensor for name, tensor in held.items()}
        return save(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        )

    def load_state(self, path: Path) -> None:
        """Restore the state that `state` returned.

        Raises:
            CheckpointError: `islands_every` is above 1 and the file is missing or of another grid. The outer
                optimizer's starting point is then unknown, and the islands could never agree on the same weights again.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {
            "left": {},
            "start": {},
            "buffer": {},
        }
        for key, tensor in (
            load_file(path, str(platform.device)) if path.exists() else {}
        ).items():
            part, _, name = key.partition(".")
            parts[part][name] = tensor
        if self._outer is not None:
            if _shapes(parts["start"]) != _shapes(self._outer.state_dict()["start"]):
                problem = (
                    "does not hold this rank's part of the model"
                    if path.exists()
                    else "is not there"
                )
                raise CheckpointError(
                    f"{path}: it {problem}. With coordinator.islands_every above 1, a run can resume only with the "
                    "placement, actor_islands, grids and lora that it was saved with."
                )
            self._outer.load_state_dict(parts)
        if self._member.compressor is not None:
            self._member.compressor.left = parts["left"]

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> float:
        num_tokens = sum(
            int((batch.fields["weights"] != 0).sum()) for batch in micro_batches
        )
        coords = self._trainable.model.grid.coords
        # The other ranks of this replica have the same micro-batches.
        speaks = coords.tp == coords.cp == coords.pp == 0
        return float(
            reduce_json(
                num_tokens if speaks else 0, sum, self._trainable.model.grid.world
            )
        )


class IslandUpdates:
    """Coordinator's part of updates that the islands join.

    Args:
        counts: counts of each model's updates so far.
        global_models: with `coordinator.aggregates: gradients`, the models that take the islands' steps, by role.
    """

    def __init__(
        self,
        config: Config,
        context: JobContext,
        counts: Mapping[str, UpdateCounts],
        global_models: Mapping[str, GlobalModel],
    ) -> None:
        self._config, self._context, self._models = config, context, global_models
        self._joined = {name: count.steps for name, count in counts.items()}

    def serve(self, role: str, step: int) -> None:
        """Serve the islands of a role in the updates of a step."""
        config = self._config
        if role == "actor" and step < config.algorithm.critic_warmup_steps:
            return
        updates = config.algorithm.num_epochs * config.algorithm.num_mini_batches
        done = self._joined.get(role, 0)
        self._joined[role] = done + updates
        model = self._models.get(role)
        for in_update in exchanges(updates, config.coordinator, done):
            if model is not None:
                model.serve_update()
            elif in_update:
                serve_update(self._context)
            else:
                serve_join(self._context)


def serve_update(context: JobContext) -> None:
    """Serve one update that the islands join: their gradients, then their loss sums."""
    serve_join(context)
    answer_islands(context, _SUMS, as_lists(receive_sums(context))).wait()


def exchanges(updates: int, config: CoordinatorConfig, done: int) -> Iterator[bool]:
    """Yield for each of a role's next updates whether the islands join it (True) or an outer step after it (False).

    Updates without any exchange yield nothing.
    """
    for number in range(done + 1, done + updates + 1):
        if config.islands_every == 1:
            yield True
        elif number % config.islands_every == 0:
            yield False


def reporting_ranks(
    config: Config, placement: ResolvedPlacement, role: str
) -> tuple[int, ...]:
    """Return the ranks that report on a role's gradients to the program: its first rank, or that of each island.

    Returns:
        An empty tuple if each rank of the role decides by itself. This is the case if the role's gradients belong
        together with no other gradients.
    """
    num_islands = len(placement.islands)
    takes_local_steps = num_islands > 1 and config.coordinator.islands_every > 1
    if takes_local_steps:
        return ()
    is_apart = config.uses_critic and not placement.colocated("critic", "actor")
    is_joined = num_islands > 1 and placement.colocated(place_of(role), "actor")
    if not is_joined and not (is_apart and role not in BESIDE_ACTOR):
        return ()
    return tuple(
        group.ranks[0]
        for group in placement.role_groups
        if place_of(role) in group.roles
    )


def place_of(role: str) -> str:
    """Return the role whose ranks train this role. Reward and draft models that the run trains are on the actor's."""
    return "actor" if role in BESIDE_ACTOR else role


def island_name(role: str, number: int) -> str:
    """Return the name of a role on an island. The first island's has no suffix."""
    return f"{role}.{number}" if number else role


def island_file(role: str, rank: int) -> str:
    """Return the file name of a rank's island state in a checkpoint."""
    return f"island_{role}_{rank}.safetensors"


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
