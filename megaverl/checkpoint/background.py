"""One rank's part of a checkpoint, written in a thread while training goes on.

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

NICENESS = 10  # of the writing thread: training comes first


def start_writing(write: Callable[[], T], *, in_background: bool = True) -> Future[T]:
    """Call `write` in a thread of its own, or here, and give its result or error.

    The thread is no executor's: those are waited for when a process ends, and a disk may hang.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            if in_background and hasattr(os, "setpriority"):
                # on Linux a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            future.set_result(write())
        except Exception as error:  # reported to all ranks when the checkpoint is committed
            future.set_exception(error)

    if in_background:
        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    else:
        run()
    return future


class HostBuffers:
    """Host memory for copies, page-locked where they come from a GPU. It is kept, and used again, from save to save."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self.num_bytes = 0  # of all, free or not

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, complete when this returns, in memory that is the caller's until it is given back."""
        free = self._free.setdefault((tensor.shape, tensor.dtype), [])
        if not free:
            self.num_bytes += tensor.nbytes
            free.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=platform.is_cuda))
        return free.pop().copy_(tensor)

    def give_back(self, copy: torch.Tensor) -> None:
        """It is not needed any more."""
        self._free[copy.shape, copy.dtype].append(copy)


class HeldTensors(Generic[K]):
    """What weights and optimizer are from the end of one update to the next: most of a step, generation included.

    The writing thread takes one tensor after the other; it may read each until it takes the next. Whoever is about
    to change them calls `settle` first, which copies what was not written yet. A copy's memory is free again when it
    is written: of a GPU's tensors there is one copy at a time until an update begins.

    Args:
        tensors: not to be changed before `settle`.
        changing: may change as soon as this is made: copied now.
        buffers: for the copies; of no other save meanwhile.
    """

    def __init__(
        self, tensors: Mapping[K, torch.Tensor], changing: Mapping[K, torch.Tensor], buffers: HostBuffers
    ) -> None:
        self._waiting = dict(tensors)  # not written and not copied; one that is being written is among them
        self._buffers = buffers
        self._copied = {key: buffers.copy(tensor) for key, tensor in changing.items()}
        self._reading: K | None = None
        self._changed = threading.Condition()

    def take(self, key: K) -> torch.Tensor:
        """The tensor itself, or its copy; in host memory. The one taken before is done with."""
        with self._changed:
            self._let_go()
            self._reading = key
            if key in self._waiting and self._waiting[key].is_cuda:
                self._copy(key)
            return self._copied[key] if key in self._copied else self._waiting[key]

    def close(self) -> None:
        """The writing thread is through, or has failed: nothing is read any more."""
        with self._changed:
            self._waiting.clear()
            self._reading = None
            for copy in self._copied.values():
                self._buffers.give_back(copy)
            self._copied.clear()
            self._changed.notify_all()

    def settle(self, waits: Callable[[], None] = lambda: None) -> None:
        """Copy what is still to be written, and wait for the one that is being read: all may then change.

        Args:
            waits: called before waiting, which a disk that hangs makes long.
        """
        while True:
            with self._changed:
                # the last first: the writing thread comes from the other end
                key = next((key for key in reversed(self._waiting) if key != self._reading), None)
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
            if self._reading in self._copied:
                self._buffers.give_back(self._copied.pop(self._reading))
            self._reading = None
            self._changed.notify_all()

    def _copy(self, key: K) -> None:
        self._copied[key] = self._buffers.copy(self._waiting.pop(key))
