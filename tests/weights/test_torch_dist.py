"""Chunks that torch has written are found where their elements lie, and what is no chunk is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import whole
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.torch_dist import check_checksums, locate
from megaverl.weights.torch_dist_index import Chunk, IndexedArray

TENSORS = {
    "whole": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "part of another": torch.arange(100.0)[7:19].reshape(3, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "two bytes": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
}


def written(file: Path) -> dict[str, IndexedArray]:
    """All tensors in one file, one behind the other, behind three odd bytes."""
    found = {}
    with file.open("wb") as stream:
        stream.write(b"odd")
        for name, tensor in TENSORS.items():
            start = stream.tell()
            torch.save(tensor, stream)
            chunk = Chunk(
                whole(tuple(tensor.shape)), file, start, stream.tell() - start
            )
            found[name] = IndexedArray(
                tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), [chunk]
            )
    return found


def test_elements_are_found_where_torch_has_put_them(tmp_path: Path) -> None:
    arrays = written(tmp_path / "__0_0.distcp")
    check_checksums(arrays)
    with StoredArrayReader(locate(arrays)) as reader:
        for name, tensor in TENSORS.items():
            found = torch.empty(tensor.shape, dtype=tensor.dtype)
            reader.read(name, whole(tuple(tensor.shape)), found)
            assert torch.equal(found, tensor), name


def test_what_is_not_as_the_index_says_is_refused(tmp_path: Path) -> None:
    arrays = written(tmp_path / "__0_0.distcp")
    array = arrays["whole"]
    [chunk] = array.chunks
    with pytest.raises(CheckpointError, match="the index says torch.float16"):
        locate({"whole": IndexedArray(array.shape, "float16", [chunk])})
    with pytest.raises(CheckpointError, match="__0_0.distcp: whole .* is damaged"):
        locate(
            {
                "whole": IndexedArray(
                    array.shape, array.dtype, [chunk._replace(length=chunk.length - 9)]
                )
            }
        )
    data = bytearray(chunk.file.read_bytes())
    data[locate(arrays)["whole"].extents[0].offset] ^= 1
    chunk.file.write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=r"bytes were changed since it was written: __0_0.distcp: whole ",
    ):
        check_checksums(arrays)
