"""CUDA IPC between real processes, with a stand-in for torch's calls: a GPU's memory is a file that others map.

The stand-in keeps torch's rules (`megaverl.weights.transports.ipc` names where they
stand): what is shared counts its readers from one, in an unsigned number; a storage
that is shared stays allocated until that is zero; a handle belongs to an allocation.
Weights travel through it as they would through a GPU's memory, on gloo.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions, ipc
from tests.weights.transport_ranks import Sides

DEVICE = 5  # this rank's
BEFORE = 64  # bytes of an allocation that belong to another tensor


def mapped(path: Path, nbytes: int) -> torch.UntypedStorage:
    """The bytes behind the first ones of a file."""
    whole = torch.UntypedStorage.from_file(str(path), True, nbytes + BEFORE)
    storage: Any = torch._C._construct_storage_from_data_pointer(
        whole.data_ptr() + BEFORE, whole.device, nbytes
    )
    weakref.finalize(storage, whole.nbytes)  # which keeps it
    return cast(torch.UntypedStorage, storage)


class FakeDevice:
    """This process's GPU memory, and what torch's calls do with it.

    Attributes:
        counts: calls, and what is `open` of other processes' memory now.
        devices: that memory was opened on.
        readers: of each thing that was shared, the count that torch keeps.
        problem: of every opening from now on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts, self.devices = folder, Counter[str](), set[int]()
        self.readers: list[int] = []
        self.problem = ""
        self._allocations: dict[int, Path] = {}

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Its first bytes are another tensor's, as in a segment of torch's caching allocator."""
        path = self.folder / f"{os.getpid()}-{self.counts['allocations']}"
        self.counts["allocations"] += 1
        storage = mapped(path, nbytes)
        self._allocations[storage.data_ptr()] = path
        return storage

    def free(self, storage: torch.UntypedStorage) -> None:
        self._allocations.pop(storage.data_ptr()).unlink()

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        assert storage.data_ptr() in self._allocations, (
            "only what the allocator gave can be shared"
        )
        self.counts["shared"] += 1
        self.readers.append(1)
        weakref.finalize(storage, self.counts.update, {"shared, then gone": 1})
        path, place = self._allocations[storage.data_ptr()], len(self.readers) - 1
        return (
            0,
            str(path).encode(),
            storage.nbytes(),
            BEFORE,
            b"counter",
            place,
            b"event",
            True,
        )

    def release(self, counter: bytes, place: int) -> None:
        assert counter == b"counter"
        self.readers[place] = (self.readers[place] - 1) % 2**64

    def open(
        self, device: int, handle: bytes, nbytes: int, offset: int, *rest: Any
    ) -> torch.UntypedStorage:
        counter, _, _, waits_for_event = rest
        assert counter != b"counter" and not waits_for_event and offset == BEFORE
        if self.problem:
            raise RuntimeError(
                f"CUDA error: {self.problem}\nCUDA kernel errors might be ..."
            )
        self.devices.add(device)
        self.counts.update({"opened": 1, "open": 1})
        storage = mapped(Path(handle.decode()), nbytes)
        weakref.finalize(storage, self.counts.subtract, {"open": 1})
        return storage

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        storage: Any = torch.UntypedStorage
        patch.setattr(
            storage, "_share_cuda_", lambda alias: self.share(alias), raising=False
        )
        patch.setattr(storage, "_release_ipc_counter_cuda", self.release, raising=False)
        patch.setattr(storage, "_new_shared_cuda", self.open, raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE)
        patch.setattr(
            torch.cuda,
            "current_stream",
            lambda: SimpleNamespace(synchronize=lambda: None),
        )
        for module in (ipc, ipc):
            patch.setattr(
                module,
                "platform",
                SimpleNamespace(is_cuda=True, device=torch.device("cpu")),
            )


class Source:
    """The source's tensors, in two storages on the device, as Megatron keeps parameters in buffers."""

    def __init__(
        self, device: FakeDevice, tensors: dict[str, torch.nn.Parameter]
    ) -> None:
        self._device, self._tensors = device, tensors
        self._storages: list[torch.UntypedStorage] = []
        self.allocate()

    def allocate(self) -> None:
        """All in memory of its own, as when what was offloaded comes back."""
        names, freed = list(self._tensors), self._storages
        self._storages = []
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            storage = self._device.allocate(
                sum(self._tensors[name].numel() * 4 for name in part)
            )
            self._storages.append(storage)
            start = 0
            for name in part:
                tensor = self._tensors[name]
                place = torch.empty(0).set_(
                    storage, start, tensor.shape, tensor.stride()
                )
                tensor.data = place.copy_(tensor.data)
                start += tensor.numel()
        for storage in freed:
            self._device.free(storage)


def read_over_ipc(
    folder: str, fails: dict[str, int] | None = None, offload: bool = False
) -> dict[str, Any]:
    """Three versions go from Megatron's tensors at TP2 x PP2 to vLLM's at TP2.

    Args:
        fails: of a rank, the version from which it cannot open memory; 0: never could.
        offload: the source's memory is another one before the third version.
    """
    first = (fails or {}).get(str(dist.get_rank()), 9)
    sides = Sides({"tp": 2, "pp": 2}, 2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    found: dict[str, Any] = {
        "wrong": [],
        "open": [],
        "opened": [],
        "received": [],
        "messages": [],
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=folder) as memory,
    ):
        device = FakeDevice(Path(memory))
        device.patch(patch)
        device.problem = (
            "peer access is not supported between these two devices"
            if first == 0
            else ""
        )
        ipc.logger.addHandler(handler)
        source = Source(device, sides.source)
        resharder = Resharder(
            sides.plan, sides.source, sides.dest, options=TransportOptions(ipc=True)
        )
        found["open after the trial"] = device.counts["open"]
        for version in (1, 2, 3):
            if version == first:
                device.problem = "invalid device context"
            if version == 3 and offload:
                dist.barrier()
                source.allocate()
            stats = resharder.run()
            found["wrong"] += sides.wrong(2 ** (version - 1))
            for name, value in zip(
                ("open", "opened", "received", "messages"),
                (
                    device.counts["open"],
                    device.counts["opened"],
                    stats.bytes_received,
                    stats.num_messages,
                ),
                strict=True,
            ):
                found[name].append(value)
            sides.multiply(2)
        found["by plan"] = 4 * sides.plan.num_received
        found |= {
            "readers": sorted(set(device.readers)),
            "devices": sorted(device.devices),
            "lines": lines,
        }
        found["left"] = device.counts["shared"] - device.counts["shared, then gone"]
        found["peers"] = len(sides.plan.receives)
        dist.barrier()  # others may read until here
        for tensor in sides.source.values():
            tensor.data = tensor.data.clone()
        ipc.logger.removeHandler(handler)
    return found
