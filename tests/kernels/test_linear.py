"""Products of few rows with a weight as it lies."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
import torch.nn.functional as F

from megaverl.kernels import linear as kernel
from megaverl.kernels.extension import has_tiles
from megaverl.kernels.linear import fits, linear

on_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor has no AMX")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether it is the product in float64, rounded to bfloat16 once."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    error = (found.double() - exact).abs()
    return bool((error <= exact.abs() * 2**-8 + sizes * 2**-20).all())


@on_tiles
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(("outputs", "inner"), [(16, 32), (48, 64), (32, 96), (272, 1024)])
def test_products_are_exact_but_for_rounding(outputs: int, inner: int, rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(outputs, inner).bfloat16(), torch.randn(outputs).bfloat16() if with_bias else None
    x = torch.randn(rows, 2 * inner).bfloat16()[:, :inner]  # cut out of a wider tensor
    assert fits(weight, bias)
    found = linear(x, weight, bias)
    assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
    assert close(found, x, weight, bias)


@on_tiles
def test_more_dimensions_strides_and_many_rows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64).bfloat16()
    x = torch.randn(2, 3, 64).bfloat16()
    assert torch.equal(linear(x, weight), linear(x.view(6, 64), weight).view(2, 3, 32))
    assert torch.equal(linear(x[0].t().contiguous().t(), weight), linear(x[0], weight))
    many = torch.randn(kernel.MANY_ROWS + 1, 64).bfloat16()
    assert close(linear(many, weight), many, weight, None)
    assert torch.equal(linear(many[:-1], weight)[:5], linear(many[:5], weight)), "a row's product is its own"


@on_tiles
def test_a_weight_that_was_written_to_is_the_one_that_counts() -> None:
    weight, x = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    assert linear(x, weight).eq(32).all()
    weight.mul_(2)
    assert linear(x, weight).eq(64).all()


@on_tiles
def test_nothing_behind_the_rows_is_read() -> None:
    """They end where a page begins that nobody may read."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(place + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    x = torch.frombuffer(pages, dtype=torch.bfloat16, count=mmap.PAGESIZE // 2)[-3 * 32 :].view(3, 32).fill_(1.0)
    assert linear(x, torch.ones(16, 32, dtype=torch.bfloat16)).eq(32).all()


@on_tiles
def test_what_is_no_number_spoils_its_own_row_alone() -> None:
    weight, x = torch.ones(16, 32).bfloat16(), torch.ones(20, 32).bfloat16()
    x[3, 5] = torch.nan
    assert linear(x, weight).isnan().any(dim=1).nonzero().tolist() == [[3]]


@on_tiles
@pytest.mark.parametrize(
    ("weight", "bias", "taken"),
    [
        (torch.zeros(32, 64).bfloat16(), torch.zeros(32).bfloat16(), True),
        (torch.zeros(32, 64), None, False),
        (torch.zeros(40, 64).bfloat16(), None, False),
        (torch.zeros(32, 48).bfloat16(), None, False),
        (torch.zeros(64, 32).bfloat16().t(), None, False),
        (torch.zeros(2, 32, 64).bfloat16(), None, False),
        (torch.zeros(32, 64).bfloat16(), torch.zeros(32), False),
        (torch.zeros(32, 64, device="meta", dtype=torch.bfloat16), None, False),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else str(x),
)
def test_what_it_takes(weight: torch.Tensor, bias: torch.Tensor | None, taken: bool) -> None:
    assert fits(weight, bias) == taken


def test_only_on_tiles_and_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(32, 64).bfloat16()
    monkeypatch.setattr(kernel, "has_tiles", lambda: True)
    assert fits(weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not fits(weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(kernel, "has_tiles", lambda: False)
    assert not fits(weight)
