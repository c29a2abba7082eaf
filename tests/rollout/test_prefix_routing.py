"""Routing by prefix, on simulated servers: what their caches find, and how the load is spread."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from megaverl.rollout.prefix_routing import (
    BLOCK_TOKENS,
    RELATIVE_SLACK,
    SLACK,
    PrefixRouter,
)

SERVERS = ("a", "b", "c", "d")


class Cache:
    """What one server has computed: whole blocks, found by the tokens themselves."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, ...]] = set()
        self.asked = self.found = 0

    def read(self, token_ids: Sequence[int]) -> None:
        ends = range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS)
        blocks = [tuple(token_ids[:end]) for end in ends]
        known = 0
        while known < len(blocks) and blocks[known] in self.blocks:
            known += 1
        self.asked += len(blocks)
        self.found += known
        self.blocks.update(blocks)


def conversations(
    choose: Callable[[Sequence[int], dict[str, int]], str], *, sessions: int, turns: int
) -> tuple[dict[str, Cache], dict[str, int]]:
    """Play sessions turn by turn in a random order within each turn; the caches and requests of each server."""
    draw = random.Random(0)
    caches = {server: Cache() for server in SERVERS}
    requests = dict.fromkeys(SERVERS, 0)
    said = [[draw.randrange(1000) for _ in range(80)] for _ in range(sessions)]
    for _ in range(turns):
        running = dict.fromkeys(SERVERS, 0)
        for session in draw.sample(range(sessions), sessions):
            server = choose(said[session], dict(running))
            caches[server].read(said[session])
            running[server] += 1
            requests[server] += 1
            said[session] += [draw.randrange(1000) for _ in range(40)]
    return caches, requests


def found_share(caches: dict[str, Cache]) -> float:
    asked = sum(cache.asked for cache in caches.values())
    return sum(cache.found for cache in caches.values()) / asked


def test_later_turns_find_the_earlier_ones() -> None:
    """All that can be found is found but for a few turns that a busy server gives away; without it a quarter is."""
    router = PrefixRouter()
    caches, requests = conversations(router.choose, sessions=64, turns=6)
    least, _ = conversations(
        lambda _, loads: min(loads, key=lambda server: loads[server]),
        sessions=64,
        turns=6,
    )
    one = Cache()
    best, _ = conversations(lambda *_: "a", sessions=64, turns=6)
    assert found_share(best) > 0.7 and one.asked == 0
    assert found_share(caches) > 0.95 * found_share(best)
    assert found_share(least) < 0.5 * found_share(best)
    assert max(requests.values()) < 1.25 * min(requests.values())


def test_samples_of_a_group_share_a_server_while_it_is_not_busy() -> None:
    router = PrefixRouter()
    prompt = list(range(100))
    loads = dict.fromkeys(SERVERS, 0)
    chosen = []
    for _ in range(8):
        server = router.choose(prompt, dict(loads))
        loads[server] += 1
        chosen.append(server)
    assert chosen[: SLACK + 1] == ["a"] * (SLACK + 1)
    assert max(loads.values()) - min(loads.values()) <= SLACK + 1


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=70), min_size=1, max_size=40),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_no_server_is_chosen_that_is_much_busier_than_another(
    prompts: list[list[int]], loads: list[int]
) -> None:
    router = PrefixRouter(most_blocks=8)
    by_server = dict(zip(SERVERS, loads, strict=False))
    for prompt in prompts:
        chosen = router.choose(prompt, by_server)
        slack = max(SLACK, int(min(loads) * RELATIVE_SLACK))
        assert by_server[chosen] <= min(loads) + slack
        assert len(router._readers) <= 8


def test_what_is_shorter_than_a_block_goes_where_the_load_is_smallest() -> None:
    router = PrefixRouter()
    short = list(range(BLOCK_TOKENS - 1))
    assert router.choose(short, {"a": 0, "b": 0}) == "a"
    assert router.choose(short, {"a": 1, "b": 0}) == "b"


def test_a_server_with_an_empty_cache_is_no_longer_preferred() -> None:
    router = PrefixRouter()
    prompt = list(range(64))
    assert router.choose(prompt, {"b": 0, "a": 0}) == "b"
    assert router.choose(prompt, {"a": 0, "b": 0}) == "b"
    router.forget("b")
    assert router.choose(prompt, {"a": 0, "b": 0}) == "a"
    router.forget()
    assert router.choose(prompt, {"b": 0, "a": 0}) == "b"


def test_what_was_used_last_is_remembered_longest() -> None:
    """Of four blocks that fit, the new prompt takes the place of the one that was not asked for again."""
    router = PrefixRouter(most_blocks=4)
    first, second, third = ([number] * 2 * BLOCK_TOKENS for number in range(3))
    assert router.choose(first, {"b": 0, "a": 0}) == "b"
    assert router.choose(second, {"b": 0, "a": 0}) == "b"
    assert router.choose(first, {"a": 0, "b": 0}) == "b"
    assert router.choose(third, {"b": 0, "a": 0}) == "b"
    assert router.choose(first, {"a": 0, "b": 0}) == "b"
    assert router.choose(second, {"a": 0, "b": 0}) == "a"
