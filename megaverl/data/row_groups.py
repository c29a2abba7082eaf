"""In-memory cache of Parquet row groups, so that shuffled prompts do not decode a group for every row.

A row group is decoded as a whole. A small file can decode to more bytes than there is
memory, because pages are compressed and repeated values are stored once. `GroupBound`
limits the decoded bytes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import psutil

# The cache may use a quarter of this rank's share of the free host memory.
SHARE = 4
# One row group may take half of it.
MOST_OF_MEMORY = 2
# Prompts compress to a tenth or a hundredth of their size. A group that is large and
# grows 500 times holds no prompts.
MAX_UNSUSPICIOUS_BYTES = 2**30
MAX_EXPANSION = 500


class GroupBound:
    """Limit on the decoded bytes of one row group.

    Args:
        stored: bytes of the row group in its file.
        free_bytes: free host memory that this rank may use. None: measured when the first bound is made.

    Example:
        bound = GroupBound(stored)
        bound.check(declared)  # the size in the file's footer
        for batch in batches:
            bound.add(batch.nbytes)
    """

    def __init__(self, stored: int, free_bytes: int | None = None) -> None:
        self._stored = stored
        self._num_bytes = 0
        self._most = (
            _free_at_first() if free_bytes is None else free_bytes
        ) // MOST_OF_MEMORY

    def add(self, num_bytes: int) -> None:
        """Count bytes that were decoded. Raise ValueError, see `check`."""
        self._num_bytes += num_bytes
        self.check(self._num_bytes)

    def check(self, num_bytes: int) -> None:
        """Check that a row group of `num_bytes` may be decoded.

        Raises:
            ValueError: names the limit that it exceeds, and how to write a smaller group.
        """
        if (
            num_bytes > MAX_UNSUSPICIOUS_BYTES
            and num_bytes > MAX_EXPANSION * self._stored
        ):
            raise ValueError(
                f"its row group decodes to more than {num_bytes:,} bytes from {self._stored:,} in the file; at most "
                f"{MAX_EXPANSION} times as many are read. Remove the repeating column, or write the file with "
                "smaller row groups (row_group_size)"
            )
        if num_bytes > self._most:
            raise ValueError(
                f"its row group decodes to more than {num_bytes:,} bytes, and {self._most:,} is half of the memory "
                "that is free for a rank. Write the file with smaller row groups (row_group_size)"
            )


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
        # Reentrant: garbage collection may call `forget` in the thread that is inside
        # `get`.
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


@functools.cache
def _free_at_first() -> int:
    """Return the memory that was free when this was first asked: a group that was read once is not refused later."""
    return _free_memory()


def _free_memory() -> int:
    """Return the free bytes of the host divided by the number of ranks on it."""
    return int(psutil.virtual_memory().available) // int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )


SHARED = RowGroupCache()
