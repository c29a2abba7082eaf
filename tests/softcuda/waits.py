"""The places of megaverl that order streams, as they are and with one wait left out (tests/softcuda/test_waits.py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.softcuda import install
from tests.softcuda.cases import join
from tests.softcuda.rewriting import rewrite

NUMEL = 1000


class Fault(NamedTuple):
    """A function without one of its waits.

    Attributes:
        place: "module:owner.function", or "module:function".
        old, new: what is replaced in its source.
        use: name of what uses it (USES).
    """

    place: str
    old: str
    new: str
    use: str


OFFLOAD = "megaverl.workers.offload:PinnedMemory"
FAULTS = {
    "store before the update is over": Fault(
        f"{OFFLOAD}.store",
        "self._stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        "offload",
    ),
    "memory given away before it is stored": Fault(
        f"{OFFLOAD}.store", "self._stream.synchronize()", "pass", "offload"
    ),
    "fetch into memory that is in use": Fault(
        f"{OFFLOAD}.fetch",
        "self._stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        "offload",
    ),
    "read before it is fetched": Fault(
        f"{OFFLOAD}.fetch",
        "torch.cuda.current_stream().wait_stream(self._stream)",
        "pass",
        "offload",
    ),
    "overlap reads weights that are being written": Fault(
        "megaverl.weights.reshard:FinalParts.wait_for",
        "event = self._event",
        "event = None",
        "overlap",
    ),
    "the engine reads weights that are still arriving": Fault(
        "megaverl.weights.reshard:finished",
        "torch.cuda.current_stream().synchronize()",
        "pass",
        "overlap",
    ),
    "a save writes what has not been copied": Fault(
        "megaverl.checkpoint.background:HostBuffers.copy",
        "copy_(tensor)",
        "copy_(tensor, non_blocking=True)",
        "staging",
    ),
    "a micro-batch is overwritten on its way": Fault(
        "megaverl.platform.device:to_device",
        "page_locked(values)",
        "globals().setdefault('kept', torch.empty_like(values, pin_memory=True)).copy_(values)",
        "micro-batches",
    ),
    "positions of rows are overwritten on their way": Fault(
        "megaverl.distributed.ragged:beside",
        "page_locked(values)",
        "globals().setdefault('kept', torch.empty_like(values, pin_memory=True)).copy_(values)",
        "rows",
    ),
    "shards on the host are filled while they are read": Fault(
        "megaverl.models.hf_model:shard_module",
        "platform.synchronize()",
        "pass",
        "shards on the host",
    ),
}


def use(name: str, fault: str = "") -> dict[str, Any]:
    """Use one of the places, with a fault or as it is: `right` values, and what the device reports."""
    if fault:
        module_name, _, path = FAULTS[fault].place.partition(":")
        module = importlib.import_module(module_name)
        owner_name, _, function = path.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        rewrite(module, owner, function, (FAULTS[fault].old, FAULTS[fault].new))
    right = USES[name]()
    torch.cuda.synchronize()
    return {"right": right, "reports": install.reports}


def offload() -> bool:
    """Weights leave the device after an update, other tensors use its memory, and they come back for the next."""
    from megaverl.workers.offload import Offload, PinnedMemory, storages_of

    weights = torch.ones(NUMEL, device="cuda")
    place = Offload(lambda: storages_of([weights]), PinnedMemory())
    for _ in range(2):
        weights.mul_(2)
        place.offload()
        other = torch.zeros(NUMEL, device="cuda")
        other.add_(1)
        del other
        place.onload()
        weights.add_(1)
    return bool((weights == 7).all())


def overlap() -> bool:
    """A thread sends weights that an optimizer step writes, and the main thread reads what has arrived."""
    from megaverl.weights import reshard
    from megaverl.weights.reshard import FinalParts, in_background

    weights, sent = torch.ones(NUMEL, device="cuda"), torch.empty(NUMEL, device="cuda")
    torch.cuda.synchronize()
    parts = FinalParts(1)

    def send() -> None:
        parts.wait_for(0, None)
        sent.copy_(weights)
        reshard.finished([])

    future = in_background(send)
    weights.mul_(2)
    parts.after(None)
    future.result()
    return bool((sent == 2).all())


def staging() -> bool:
    """A save reads a copy of a tensor that the next update changes."""
    from megaverl.checkpoint.background import HostBuffers, PendingTensors

    tensor = torch.ones(NUMEL, device="cuda")
    held = PendingTensors({"weight": tensor}, {}, HostBuffers())
    return bool((held.take("weight") == 1).all())


def micro_batches() -> bool:
    """Two micro-batches go to the device, the second while the first may be on its way."""
    from megaverl.platform import device

    sent = [
        device.to_device(torch.full((NUMEL,), float(value)), torch.device("cuda"))
        for value in range(2)
    ]
    return [float(tensor.mean()) for tensor in sent] == [0.0, 1.0]


def rows() -> bool:
    """Two masks of the host meet values on the device, the second while the first may be on its way."""
    from megaverl.distributed import ragged

    like = torch.zeros(NUMEL, device="cuda")
    sent = [
        ragged.beside(like, torch.full((NUMEL,), float(value))) for value in range(2)
    ]
    return [float(tensor.mean()) for tensor in sent] == [0.0, 1.0]


def shards_on_the_host() -> bool:
    """A model whose shards stay on the host is sharded, and filled at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megaverl.models import hf_model

    join()
    mesh = init_device_mesh("cuda", (1,))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, **sizes))
        module = hf_model.PolicyModule(model, 0, False, torch.float32)
    sharded = hf_model.shard_module(
        module,
        mesh,
        param_dtype=None,
        reduce_dtype=None,
        reshard_after_forward=True,
        cpu_offload=True,
    )
    shards = hf_model.local_tensors(module)
    with torch.no_grad():
        for shard in shards.values():
            shard.fill_(1)
    sharded.unshard()
    return all(bool((shard == 1).all()) for shard in shards.values())


USES: dict[str, Callable[[], bool]] = {
    "offload": offload,
    "overlap": overlap,
    "staging": staging,
    "micro-batches": micro_batches,
    "rows": rows,
    "shards on the host": shards_on_the_host,
}
