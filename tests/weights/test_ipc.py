"""Boxes read straight out of another process's memory: the arithmetic of parts, and real processes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import Box
from megaverl.weights.transports import ipc, view
from megaverl.weights.transports.ipc import TensorAddress, calls_for, joined, parts
from tests.launcher import Launcher, WorldError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="process_vm_readv is Linux's"
)

QWEN2 = {"architecture": "Qwen2ForCausalLM"}
MANY = 1024


@st.composite
def boxes_in_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, Box]:
    """A tensor, contiguous or a transposed view or one with gaps, and a box of it; 2 x 3 x 4 elements in any case."""
    shape = draw(st.sampled_from([(24,), (6, 4), (2, 12), (2, 3, 4), (24, 1), (1, 24)]))
    before = [draw(st.integers(0, 2)) for _ in shape]
    sizes = [
        low + size + draw(st.integers(0, 2))
        for low, size in zip(before, shape, strict=True)
    ]
    kind = draw(st.sampled_from(["contiguous", "transposed", "gaps"]))
    if kind == "transposed":
        tensor = torch.zeros(sizes[::-1], dtype=torch.int32).permute(
            *reversed(range(len(sizes)))
        )
    elif kind == "gaps":
        tensor = torch.zeros([*sizes[:-1], sizes[-1] + 3], dtype=torch.int32)[
            ..., 1 : 1 + sizes[-1]
        ]
    else:
        tensor = torch.zeros(sizes, dtype=torch.int32)
    return tensor, Box(
        tuple(before),
        tuple(low + size for low, size in zip(before, shape, strict=True)),
    )


def found_parts(pairs: list[tuple[torch.Tensor, Box]]) -> np.ndarray:
    return np.concatenate(
        [
            parts(TensorAddress(t.data_ptr(), t.stride(), t.element_size()), box)
            for t, box in pairs
        ]
    )


@given(
    st.lists(st.tuples(boxes_in_tensors(), boxes_in_tensors()), min_size=1, max_size=6),
    st.sampled_from([1, 2, 5, MANY]),
    st.sampled_from([7, 64, 2**30]),
)
def test_every_element_comes_to_its_place_and_nothing_else_changes(
    pairs: list[tuple[tuple[torch.Tensor, Box], tuple[torch.Tensor, Box]]],
    max_parts: int,
    max_bytes: int,
) -> None:
    for number, ((origin, _), _) in enumerate(pairs):
        origin.copy_(
            1
            + 1000 * number
            + torch.arange(origin.numel(), dtype=torch.int32).view(origin.shape)
        )
    expected = []
    for (origin, origin_box), (target, target_box) in pairs:
        expected.append(target.clone())
        view(expected[-1], target_box).copy_(
            view(origin, origin_box).reshape(target_box.shape)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "MAX_PARTS", max_parts)
        patch.setattr(ipc, "MAX_BYTES", max_bytes)
        reads = calls_for(
            joined(found_parts([d for _, d in pairs])),
            joined(found_parts([s for s, _ in pairs])),
        )
    for read in reads:
        assert (
            max(len(read.here), len(read.there)) <= max_parts
            and read.nbytes <= max_bytes
        )
        ipc._read(os.getpid(), read)
    assert all(
        torch.equal(target, wanted)
        for (_, (target, _)), wanted in zip(pairs, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("grid", "vllm_tp", "dtypes", "spec", "move_source"),
    [
        ({"tp": 2, "pp": 2}, 2, ("float32", "float32"), QWEN2, False),
        (
            {"tp": 4},
            1,
            ("bfloat16", "bfloat16"),
            {"architecture": "Qwen3ForCausalLM"},
            True,
        ),
        # dtypes that are converted go over the network, as the smaller one, and in the
        # same run
        (
            {"tp": 1, "pp": 4},
            4,
            ("float32", "bfloat16"),
            QWEN2 | {"tie_embeddings": True},
            False,
        ),
    ],
)
def test_weights_arrive_in_place(
    launch: Launcher,
    grid: dict[str, int],
    vllm_tp: int,
    dtypes: tuple[str, str],
    spec: dict[str, Any],
    move_source: bool,
) -> None:
    options = {
        "grid": grid,
        "vllm_tp": vllm_tp,
        "dtypes": dtypes,
        "spec": spec,
        "bucket_bytes": 2**20,
    }
    results = launch.world(
        4,
        "tests.weights.ranks:reshard_ids",
        ipc=True,
        move_source=move_source,
        **options,
    )
    assert [result["wrong"] for result in results] == [[]] * 4
    assert sum(result["received"] for result in results) == sum(
        result["sent"] for result in results
    )
    for result in results:
        assert result["received"] == result["elements"] * (
            4 if dtypes == ("float32", "float32") else 2
        )
        # one call for all that comes from a rank, as these are a few hundred boxes;
        # none is sent
        assert dtypes == ("float32", "bfloat16") or result["messages"] <= 3


def test_a_rank_that_dies_is_named(launch: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="rank 2 ended with exit code -9"):
        options = {
            "how": "kill",
            "lost": 2,
            "seconds": 3.0,
            "folder": tmp_path,
            "ipc": True,
        }
        launch.world(
            4, "tests.weights.transport_ranks:lose_a_rank", fresh=True, **options
        )
    for rank in (0, 1, 3):
        message, refusal, version, _ = (
            (tmp_path / f"{rank}.txt").read_text().splitlines()
        )
        assert re.match(
            "rank 2 died or stalled while the weights of version 2 moved", message
        ), message
        assert "waiting until all ranks' weights are ready to be read" in message
        assert (
            "the engine's weights are inconsistent: the reshard from version 1 to 2 failed"
            in refusal
        )
        assert version == "1"


def test_a_process_that_cannot_be_read_is_told_with_the_mend() -> None:
    nobody = 2**22 - 1  # no process has a number as high
    assert "reshard.ipc=never" in ipc._cannot_read([nobody, 0, "00" * 16])
    mine = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    probe = [os.getpid(), mine.ctypes.data, mine.tobytes().hex()]
    assert ipc._cannot_read(probe) == ""
    assert "not the same machine" in ipc._cannot_read([*probe[:2], "00" * 16])
