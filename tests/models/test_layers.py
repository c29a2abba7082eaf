"""RMSNorm and its gradients are those of PyTorch in float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megaverl.models import build
from megaverl.models.layers import RMSNorm


def make_norm(dtype: torch.dtype, *, zero_centred: bool) -> RMSNorm:
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=zero_centred,
        params_dtype=dtype,
        sequence_parallel=False,
    )
    norm = RMSNorm(config, 32, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_pytorchs_own(
    dtype: torch.dtype, zero_centred: bool
) -> None:
    torch.manual_seed(3)
    norm = make_norm(dtype, zero_centred=zero_centred)
    # heads that were cut out of a wider tensor: no two tokens of theirs are neighbours
    # in memory
    x = (torch.randn(5, 2, 3, 64) * 0.1).to(dtype)[..., :32].requires_grad_()
    grad = torch.randn(5, 2, 3, 32).to(dtype)
    found = norm(x)
    found_grads = torch.autograd.grad(found, (x, norm.weight), grad)

    exact_x, exact_weight = (
        x.detach().double().requires_grad_(),
        norm.weight.detach().double().requires_grad_(),
    )
    expected = F.rms_norm(
        exact_x, (32,), 1 + exact_weight if zero_centred else exact_weight, 1e-3
    )
    expected_grads = torch.autograd.grad(
        expected, (exact_x, exact_weight), grad.double()
    )
    for mine, theirs in zip(
        (found, *found_grads), (expected, *expected_grads), strict=True
    ):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() < 1.5 * torch.finfo(
            dtype
        ).eps * theirs.norm()


def test_what_it_was_given_stays_as_it_was_and_a_frozen_weight_has_no_gradient() -> (
    None
):
    norm = make_norm(torch.float32, zero_centred=False)
    norm.weight.requires_grad_(False)
    x, grad = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    before = x.detach().clone(), grad.clone()
    norm(x).backward(grad)
    assert norm.weight.grad is None
    assert torch.equal(x.detach(), before[0])
    assert torch.equal(grad, before[1])


def test_what_a_layer_is_made_of_is_found_in_either_form_of_megatron_core() -> None:
    parts = SimpleNamespace(router=None)
    # 0.16's ModuleSpec.
    assert build._parts_of(SimpleNamespace(submodules=parts)) is parts
    assert build._parts_of(partial(print, submodules=parts)) is parts  # 0.19's function
