"""`reshard.overlap`: a thread moves the next version into a second set of tensors while the last one is in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

from megaverl.errors import ReshardError
from megaverl.platform import platform

# Left free beside the second set: allocations of the generation that goes on meanwhile.
HEADROOM = 1.05


class Staging:
    """Tensors like the destination's, padding included, and the swap at the boundary.

    Args:
        may_rebind: the destination's tensors may take other storage; else the swap is a copy on the device.

    Raises:
        ReshardError: there is no memory for a second set.
    """

    def __init__(self, dest: Mapping[str, torch.Tensor], may_rebind: bool) -> None:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in dest.values())
        free = free_bytes()
        if free is not None and needed * HEADROOM > free:
            raise ReshardError(
                f"reshard.overlap needs {needed:,} bytes for a second set of the engine's weights, and {free:,} are "
                "free on this rank. Set reshard.overlap=false, or lower rollout.vllm.gpu_memory_utilization."
            )
        self._dest, self._may_rebind = dest, may_rebind
        self.tensors = {name: tensor.detach().clone() for name, tensor in dest.items()}

    def swap(self) -> None:
        """The staged version becomes the destination's."""
        for name, staged in self.tensors.items():
            target = self._dest[name]
            if self._may_rebind:
                target.data, staged.data = staged.data, target.data
            else:
                target.detach().copy_(staged)


def free_bytes() -> int | None:
    """Memory that is free where the weights are; None where that cannot be known."""
    if platform.is_cuda:
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":", 1) for line in lines)
    except OSError:  # not Linux
        return None
    return int(found["MemAvailable"].split()[0]) * 1024


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
