"""Mamba-2 layers: the scan against its recurrence, and the convolution and the norm against PyTorch's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.models import mamba
from megaverl.models.mamba import GatedGroupNorm, Mamba2Mixer, scan
from megaverl.sharding.model_spec import MambaSpec

HEADS, WIDTH, GROUPS, STATE = 6, 3, 2, 5
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=5)


def inputs(num_rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, time steps, decays, B and C."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows = (num_rows, length)
    steps = F.softplus(normal(*rows, HEADS))
    b, c = normal(*rows, GROUPS, STATE), normal(*rows, GROUPS, STATE)
    return normal(*rows, HEADS, WIDTH), steps, -normal(HEADS).exp(), b, c


def token_by_token(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """The recurrence of arXiv 2405.21060, eq. 1, of rows that are one sample each."""
    state = x.new_zeros(len(x), HEADS, WIDTH, STATE)
    outputs = []
    for token in range(x.shape[1]):
        of_heads = [
            y[:, token].repeat_interleave(HEADS // GROUPS, dim=1) for y in (b, c)
        ]
        step = dt[:, token, :, None]
        added = (step * x[:, token]).unsqueeze(-1) * of_heads[0].unsqueeze(-2)
        state = (step.squeeze(-1) * decay).exp()[..., None, None] * state + added
        outputs.append((state * of_heads[1].unsqueeze(-2)).sum(-1))
    return torch.stack(outputs, 1)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, chunk_size=st.integers(1, 24))
def test_the_state_starts_again_in_each_sample(
    lengths: list[int], chunk_size: int
) -> None:
    """Outputs and gradients are those of each sample by itself, wherever chunks end."""
    given = inputs(1, sum(lengths))
    packed, alone = (tuple(x.clone().requires_grad_() for x in given) for _ in range(2))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    found = scan(*packed, chunk_size, numbers)
    x, dt, decay, b, c = alone
    parts = zip(*(y.split(lengths, dim=1) for y in (x, dt, b, c)), strict=True)
    expected = torch.cat(
        [token_by_token(x, dt, decay, b, c) for x, dt, b, c in parts], dim=1
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(found)
    for result in (found, expected):
        (result * weights).sum().backward()
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-8)


def test_rows_that_are_one_sample_each() -> None:
    given = inputs(3, 11)
    torch.testing.assert_close(scan(*given, 4), token_by_token(*given))


def test_large_steps_lose_nothing() -> None:
    """A state that decays at once, in float32: no product overflows and no difference cancels."""
    x, dt, decay, b, c = inputs(1, 300)
    given = (x, 20 * dt, 10 * decay, b, c)
    found = scan(*(y.float() for y in given), 64)
    assert found.isfinite().all()
    expected = token_by_token(*given).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def spec_of(*, conv_size: int, bias: bool) -> MambaSpec:
    return MambaSpec(HEADS, WIDTH, GROUPS, STATE, conv_size, bias, 8)


@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_the_norm_is_over_each_group(num_groups: int) -> None:
    """Groups that are on several ranks are normalized as on one."""
    width = 12
    norm = GatedGroupNorm(width, num_groups, 1e-5, torch.float64)
    norm.weight.data.normal_()
    out, gate = torch.randn(2, 4, 1, width, dtype=torch.float64)
    gated = (out * F.silu(gate)).unflatten(-1, (num_groups, -1))
    expected = F.rms_norm(gated, gated.shape[-1:], eps=1e-5).flatten(-2) * norm.weight
    torch.testing.assert_close(norm(out, gate), expected)
    for group in range(num_groups):
        rows = slice(group * width // num_groups, (group + 1) * width // num_groups)
        alone = GatedGroupNorm(width // num_groups, 1, 1e-5, torch.float64)
        alone.weight.data.copy_(norm.weight[rows])
        torch.testing.assert_close(
            alone(out[..., rows], gate[..., rows]), expected[..., rows]
        )


def as_mamba_ssm(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, size: int, **more: Any
) -> Tensor:
    """Stand-in with the arguments of mamba-ssm's `mamba_chunk_scan_combined` (2.2)."""
    assert more["dt_softplus"] and all(y.is_contiguous() for y in (x, dt, b, c))
    sample = more["seq_idx"]
    if sample is not None:
        assert sample.dtype == torch.int32 and sample.shape == x.shape[:2]
        sample = sample[0]
    steps = F.softplus(dt.float() + more["dt_bias"])
    y = scan(x, steps, decay, b, c, size, sample)
    return (y + x.float() * more["D"][:, None]).to(x.dtype)


def test_mamba_ssm_is_used_on_a_gpu_if_it_is_installed() -> None:
    name = "mamba_ssm.ops.triton.ssd_combined"
    module = ModuleType(name)
    module.mamba_chunk_scan_combined = as_mamba_ssm  # type: ignore[attr-defined]
    choose = mamba.fused_scan.__wrapped__
    assert choose("cuda") is None and choose("cpu") is None
    with (
        mock.patch.dict(sys.modules, {name: module}),
        mock.patch.object(mamba.importlib.util, "find_spec", lambda name: name),
    ):
        assert choose("cuda") is as_mamba_ssm and choose("cpu") is None


def test_mamba_ssm_gets_what_the_scan_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a packed row and in rows of one sample each."""
    spec = spec_of(conv_size=4, bias=True)
    layer = SimpleNamespace(
        mamba=spec,
        num_sharing=1,
        A_log=torch.randn(HEADS),
        D=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS),
        exchange=SimpleNamespace(of_own_heads=lambda values: values),
    )
    for rows, positions in (
        (1, torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3, 0])),
        (2, None),
    ):
        mixed, steps = (
            torch.randn(rows, 10, spec.conv_rows),
            torch.randn(rows, 10, HEADS),
        )
        found = []
        for kernel in (None, as_mamba_ssm):
            monkeypatch.setattr(
                mamba, "fused_scan", lambda device, kernel=kernel: kernel
            )
            found.append(Mamba2Mixer._scan(layer, mixed, steps, positions))  # type: ignore[arg-type]
        torch.testing.assert_close(*found)
