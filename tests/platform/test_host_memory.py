"""Pages that hold no object go back to the operating system."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import psutil
import pytest

from megaverl.platform import host_memory

BLOCK = 4000  # bytes, fewer than what glibc takes from the system for one object alone
COUNT = 25_000


@pytest.mark.skipif(
    host_memory._malloc_trim() is None, reason="the C library is not glibc"
)
def test_pages_between_objects_go_back() -> None:
    process = psutil.Process()
    blocks = [bytes(BLOCK) for _ in range(COUNT)]
    # The last block, at the end of the heap, keeps glibc from returning the others.
    kept = blocks[-1]
    del blocks
    before = process.memory_info().rss
    host_memory.trim_heap()
    after = process.memory_info().rss
    assert len(kept) == BLOCK
    assert before - after > BLOCK * COUNT / 2


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []

    def load(name: object) -> SimpleNamespace:
        loaded.append(name)
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", load)
    host_memory._malloc_trim.cache_clear()
    try:
        host_memory.trim_heap()
        host_memory.trim_heap()
        assert loaded == [None], "looked for once"
    finally:
        host_memory._malloc_trim.cache_clear()
