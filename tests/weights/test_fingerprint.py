"""Fingerprints: what changes them, that parts add up, and that a comparison names what is wrong where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import Box, subtract, whole
from megaverl.sharding.layout import Layout, Piece, whole_layout
from megaverl.weights import fingerprint
from megaverl.weights.fingerprint import box_fingerprint, fingerprints
from tests.launcher import Launcher

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of(
    data: torch.Tensor, box: Box | None = None, dtype: torch.dtype | None = None
) -> int:
    return int(box_fingerprint(data, box or whole(data.shape), dtype))


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_shows(dtype: torch.dtype) -> None:
    data = random((5, 7), dtype)
    bits = data.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    found = {of(data)}
    for row in range(5):
        for column in range(7):
            for bit in range(8 * dtype.itemsize):
                mask = (
                    torch.tensor(1).bitwise_left_shift(torch.tensor(bit)).to(bits.dtype)
                )
                bits[row, column] ^= mask
                found.add(of(data))
                bits[row, column] ^= mask
    assert len(found) == 1 + data.numel() * 8 * dtype.itemsize
    assert of(data) in found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (6, 9), (3, 4, 5)])
def test_every_swap_of_two_elements_shows(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    data = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    original, flat = of(data), data.view(-1)
    for i in range(flat.numel()):
        for j in range(i):
            flat[[i, j]] = flat[[j, i]]
            assert of(data) != original, (i, j)
            flat[[i, j]] = flat[[j, i]]
    # the hardest pair: they differ in the highest bit alone
    sign = torch.full(shape, 2.0, dtype=dtype)
    sign.view(-1)[1] = -2.0
    swapped = sign.clone()
    swapped.view(-1)[[0, 1]] = swapped.view(-1)[[1, 0]]
    assert of(sign) != of(swapped)


def test_swapped_rows_columns_and_shifts_show() -> None:
    data = random((64, 48), torch.bfloat16)
    found = {
        of(data),
        of(data.flip(0)),
        of(data.flip(1)),
        of(data.roll(1, 0)),
        of(data.roll(1, 1)),
    }
    rows = data.clone()
    rows[[3, 40]] = rows[[40, 3]]
    columns = data.clone()
    columns[:, [3, 40]] = columns[:, [40, 3]]
    block = data.clone()  # the same rows in the same columns, gate for up
    block[:32], block[32:] = data[32:], data[:32]
    assert len(found | {of(rows), of(columns), of(block)}) == 8


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and disjoint boxes that make it up, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        hole = Box(
            start,
            tuple(
                draw(st.integers(low + 1, n))
                for low, n in zip(start, shape, strict=True)
            ),
        )
        boxes = [rest for box in boxes for rest in subtract(box, hole)] + [hole]
    return shape, draw(st.permutations(boxes))


@given(cut_up(), st.sampled_from(DTYPES), st.integers(1, 40))
def test_parts_add_up_to_the_whole(
    cuts: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype, chunk: int
) -> None:
    shape, boxes = cuts
    data = random(shape, dtype)
    expected = of(data) % 2**64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "CPU_CHUNK", chunk)  # whatever the chunks
        assert sum(of(data[box.slices], box) for box in boxes) % 2**64 == expected
    assert fingerprints(whole_layout([("w", shape)]), {"w": data}) == {"w": expected}


def test_padding_does_not_count_and_places_are_global() -> None:
    data = random((6, 4))
    layout = Layout(
        (Piece("w", Box((2, 0), (6, 4)), "local", Box((1, 0), (5, 4))),),
        {"local": (8, 4)},
        {"w": (6, 4)},
    )
    local = torch.full((8, 4), 7.0)
    local[1:5] = data[2:]
    expected = of(data[2:], Box((2, 0), (6, 4))) % 2**64
    assert fingerprints(layout, {"local": local}) == {"w": expected}
    local[[0, 5, 6, 7]] = torch.nan
    assert fingerprints(layout, {"local": local}) == {"w": expected}
    assert of(data[2:]) % 2**64 != expected  # the same elements at another place


def test_a_float32_source_is_rounded_to_the_dtype_of_the_destination() -> None:
    data = random((33, 5))
    assert of(data, dtype=torch.bfloat16) == of(data.bfloat16())
    assert of(data, dtype=torch.bfloat16) != of(data)


def test_an_expert_in_a_fused_tensor_counts_like_one_alone() -> None:
    data = random((6, 4))
    fused = torch.stack([data * 2, data])
    assert of(fused[1:2], whole((6, 4))) == of(data)


CLEAN = None
TP2_PP2 = {"tp": 2, "pp": 2}


def fault(side: str, rank: int, local: str, kind: str) -> dict[str, Any]:
    return {"side": side, "rank": rank, "local": local, "kind": kind}


def test_a_comparison_names_tensor_box_and_rank(launch: Launcher) -> None:
    faults = [
        CLEAN,
        fault("dest", 3, "model.layers.2.self_attn.qkv_proj.weight", "flipped bit"),
        fault("dest", 0, "model.layers.0.mlp.down_proj.weight", "swapped elements"),
        fault("dest", 1, "model.layers.3.mlp.gate_up_proj.weight", "swapped rows"),
        fault("dest", 2, "model.norm.weight", "stale"),
        fault("source", 2, "decoder.layers.1.input_layernorm.weight", "stale"),
        CLEAN,
    ]
    expected = [
        "",
        # the last element of rank 3's half: the second of two v heads
        r"differ after resharding: model.layers.2.self_attn.v_proj.weight \[2:4, 0:8\]: "
        r"model.layers.2.self_attn.qkv_proj.weight of the destination on rank 3 is not what the source holds on rank 3",
        r"resharding: model.layers.0.mlp.down_proj.weight \[0:8, 0:8\]: \S+ of the destination on rank 0",
        r"resharding: model.layers.3.mlp.gate_proj.weight \[8:16, 0:8\]: \S+ of the destination on rank 1 .* on rank 3",
        r"resharding: model.norm.weight \[0:8\]: model.norm.weight of the destination on rank 2",
        # the copies of the second stage are on ranks 2 and 3; what rank 2 gave was
        # right when it was resharded
        r"model.layers.3.input_layernorm.weight \[0:8\]: \S+ of the destination on rank 0 .* on rank 2",
        "",
    ]
    for results in launch.world(
        4,
        "tests.weights.fingerprint_ranks:compare_after_faults",
        grid=TP2_PP2,
        vllm_tp=2,
        dtypes=("float32", "bfloat16"),
        faults=faults,
    ):
        for found, pattern in zip(results, expected, strict=True):
            if not pattern:
                assert found == ""
            else:
                assert found.startswith("ReshardError") and re.search(pattern, found), (
                    found
                )
        assert results[1].count("is not what") == 1


def test_a_single_bad_source_replica_is_found(launch: Launcher) -> None:
    """Even the one whose value all others are compared with, when two others outvote it."""
    bad = [
        fault("source", rank, "decoder.layers.1.mlp.linear_fc1.weight", "swapped rows")
        for rank in (0, 2)
    ]
    for results in launch.world(
        4,
        "tests.weights.fingerprint_ranks:compare_after_faults",
        grid={"dp": 4},
        vllm_tp=4 // 2,
        dtypes=("bfloat16", "float32"),
        faults=bad,
    ):
        for rank, found in zip((0, 2), results, strict=True):
            named = re.findall(r"of the (\w+) on rank (\d)", found)
            assert named and set(named) == {("source", str(rank))}, found
            assert "model.layers.1.mlp.gate_proj.weight [0:8, 0:8]" in found
