"""Any box of an array in files, whichever way it is read, is what slicing gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import Box, whole
from megaverl.weights import stored
from megaverl.weights.stored import Extent, StoredArray, StoredArrayReader

SHAPE = (3, 40, 64)
BOXES = [
    whole(SHAPE),
    Box((1, 0, 0), (2, 40, 64)),  # one run
    Box((1, 5, 0), (2, 9, 64)),
    Box((0, 0, 16), (3, 40, 48)),  # columns
    Box((2, 7, 3), (3, 33, 60)),
    Box((1, 3, 62), (3, 38, 64)),  # few of many columns
    Box((0, 10, 0), (3, 20, 64)),
    Box((1, 4, 9), (2, 5, 12)),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_box_is_what_slicing_gives(
    box: Box, dtype: torch.dtype, tmp_path: Path
) -> None:
    array = torch.randn(SHAPE).to(torch.bfloat16)
    halves = [Box((0, 0, 0), (3, 18, 64)), Box((0, 18, 0), (3, 40, 64))]
    parts = [array[half.slices].contiguous() for half in halves]
    parts.append(array.transpose(1, 2).contiguous())
    files, extents = [], []
    for number, part in enumerate(parts):
        file = tmp_path / f"{number}.bin"
        file.write_bytes(b"head" + part.view(torch.uint8).numpy().tobytes())
        files.append(file)
    extents = [Extent(half, file, 4) for half, file in zip(halves, files, strict=False)]
    transposed = Extent(whole(SHAPE), files[2], 4, (64 * 40, 1, 40))
    arrays = {
        "halves": StoredArray(SHAPE, torch.bfloat16, extents),
        "transposed": StoredArray(SHAPE, torch.bfloat16, [transposed]),
    }
    with StoredArrayReader(arrays) as reader:
        for name in arrays:
            out = torch.full(box.shape, torch.nan, dtype=dtype)
            reader.read(name, box, out)
            assert torch.equal(out, array[box.slices].to(dtype)), name
            wide = torch.full(
                (*box.shape[:-1], box.shape[-1] + 3), torch.nan, dtype=dtype
            )
            reader.read(name, box, wide[..., 1:-2])  # into a part of something larger
            assert torch.equal(wide[..., 1:-2], array[box.slices].to(dtype)), name
            assert wide[..., 0].isnan().all() and wide[..., -2:].isnan().all()


def test_columns_hold_few_pages_of_a_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wide the array: what is mapped for some rows is given back before the next are."""
    array = torch.arange(2 * 4096 * 1024, dtype=torch.int32).view(2, 4096, 1024)
    (tmp_path / "0.bin").write_bytes(b"head" + array.numpy().tobytes())
    given_back: list[tuple[int, int]] = []
    monkeypatch.setattr(
        stored,
        "_give_back",
        lambda mapped, start, stop: given_back.append((start, stop)),
    )
    held = StoredArray(
        tuple(array.shape),
        torch.int32,
        [Extent(whole(array.shape), tmp_path / "0.bin", 4)],
    )
    box = Box((1, 8, 512), (2, 4096, 1024))
    out = torch.empty(box.shape, dtype=torch.int32)
    with StoredArrayReader({"a": held}) as reader:
        reader.read("a", box, out)
    assert torch.equal(out, array[box.slices])
    assert max(stop - start for start, stop in given_back) <= stored.MAPPED_BYTES
    row = 4 * 1024
    assert (
        given_back[0][0] == 4 + (4096 + 8) * row
        and given_back[-1][1] == 4 + 2 * 4096 * row
    )
    assert all(
        stop == start
        for (_, stop), (start, _) in zip(given_back, given_back[1:], strict=False)
    )


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(bytes(100))
    array = StoredArray(
        (10, 10), torch.float32, [Extent(whole((10, 10)), tmp_path / "short.bin", 0)]
    )
    with StoredArrayReader({"a": array}) as reader:
        for box in (whole((10, 10)), Box((0, 2), (10, 7))):
            with pytest.raises(CheckpointError, match=r"short.bin: truncated"):
                reader.read("a", box, torch.empty(box.shape))
