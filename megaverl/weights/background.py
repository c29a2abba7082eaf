"""One thread for one reshard, with the device and stream that it needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

from megaverl.platform import platform

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs `function` from now on, on a stream of its own behind what the current one has been given."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._found: list[Result] = []
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._stream = torch.cuda.Stream() if platform.is_cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, name="reshard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            platform.start()  # the current device belongs to the thread
            with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                self._found.append(self._function())
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        self.seconds = time.perf_counter() - start

    def result(self) -> Result:
        """Wait for the function and return what it did; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
