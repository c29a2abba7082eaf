"""Islands of the actor on slowly connected nodes: their gradients added up, or every K steps their weights averaged.

K = 1: each island's gradient of its own samples becomes the gradient of all samples, and every island takes the same
step. K > 1 (DiLoCo, arXiv 2311.08105): each takes K steps of its own; then the mean of their changes is the gradient
of an outer optimizer, SGD with Nesterov momentum, that all take alike. Either goes through the coordinator: bucket by
bucket up, the sum down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megaverl.distributed.worlds import Channel, Fabric
from megaverl.errors import TrainingStopped
from megaverl.platform import platform

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
        channel.send(fabric.control, {coordinator: numbers}).wait()
        channel.receive(fabric.control, {coordinator: numbers})
        if numbers[0] != count:
            raise TrainingStopped(
                f"the actor's islands differ: {fabric.describe(fabric.rank)} has {count} elements of gradient, and the "
                f"first island's rank {int(numbers[0])}, or another bucket or compression. All islands need one grid."
            )
        total = float(numbers[1])
        if total <= 0:
            raise TrainingStopped("no island has a token to train on.")
        group = fabric.group if fabric.has_device(coordinator) else fabric.control
        device = platform.device if fabric.has_device(coordinator) else torch.device("cpu")
        for number, views in enumerate(_buckets(gradients, self._bucket)):
            flat = torch.cat([view.float() for view in views]) * (divided_by / total)
            wire = self._compressor.compress(str(number), flat) if self._compressor else flat
            channel.send(group, {coordinator: wire.to(device)}).wait()
            answer = torch.empty(flat.shape, dtype=flat.dtype, device=device)
            channel.receive(group, {coordinator: answer})
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
    numbers = {rank: torch.zeros(4, dtype=torch.float64) for ranks in islands for rank in ranks}
    channel.receive(fabric.control, numbers)
    places = list(zip(*islands, strict=True))
    shapes = {rank: found[[0, 2, 3]].tolist() for rank, found in numbers.items()}  # count, bucket, compressed
    differ = [ranks for ranks in places if any(shapes[rank] != shapes[ranks[0]] for rank in ranks)]
    tokens = sum(float(numbers[ranks[0]][1]) for ranks in islands)
    answers: dict[int, Tensor] = {}
    for ranks in places:
        answer = numbers[ranks[0]].clone()
        answer[0], answer[1] = -1.0 if differ else answer[0], tokens
        answers |= dict.fromkeys(ranks, answer)
    channel.send(fabric.control, answers).wait()
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
    parts = {rank: torch.empty(size, dtype=dtype, device=platform.device) for rank in ranks}
    joined = torch.zeros(size, dtype=torch.float64, device=platform.device)
    channel.receive(fabric.group, parts)
    for part in parts.values():
        joined += part
    channel.send(fabric.group, dict.fromkeys(ranks, joined.float())).wait()


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
