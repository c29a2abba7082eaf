"""The software device is a CUDA device with values: what CUDA computes, refuses, allocates and draws."""

from __future__ import annotations

from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice

CASES = "tests.softcuda.cases"


def test_values_and_gradients_are_those_of_the_cpu(device: SoftwareDevice) -> None:
    ended = device.ranks(1, f"{CASES}:gradients")
    assert ended.check() == [True]
    assert ended.matrix_products(0) == 2  # forward, and for the weight backward
    assert device.ranks(1, f"{CASES}:optimizers").check() == [
        {"fused": True, "foreach": True, "plain": True}
    ]


def test_large_and_small_boxes_are_copied(device: SoftwareDevice) -> None:
    for threshold in (1, 512, 1 << 30):
        assert device.ranks(1, f"{CASES}:copies", threshold=threshold).check() == [True]


def test_what_cuda_refuses_is_refused(device: SoftwareDevice) -> None:
    [found] = device.ranks(1, f"{CASES}:refusals").check()
    assert "can't convert cuda:0 device type tensor to numpy" in found["numpy"]
    for operator in ("add", "add_", "mm"):
        assert "Expected all tensors to be on the same device" in found[operator], (
            operator
        )
    assert "no error" not in found.values()
    assert "invalid device ordinal" in found["device"]
    assert found["memory"].startswith("OutOfMemoryError: CUDA out of memory")


def test_memory_is_shared_counted_and_given_back(device: SoftwareDevice) -> None:
    assert device.ranks(1, f"{CASES}:memory").check() == [
        {
            "emptied": 64,
            "shared": [[2.0, 2.0], [2.0, 2.0]],
            "loaded": ["cuda:0", 32.0],
            "pinned": [True, True, False],
            "counted": True,
        }
    ]
    [fresh] = device.ranks(
        1, f"{CASES}:poisoned", options=Options(devices=1, poisons=True)
    ).check()
    assert fresh == ["nan", "nan"]


def test_the_devices_generator_is_its_own_unless_bits_are_compared(
    device: SoftwareDevice,
) -> None:
    own = {"repeats": True, "moves_on": True, "is_the_cpus": True}  # the same seed
    assert device.ranks(1, f"{CASES}:draws").check() == [own]
    shared = Options(devices=1, shares_generator=True)
    assert device.ranks(1, f"{CASES}:draws", options=shared).check() == [own]


def test_a_rank_that_computes_nothing_on_its_device_is_no_success(
    device: SoftwareDevice,
) -> None:
    ended = device.ranks(1, "tests.softcuda.test_device:on_the_host")
    assert ended.codes == [0] and ended.kernels == [{}]
    try:
        ended.check()
    except AssertionError as error:
        assert str(error) == "rank 0 ran nothing on its device"
    else:
        raise AssertionError("work on the CPU counts as work on the device")


def on_the_host() -> float:
    import torch

    return float((torch.ones(2, 2) @ torch.ones(2, 2)).sum())
