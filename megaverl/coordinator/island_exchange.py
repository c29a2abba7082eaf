"""Gradients of the islands through the coordinator: bucket by bucket up, the sum down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.coordinator.islands import Compressor
from megaverl.distributed.worlds import Fabric
from megaverl.errors import TrainingStopped
from megaverl.platform import platform

# Elements of a bucket: what the coordinator holds of each island at a time.
BUCKET = 1 << 22
_TAG = 0x400000
_NUMBERS = 4


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
        fabric, coordinator = self._fabric, self._fabric.placement.coordinator
        count = sum(tensor.numel() for tensor in gradients.values())
        numbers = torch.tensor([count, tokens, self._bucket, self._compressor is not None], dtype=torch.float64)
        _move(fabric, fabric.control, numbers, coordinator, send=True)
        _move(fabric, fabric.control, numbers, coordinator, send=False)
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
                _move(fabric, fabric.group, wire, coordinator, send=True)
                _move(fabric, fabric.group, flat, coordinator, send=False)
            else:
                _move(fabric, fabric.control, wire.cpu(), coordinator, send=True)
                answer = torch.empty(flat.shape, dtype=flat.dtype)
                _move(fabric, fabric.control, answer, coordinator, send=False)
                flat.copy_(answer)
            start = 0
            for view in views:
                view.copy_(flat[start : start + view.numel()])
                start += view.numel()
        return total


def serve_join(fabric: Fabric) -> None:
    """The coordinator's part of one `join`: adds up what comes, island by island in their order, in float64.

    Its memory is a bucket of each island, whatever the model's size. With K > 1 it serves every K-th step.

    Raises:
        TrainingStopped: islands that do not fit together (their ranks raise as well), or one that is lost.
    """
    places = list(zip(*fabric.placement.islands, strict=True))
    told = {rank: torch.zeros(_NUMBERS, dtype=torch.float64) for ranks in places for rank in ranks}
    for rank, numbers in told.items():
        _move(fabric, fabric.control, numbers, rank, send=False)
    differ = [
        ranks for ranks in places if any(told[rank][[0, 2, 3]].ne(told[ranks[0]][[0, 2, 3]]).any() for rank in ranks)
    ]
    tokens = sum(float(told[island[0]][1]) for island in fabric.placement.islands)
    for ranks in places:
        for rank in ranks:
            answer = told[ranks[0]].clone()
            answer[0] = -1.0 if differ else answer[0]
            answer[1] = tokens
            _move(fabric, fabric.control, answer, rank, send=True)
    if differ:
        raise TrainingStopped(f"the actor's islands differ at the ranks {differ}: all islands need one grid.")
    if tokens <= 0:
        raise TrainingStopped("no island has a token to train on.")
    for ranks, start in _in_turn(places, told):
        count, _, bucket, compressed = (int(number) for number in told[ranks[0]])
        size = min(bucket, count - start)
        _join_bucket(fabric, ranks, size, torch.bfloat16 if compressed else torch.float32)


def _in_turn(places: Sequence[tuple[int, ...]], told: Mapping[int, Tensor]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every place's buckets, the first of all places before the second of any."""
    longest = max((int(told[ranks[0]][0]) for ranks in places), default=0)
    smallest = min((int(told[ranks[0]][2]) for ranks in places), default=1)
    for number in range(-(-longest // smallest)):
        for ranks in places:
            count, bucket = int(told[ranks[0]][0]), int(told[ranks[0]][2])
            if number * bucket < count:
                yield ranks, number * bucket


def _join_bucket(fabric: Fabric, ranks: Sequence[int], size: int, dtype: torch.dtype) -> None:
    parts = [torch.empty(size, dtype=dtype, device=platform.device) for _ in ranks]
    joined = torch.zeros(size, dtype=torch.float64, device=platform.device)
    for rank, part in zip(ranks, parts, strict=True):
        _move(fabric, fabric.group, part, rank, send=False)
        joined += part
    answer = joined.float()
    for rank in ranks:
        _move(fabric, fabric.group, answer, rank, send=True)


def _buckets(gradients: Mapping[str, Tensor], bucket: int) -> Iterator[list[Tensor]]:
    """Views of all elements in their order, `bucket` of them at a time, the last ones fewer."""
    views: list[Tensor] = []
    room = bucket
    for tensor in gradients.values():
        flat = tensor.view(-1)
        start = 0
        while start < flat.numel():
            view = flat[start : start + room]
            views.append(view)
            start, room = start + view.numel(), room - view.numel()
            if room == 0:
                yield views
                views, room = [], bucket
    if views:
        yield views


def _move(fabric: Fabric, group: dist.ProcessGroup, tensor: Tensor, peer: int, *, send: bool) -> None:
    try:
        if send:
            work = dist.isend(tensor, group=group, group_dst=peer, tag=_TAG)
        else:
            work = dist.irecv(tensor, group=group, group_src=peer, tag=_TAG)
        assert work is not None
        if platform.is_cuda and tensor.is_cuda:
            work.wait()
        else:
            work.wait(fabric.timeout)
    except RuntimeError as error:
        raise TrainingStopped(
            f"{fabric.describe(peer)} died or stalled while the islands' gradients were joined "
            f"({str(error).splitlines()[0][:160]})"
        ) from error
