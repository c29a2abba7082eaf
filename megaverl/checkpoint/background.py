"""One rank's part of a checkpoint, written in a thread while training goes on.

A tensor is copied only if training is about to change it before it is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, MutableMapping
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


class HeldTensors(Generic[K]):
    """What weights and optimizer are from the end of one update to the next: most of a step, generation included.

    The writing thread takes one tensor after the other; it may read each until it takes the next. Whoever is about
    to change them calls `settle` first, which copies what was not written yet.

    Args:
        tensors: not to be changed before `settle`.
        buffers: host memory for copies, kept from save to save; grows as it is needed.
    """

    def __init__(self, tensors: Mapping[K, torch.Tensor], buffers: MutableMapping[K, torch.Tensor]) -> None:
        self._waiting = dict(tensors)  # not written and not copied; one that is being written is among them
        self._buffers = buffers
        self._copied: dict[K, torch.Tensor] = {}
        self._reading: K | None = None
        self._changed = threading.Condition()

    def take(self, key: K) -> torch.Tensor:
        """The tensor itself, or its copy; in host memory. The one taken before is done with."""
        with self._changed:
            self._let_go()
            if key in self._copied:
                return self._copied[key]
            tensor = self._waiting[key]
            if tensor.is_cuda:
                return self._copy(key)
            self._reading = key
            return tensor

    def close(self) -> None:
        """The writing thread is through, or has failed: nothing is read any more."""
        with self._changed:
            self._waiting.clear()
            self._reading = None
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
            self._reading = None
            self._changed.notify_all()

    def _copy(self, key: K) -> torch.Tensor:
        tensor = self._waiting.pop(key)
        self._copied[key] = copied = copy_to_host(tensor, self._buffers, key)
        return copied


def copy_to_host(tensor: torch.Tensor, buffers: MutableMapping[K, torch.Tensor], key: K) -> torch.Tensor:
    """A copy in the buffer of that key, page-locked where it comes from a GPU; complete when this returns."""
    buffer = buffers.get(key)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=platform.is_cuda)
    buffer.copy_(tensor)
    return buffer
