"""Packing of messages, and the transports on real processes over gloo."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megaverl.sharding.boxes import whole
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports import ALONE, messages
from tests.launcher import Launcher

QWEN2 = {"architecture": "Qwen2ForCausalLM"}


def transfer(number: int, shape: tuple[int, ...]) -> Transfer:
    box = whole(shape)
    return Transfer(f"t{number}", box, 0, "s", box, 1, "d", box)


# Small boxes that fill several buckets.
@example([(5, 3)] * 200, (torch.float32,), 2048)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=30),
    st.sampled_from(
        [
            (torch.bfloat16,),
            (torch.float32,),
            (torch.bfloat16, torch.float32, torch.float16),
        ]
    ),
    st.sampled_from([64, 256, 2048]),
)
def test_messages_hold_every_element_once_and_fit_the_bucket(
    shapes: list[tuple[int, int]], dtypes: tuple[torch.dtype, ...], bucket_bytes: int
) -> None:
    transfers = [transfer(i, shape) for i, shape in enumerate(shapes)]
    sent = {f"t{i}": np.zeros(shape, dtype=int) for i, shape in enumerate(shapes)}
    dtype_of = {
        part.tensor: dtypes[i % len(dtypes)] for i, part in enumerate(transfers)
    }
    for message in messages(
        transfers, lambda part: dtype_of[part.tensor], bucket_bytes
    ):
        assert message.nbytes <= bucket_bytes
        end = 0
        for part, offset in zip(message.transfers, message.offsets, strict=True):
            assert offset == end, "nothing but elements travels"
            assert offset % dtype_of[part.tensor].itemsize == 0
            end = offset + part.box.numel * dtype_of[part.tensor].itemsize
            assert part.source_box == part.box == part.dest_box
            sent[part.tensor][part.box.slices] += 1
        assert end == message.nbytes
    assert all((count == 1).all() for count in sent.values())


def test_the_number_of_messages_grows_with_the_bytes_not_with_the_boxes() -> None:
    small = [transfer(i, (16,)) for i in range(1000)]
    assert len(messages(small, lambda _: torch.float32, 64 * 1024)) == 1
    large = transfer(0, (1000, 1000))
    bucket = 64 * 1024
    assert (
        len(messages([large], lambda _: torch.float32, bucket))
        <= 4_000_000 / (bucket * (1 - ALONE)) + 1
    )


@pytest.mark.parametrize(
    ("grid", "vllm_tp", "dtypes", "bucket_bytes", "spec"),
    [
        ({"tp": 2, "pp": 2}, 2, ("float32", "float32"), 2**20, QWEN2),
        # a bucket smaller than the matrices: parts, boxes that land in place, and
        # packed ones
        ({"tp": 2, "pp": 2}, 2, ("float32", "bfloat16"), 256, QWEN2),
        (
            {"tp": 1, "pp": 4},
            4,
            ("bfloat16", "float32"),
            2048,
            QWEN2 | {"tie_embeddings": True},
        ),
        (
            {"tp": 4, "pp": 1},
            1,
            ("bfloat16", "bfloat16"),
            512,
            {"architecture": "Qwen3ForCausalLM"},
        ),
        ({"tp": 2, "dp": 2}, 2, ("float32", "bfloat16"), 2**20, QWEN2),
        ({"cp": 2, "pp": 2}, 2, ("float32", "bfloat16"), 2**20, QWEN2),
    ],
)
def test_weights_arrive_in_place(
    launch: Launcher,
    grid: dict[str, int],
    vllm_tp: int,
    dtypes: tuple[str, str],
    bucket_bytes: int,
    spec: dict[str, Any],
) -> None:
    results = launch.world(
        4,
        "tests.weights.ranks:reshard_ids",
        grid=grid,
        vllm_tp=vllm_tp,
        dtypes=dtypes,
        bucket_bytes=bucket_bytes,
        spec=spec,
    )
    assert [result["wrong"] for result in results] == [[]] * 4
    assert sum(result["received"] for result in results) == sum(
        result["sent"] for result in results
    )
    itemsize = 4 if dtypes == ("float32", "float32") else 2
    for result in results:
        # the smaller dtype travels, and nothing beside the elements
        assert result["received"] == result["elements"] * itemsize


@pytest.mark.parametrize("ipc", [False, True])
def test_matrices_that_lie_transposed_and_in_steps(launch: Launcher, ipc: bool) -> None:
    """On both sides, in parts that a bucket does not hold whole; fingerprints see them too."""
    results = launch.world(
        4,
        "tests.weights.ranks:reshard_ids",
        grid={"tp": 2, "pp": 2},
        vllm_tp=2,
        dtypes=("float32", "float32"),
        bucket_bytes=256,
        spec=QWEN2,
        ipc=ipc,
        move_source=True,
        in_views=True,
    )
    assert [result["wrong"] for result in results] == [[]] * 4
    assert all(result["received"] == result["elements"] * 4 for result in results)


def test_equal_layouts_in_one_process_send_nothing(launch: Launcher) -> None:
    results = launch.world(
        4,
        "tests.weights.ranks:reshard_ids",
        grid={"tp": 2, "dp": 2},
        vllm_tp=2,
        dtypes=("float32", "float32"),
        bucket_bytes=2**20,
        spec=QWEN2 | {"vocab_size": 64},
    )
    assert [(result["wrong"], result["messages"]) for result in results] == [
        ([], 0)
    ] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "the source has no such parameter: decoder.final_layernorm.weight"),
        (
            "shape",
            r"shape \[3\], the layout says \[8\]: decoder.final_layernorm.weight",
        ),
        ("extra", "no weight of the model belongs to decoder.weight_scale"),
        (
            "dtype",
            "torch.float32 at the source here, torch.bfloat16 on rank 1: model.norm.weight",
        ),
        ("quantised", "torch.int8 on rank 1: model.norm.weight"),
    ],
)
def test_one_rank_with_wrong_parameters_stops_all(
    launch: Launcher, fault: str, message: str
) -> None:
    for found in launch.world(
        4, "tests.weights.ranks:reshard_with_a_fault", fault=fault
    ):
        assert found.startswith("ReshardError")
        assert re.search(message, found), found
