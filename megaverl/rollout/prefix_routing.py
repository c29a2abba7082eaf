"""Routing of requests to servers that have read the beginning of a prompt before.

An engine keeps what it has computed of a prompt in blocks of tokens, and a later
request that begins with the same blocks skips them. With several servers this needs the
later request to reach the same server:

    turn 1 of a conversation   [prompt]                          -> server A
    turn 2                     [prompt][answer][next question]   -> server A, again
    samples of a group         [prompt]                          -> server A, A, A, B ...

The router remembers the blocks that each server was sent. It prefers the longest
beginning, among the servers whose load is close to the smallest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Tokens of a block, as in vLLM. A shorter match would not be found in its cache.
BLOCK_TOKENS = 16
# Blocks that are remembered: 16 million tokens, in about 200 MB.
MOST_BLOCKS = 1 << 20
# A server with this many requests more than the least loaded one gets no further one
# for its cache alone: two, or half as many again.
SLACK, RELATIVE_SLACK = 2, 0.5


def block_digests(token_ids: Sequence[int]) -> list[bytes]:
    """Return a digest for each whole block, of the block and of all that comes before it."""
    digests: list[bytes] = []
    previous = b""
    for begin in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", token_ids[begin : begin + BLOCK_TOKENS]).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=16).digest()
        digests.append(previous)
    return digests


class PrefixRouter:
    """Chooses servers for the requests of one rank. Not thread-safe: the pool calls it under its lock.

    Example:
        >>> router = PrefixRouter()
        >>> question = list(range(64))
        >>> router.choose(question, {"a": 1, "b": 0})
        'b'
        >>> router.choose([*question, 7, 8, 9], {"a": 0, "b": 1})
        'b'
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        # Digest of a block -> servers that have read it; the last used ones at the end.
        self._readers: OrderedDict[bytes, set[str]] = OrderedDict()

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """Return the server for a prompt, and remember that it reads it.

        Args:
            loads: number of running requests of each server that may be chosen, in order of preference.
        """
        digests = block_digests(token_ids)
        smallest = min(loads.values())
        most = smallest + max(SLACK, int(smallest * RELATIVE_SLACK))
        candidates = [server for server, load in loads.items() if load <= most]
        known = {server: self._num_known(digests, server) for server in candidates}
        # The first of equals: `min` keeps the order of `loads`.
        chosen = min(candidates, key=lambda server: (-known[server], loads[server]))
        for digest in digests:
            self._readers.setdefault(digest, set()).add(chosen)
            self._readers.move_to_end(digest)
        while len(self._readers) > self._most_blocks:
            self._readers.popitem(last=False)
        return chosen

    def forget(self, server: str | None = None) -> None:
        """Forget what a server has read, because its cache is empty. None: all servers."""
        if server is None:
            self._readers.clear()
            return
        for servers in self._readers.values():
            servers.discard(server)

    def _num_known(self, digests: Sequence[bytes], server: str) -> int:
        """Return the number of blocks at the beginning that a server has read."""
        for count, digest in enumerate(digests):
            if server not in self._readers.get(digest, ()):
                return count
        return len(digests)
