"""Tensors that are written while training goes on."""

from __future__ import annotations

import threading

import torch

from megaverl.checkpoint.background import HeldTensors


def held(count: int = 3) -> tuple[dict[str, torch.Tensor], HeldTensors[str], dict[str, torch.Tensor]]:
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(count)}
    buffers: dict[str, torch.Tensor] = {}
    return tensors, HeldTensors(tensors, buffers), buffers


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(-1.0)


def test_what_is_written_before_the_step_is_never_copied() -> None:
    tensors, holding, buffers = held()
    for name, tensor in tensors.items():
        assert holding.take(name).data_ptr() == tensor.data_ptr()
    holding.close()
    holding.settle()
    assert buffers == {}


def test_what_is_not_written_before_the_step_is_copied() -> None:
    tensors, holding, buffers = held()
    holding.settle()
    change(tensors)
    assert [holding.take(name).tolist() for name in tensors] == [[float(i)] * 4 for i in range(3)]
    again = HeldTensors(tensors, buffers)
    places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    again.settle()
    assert {name: again.take(name).data_ptr() for name in tensors} == places, "the next save finds the memory again"


def test_a_step_waits_for_the_tensor_that_is_being_written() -> None:
    tensors, holding, _ = held()
    reading = holding.take("t0")
    step = threading.Thread(target=lambda: (holding.settle(), change(tensors)), daemon=True)
    step.start()
    step.join(0.05)
    assert step.is_alive() and reading.tolist() == [0.0] * 4
    assert holding.take("t1").tolist() == [1.0] * 4  # done with t0; a copy, or the tensor itself, which then holds
    holding.close()
    step.join(60)
    assert not step.is_alive() and reading.tolist() == [-1.0] * 4


def test_a_writer_that_fails_holds_nothing_up() -> None:
    tensors, holding, buffers = held()
    holding.take("t0")
    holding.close()
    holding.settle()
    change(tensors)
    assert buffers == {}
