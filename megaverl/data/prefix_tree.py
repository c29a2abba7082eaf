"""Prefix tree of samples: which of their first tokens are equal, and are therefore computed once.

Samples of one prompt share the prompt. Conversations of an agent share more: a program
that drops the reasoning of earlier turns, tries two continuations of a turn, or asks a
sub-agent sends a history that begins like an earlier conversation and then differs.

    sample 0    system  user  turn 1
    sample 1    system  user  turn 1  answer  turn 2       shares "system user turn 1"
    sample 2    system  user  turn 1  answer  turn 2'      shares all before "turn 2'"
    sample 3    system  user  turn 1'                      shares "system user"

The tree is stored as an order of the samples and the number of tokens that each sample
shares with the one before it, like a suffix array with its longest common prefixes. In
this order samples with equal beginnings are neighbours, so two samples share the
smallest number between them, and each subset of samples has its tree by the same rule.

A token that predicts a token of a response belongs to its sample alone: a row then has
one place for each prediction. So a sample shares at most its prompt without the last
token. Where branches meet, the one with the shortest prompt comes first: its response
is the prompt of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


class PrefixTree:
    """Prefix tree of samples 0, 1, ....

    Args:
        order: the samples in an order in which those with equal beginnings are neighbours.
        equal: for each place of the order, the number of first tokens in which this sample equals the one before it; 0
            at the first place.
        limits: for each sample, the number of tokens that it shares at most.

    Example:
        tree = PrefixTree.of_tokens([[1, 2, 3], [1, 2], [1, 2, 4]], limits=[2, 1, 2], groups=[0, 0, 0])
        tree.num_tokens([0, 1, 2], lengths=[3, 2, 3])  # 4: tokens 1, 2, 3 and 4
    """

    def __init__(
        self, order: Sequence[int], equal: Sequence[int], limits: Sequence[int]
    ) -> None:
        self.order = list(order)
        self.equal = list(equal)
        self.limits = list(limits)
        self._place = {sample: place for place, sample in enumerate(self.order)}
        # Place at which the run of samples that are equal to a neighbour in any token
        # begins.
        self._root: list[int] = []
        for place, count in enumerate(self.equal):
            self._root.append(self._root[-1] if place and count else place)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixTree):
            return NotImplemented
        mine = (self.order, self.equal, self.limits)
        return mine == (other.order, other.equal, other.limits)

    __hash__ = None  # type: ignore[assignment]  # its lists may change

    def __repr__(self) -> str:
        return f"PrefixTree({self.order}, {self.equal}, {self.limits})"

    @classmethod
    def apart(cls, num_samples: int) -> PrefixTree:
        """Return the tree of samples that share nothing."""
        zeros = [0] * num_samples
        return cls(range(num_samples), zeros, zeros)

    @classmethod
    def of_prompts(
        cls, prompts: Sequence[int], prompt_lengths: Sequence[int]
    ) -> PrefixTree:
        """Return the tree of samples that share their prompt, if it is equal, and nothing else.

        Args:
            prompts: number per sample that is equal for samples with the same prompt.
            prompt_lengths: tokens of each prompt.
        """
        first_with = _first_places(prompts)
        # Prompts in the order of their first samples, each with its samples in theirs.
        order = sorted(range(len(prompts)), key=lambda i: (first_with[prompts[i]], i))
        equal = [
            0 if first_with[prompts[sample]] == sample else prompt_lengths[sample]
            for sample in order
        ]
        return cls(order, equal, limits_of(prompt_lengths))

    @classmethod
    def of_tokens(
        cls,
        sequences: Sequence[Sequence[int] | np.ndarray],
        limits: Sequence[int],
        groups: Sequence[int],
    ) -> PrefixTree:
        """Return the tree of samples that share all tokens up to the first difference.

        Args:
            sequences: tokens of each sample.
            limits: number of tokens that each sample shares at most.
            groups: number per sample. Samples of different groups share nothing.
        """
        tokens = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        first_with = _first_places(groups)
        # Any total order will do in which a common prefix keeps sequences together. The
        # order of their bytes is one, and is fast to compare.
        order = sorted(
            range(len(tokens)),
            key=lambda i: (first_with[groups[i]], tokens[i].tobytes(), i),
        )
        equal = _equal_to_the_one_before(order, tokens, groups)
        order = _shortest_first(order, equal, limits)
        return cls(order, _equal_to_the_one_before(order, tokens, groups), limits)

    def in_order(self, samples: Sequence[int]) -> list[int]:
        """Return samples in the order of the tree."""
        return sorted(samples, key=self._place.__getitem__)

    @property
    def shared(self) -> list[int]:
        """Return, for each place of the order, the number of tokens that this sample shares with the one before it."""
        return [
            min(count, self.limits[sample])
            for sample, count in zip(self.order, self.equal, strict=True)
        ]

    def subset(self, samples: Sequence[int]) -> PrefixTree:
        """Return the tree of some samples, numbered by their index in `samples`."""
        places = [self._place[sample] for sample in samples]
        order = sorted(range(len(samples)), key=places.__getitem__)
        equal = [
            self._equal_between(places[before], places[sample])
            for before, sample in zip(order, order[1:], strict=False)
        ]
        limits = [self.limits[sample] for sample in samples]
        return PrefixTree(order, [0, *equal][: len(order)], limits)

    def num_tokens(self, samples: Sequence[int], lengths: Sequence[int]) -> int:
        """Return the tokens of samples that are packed into one row, each shared token counted once.

        Args:
            samples: the samples.
            lengths: tokens of every sample of the tree.
        """
        places = sorted(self._place[sample] for sample in samples)
        return sum(lengths[sample] for sample in samples) - self.num_shared(places)

    def place_of(self, sample: int) -> int:
        """Return the place of a sample in the order."""
        return self._place[sample]

    def num_shared(self, places: Sequence[int]) -> int:
        """Return the tokens that a row with the samples at these places, ascending, saves."""
        return sum(
            min(self._equal_between(before, place), self.limits[self.order[place]])
            for before, place in zip(places, places[1:], strict=False)
        )

    def _equal_between(self, before: int, place: int) -> int:
        """Return the number of first tokens in which the samples at two places of the order are equal."""
        if self._root[before] != self._root[place]:
            return 0
        return min(self.equal[before + 1 : place + 1])


class GrowingRow:
    """Samples that are packed into one row, to which further samples are added.

    Attributes:
        samples: the samples, in the order in which they were added.
        num_tokens: tokens of the row, each shared token counted once.
    """

    def __init__(self, tree: PrefixTree, lengths: Sequence[int]) -> None:
        self.samples: list[int] = []
        self.num_tokens = 0
        self._tree, self._lengths = tree, lengths
        self._places: list[int] = []  # of the samples in the tree's order, ascending

    def add(self, samples: Sequence[int]) -> None:
        """Add samples to the row."""
        self._places, growth = self._with(samples)
        self.samples += samples
        self.num_tokens += growth

    def growth(self, samples: Sequence[int]) -> int:
        """Return the tokens by which the row would grow with further samples."""
        return self._with(samples)[1]

    def _with(self, samples: Sequence[int]) -> tuple[list[int], int]:
        """Return the places with those of further samples, and the tokens that these add."""
        places = list(self._places)
        growth = 0
        for sample in samples:
            place = self._tree.place_of(sample)
            index = bisect_left(places, place)
            before = places[index - 1 : index] if index else []
            after = places[index : index + 1]
            neighbours = [*before, place, *after]
            growth += self._lengths[sample] - self._tree.num_shared(neighbours)
            # What its neighbours share with each other was subtracted already.
            growth += self._tree.num_shared([*before, *after])
            places.insert(index, place)
        return places, growth


def limits_of(prompt_lengths: Sequence[int]) -> list[int]:
    """Return the tokens that each sample shares at most: its prompt without the token that predicts the response."""
    return [max(0, length - 1) for length in prompt_lengths]


def _first_places(values: Sequence[int]) -> dict[int, int]:
    """Return the first place of each value."""
    first: dict[int, int] = {}
    for place, value in enumerate(values):
        first.setdefault(value, place)
    return first


def _equal_to_the_one_before(
    order: Sequence[int], tokens: Sequence[np.ndarray], groups: Sequence[int]
) -> list[int]:
    """Return `PrefixTree.equal` of an order."""
    equal = [
        _num_equal(tokens[before], tokens[sample])
        if groups[before] == groups[sample]
        else 0
        for before, sample in zip(order, order[1:], strict=False)
    ]
    return [0, *equal][: len(order)]


def _shortest_first(
    order: Sequence[int], equal: Sequence[int], limits: Sequence[int]
) -> list[int]:
    """Return the order in which, where branches meet, the one with the smallest limit comes first."""
    result: list[int] = []
    # Spans of the order that are branches of a node whose other branches came before.
    # A stack instead of recursion: a long chain of turns is a deep tree.
    spans = [(0, len(order))] if order else []
    while spans:
        begin, end = spans.pop()
        if end - begin == 1:
            result.append(order[begin])
            continue
        depth = min(equal[begin + 1 : end])
        inner = range(begin + 1, end)
        cuts = [begin, *(place for place in inner if equal[place] == depth), end]
        branches = sorted(
            zip(cuts, cuts[1:], strict=False),
            key=lambda span: min(limits[order[place]] for place in range(*span)),
        )
        spans += reversed(branches)
    return result


def _num_equal(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal tokens at the beginnings of two sequences."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
