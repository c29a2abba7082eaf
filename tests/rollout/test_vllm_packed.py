"""Layers of vLLM whose packed weights a reshard must not write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaverl.errors import RolloutError
from megaverl.rollout.vllm_packed import PERMUTES_BIAS, _Layer


def layer(kernel: str, bias: torch.Tensor | None = None, columns: int = 64) -> _Layer:
    """A layer in NVFP4 or INT4, as far as `_Layer.weight` reads it."""
    is_nvfp4 = "Fp4" in kernel
    scheme = SimpleNamespace(
        kernel=type(kernel, (), {})(), group_size=32, symmetric=True
    )
    module = SimpleNamespace(
        scheme=scheme,
        bias=bias,
        output_size_per_partition=32,
        input_size_per_partition=columns,
    )
    names = ["weight_packed", "weight_scale"]
    if is_nvfp4:
        names.append("weight_global_scale")
    recorded: Any = {name: torch.zeros(1) for name in names}
    return _Layer(module, recorded)


@pytest.mark.parametrize("kernel", PERMUTES_BIAS)
def test_biases_that_a_kernel_permutes_are_refused(kernel: str) -> None:
    layer(kernel)._format()
    with pytest.raises(RolloutError, match=f"qkv has a bias, which .* {kernel}"):
        layer(kernel, bias=torch.zeros(32)).weight("qkv")


def test_unknown_kernels_and_cut_groups_are_refused() -> None:
    with pytest.raises(RolloutError, match="kernel NewKernel is none of those"):
        layer("NewKernel").weight("qkv")
    with pytest.raises(RolloutError, match="qkv has 40 columns on a rank"):
        layer("MarlinLinearKernel", columns=40).weight("qkv")
