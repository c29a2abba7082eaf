"""Writing in the background: a thread writes tensors of a checkpoint while training continues.

A tensor is copied only if training is about to change it before it is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from megaverl.platform import platform

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

NICENESS = 10  # lower priority for the writing thread, so that training comes first


def start_writing(write: Callable[[], T], *, in_background: bool = True) -> Future[T]:
    """Call `write` in a thread, or directly, and return a future of its result.

    The thread does not belong to an executor: Python waits for executors at exit, and a
    disk may hang.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            if in_background and hasattr(os, "setpriority"):
                # On Linux every thread has its own priority.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            future.set_result(write())
        except Exception as error:
            # Reported to all ranks when the checkpoint is committed.
            future.set_exception(error)

    if in_background:
        # A daemon thread, so that a hanging disk cannot keep the process alive.
        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    else:
        run()
    return future


class HostBuffers:
    """Host memory for copies, page-locked if they come from a GPU. Buffers are kept and reused from save to save."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self.num_bytes = 0  # bytes of all buffers, free or in use

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a complete copy in memory that belongs to the caller until `give_back`."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        if not free:
            self.num_bytes += tensor.nbytes
            free.append(
                torch.empty(
                    # Page-locked memory, without which a copy from a GPU is far slower.
                    tensor.shape,
                    dtype=tensor.dtype,
                    pin_memory=platform.is_cuda,
                )
            )
        return free.pop().copy_(tensor)

    def give_back(self, copy: torch.Tensor) -> None:
        """Return a buffer for reuse."""
        self._free[copy.shape, copy.dtype].append(copy)


class PendingTensors(Generic[K]):
    """Tensors that do not change between two updates: weights and optimizer state, for most of a step.

    The writing thread takes one tensor after the other, and may read each until it
    takes the next. Code that is about to change the tensors calls `settle` first, which
    copies those that are not written yet. A copy's memory is free again once it is
    written. So there is only one copy of a GPU tensor at a time, until an update
    begins.

        writing thread:    take(a) write   take(b) write   take(c) write copy   close()
        training thread:   ... generation ...        settle(): copy c, wait for b, then step

    Args:
        tensors: must not change before `settle`.
        changing: may change at once, so they are copied in the constructor.
        buffers: memory for the copies, which no other save may use meanwhile.
    """

    def __init__(
        self,
        tensors: Mapping[K, torch.Tensor],
        changing: Mapping[K, torch.Tensor],
        buffers: HostBuffers,
    ) -> None:
        # In the order in which they are written, which `settle` relies on.
        # Not copied, and not written or still being written.
        self._waiting = dict(tensors)
        self._buffers = buffers
        self._copied = {key: buffers.copy(tensor) for key, tensor in changing.items()}
        self._reading: K | None = None
        self._changed = threading.Condition()

    def take(self, key: K) -> torch.Tensor:
        """Return the tensor or its copy, in host memory. The tensor taken before is released."""
        with self._changed:
            # Asking for the next tensor means that the last one is written.
            self._let_go()
            self._reading = key
            # The file is written from host memory. The caller's device tensor may
            # change once it is copied.
            if key in self._waiting and self._waiting[key].is_cuda:
                self._copy(key)
            return self._copied[key] if key in self._copied else self._waiting[key]

    def close(self) -> None:
        """Release all tensors: the writing thread has finished or failed, and reads nothing more."""
        with self._changed:
            self._waiting.clear()
            self._reading = None
            for copy in self._copied.values():
                self._buffers.give_back(copy)
            self._copied.clear()
            self._changed.notify_all()

    def settle(self, waits: Callable[[], None] = lambda: None) -> None:
        """Copy tensors that are still to be written, and wait for the one that is being read. Then all may change.

        Args:
            waits: called before waiting, which takes long if the disk hangs.
        """
        while True:
            with self._changed:
                # Start with the last tensor, as the writing thread starts with the
                # first.
                key = next(
                    (key for key in reversed(self._waiting) if key != self._reading),
                    None,
                )
                if key is not None:
                    self._copy(key)
                elif self._waiting:
                    waits()
                    self._changed.wait()
                else:
                    return

    def _let_go(self) -> None:
        if self._reading is not None:
            self._waiting.pop(self._reading, None)
            # The copy's memory serves the next save.
            if self._reading in self._copied:
                self._buffers.give_back(self._copied.pop(self._reading))
            self._reading = None
            self._changed.notify_all()

    def _copy(self, key: K) -> None:
        self._copied[key] = self._buffers.copy(self._waiting.pop(key))
