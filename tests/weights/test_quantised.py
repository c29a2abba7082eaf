"""Quantised engines: what lands there is what a naive quantisation of the whole weights gives, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaverl.sharding.vllm import QuantisedWeight
from megaverl.weights.transports.quantised import FP8, dequantise, quantise
from tests.launcher import Launcher
from tests.weights.quantised_ranks import reference

QWEN2, MOE, DEEPSEEK, GRANITE_MOE = (
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GraniteMoeForCausalLM",
)


@settings(max_examples=40, deadline=None)
# Below the least scale of a block.
@example(rows=300, columns=130, scale=1e-6, transposed=False)
@example(rows=1, columns=1, scale=0.0, transposed=True)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    transposed=st.booleans(),
)
def test_a_block_after_the_other(
    rows: int, columns: int, scale: float, transposed: bool
) -> None:
    matrix = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        * scale
    ).bfloat16()
    for powers_of_two in (False, True):
        numbers, scales = reference(matrix, 128, powers_of_two)
        place = (
            torch.empty(columns, rows, dtype=FP8).t()
            if transposed
            else torch.empty(rows, columns, dtype=FP8)
        )
        into = QuantisedWeight(place, torch.empty(scales.shape), 128, powers_of_two)
        quantise(matrix, into)
        assert torch.equal(
            into.numbers.contiguous().view(torch.uint8), numbers.view(torch.uint8)
        )
        assert torch.equal(into.scales, scales)
        # half a step of four bits of mantissa, and what is too small to have them
        error = (dequantise(into) - matrix.float()).abs()
        assert (error <= matrix.float().abs() / 16 + scales.max() * 2**-10).all()


@pytest.mark.parametrize("block", [None, 128])
def test_a_long_matrix_is_quantised_in_slices(
    block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaverl.weights.transports.quantised.CHUNK", 5_000)
    matrix = torch.randn(777, 60).bfloat16()
    numbers, scales = reference(matrix, block)
    into = QuantisedWeight(
        torch.empty(matrix.shape, dtype=FP8), torch.empty(scales.shape), block
    )
    quantise(matrix, into)
    assert torch.equal(
        into.numbers.view(torch.uint8), numbers.view(torch.uint8)
    ) and torch.equal(into.scales, scales)


def test_zeros_and_the_largest_numbers_survive() -> None:
    for block in (None, 128):
        into = QuantisedWeight(torch.empty(4, 4, dtype=FP8), torch.empty(1, 1), block)
        for value in (0.0, 3e38, -1e-30):
            quantise(torch.full((4, 4), value), into)
            assert (
                torch.isfinite(dequantise(into)).all()
                and (dequantise(into) - value).abs().max() <= abs(value) / 16 + 1e-6
            )


def case(
    architecture: str, grid: dict[str, int], tp: int, **more: Any
) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "grid": grid,
        "tp": tp,
        "quantization": "fp8_per_block",
        **more,
    }


CASES = {
    2: [
        case(QWEN2, {"tp": 1, "dp": 2}, 2, ipc=True),
        case(QWEN2, {"tp": 2}, 2, dtype="float32"),
        case(QWEN2, {"tp": 2}, 1, quantization="fp8_per_tensor"),
        case(QWEN2, {"pp": 2}, 2, quantization="fp8", bucket=2**30),
        case(MOE, {"tp": 2}, 2),
        case(MOE, {"dp": 2, "ep": 2}, 2, expert_parallel=True),
        case(DEEPSEEK, {"tp": 2}, 2),
        # Files hold all experts of a layer in one array.
        case(GRANITE_MOE, {"tp": 2}, 2),
        case(GRANITE_MOE, {"dp": 2, "ep": 2}, 2, expert_parallel=True),
        case(
            DEEPSEEK,
            {"tp": 2, "ep": 2, "etp": 1},
            1,
            quantization="fp8_per_tensor",
            ipc=True,
        ),
    ],
    4: [
        case(QWEN2, {"tp": 2, "pp": 2}, 4),
        case(MOE, {"tp": 2, "pp": 2}, 2, expert_parallel=True),
        case(QWEN2, {"tp": 2, "pp": 2}, 2, delta="on"),
    ],
}


def check_changes(result: dict[str, Any]) -> None:
    """Weights in floating point arrive as changes, and matrices whole: an engine lacks the elements that stay."""
    assert 0 < result["changed"] < 0.01
    matrices = 0.8 * 2 * result["elements"]
    assert matrices < result["few"] < 2 * result["elements"] <= result["received"]


@pytest.mark.parametrize("world", CASES)
def test_what_lands_is_the_quantisation_of_the_whole_weights(
    launch: Launcher, world: int
) -> None:
    for found in launch.world(
        world, "tests.weights.quantised_ranks:land", cases=CASES[world]
    ):
        for arguments, result in zip(CASES[world], found, strict=True):
            assert result["wrong"] == [], arguments
            if "delta" in arguments:
                check_changes(result)
                continue
            assert result["received"] == result["few"] == 2 * result["elements"], (
                "as many bytes as into an engine of bfloat16"
            )
            assert (result["parts"] == 1) == (arguments.get("bucket") == 2**30)
            assert 0 < result["error"] < 0.05, arguments


def test_what_is_relayed_lands_as_what_comes_directly(launch: Launcher) -> None:
    """From one trainer to three engines on two nodes. Boxes are forwarded from the buffer, still in floating point."""
    cases = [
        case(QWEN2, {"tp": 1}, 1, nodes=[0, 1, 2, 2]),
        case(
            MOE,
            {"tp": 1},
            1,
            nodes=[0, 1, 2, 2],
            quantization="fp8_per_tensor",
            dtype="float32",
        ),
        case(QWEN2, {"tp": 1}, 1, nodes=[0, 1, 2, 2], delta="on"),
    ]
    results = launch.world(4, "tests.weights.quantised_ranks:land", cases=cases)
    for number, arguments in enumerate(cases):
        of_ranks = [found[number] for found in results]
        assert [result["wrong"] for result in of_ranks] == [[]] * 4, arguments
        assert sum(result["forwarded"] for result in of_ranks) > 0
        if "delta" in arguments:
            for result in of_ranks[1:]:
                check_changes(result)
            continue
        assert all(result["received"] == 2 * result["elements"] for result in of_ranks)


def test_what_landed_otherwise_is_named_before_it_is_quantised(
    launch: Launcher,
) -> None:
    local = "model.layers.1.mlp.down_proj.weight"
    for message in launch.world(
        2,
        "tests.weights.quantised_ranks:land_otherwise",
        architecture=QWEN2,
        tp=2,
        local=local,
    ):
        assert (
            f"{local} of the destination on rank 1 is not what the source holds"
            in message
        )
