"""Several sources with weights: whose turn it is, by arithmetic on (seed, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megaverl.data.sampler import PromptSampler
from megaverl.errors import DataError

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
