"""Samples of a step's batch that one rank holds, and exchanges between the ranks that hold parts of it.

A rank's samples follow from the lengths of all samples, by arithmetic that every rank
repeats. Results that one rank computes go row by row to the other ranks with the same
samples. Sums over all samples are sums of what each rank contributes for its own
groups. So a rank's traffic and work grow with its samples and not with the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.row_transfer import Moving, move_ragged
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.distributed.collectives import device_of, gather_host_rows
from megaverl.distributed.job_context import JobContext, default_group
from megaverl.distributed.ragged import RaggedBatch, beside
from megaverl.sharding.rows import Rows


@dataclass(frozen=True)
class HeldRows:
    """Samples of a step's batch that this rank holds, and what every rank of its role group knows about all samples.

    Attributes:
        context: communication of the job.
        lengths: lengths of all samples.
        group_ids: group of every sample.
        by_rank: rank of the job -> numbers of its samples, ascending. Equal on every rank.
        groups_by_rank: rank -> samples that it reports for. Each sample and each group has exactly one such rank.
    """

    context: JobContext
    lengths: SequenceLengths
    group_ids: Sequence[int]
    by_rank: Rows
    groups_by_rank: Mapping[int, range]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Numbers of this rank's samples, in the order of its batch."""
        return tuple(self.by_rank[self.context.rank])

    @cached_property
    def place(self) -> dict[int, int]:
        """Index in this rank's batch of each of its samples, by number."""
        return {row: place for place, row in enumerate(self.rows)}

    @cached_property
    def own(self) -> Tensor:
        """Indices of the samples that this rank reports for, [k] int64."""
        return torch.tensor(
            [self.place[row] for row in self.groups_by_rank[self.context.rank]],
            dtype=torch.int64,
        )

    def places_of(self, samples: Sequence[int]) -> list[int]:
        """Return the indices in this rank's batch of those `samples` that it holds."""
        return [self.place[row] for row in samples if row in self.place]

    def pick(self, values: Tensor) -> Tensor:
        """Select this rank's samples: [B, ...] of all samples -> [n, ...]."""
        return values[torch.tensor(self.rows, dtype=torch.int64)]

    def gather_samples(self, values: Tensor) -> Tensor:
        """Gather values of all samples on every host: [n, ...] of this rank's samples -> [B, ...].

        Meant for a few numbers per sample.
        """
        return gather_host_rows(values.cpu()[self.own], default_group())

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on each of them."""
        total = values.to(device_of(), copy=True)
        dist.all_reduce(total, group=default_group())
        return total.to(values.device)

    def spread(
        self, name: str, tensors: Mapping[str, Tensor], source: Rows
    ) -> dict[str, Tensor]:
        """Send results from the ranks that computed them to all ranks that hold the samples.

        Collective over the role group.

        Args:
            tensors: [n, ...] each, with zeros after a response, for the n samples of this rank's batch.
            source: rank -> samples whose results it has. Each sample has one such rank.

        Returns:
            Results of all of this rank's samples, by name, on the device of the inputs.
        """
        # Every rank of the group takes part, also one that computed nothing.
        source = {rank: source.get(rank, ()) for rank in self.context.role_group.ranks}
        computed_rows = source[self.context.rank]
        places = torch.tensor(
            [self.place[row] for row in computed_rows], dtype=torch.int64
        )
        rows = {key: tensor[beside(tensor, places)] for key, tensor in tensors.items()}
        response_lengths = self.lengths.response_lengths
        longest = max(response_lengths, default=0)
        computed_lengths = torch.tensor(
            [response_lengths[row] for row in computed_rows]
        ).long()
        axes: dict[str, str] = {}
        lengths: dict[str, Tensor] = {}
        for key, tensor in rows.items():
            if tensor.dim() < 2:
                continue
            # A response has one value per token, or one more. Other widths are sent
            # whole.
            surplus = tensor.shape[1] - longest
            if surplus in (0, 1):
                axis = f"{surplus} more"
                axes[key] = axis
                lengths[axis] = computed_lengths + surplus
        moving = Moving.plan(self.context, name, source, self.by_rank)
        moved = move_ragged(self.context, moving, RaggedBatch(rows, axes, lengths))
        assert moved is not None
        return dict(moved.tensors)
