"""Which rows a step takes, by arithmetic on (seed, step): nothing is iterated, nothing need be saved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from megaverl.errors import DataError


class PromptSampler:
    """Steps of `prompts_per_step` rows, cut from one endless stream of epochs.

    Every epoch is a permutation of all rows, drawn anew from (seed, epoch); unshuffled, it is the rows in
    order. A step may reach over the end of an epoch, so no row is ever left out.

    Args:
        num_rows: rows of the data set, at least 1.
        prompts_per_step: rows of one step, at least 1; may exceed `num_rows`.
        seed: any integer >= 0.
        fingerprint: of the data set; a resumed run is refused if it has changed.
    """

    def __init__(
        self, num_rows: int, prompts_per_step: int, seed: int, *, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        if num_rows < 1:
            raise DataError("the data set is empty: there are no rows to take prompts from.")
        if prompts_per_step < 1:
            raise DataError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1.")
        self.num_rows = num_rows
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint

    def indices(self, step: int) -> list[int]:
        """Row numbers of step `step` (the first is 0), the same whichever steps were asked for before."""
        return self.rows(step * self.prompts_per_step, self.prompts_per_step)

    def rows(self, position: int, count: int) -> list[int]:
        """The `count` row numbers from `position` of the endless stream on."""
        chosen: list[int] = []
        end = position + count
        while position < end:
            epoch, offset = divmod(position, self.num_rows)
            taken = min(self.num_rows - offset, end - position)
            chosen.extend(self.epoch_order(epoch)[offset : offset + taken].tolist())
            position += taken
        return chosen

    def epoch(self, step: int) -> float:
        """Epochs before step `step`: 1.5 is half-way through the second."""
        return step * self.prompts_per_step / self.num_rows

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Row numbers of one epoch, int64 [num_rows]."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return _permutation(self.num_rows, self.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on: JSON, a few bytes."""
        return {
            "num_rows": self.num_rows,
            "prompts_per_step": self.prompts_per_step,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with another order than the one that a checkpoint was made with.

        Raises:
            DataError: names each value that differs.
        """
        mine = self.state_dict()
        changed = [f"{key}: was {state.get(key)!r}, is {mine[key]!r}" for key in mine if state.get(key) != mine[key]]
        if changed:
            raise DataError(
                "the checkpoint was made with other prompts, so the run cannot go on exactly: "
                + "; ".join(changed)
                + ". Restore the data files and `data`/`run.seed` settings, or start a new run from the "
                "saved weights."
            )


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
    order.setflags(write=False)
    return order


def split_held_out(num_rows: int, num_held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers for training and for validation: disjoint, each sorted.

    For a data set that has no validation file.

    Raises:
        DataError: `num_held_out` leaves no rows for training.
    """
    if not 0 <= num_held_out < num_rows:
        raise DataError(f"cannot hold out {num_held_out} of {num_rows} rows: at least one must be left for training.")
    order = np.random.Generator(np.random.PCG64([seed, num_rows, num_held_out])).permutation(num_rows)
    return sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())
