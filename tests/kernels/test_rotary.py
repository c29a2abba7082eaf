"""Rotary embeddings in one pass, and their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.kernels import extension
from megaverl.kernels import rotary as kernel
from megaverl.kernels.rotary import fits, rotate
from megaverl.models.tiny import make_tiny_folder
from megaverl.platform import platform
from tests.worlds import run_world

built = pytest.mark.skipif(bool(extension.why_not()), reason=extension.why_not())


def example(
    dtype: torch.dtype, *, batch: int = 1, dim: int = 44, rotated: int = 38
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads that were cut out of a wider tensor, angles of each dimension its own, and a gradient."""
    torch.manual_seed(6)
    x = torch.randn(7, batch, 5, dim)[:, :, 1:4].to(dtype).requires_grad_()
    angles = torch.rand(7, 1, 1, rotated) * 300
    angles[..., rotated // 2 :] = angles[..., : rotated // 2]
    return x, angles, torch.randn(7, batch, 3, dim).to(dtype)


def as_complex_numbers(x: torch.Tensor, angles: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x[n] + i x[n + rotated / 2], times e^(i angle), in float64; cosines and sines of what `dtype` can tell."""
    rotated = angles.shape[-1]
    first, second, rest = x.double().split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
    half = angles[..., : rotated // 2]
    turn = torch.complex(*((part(half) * scale).to(dtype).double() for part in (torch.cos, torch.sin)))
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag, rest], dim=-1)


@built
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.005)], ids=["float32", "bfloat16"]
)
def test_values_and_gradients_are_turned_complex_numbers(
    dtype: torch.dtype, tolerance: float, batch: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(kernel, "CHUNK_TOKENS", 3)
    x, angles, grad = example(dtype, batch=batch)
    found = rotate(x, angles, 1.5)
    [found_grad] = torch.autograd.grad(found, x, grad.transpose(1, 2).contiguous().transpose(1, 2))
    exact = x.detach().double().requires_grad_()
    expected = as_complex_numbers(exact, angles, 1.5, dtype)
    [expected_grad] = torch.autograd.grad(expected, exact, grad.double())
    for mine, theirs in ((found, expected), (found_grad, expected_grad)):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


@built
def test_both_halves_may_turn_by_angles_of_their_own() -> None:
    x, angles, grad = example(torch.float32, rotated=44)
    angles = torch.rand_like(angles)
    first, second = x.chunk(2, dim=-1)
    expected = x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    found = rotate(x, angles)
    torch.testing.assert_close(found, expected)
    [found_grad], [expected_grad] = (torch.autograd.grad(y, x, grad) for y in (found, expected))
    torch.testing.assert_close(found_grad, expected_grad)


@built
def test_sines_are_made_once_for_angles_and_anew_for_others() -> None:
    x, angles, _ = example(torch.float32)
    with torch.no_grad():
        first = rotate(x, angles)
        assert kernel._table(angles, torch.float32, 1.0)[0] is kernel._table(angles, torch.float32, 1.0)[0]
        angles += 1.0
        moved = rotate(x, angles)
        other = rotate(x, angles - 1.0)
    assert not torch.equal(first, moved)
    torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rotate(x, angles).double(), as_complex_numbers(x, angles, 1.0, torch.float32))
    assert rotate(x.bfloat16(), angles).dtype == torch.bfloat16


@built
@pytest.mark.parametrize(
    ("dtype", "x_shape", "angles_shape", "taken"),
    [
        (torch.float32, (7, 2, 3, 8), (7, 1, 1, 8), True),
        (torch.float64, (7, 2, 3, 8), (7, 1, 1, 8), False),
        (torch.float32, (7, 2, 3, 8), (7, 2, 1, 8), False),  # angles of each row
        (torch.float32, (7, 2, 3, 8), (9, 1, 1, 8), False),
        (torch.float32, (7, 2, 3, 8), (7, 1, 1, 10), False),
        (torch.float32, (7, 3, 8), (7, 1, 8), False),
    ],
    ids=str,
)
def test_what_it_takes(
    dtype: torch.dtype, x_shape: tuple[int, ...], angles_shape: tuple[int, ...], taken: bool
) -> None:
    assert fits(torch.zeros(x_shape, dtype=dtype), torch.zeros(angles_shape)) == taken


def test_nothing_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_load", lambda: (None, "left out"))
    assert not fits(torch.zeros(7, 1, 3, 8), torch.zeros(7, 1, 1, 8))


@built
@pytest.mark.skipif(platform.is_cuda, reason="adapts a CPU")
def test_attention_of_megatron_core_takes_it_and_computes_the_same(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen2ForCausalLM")
    [found] = run_world(1, "tests.models.ranks:rotary_embeddings", folder=folder)
    assert found == {
        "recorded": True,
        "difference": pytest.approx(0, abs=1e-5),
        "interleaved": "left to megatron-core",
        "latent": "left to megatron-core",
    }
