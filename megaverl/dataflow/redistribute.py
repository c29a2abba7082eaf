"""A batch that comes to the ranks of a role: each sample lands on one of them, and goes on to those that work on it.

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
            lambda outline: join_rows(part.rows(outline) for part in parts),
            frozenset[str]().union(*(part.of_all for part in parts)),
        )


def landing(count: int, dest: Sequence[int]) -> dict[int, range]:
    """Where each of `count` samples lands: by its number alone, on as many on each rank, up to one."""
    return {rank: rows_of_rank(count, place, len(dest)) for place, rank in enumerate(dest)}


def go_on(
    fabric: Fabric, name: str, landed: RolloutBatch, outline: SequenceLengths, dest: Sequence[int], reads: Reads
) -> RolloutBatch:
    """From where samples have landed to those that read them; every rank of `dest` takes part.

    Args:
        landed: this rank's, in the order of their numbers.

    Returns: a batch of all samples. Those that this rank does not read have their lengths, the number of their prompt
        and what is read of all, and no tokens.

    Raises:
        DataError: a sample that there is not is to be read.
        TrainingStopped: a rank that did not send or take its rows in time, by number and role.
    """
    count, here = len(outline), landing(len(outline), dest)
    found = reads.rows(outline)
    wanted = {rank: sorted(found.get(rank, ())) for rank in dest}
    part = move_batch(fabric, Moving.plan(fabric, f"{name}, to their readers", here, wanted), landed)
    assert part is not None
    batch = spread_batch(part, wanted[fabric.rank], outline)
    weighed = {key: tensor for key, tensor in landed.tensors.items() if key in reads.of_all}
    if weighed:
        others = {rank: sorted(set(range(count)) - set(wanted[rank])) for rank in dest}
        moving = Moving.plan(fabric, f"{name}, what is read of all", here, others)
        moved = move_tensors(fabric, moving, weighed, landed)
        if others[fabric.rank] and moved is not None:
            batch = batch.with_(**{key: _filled(batch[key], others[fabric.rank], moved[key]) for key in moved})
    return batch


def spread_batch(part: RolloutBatch, rows: Sequence[int], outline: SequenceLengths) -> RolloutBatch:
    """A batch of all rows whose other rows have their outline and nothing else, so that all ranks plan alike."""
    count, index = len(outline), torch.tensor(list(rows), dtype=torch.int64)
    longest = {
        "prompt": max(outline.prompt_lengths, default=0),
        "response": max(outline.response_lengths, default=0),
    }
    wide = part.trim().pad_to(**longest)
    if len(rows) == count:
        return wide
    tensors = {}
    for name, tensor in wide.tensors.items():
        whole = tensor.new_full((count, *tensor.shape[1:]), FIELDS[name].fill)
        whole[index] = tensor
        tensors[name] = whole
    tensors["prompt_lengths"] = torch.tensor(outline.prompt_lengths, dtype=torch.int64)
    tensors["response_lengths"] = torch.tensor(outline.response_lengths, dtype=torch.int64)
    tensors["prompt_numbers"] = torch.tensor(outline.prompts, dtype=torch.int64)
    columns = {name: _spread_column(column, rows, count) for name, column in part.columns.items()}
    return RolloutBatch(tensors, columns)


def read_outline(name: str, said: Any) -> SequenceLengths:
    """An outline that came as JSON.

    Raises:
        DataError: it is none.
    """
    try:
        outline = SequenceLengths(*said)
        if len({len(column) for column in outline}) != 1:
            raise ValueError("its parts are of different lengths")
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: what came does not say which samples there are: {error}") from error
    return outline


def _spread_column(column: Sequence[Any], rows: Sequence[int], count: int) -> list[Any]:
    whole: list[Any] = [None] * count
    for row, entry in zip(rows, column, strict=True):
        whole[row] = entry
    return whole


def _filled(whole: Tensor, rows: Sequence[int], part: Tensor) -> Tensor:
    """`whole` with these rows as in `part`, beyond whose widths there is nothing."""
    whole, index = whole.clone(), torch.tensor(list(rows), dtype=torch.int64)
    kept = tuple(slice(0, min(sizes)) for sizes in zip(whole.shape[1:], part.shape[1:], strict=True))
    whole[(slice(None), *kept)][index] = part[(slice(None), *kept)]
    return whole
