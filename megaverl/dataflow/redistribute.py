"""A batch that comes to the ranks of a role: scattered over them, and redistributed to those that work on its samples.

So a sample crosses to the role once, though the tensor- and pipeline-parallel ranks of a replica all read it, and may
leave before anyone knows how long the others will be: who works on which follows from the lengths of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.batching import rows_of_rank
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.dataflow.row_transfer import Moving, move_batch, move_tensors
from megaverl.distributed.worlds import Fabric
from megaverl.errors import DataError
from megaverl.sharding.rows import Rows, join_rows


@dataclass(frozen=True)
class Reads:
    """What an operator reads of a batch that comes from other ranks.

    Attributes:
        rows: rank of the job -> the samples that it works on; the same on all ranks that the batch comes to.
        of_all: tensors that each of these ranks has of every sample, to weigh its own against them; those of them that
            the batch has.
    """

    rows: Callable[[SequenceLengths], Rows]
    of_all: frozenset[str] = frozenset()

    @staticmethod
    def together(reads: Iterable[Reads]) -> Reads:
        """What several operators on the same ranks read."""
        parts = list(reads)
        return Reads(
            lambda lengths: join_rows(part.rows(lengths) for part in parts),
            frozenset[str]().union(*(part.of_all for part in parts)),
        )


def scatter_rows(count: int, dest: Sequence[int]) -> dict[int, range]:
    """To which rank each of `count` samples goes first: by its number alone, as many to each rank, up to one."""
    return {rank: rows_of_rank(count, place, len(dest)) for place, rank in enumerate(dest)}


def redistribute(
    fabric: Fabric, name: str, scattered: RolloutBatch, lengths: SequenceLengths, dest: Sequence[int], reads: Reads
) -> RolloutBatch:
    """From where samples were scattered to those that read them; every rank of `dest` takes part.

    Args:
        scattered: this rank's, in the order of their numbers.

    Returns: a batch of all samples. Those that this rank does not read have their lengths, the number of their prompt
        and what is read of all, and no tokens.

    Raises:
        DataError: a sample that there is not is to be read.
        TrainingStopped: a rank that did not send or take its rows in time, by number and role.
    """
    count, here, found = len(lengths), scatter_rows(len(lengths), dest), reads.rows(lengths)
    wanted = {rank: sorted(found.get(rank, ())) for rank in dest}
    part = move_batch(fabric, Moving.plan(fabric, f"{name}, to their readers", here, wanted), scattered)
    assert part is not None
    batch = _all_samples(part, wanted[fabric.rank], lengths)
    weighed = {key: tensor for key, tensor in scattered.tensors.items() if key in reads.of_all}
    if weighed:
        others = {rank: sorted(set(range(count)) - set(wanted[rank])) for rank in dest}
        moving = Moving.plan(fabric, f"{name}, what is read of all", here, others)
        moved = move_tensors(fabric, moving, weighed, scattered)
        if (rows := others[fabric.rank]) and moved is not None:
            batch = batch.with_(**{key: place_rows(batch[key].clone(), rows, moved[key]) for key in moved})
    return batch


def _all_samples(part: RolloutBatch, rows: Sequence[int], lengths: SequenceLengths) -> RolloutBatch:
    """A batch of all rows whose other rows have their lengths and nothing else, so that all ranks plan alike."""
    count = len(lengths)
    longest = {"prompt": max(lengths.prompt_lengths, default=0), "response": max(lengths.response_lengths, default=0)}
    wide = part.trim().pad_to(**longest)
    if len(rows) == count:
        return wide
    tensors = {
        name: place_rows(tensor.new_full((count, *tensor.shape[1:]), FIELDS[name].fill), rows, tensor)
        for name, tensor in wide.tensors.items()
    }
    tensors["prompt_lengths"] = torch.tensor(lengths.prompt_lengths, dtype=torch.int64)
    tensors["response_lengths"] = torch.tensor(lengths.response_lengths, dtype=torch.int64)
    tensors["prompt_numbers"] = torch.tensor(lengths.prompts, dtype=torch.int64)
    place = {row: number for number, row in enumerate(rows)}
    columns = {
        name: [column[place[row]] if row in place else None for row in range(count)]
        for name, column in part.columns.items()
    }
    return RolloutBatch(tensors, columns)


def place_rows(whole: Tensor, rows: Sequence[int], part: Tensor) -> Tensor:
    """`whole`, in place, with these rows as in `part`; beyond the narrower of their widths there is nothing."""
    kept = (slice(None), *(slice(0, min(sizes)) for sizes in zip(whole.shape[1:], part.shape[1:], strict=True)))
    if rows:
        whole[kept][torch.tensor(list(rows), dtype=torch.int64)] = part[kept]
    return whole


def read_lengths(name: str, found: Any) -> SequenceLengths:
    """Lengths that came as JSON.

    Raises:
        DataError: they are none.
    """
    try:
        lengths = SequenceLengths(*found)
        if len({len(column) for column in lengths}) != 1:
            raise ValueError("its parts are of different lengths")
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: what came does not say which samples there are: {error}") from error
    return lengths
