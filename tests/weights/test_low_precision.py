"""INT4, MXFP8 and NVFP4: naive float64 arithmetic from packed bits, and the libraries that define the formats."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.sharding.quantization import GROUP_FORMATS, GroupFormat
from megaverl.weights.low_precision import (
    dequantise_groups,
    fake_quantise,
    packed_tensors,
    quantise_groups,
)
from megaverl.weights.transports.quantised import packed_matrix

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(bits: int) -> float:
    """The number of these bits: sign, four bits of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    assert exponent < 15 or mantissa < 7, "NaN"
    size = (
        mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    )
    return -size if sign else size


def unpacked(tensors: dict[str, torch.Tensor], form: GroupFormat) -> torch.Tensor:
    """The matrix in float64 that packed bits mean, element by element."""
    packed = tensors["weight" if form.kind == "mxfp8" else "weight_packed"]
    scales = tensors["weight_scale"]
    per_item = {"int4": 8, "mxfp8": 1, "nvfp4": 2}[form.kind]
    rows, columns = packed.shape[0], packed.shape[1] * per_item
    words = (
        (packed.view(torch.uint8) if form.kind == "mxfp8" else packed)
        .to(torch.int64)
        .tolist()
    )
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            word, group = words[i][j // per_item], j // form.group
            if form.kind == "int4":
                zero = 8
                if not form.symmetric:
                    points = int(tensors["weight_zero_point"][i // 8, group])
                    zero = points >> 4 * (i % 8) & 15
                number = (word >> 4 * (j % 8) & 15) - zero
                matrix[i, j] = number * float(scales[i, group])
            elif form.kind == "mxfp8":
                matrix[i, j] = e4m3(word) * 2.0 ** (int(scales[i, group]) - 127)
            else:
                bits = word >> 4 * (j % 2) & 15
                number = -E2M1[bits & 7] if bits >> 3 else E2M1[bits]
                scale = e4m3(int(scales.view(torch.uint8)[i, group]))
                matrix[i, j] = number * scale / float(tensors["weight_global_scale"])
    return matrix


def step(form: GroupFormat, group: list[float], largest: float) -> float:
    """The most that an element of this group may be off, by the format's definition in exact arithmetic."""
    peak = max(map(abs, group))
    if form.kind == "int4":
        high, low = max(0.0, *group), min(0.0, *group)
        span = 2 * peak if form.symmetric else high - low
        # Symmetric numbers end at 7, one half of a step before the largest element. A
        # zero point is rounded, which costs as much.
        return span / 15
    if form.kind == "mxfp8":
        # Half a step of the last binade, from 256 to 448.
        exponent = math.ceil(math.log2(Fraction(peak) / 448) - 1e-12) if peak else -127
        return 16 * 2.0**exponent
    # Half the distance between 4 and 6, and a scale rounded down by 1/16.
    return max(peak / 6 * (1 + 1 / 8), largest / 6 / 448 / 64)


@pytest.mark.parametrize("name", GROUP_FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 3),
    size=st.sampled_from([1e-4, 0.05, 30.0]),
    kind=st.sampled_from(["normal", "positive", "zeros", "sparse"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_packed_bits_are_the_nearest_numbers(
    name: str,
    rows: int,
    groups: int,
    size: float,
    kind: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    form = GROUP_FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, groups * form.group, generator=generator) * size
    matrix = {
        "normal": matrix,
        "positive": matrix.abs(),
        "zeros": torch.zeros_like(matrix),
        "sparse": matrix * (torch.rand(matrix.shape, generator=generator) < 0.05),
    }[kind].to(dtype)
    quantised = quantise_groups(matrix, form, scale_dtype=dtype)
    held = dequantise_groups(quantised)
    meant = unpacked(packed_tensors(quantised, form, dtype), form)
    assert torch.allclose(held.double(), meant, rtol=3e-7, atol=0)
    # Fake quantisation is the same matrix, rounded to the dtype of the weights.
    faked = fake_quantise(matrix, form, scale_dtype=dtype)
    assert torch.equal(faked, held.to(dtype)) and faked.dtype == dtype
    largest, slack = float(matrix.abs().max()), 1.02 if dtype is torch.bfloat16 else 1
    for i in range(rows):
        for g in range(groups):
            part = slice(g * form.group, (g + 1) * form.group)
            most = step(form, matrix[i, part].tolist(), largest) * slack
            error = (meant[i, part] - matrix[i, part].double()).abs().max()
            assert float(error) <= most * 1.001 + 1e-30


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_the_libraries_that_define_the_formats_agree(name: str) -> None:
    """compressed-tensors and vLLM, which are installed with the engine, quantise to the same bits."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        generate_gparam,
    )

    form = GROUP_FORMATS[name]
    matrix = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    quantised = quantise_groups(matrix, form, scale_dtype=torch.float32)
    tensors = packed_tensors(quantised, form, torch.float32)
    if form.kind == "mxfp8":
        from vllm.model_executor.layers.quantization.utils import mxfp8_utils

        numbers, exponents = mxfp8_utils._mxfp8_e4m3_quantize_torch(matrix)
        assert torch.equal(
            tensors["weight"].view(torch.uint8), numbers.view(torch.uint8)
        )
        assert torch.equal(tensors["weight_scale"], exponents)
        return
    arguments = QuantizationArgs(
        num_bits=4,
        type="int" if form.kind == "int4" else "float",
        strategy="group" if form.kind == "int4" else "tensor_group",
        group_size=form.group,
        symmetric=form.symmetric,
        **(
            {}
            if form.kind == "int4"
            else {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
        ),
    )
    low, high = matrix.unflatten(1, (-1, form.group)).aminmax(dim=-1)
    factor = None
    if form.kind == "nvfp4":
        factor = generate_gparam(matrix.min(), matrix.max())
        assert torch.equal(tensors["weight_global_scale"], factor)
    scales, points = calculate_qparams(low, high, arguments, global_scale=factor)
    assert torch.equal(tensors["weight_scale"].float(), scales.float())
    numbers = quantize(
        matrix, scales, points, arguments, dtype=None, global_scale=factor
    )
    if form.kind == "nvfp4":
        assert torch.equal(tensors["weight_packed"], pack_fp4_to_uint8(numbers))
        return
    packed = pack_to_int32(numbers.to(torch.int8), 4)
    assert torch.equal(tensors["weight_packed"], packed)
    if not form.symmetric:
        points = pack_to_int32(points.to(torch.int8), 4, packed_dim=0)
        assert torch.equal(tensors["weight_zero_point"], points)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_a_long_matrix_is_packed_in_slices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = GROUP_FORMATS[name]
    matrix = torch.randn(45, 128).bfloat16()
    largest = matrix.abs().max().float()
    whole = packed_matrix(matrix, name, torch.bfloat16, largest)
    monkeypatch.setattr("megaverl.weights.transports.quantised.CHUNK", 3_000)
    sliced = packed_matrix(matrix, name, torch.bfloat16, largest)
    assert whole.keys() == sliced.keys()
    for key, tensor in whole.items():
        assert torch.equal(
            tensor.contiguous().view(torch.uint8), sliced[key].view(torch.uint8)
        )
    rows, columns = matrix.shape
    stored = sum(t.nbytes for key, t in whole.items() if key != "weight_shape")
    assert stored == form.num_bytes(rows, columns, 2)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_gradients_pass_through_unchanged(name: str) -> None:
    """Equal to float64 autograd of x + constant, where the constant is the rounding."""
    matrix = torch.randn(8, 128, requires_grad=True)
    inputs = torch.randn(5, 128)
    form = GROUP_FORMATS[name]
    rounded = fake_quantise(matrix, form, scale_dtype=torch.float32)
    torch.nn.functional.linear(inputs, rounded).square().sum().backward()
    exact = matrix.detach().double().requires_grad_()
    rounding = rounded.detach().double() - exact.detach()
    product = torch.nn.functional.linear(inputs.double(), exact + rounding)
    product.square().sum().backward()
    assert torch.allclose(matrix.grad.double(), exact.grad, rtol=1e-4, atol=1e-3)


def test_ties_of_nvfp4_go_to_the_even_number() -> None:
    row = [0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, -5.0, 6.0, 0.26] + [0.0] * 6
    form = GROUP_FORMATS["nvfp4"]
    quantised = quantise_groups(torch.tensor([row]), form, scale_dtype=torch.float32)
    rounded = dequantise_groups(quantised)[0, :10].tolist()
    assert rounded == [0.0, -1.0, 1.0, -2.0, 2.0, -4.0, 4.0, -4.0, 6.0, 0.5]
