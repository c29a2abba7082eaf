"""Promises of results, which clients collect with long polls."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from typing import Any


class RequestFailed(Exception):
    """A request that cannot be carried out, through a fault of the client."""


class Promise:
    """Result of one request, now or later.

    Attributes:
        id: name of the promise, which the client asks for.
        result: the result, once there is one.
        error: why the request failed, once it has.
        is_cancelled: the client does not want the result any more.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(12)
        self.result: Any = None
        self.error = ""
        self.is_cancelled = False
        self._settled = threading.Event()

    def fulfil(self, result: Any) -> None:
        """Set the result."""
        self.result = result
        self._settled.set()

    def fail(self, error: RequestFailed) -> None:
        """Set the reason why there is no result."""
        self.error = str(error)
        self._settled.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the result. Return whether there is a result or an error."""
        return self._settled.wait(seconds)


class Promises:
    """All promises of the server, by id. Settled ones are forgotten after a while.

    Args:
        keep_seconds: time from a promise's creation until it may be forgotten, if it is settled.
    """

    def __init__(self, keep_seconds: float = 3600.0) -> None:
        self._keep_seconds = keep_seconds
        self._promises: OrderedDict[str, tuple[Promise, float]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self) -> Promise:
        """Return a new promise."""
        promise = Promise()
        now = time.monotonic()
        with self._lock:
            self._promises[promise.id] = promise, now
            # The oldest come first.
            while self._promises:
                oldest, created = next(iter(self._promises.values()))
                if now - created < self._keep_seconds or not oldest.wait(0.0):
                    break
                del self._promises[oldest.id]
        return promise

    def find(self, id: str) -> Promise | None:
        """Return the promise of this id, or None if it is unknown or forgotten."""
        with self._lock:
            entry = self._promises.get(id)
        return None if entry is None else entry[0]
