"""A rank's own samples of a step: it has the tokens and results of those that it works on, and of all others a few
numbers.

Who has which follows from the lengths of all, by arithmetic that every rank does alone. What one rank works out goes to
the others that have the same samples, row by row; sums over all samples are sums of what each rank says of its own
groups. So a rank's bytes and work grow with its samples and not with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import groups_of_ranks
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.data.row_transfer import Moving, move_batch, move_ragged
from megaverl.distributed.collectives import device_of, gather_host_rows
from megaverl.distributed.ragged import RaggedBatch
from megaverl.distributed.worlds import Fabric, default_group
from megaverl.sharding.rows import Rows, join_rows


@dataclass(frozen=True)
class HeldRows:
    """Which samples of a step's batch this rank has, and what every rank of its world knows of all of them.

    Attributes:
        lengths, group_ids: of all samples.
        by_rank: rank of the job -> the numbers of its samples, ascending; the same on every rank.
        groups_by_rank: rank -> those of them that it speaks for: each sample has one such rank, and so has each group.
    """

    fabric: Fabric
    lengths: SequenceLengths
    group_ids: Sequence[int]
    by_rank: Rows
    groups_by_rank: Mapping[int, range]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The numbers of this rank's samples, in the order of its batch."""
        return tuple(self.by_rank[self.fabric.rank])

    @cached_property
    def place(self) -> dict[int, int]:
        """Where in this rank's batch a sample is, by its number."""
        return {row: place for place, row in enumerate(self.rows)}

    @cached_property
    def own(self) -> Tensor:
        """[k] int64: the places of the samples that this rank speaks for."""
        return torch.tensor([self.place[row] for row in self.groups_by_rank[self.fabric.rank]], dtype=torch.int64)

    def places_of(self, samples: Sequence[int]) -> list[int]:
        """The places of those of these samples that this rank has."""
        return [self.place[row] for row in samples if row in self.place]

    def pick(self, values: Tensor) -> Tensor:
        """[B, ...] of all samples -> [n, ...] of this rank's."""
        return values[torch.tensor(self.rows, dtype=torch.int64)]

    def of_all(self, values: Tensor) -> Tensor:
        """[n, ...] of this rank's samples -> [B, ...] of all, on every host; for a few numbers a sample."""
        return gather_host_rows(values[self.own], default_group())

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        total = values.to(device_of(), copy=True)
        dist.all_reduce(total, group=default_group())
        return total.to(values.device)

    def whole_on(self, rank: int, batch: RolloutBatch) -> RolloutBatch:
        """All samples, on one rank of the job; on the others `batch`, as it is. Every rank takes part."""
        everything = {rank: range(len(self.lengths))}
        moving = Moving.plan(self.fabric, "whole batch", self.groups_by_rank, everything)
        whole = move_batch(self.fabric, moving, batch.select(self.own))
        return batch if whole is None else whole

    def spread(self, name: str, tensors: Mapping[str, Tensor], source: Rows) -> dict[str, Tensor]:
        """Results from the rank that has worked them out to all that have the samples; every rank takes part.

        Args:
            tensors: [n, ...] each, with zeros beyond a response; n samples as in this rank's batch.
            source: rank -> the samples whose results it has; each is in one of them.

        Returns: by name, of all of this rank's samples, on the host.
        """
        source = {rank: source.get(rank, ()) for rank in self.fabric.world.ranks}
        mine = torch.tensor([self.place[row] for row in source[self.fabric.rank]], dtype=torch.int64)
        rows = {key: tensor.cpu()[mine] for key, tensor in tensors.items()}  # read from a device once, not by message
        # of a response there is a value for each token, or one more
        longest = max(self.lengths.response_lengths, default=0)
        beyond = {key: tensor.shape[1] - longest for key, tensor in rows.items() if tensor.dim() > 1}
        axes = {key: f"{more} more" for key, more in beyond.items() if more in (0, 1)}
        sizes = torch.tensor([self.lengths.response_lengths[row] for row in source[self.fabric.rank]])
        lengths = {axes[key]: sizes.long() + beyond[key] for key in axes}
        moving = Moving.plan(self.fabric, name, source, self.by_rank)
        moved = move_ragged(self.fabric, moving, RaggedBatch(rows, axes, lengths))
        assert moved is not None
        return dict(moved.tensors)


@dataclass(frozen=True)
class Readers:
    """Who reads which samples of a batch, of the ranks of a world.

    Attributes:
        rows: lengths of all samples -> those that each rank of the world works on.
    """

    fabric: Fabric
    rows: Callable[[SequenceLengths], Rows]

    def held(self, lengths: SequenceLengths, group_ids: Sequence[int]) -> HeldRows:
        """What each rank has of a batch: what it works on, and the groups that it speaks for."""
        ranks = self.fabric.world.ranks
        groups = dict(zip(ranks, groups_of_ranks(group_ids, len(ranks)), strict=True))
        return HeldRows(self.fabric, lengths, group_ids, join_rows([groups, self.rows(lengths)]), groups)

    def of_whole(self, batch: RolloutBatch) -> RolloutBatch:
        """This rank's samples of a batch that every rank has; of several agents' samples all."""
        if "agent_ids" in batch:
            return batch
        groups = batch.group_ids.tolist() if "group_ids" in batch else list(range(len(batch)))
        found = self.held(sequence_lengths(batch), groups)
        return as_held(batch.select(found.rows), found)


def as_held(batch: RolloutBatch, held: HeldRows) -> RolloutBatch:
    """A batch of this rank's samples, as wide as one of all would be; where every rank has all of them, just that."""
    lengths = held.lengths
    wide = batch.trim().pad_to(
        prompt=max(lengths.prompt_lengths, default=0), response=max(lengths.response_lengths, default=0)
    )
    if all(len(rows) == len(lengths) for rows in held.by_rank.values()):
        return wide
    return RolloutBatch(wide.tensors, wide.columns, held=held)


def of_all(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[n, ...] of a batch's samples -> [B, ...] of all samples of its step, on every rank."""
    return values if batch.held is None else batch.held.of_all(values)


def of_held(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[B, ...] of all samples of a step -> [n, ...] of those in this batch."""
    return values if batch.held is None else batch.held.pick(values)
