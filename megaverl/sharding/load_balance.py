"""Who serves whom: the ranks that hold the same boxes share out those that need them, as evenly as can be.

The rule, the same on every rank: a holder on the needing rank's own node, else any holder. Those who need
boxes of one size stand in a line, each with as many requests as there are tensors alike; the line is cut into
equal runs, one a holder. So holders differ by one request at most, and a rank meets few holders. Large boxes
are dealt first, and what does not come out even goes on where the last deal ended: over all sizes, the holders
differ by one largest box at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaverl.sharding.holders import RankLayouts, TensorGroup

ANYWHERE = -1  # the pool of all holders, beside those of single nodes


class ShardRange(NamedTuple):
    """Bundle `bundle` of tensors `low` to `high` (not included) of a geometry, both by their number."""

    geometry: int
    low: int
    high: int
    bundle: int


@dataclass(frozen=True)
class Deal:
    """Requests of one size to one pool: request `place * num_tensors + i` is for tensor i, from the rank at
    that place of `needing`. The first `extra` holders from `start` on get one more than the others."""

    pool: Sequence[int]
    start: int
    needing: dict[int, int]
    num_tensors: int

    @property
    def share(self) -> tuple[int, int]:
        return divmod(len(self.needing) * self.num_tensors, len(self.pool))

    def holders(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """`(holder, low, high)`: who gives `rank` tensors low to high."""
        each, extra = self.share
        first = self.needing[rank] * self.num_tensors
        request = first
        while request < first + self.num_tensors:
            longer = extra * (each + 1)
            turn = request // (each + 1) if request < longer else extra + (request - longer) // each
            end = min(self._first_request(turn + 1), first + self.num_tensors)
            yield self.pool[(self.start + turn) % len(self.pool)], request - first, end - first
            request = end

    def served(self, place: int, ranks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """`(rank, low, high)`: to whom the holder at a place of the pool gives tensors low to high."""
        turn = (place - self.start) % len(self.pool)
        request, end = self._first_request(turn), self._first_request(turn + 1)
        while request < end:
            number, low = divmod(request, self.num_tensors)
            high = min(self.num_tensors, low + end - request)
            yield ranks[number], low, high
            request += high - low

    def _first_request(self, turn: int) -> int:
        each, extra = self.share
        return turn * each + min(turn, extra)


class Dealer:
    """All deals of one set of holders: the ranks of some classes of the source.

    Args:
        classes: the classes.
        wanted: `(size, geometry, bundle, class of the destination)` for all that the holders have and
            somebody wants, by numbers.
    """

    def __init__(
        self,
        classes: Iterable[int],
        wanted: Iterable[tuple[int, int, int, int]],
        geometries: Sequence[TensorGroup],
        source: RankLayouts,
        dest: RankLayouts,
        node_of: Sequence[int],
    ) -> None:
        self._holders = frozenset(classes)
        self._node_of = node_of
        self._pools = self._make_pools(source)
        self._place = {key: {rank: i for i, rank in enumerate(pool)} for key, pool in self._pools.items()}
        self._deals: dict[tuple[int, int, int], dict[int, Deal]] = {}
        starts = dict.fromkeys(self._pools, 0)
        lines: dict[tuple[int, int, int], list[int]] = {}
        for size, geometry, bundle, number in wanted:
            lines.setdefault((-size, geometry, bundle), []).append(number)
        for (size, geometry, bundle), numbers in sorted(lines.items()):
            deals = self._deals[geometry, bundle, -size] = {}
            for key, needing in self._lines(numbers, source, dest).items():
                deal = Deal(self._pools[key], starts[key], needing, len(geometries[geometry].tensors))
                starts[key] = (deal.start + deal.share[1]) % len(deal.pool)
                deals[key] = deal

    def _make_pools(self, source: RankLayouts) -> dict[int, list[int]]:
        """The holders of each node, and all; of each class first one on every node, then the next."""
        on_node: dict[tuple[int, int], int] = {}
        order = []
        for number in sorted(self._holders):
            for rank in source.ranks[number]:
                node = self._node_of[rank]
                nth = on_node[number, node] = on_node.get((number, node), -1) + 1
                order.append((number, nth, node, rank))
        pools: dict[int, list[int]] = {ANYWHERE: []}
        for _, _, node, rank in sorted(order):
            pools[ANYWHERE].append(rank)
            pools.setdefault(node, []).append(rank)
        return pools

    def _lines(self, numbers: Sequence[int], source: RankLayouts, dest: RankLayouts) -> dict[int, dict[int, int]]:
        lines: dict[int, dict[int, int]] = {}
        for number in numbers:
            for rank in dest.ranks[number]:
                if source.class_of[rank] not in self._holders:
                    line = lines.setdefault(self._pool_of(rank), {})
                    line[rank] = len(line)
        return lines

    def _pool_of(self, rank: int) -> int:
        node = self._node_of[rank]
        return node if node in self._pools else ANYWHERE

    def fetched(self, rank: int, geometry: int, bundle: int, size: int) -> Iterator[tuple[int, ShardRange]]:
        """From whom `rank`, which is none of the holders, gets what."""
        deal = self._deals[geometry, bundle, size][self._pool_of(rank)]
        for holder, low, high in deal.holders(rank):
            yield holder, ShardRange(geometry, low, high, bundle)

    def served(self, rank: int) -> Iterator[tuple[int, ShardRange]]:
        """To whom `rank`, one of the holders, gives what."""
        for (geometry, bundle, _), deals in self._deals.items():
            for key in (ANYWHERE, self._node_of[rank]):
                if key in deals:
                    deal = deals[key]
                    for other, low, high in deal.served(self._place[key][rank], list(deal.needing)):
                        yield other, ShardRange(geometry, low, high, bundle)
