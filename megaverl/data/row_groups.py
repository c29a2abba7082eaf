"""In-memory cache of Parquet row groups, so that shuffled prompts do not decode a group for every row."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import psutil

# The cache may use a quarter of this rank's share of the free host memory.
SHARE = 4  # of the host memory that was free, and is this rank's, one part in so many


class RowGroupCache:
    """Cache of decoded row groups of any number of files. The least recently used ones are evicted first.

    The group read last is always kept, however large it is. Thread-safe.

    Args:
        budget: bytes of decoded tables. None: a share of the memory that is free when the first group is loaded.

    Example:
            cache = RowGroupCache()
            table = cache.get((file_number, group), lambda: file.read_row_group(group))
            cache.forget(file_number)
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._num_bytes = 0
        # Reentrant: garbage collection may call `forget` in the thread that is inside `get`.
        self._lock = threading.RLock()

    def get(self, key: tuple[int, int], load: Callable[[], Any]) -> Any:
        """Return the table of (file, group).

        `load` decodes it if it is not cached, and its exceptions are passed on.
        """
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
            table = load()
            if self._budget is None:
                self._budget = _free_memory() // SHARE
            self._tables[key] = table
            self._num_bytes += table.nbytes
            while self._num_bytes > self._budget and len(self._tables) > 1:
                self._drop(next(iter(self._tables)))
            return table

    def forget(self, file: int) -> None:
        """Evict all groups of a file."""
        with self._lock:
            for key in [key for key in self._tables if key[0] == file]:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        """Evict one group."""
        self._num_bytes -= self._tables.pop(key).nbytes


def _free_memory() -> int:
    """Return the free bytes of the host divided by the number of ranks on it."""
    return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


SHARED = RowGroupCache()
