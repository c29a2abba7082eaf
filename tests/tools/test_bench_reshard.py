"""The benchmark's arithmetic, and the whole of it once, tiny; what it measures is not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.plan import make_plans
from tests.launcher import Launcher
from tools import bench_reshard
from tools.bench_reshard import parse, summarise, table
from tools.reshard_measure import (
    MB,
    PAIRS,
    End,
    Job,
    ends,
    fill,
    least_elements,
    peak_memory,
    share_in_place,
)
from tools.reshard_peers import PlainExchange

TINY = [
    "--layers",
    "2",
    "--hidden",
    "128",
    "--ffn",
    "128",
    "--heads",
    "2",
    "--vocab",
    "130",
    "--repeats",
    "1",
]


def test_defaults_are_the_size_of_half_a_billion_parameters() -> None:
    job = parse([]).job
    assert (job.layers, job.hidden, job.ffn, job.heads, job.kv_heads, job.vocab) == (
        24,
        896,
        4864,
        14,
        2,
        151936,
    )
    assert (
        {"tp2pp2-vllm2", "tp2pp2-vllm1", "tp1pp4-vllm2", "tp4-vllm2"}
        <= set(job.pairs)
        == set(PAIRS)
    )
    assert job.sized_for([2, 1]) == job
    nearest = job.sized_for([4, 2])
    assert (nearest.heads, nearest.kv_heads, nearest.hidden) == (16, 4, 1024)


def test_pairs_name_grids() -> None:
    assert ends("tp2pp2-vllm1", 4) == (End("megatron", 2, 2, 1), End("vllm", 1, 1, 4))
    assert [str(end) for end in ends("tp1pp4-tp2dp2", 4)] == ["TP1xPP4", "TP2xDP2"]
    assert [str(end) for end in ends("fsdp2dp2-vllm2", 4)] == ["FSDP2xDP2", "vLLM TP2"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--pairs", "tp2pp4-vllm2"], "tp2pp4 is not a grid of 4 processes"),
        (["--pairs", "vllm2-vllm2"], "it goes from Megatron or FSDP2 to vLLM"),
        (["--pairs", "fsdp4-tp4"], "it goes from Megatron or FSDP2 to vLLM"),
        (["--pairs", "tp4-zero3"], "'zero3' is not like tp2pp2, fsdp4 or vllm2"),
    ],
)
def test_what_cannot_be_run_is_refused(
    wrong: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert named in capsys.readouterr().err


def boxes(shape: tuple[int, int]) -> st.SearchStrategy[list[Box]]:
    rows, columns = (
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(
            lambda p: p[0] < p[1]
        )
        for n in shape
    )
    return st.lists(
        st.builds(lambda r, c: Box((r[0], c[0]), (r[1], c[1])), rows, columns),
        max_size=3,
    )


def layout_of(boxes: list[Box], shape: tuple[int, int]) -> Layout:
    pieces = [
        Piece("w", box, f"p{i}", Box((0, 0), box.shape)) for i, box in enumerate(boxes)
    ]
    return Layout(
        tuple(pieces),
        {p.local: p.box.shape for p in pieces},
        {"w": shape} if pieces else {},
    )


@given(boxes((7, 5)), boxes((7, 5)))
def test_the_minimum_is_what_is_needed_and_not_held(
    held: list[Box], needed: list[Box]
) -> None:
    masks = np.zeros((2, 7, 5), dtype=bool)
    for mask, side in zip(masks, (held, needed), strict=True):
        for box in side:
            mask[box.slices] = True
    expected = int((masks[1] & ~masks[0]).sum())
    assert (
        least_elements(layout_of(held, (7, 5)), layout_of(needed, (7, 5))) == expected
    )


def test_columns_of_wider_rows_are_no_run() -> None:
    source, dest = layout_of([Box((0, 0), (4, 6))], (4, 6)), Layout((), {}, {})
    for box, place, shape, share in (
        (Box((1, 0), (3, 6)), Box((0, 0), (2, 6)), (2, 6), 1.0),
        (Box((0, 0), (4, 3)), Box((0, 0), (4, 3)), (4, 6), 0.0),
        (Box((2, 0), (3, 3)), Box((2, 3), (3, 6)), (4, 6), 1.0),  # part of one row
    ):
        dest = Layout((Piece("w", box, "d", place),), {"d": shape}, {"w": (4, 6)})
        plans = make_plans(
            lambda r: source if r == 0 else Layout((), {}, {}),
            lambda r, d=dest: d if r else source,
            2,
        )
        assert share_in_place(plans[1]) == share


def test_every_element_is_filled_by_its_place() -> None:
    whole = layout_of([Box((0, 0), (3000, 8))], (3000, 8))
    part = layout_of([Box((1500, 2), (2900, 5))], (3000, 8))
    tensors = {"p0": torch.full((3000, 8), torch.nan, dtype=torch.bfloat16)}
    some = {"p0": torch.empty(1400, 3, dtype=torch.bfloat16)}
    fill(whole, tensors)
    fill(part, some)
    assert torch.equal(some["p0"], tensors["p0"][1500:2900, 2:5])
    assert tensors["p0"].isfinite().all() and tensors["p0"].unique().numel() > 1000


def test_extra_memory_is_the_peak_and_not_what_stays() -> None:
    def run() -> None:
        torch.ones(30 * MB, dtype=torch.uint8)

    assert 29 * MB <= peak_memory(run) <= 40 * MB
    assert peak_memory(lambda: None) < 5 * MB


def test_a_plain_exchange_moves_the_plans_bytes() -> None:
    source, dest = (
        layout_of([Box((0, 0), (4, 6))], (4, 6)),
        layout_of([Box((0, 0), (4, 6))], (4, 6)),
    )
    empty = Layout((), {}, {})
    plan = make_plans(
        lambda r: empty if r else source, lambda r: dest if r else empty, 2
    )[1]
    assert PlainExchange(plan, 2, 16).bytes_received == 4 * 6 * 2


def way(seconds: list[float], received: int) -> dict[str, Any]:
    zero = {
        "messages": 1,
        "objects": 0,
        "first_objects": 0,
        "peak": MB,
        "first_seconds": 1.0,
    }
    return zero | {"seconds": seconds, "received": received}


def test_the_table_shows_medians_of_the_slowest_ranks_and_both_sides_of_a_ratio() -> (
    None
):
    shared = {
        "parameters": 10,
        "local": 0,
        "aliased": 0,
        "in_place": 1.0,
        "setup_seconds": 0.1,
    }
    shared |= {"check": {"bytes": 10**9, "seconds": 1.0}, "fingerprint_rate": 2e9}
    ranks = [
        shared
        | {
            "least": MB,
            "ways": {
                "ours": way(ours, MB),
                "ours, network": way([0.4] * 3, MB),
                "bridge": way([3.0, 3.0, 3.0], 9 * MB),
                "plain": way([0.2] * 3, MB),
            },
        }
        for ours in ([0.1, 0.5, 0.2], [0.25, 0.1, 0.2])
    ]
    found = summarise(ranks)
    assert found["ways"]["ours"]["turns"] == [0.25, 0.5, 0.2]
    assert found["ways"]["ours"]["seconds"] == 0.25
    shown = table(Job(), "tp2pp2-vllm2", found)
    assert (
        "12.00x" in shown
        and "exactly what ours receives" in shown
        and "80% of the plain" in shown
        and "50% over the" in shown
    )
    found["least"] = [MB, MB - 2]
    assert "NOT what ours receives" in table(Job(), "tp2pp2-vllm2", found)


def test_the_whole_benchmark_runs(
    tmp_path: Path,
    launch: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two processes, vLLM's real model, megatron.core.resharding; every way's weights are compared on the way."""

    def start_copies(arguments: list[str], nproc: int) -> int:
        ended = launch.command(arguments, ranks=nproc, logs=tmp_path / "output")
        assert ended.codes == [0] * nproc, ended.text
        return 0

    monkeypatch.setattr(bench_reshard, "start_ranks", start_copies)
    pairs = ["--nproc", "2", "--pairs", "tp1pp2-vllm2", "tp2-tp1dp2", "fsdp2-vllm2"]
    assert (
        bench_reshard.main([*TINY, *pairs, "--json", str(tmp_path / "found.json")]) == 0
    )
    shown = capsys.readouterr().out
    assert "TP1xPP2 -> vLLM TP2" in shown and "TP2 -> TP1xDP2" in shown
    for pair, peer in (
        ("tp1pp2-vllm2", "bridge"),
        ("tp2-tp1dp2", "megatron.core"),
        ("fsdp2-vllm2", "bridge"),
    ):
        found = json.loads((tmp_path / "found.json").read_text())["pairs"][pair]
        for name in ("ours", "ours, network"):
            ours = found["ways"][name]
            assert (
                ours["received"] == found["least"] == found["ways"]["plain"]["received"]
            )
            assert ours["objects"] == [0, 0] and ours["first_objects"] == [0, 0]
        assert sum(found["ways"][peer]["received"]) >= sum(found["least"]) > 0
