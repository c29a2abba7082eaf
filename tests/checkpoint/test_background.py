"""Tensors that are written while training goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from megaverl.checkpoint.background import HostBuffers, PendingTensors
from tests.device_tensors import DeviceTensor


def held(
    count: int = 3,
) -> tuple[dict[str, torch.Tensor], PendingTensors[str], HostBuffers]:
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(count)}
    buffers = HostBuffers()
    return tensors, PendingTensors(tensors, {}, buffers), buffers


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(-1.0)


def test_what_is_written_before_the_step_is_never_copied() -> None:
    tensors, holding, buffers = held()
    for name, tensor in tensors.items():
        assert holding.take(name).data_ptr() == tensor.data_ptr()
    holding.close()
    holding.settle()
    assert buffers.num_bytes == 0


def test_what_is_not_written_before_the_step_is_copied() -> None:
    tensors, holding, buffers = held()
    holding.settle()
    change(tensors)
    assert [holding.take(name).tolist() for name in tensors] == [
        [float(i)] * 4 for i in range(3)
    ]
    holding.close()
    PendingTensors(tensors, {}, buffers).settle()
    assert buffers.num_bytes == 3 * 16, "the next save finds the memory again"


def test_what_changes_at_once_is_copied_at_once() -> None:
    tensors, _, buffers = held()
    holding = PendingTensors({}, tensors, buffers)
    change(tensors)
    assert [holding.take(name).tolist() for name in tensors] == [
        [float(i)] * 4 for i in range(3)
    ]


def test_of_what_lies_in_a_gpu_one_copy_is_held_at_a_time() -> None:
    tensors, _, buffers = held()
    holding = PendingTensors(
        {name: DeviceTensor(tensor) for name, tensor in tensors.items()}, {}, buffers
    )
    assert [holding.take(name).tolist() for name in tensors] == [
        [float(i)] * 4 for i in range(3)
    ]
    holding.settle(
        waits=lambda: pytest.fail("the last one is a copy: nobody reads the device")
    )
    assert buffers.num_bytes == 16


def test_a_step_waits_for_the_tensor_that_is_being_written() -> None:
    tensors, holding, _ = held()
    reading = holding.take("t0")
    step = threading.Thread(
        target=lambda: (holding.settle(), change(tensors)), daemon=True
    )
    step.start()
    step.join(0.05)
    assert step.is_alive() and reading.tolist() == [0.0] * 4
    # Done with t0; a copy, or the tensor itself, which then holds.
    assert holding.take("t1").tolist() == [1.0] * 4
    holding.close()
    step.join(60)
    assert not step.is_alive() and reading.tolist() == [-1.0] * 4


def test_a_writer_that_fails_holds_nothing_up() -> None:
    tensors, holding, buffers = held()
    holding.take("t0")
    holding.close()
    holding.settle()
    change(tensors)
    assert buffers.num_bytes == 0
