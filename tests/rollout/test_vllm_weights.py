"""vLLM's GPU pool, of which there is none here: a stand-in for what its allocator and torch's report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megaverl.errors import RolloutError
from megaverl.rollout.vllm_weights import contents_dropped, order_kept


@dataclass
class Allocation:
    """As vLLM's `AllocationData`: handle is (device, bytes, address, ...)."""

    handle: tuple[int, int, int, int]
    tag: str


@dataclass
class Pool:
    """As vLLM's `CuMemAllocator`, with what it would copy to the host as it sleeps."""

    pointer_to_data: dict[int, Allocation] = field(default_factory=dict)

    def copied(self, level: int) -> set[int]:
        tags = ("weights", "runtime") if level == 1 else ("runtime",)
        return {
            address
            for address, data in self.pointer_to_data.items()
            if data.tag in tags
        }


def segment(tensors: list[torch.Tensor], unused: int = 0) -> dict[str, int]:
    """torch's report of an allocation that these tensors lie in; as if it began where the first does."""
    requested = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return {
        "address": tensors[0].data_ptr(),
        "total_size": requested + unused,
        "requested_size": requested,
    }


def test_only_what_is_written_anew_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, sizes = bytearray(6 * 2**16), (4096, 4096, 4096, 2048, 2048, 64)
    # Each with storage of its own, none close to another.
    whole, cache, adopted, weight, state, buffer = (
        torch.frombuffer(memory, dtype=torch.float32, count=numel, offset=place * 2**16)
        for place, numel in enumerate(sizes)
    )
    pool = Pool(
        {
            tensor.data_ptr(): Allocation((0, tensor.nbytes, tensor.data_ptr(), 0), tag)
            for tensor, tag in (
                (whole, "weights"),
                (weight, "weights"),
                (buffer, "weights"),
                (cache, "kv_cache"),
            )
        }
    )
    # with the sampler's state in the allocation of a small weight
    mixed = segment([weight]) | {"requested_size": weight.nbytes + state.nbytes}
    segments = [
        segment([whole], unused=512),
        mixed,
        segment([buffer]),
        segment([cache]),
        segment([adopted]),
    ]
    monkeypatch.setattr(
        "vllm.device_allocator.get_mem_allocator_instance", lambda: pool
    )
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    kept = {weight.data_ptr(), buffer.data_ptr()}
    with contents_dropped([whole, weight, adopted]) as dropped:
        assert pool.copied(level=1) == kept, (
            "a weight that shares its allocation is copied with what is beside it"
        )
        assert dropped == whole.nbytes
    assert pool.copied(level=1) == kept | {whole.data_ptr()}, (
        "awake, all are vLLM's weights again"
    )
    assert pool.pointer_to_data[cache.data_ptr()].tag == "kv_cache"


class Experts(nn.Module):
    """Of a fused mixture, with the parameters that vLLM gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(2, 8, 4))


def swapped(layer: Experts) -> None:
    """What FlashInfer's CUTLASS kernel wants: up before gate."""
    layer.w13_weight.data = (
        layer.w13_weight.reshape(2, 2, 4, 4).flip(dims=[1]).reshape(2, 8, 4)
    )


def permuted_in_place(layer: Experts) -> None:
    layer.w13_weight.data.copy_(layer.w13_weight.data[:, [4, 0, 5, 1, 6, 2, 7, 3]])


def transposed(layer: Experts) -> None:
    layer.w13_weight.data = layer.w13_weight.data.transpose(1, 2)


def packed(layer: Experts) -> None:
    layer.packed = nn.Parameter(layer.w13_weight.data.flatten())
    del layer.w13_weight


def copied(layer: Experts) -> None:
    layer.w13_weight.data = layer.w13_weight.data.clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            swapped,
            "layer.w13_weight of Experts holds its elements in another order. Set rollout.vllm.moe_backend",
        ),
        (
            permuted_in_place,
            "layer.w13_weight of Experts holds its elements in another order",
        ),
        (
            transposed,
            "is [2, 4, 8] float32 with strides [32, 1, 4] and was [2, 8, 4] float32",
        ),
        (
            packed,
            "2 of 1 parameters after loading, where a reshard cannot follow: layer.w13_weight of Experts is gone",
        ),
        (copied, None),
    ],
)
def test_weights_in_another_order_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], message: str | None
) -> None:
    from vllm.model_executor.model_loader import base_loader

    model = nn.Module()
    model.layer = Experts()
    monkeypatch.setattr(
        base_loader, "process_weights_after_loading", lambda model: change(model.layer)
    )
    with order_kept():
        if message is None:
            base_loader.process_weights_after_loading(model)
        else:
            with pytest.raises(RolloutError) as error:
                base_loader.process_weights_after_loading(model)
            assert message in str(error.value)
