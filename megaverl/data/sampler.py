"""Which rows a step takes, of one source or of several with weights: arithmetic on (seed, step), nothing is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


BLOCK = 4096  # positions in which every source has exactly its share


class Mixture:
    """Which source is taken at each position of an endless stream.

    In every `BLOCK` positions a source has the number of turns that its weight gives it, to the nearest, and one at
    least; their order is drawn from (seed, block).

    Args:
        weights: above 0, at most `BLOCK` of them; only their ratios count.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.turns = _apportion(tuple(weights))
        self.seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """The source whose turn it is, and how many turns that source had before."""
        block, place = divmod(position, BLOCK)
        order, before = _order(self.turns, self.seed, block)
        source = int(order[place])
        return source, block * self.turns[source] + int(before[place])


class MixedSampler(PromptSampler):
    """Steps of rows out of several sources, each with its share; a source that is done begins anew.

    Args:
        sizes: rows of each source; row numbers run through them one after the other.
        weights: one for each.
        The rest is as in `PromptSampler`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        prompts_per_step: int,
        seed: int,
        *,
        shuffle: bool = True,
        fingerprint: str = "",
    ) -> None:
        super().__init__(sum(sizes), prompts_per_step, seed, shuffle=shuffle, fingerprint=fingerprint)
        if empty := [number for number, size in enumerate(sizes) if not size]:
            raise DataError(f"source {empty[0] + 1} has no rows left, but a weight. Leave it out.")
        self.sizes, self.weights = tuple(sizes), tuple(weights)
        self.mixture = Mixture(weights, seed)
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def rows(self, position: int, count: int) -> list[int]:
        chosen = []
        for place in range(position, position + count):
            source, turn = self.mixture.at(place)
            epoch, offset = divmod(turn, self.sizes[source])
            order = _source_order(self.sizes[source], self.seed, source, epoch) if self.shuffle else None
            chosen.append(self._starts[source] + (int(order[offset]) if order is not None else offset))
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sizes": list(self.sizes), "weights": list(self.weights)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)


def _apportion(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Turns in a block: by the largest remainders, one at least each."""
    if not weights or min(weights) <= 0 or len(weights) > BLOCK:
        raise DataError(f"weights {weights}: expected 1 to {BLOCK} numbers above 0.")
    exact = np.asarray(weights) / sum(weights) * BLOCK
    turns = np.maximum(1, np.floor(exact).astype(int))
    while turns.sum() < BLOCK:
        turns[int(np.argmax(exact - turns))] += 1
    while turns.sum() > BLOCK:
        turns[int(np.argmax(turns - exact + (turns <= 1) * -BLOCK))] -= 1
    return tuple(int(turn) for turn in turns)


@lru_cache(maxsize=4)
def _order(turns: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """[BLOCK] the source of each position, and how often that source was there before in the block."""
    order = np.repeat(np.arange(len(turns)), turns)
    np.random.Generator(np.random.PCG64([seed, 1, block])).shuffle(order)
    before = np.zeros(BLOCK, dtype=np.int64)
    for source in range(len(turns)):
        mine = order == source
        before[mine] = np.arange(turns[source])
    return order, before


@lru_cache(maxsize=64)
def _source_order(size: int, seed: int, source: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, 2, source, epoch])).permutation(size)
