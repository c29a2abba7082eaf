"""Changed elements instead of whole messages: the encoding, and the bits of whole reshards on real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import ReshardError
from megaverl.sharding.boxes import whole
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.changes import (
    Encoding,
    as_bits,
    decode,
    differ,
    encode,
    indices_at,
    pack_bits,
    unpack_bits,
)
from megaverl.weights.transports.sent_weights import VERSIONS_WITHOUT, SentWeights
from tests.launcher import Launcher
from tests.weights.delta_ranks import VERSIONS, mixed_versions

WIDTH = 40  # elements of the tensor of which copies are kept

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Four nodes of two ranks each, or every rank a node.
PAIRS, SINGLE = [0, 0, 1, 1, 2, 2, 3, 3], list(range(8))


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two versions of some elements, with any bits: random places, runs, or everything changed."""
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.integers(1, 5000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = torch.iinfo(torch.int16).min, torch.iinfo(torch.int16).max
    shorts = torch.randint(
        low, high + 1, (numel * dtype.itemsize // 2,), generator=generator
    )
    before = shorts.to(torch.int16).view(dtype)
    share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.5, 1.0]))
    changed = torch.rand(numel, generator=generator) < share
    if draw(st.booleans()):
        first = draw(st.integers(0, numel - 1))
        changed[first : first + draw(st.integers(0, 2000))] = True
    after = before.clone()
    as_bits(after)[changed] ^= draw(st.sampled_from([1, 7, 64]))
    return before, after


@settings(max_examples=300, deadline=None)
@given(versions())
def test_changes_restore_every_bit(
    both: tuple[torch.Tensor, torch.Tensor],
) -> None:
    before, after = both
    changed = differ(after, before)
    changes = encode(after, changed)
    assert changes.num_changed == int(changed.sum())
    if changes.payload is None:
        # A mask, the longest encoding of so many changes, would not have been shorter.
        mask = -(-before.numel() // 8) + changes.num_changed * before.element_size()
        assert changes.encoding is Encoding.WHOLE
        assert mask >= before.numel() * before.element_size()
        return
    assert changes.nbytes == changes.payload.numel()
    assert changes.nbytes < before.numel() * before.element_size()
    places, values = decode(
        changes.payload,
        changes.encoding,
        changes.num_changed,
        before.numel(),
        before.dtype,
    )
    restored = before.clone()
    as_bits(restored)[places] = as_bits(values)
    assert torch.equal(as_bits(restored), as_bits(after))


@given(st.lists(st.booleans(), max_size=70))
def test_bits_are_packed_from_the_lowest(flags: list[bool]) -> None:
    packed = pack_bits(torch.tensor(flags, dtype=torch.bool))
    assert packed.tolist() == [
        sum(flag << place for place, flag in enumerate(flags[first : first + 8]))
        for first in range(0, len(flags), 8)
    ]
    assert unpack_bits(packed, len(flags)).tolist() == flags


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_places_of_a_box_become_indices(shape: list[int], data: st.DataObject) -> None:
    last = torch.Size(shape).numel() - 1
    drawn = data.draw(st.lists(st.integers(0, last), max_size=20))
    positions = torch.tensor(drawn, dtype=torch.int64)
    expected = torch.unravel_index(positions, shape)
    assert torch.equal(torch.stack(indices_at(positions, shape)), torch.stack(expected))


@pytest.mark.parametrize(
    ("share", "run", "encoding", "fraction"),
    [
        (0.01, 1, Encoding.GAPS8, 0.0157),
        (0.0001, 1, Encoding.GAPS16, 0.00022),
        (0.01, 100, Encoding.RUNS16, 0.0125),
        (0.3, 1, Encoding.MASK, 0.363),
        (0.95, 1, Encoding.WHOLE, 1.0),
    ],
)
def test_the_shortest_encoding_is_taken(
    share: float, run: int, encoding: Encoding, fraction: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(2**20 // run, generator=generator) < share
    changed = starts.repeat_interleave(run)
    values = torch.ones(len(changed), dtype=torch.bfloat16)
    changes = encode(values, changed)
    assert changes.encoding is encoding
    assert changes.nbytes <= fraction * 2 * len(values)


def test_damaged_changes_are_refused() -> None:
    values = torch.arange(100, dtype=torch.float32)
    changes = encode(values, values == 60)
    assert changes.payload is not None
    damaged = changes.payload.clone()
    damaged[-1] = 120
    with pytest.raises(ReshardError, match="damaged"):
        decode(damaged, changes.encoding, changes.num_changed, 100, torch.float32)
    with pytest.raises(ReshardError, match="damaged"):
        decode(changes.payload, changes.encoding, 0, 100, torch.float32)


def test_a_sender_at_another_version_is_refused() -> None:
    assert re.search("changes for version 2 arrived while version 3", mixed_versions())


CASES: dict[str, dict[str, Any]] = {
    "TP2 to six engines": {"grid": {"tp": 2}, "engine_tp": 1},
    "TP2 to three at TP2, packed and split": {
        "grid": {"tp": 2},
        "engine_tp": 2,
        "bucket_bytes": 512,
    },
    "stages, float32 masters": {
        "grid": {"pp": 2},
        "engine_tp": 2,
        "dtypes": ("float32", "bfloat16"),
    },
    "float32, a wider engine": {
        "grid": {"dp": 2},
        "engine_tp": 1,
        "dtypes": ("bfloat16", "float32"),
    },
    "relayed": {"grid": {"tp": 2}, "engine_tp": 1, "fan_out": True, "nodes": SINGLE},
    "relayed, into nodes of two": {
        "grid": {"tp": 2},
        "engine_tp": 2,
        "fan_out": True,
        "bucket_bytes": 512,
    },
    "relayed, whole inside nodes": {
        "grid": {"tp": 2},
        "engine_tp": 1,
        "fan_out": True,
        "delta": "auto",
    },
    "in the background": {"grid": {"tp": 2}, "engine_tp": 2, "background": True},
    "through files": {"grid": {"tp": 2}, "engine_tp": 2, "folder": "files"},
}


@pytest.mark.parametrize("name", CASES)
def test_engines_have_the_bits_of_whole_reshards(
    launch: Launcher, tmp_path: Path, name: str
) -> None:
    case = {"nodes": PAIRS} | CASES[name]
    if "folder" in case:
        case["folder"] = str(tmp_path)
    results = launch.world(8, "tests.weights.delta_ranks:deltas", **case)
    assert [result["wrong"] for result in results] == [[]] * 8
    for number, kind in enumerate(VERSIONS):
        ranks = [result["versions"][number] for result in results]
        sent = sum(each["sent"] for each in ranks)
        whole = sum(each["whole"] for each in ranks)
        assert sent == sum(each["received"] for each in ranks)
        changed = {each["changed"] for each in ranks}
        if kind in ("first", "lost"):
            assert changed == {None} and sent == whole
        elif case.get("delta", "on") == "on":
            [fraction] = changed
            assert fraction is not None
            assert (fraction == 0) == (kind == "nothing")
            if kind == "few":
                assert 0.003 < fraction < 0.02
            # Sizes take 32 bytes a message; nothing else is added to the changes.
            assert sent < whole or kind == "most"
    for result in results:
        assert result["copies"] <= result["held"]
    assert sum(result["copies"] for result in results) > 0


def test_auto_stops_comparing_while_changes_take_half_of_the_bytes() -> None:
    """... and compares again after a while; `on` never stops."""
    source = {"weight": torch.zeros(WIDTH, dtype=torch.bfloat16)}
    box = whole((WIDTH,))
    transfer = Transfer("weight", box, 0, "weight", box, 1, "weight", box)
    compared: dict[str, list[bool]] = {}
    for mode in ("auto", "on"):
        sent = SentWeights(mode, source, torch.device("cpu"))  # type: ignore[arg-type]
        sent.add([transfer], torch.bfloat16)
        sent.keep()
        sent.due = True
        compared[mode] = []
        for version in range(24):
            compared[mode].append(sent.compares)
            source["weight"].fill_(version)
            if sent.compares:
                # Few changes in the first three versions, then more than half.
                sent.count(10 if version < 3 else 60, 100)
            sent.keep()
            if sent.compares:
                [copy] = sent.boxes([transfer])
                assert torch.equal(copy, source["weight"])
    assert compared["on"] == [True] * 24
    pause = [True] + [False] * VERSIONS_WITHOUT
    assert compared["auto"] == [True] * 3 + (pause * 3)[:21]
