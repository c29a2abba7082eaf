"""The gated activation, its gradient, and the MLPs of megatron-core that take it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megaverl.models.tiny import make_tiny_folder
from megaverl.platform import platform
from megaverl.platform.megatron_cpu import GatedSilu, _gates_plainly
from tests.launcher import Launcher


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """With a width that fills no registers, and gates far from 0."""
    torch.manual_seed(4)
    joined = torch.randn(3, 2, 2 * 37)
    joined[0] *= 100
    joined[1, 0, 5] = -3e38
    return joined.to(dtype).requires_grad_(), torch.randn(3, 2, 37).to(dtype)


def by_the_equation(
    joined: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradient in float64."""
    joined = joined.detach().double().requires_grad_()
    gate, up = joined.chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    return expected.detach(), torch.autograd.grad(expected, joined, grad.double())[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.02)],
    ids=str,
)
def test_values_and_gradients_are_the_equations(
    dtype: torch.dtype, tolerance: float
) -> None:
    joined, grad = example(dtype)
    expected, expected_grad = by_the_equation(joined, grad)
    found = GatedSilu.apply(joined)
    [found_grad] = torch.autograd.grad(found, joined, grad)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found_grad.double(), expected_grad, rtol=tolerance, atol=tolerance
    )
    with torch.no_grad():
        torch.testing.assert_close(
            GatedSilu.apply(joined).double(), expected, rtol=tolerance, atol=tolerance
        )


def test_what_is_no_number_stays_none() -> None:
    joined, _ = example(torch.float32)
    with torch.no_grad():
        joined[0, 0, 1] = joined[1, 1, 40] = torch.nan
    assert GatedSilu.apply(joined).isnan().nonzero().tolist() == [[0, 0, 1], [1, 1, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_leaves_what_it_was_given_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    joined, grad = example(dtype)
    before = joined.detach().clone(), grad.clone()
    result = GatedSilu.apply(joined)
    result.backward(grad)
    assert joined.grad is not None
    assert result.dtype == joined.grad.dtype == dtype
    assert torch.equal(joined.detach(), before[0])
    assert torch.equal(grad, before[1])


@pytest.mark.parametrize(
    ("changes", "plainly"),
    [
        ({}, True),
        ({"activation_func": F.gelu}, False),
        ({"gated_linear_unit": False}, False),
        ({"activation_func_clamp_value": 7.0}, False),
        ({"glu_linear_offset": 1.0}, False),
        ({"use_te_activation_func": True}, False),
        ({"bias_activation_fusion": True}, False),
    ],
    ids=str,
)
def test_what_else_a_configuration_asks_for_is_left_to_megatron_core(
    changes: dict[str, Any], plainly: bool
) -> None:
    plain = {
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "use_te_activation_func": False,
        "bias_activation_fusion": False,
    }
    assert _gates_plainly(SimpleNamespace(**(plain | changes))) == plainly


def test_mlps_of_megatron_core_take_it_where_there_is_no_gpu(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM")
    [operators] = launch.world(
        1, "tests.models.ranks:operators_of_a_gated_mlp", folder=folder
    )
    assert any(name.startswith("GatedSilu") for name in operators) != platform.is_cuda
