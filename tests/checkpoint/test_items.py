"""Tensors in files: read back to the bit, by torch as well, and no byte of them can change unseen."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest
import torch

from megaverl.checkpoint import ChecksummedFile, crc32_of, read_into, tensor_records
from megaverl.checkpoint.tensor_records import (
    frame_of,
    read_object,
    read_tensor,
    write_tensor,
)
from megaverl.errors import DamagedCheckpoint
from tests.device_tensors import DeviceTensor

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "part of another": torch.arange(100, dtype=torch.float64)[7:9],
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.empty(0, 4),
}


def written(path: Path, *tensors: torch.Tensor) -> list[int]:
    """Where each begins, and the end."""
    with ChecksummedFile(path) as file:
        places = [0]
        for tensor in tensors:
            write_tensor(file, tensor)
            places.append(file.num_bytes)
    assert file.record == [path.stat().st_size, f"{zlib.crc32(path.read_bytes()):08x}"]
    assert crc32_of(path) == file.record[1]
    return places


@pytest.mark.parametrize("keep_cached", [True, False])
def test_tensors_come_back_to_the_bit_and_torch_reads_them(
    tmp_path: Path, keep_cached: bool
) -> None:
    path = tmp_path / "items"
    places = written(path, *TENSORS.values())
    with open(path, "rb", buffering=0) as file:
        for tensor, start, end in zip(
            TENSORS.values(), places[:-1], places[1:], strict=True
        ):
            frame = frame_of(tensor.shape, tensor.dtype)
            assert frame is not None and frame.length == end - start
            found = torch.empty(tensor.shape, dtype=tensor.dtype)
            read_tensor(file, start, frame, found, keep_cached=keep_cached)
            assert torch.equal(found, tensor)
            by_torch = torch.load(
                io.BytesIO(read_object(file, start, end - start)), weights_only=True
            )
            assert torch.equal(by_torch, tensor) and by_torch.dtype == tensor.dtype


def test_what_is_left_to_torch_is_stored_without_its_surroundings(
    tmp_path: Path,
) -> None:
    part = torch.arange(10_000)[3:7]
    assert frame_of(part.shape, part.dtype) is None
    [start, end] = written(tmp_path / "items", part)
    assert end < 4_000
    with open(tmp_path / "items", "rb", buffering=0) as file:
        assert torch.equal(
            torch.load(io.BytesIO(read_object(file, start, end)), weights_only=True),
            part,
        )


@pytest.mark.parametrize("name", [*TENSORS, "left to torch"])
def test_what_lies_in_a_gpu_is_written_as_if_it_lay_on_the_host(
    tmp_path: Path, name: str
) -> None:
    tensor = TENSORS.get(name, torch.arange(3))
    written(tmp_path / "host", tensor)
    written(tmp_path / "device", DeviceTensor(tensor))
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


def test_tensors_too_large_for_a_plain_zip_are_left_to_torch() -> None:
    assert frame_of((tensor_records.LARGEST // 4,), torch.float32) is not None
    assert frame_of((tensor_records.LARGEST // 4 + 1,), torch.float32) is None


def test_no_byte_can_change_unseen(tmp_path: Path) -> None:
    path, tensor = tmp_path / "items", TENSORS["matrix"]
    start, end = written(path, torch.ones(3), tensor)[1:]
    whole, frame, into = (
        path.read_bytes(),
        frame_of(tensor.shape, tensor.dtype),
        torch.empty_like(tensor),
    )
    assert frame is not None
    for at in range(start, end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with (
            open(path, "rb", buffering=0) as file,
            pytest.raises(DamagedCheckpoint, match="not those that were"),
        ):
            read_tensor(file, start, frame, into)
    path.write_bytes(whole[: end - 1])
    with open(path, "rb", buffering=0) as file:
        with pytest.raises(DamagedCheckpoint, match=f"it ends at {end - 1}"):
            read_tensor(file, start, frame, into)
        with pytest.raises(DamagedCheckpoint):
            read_object(file, start, end - start)


def test_pieces_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaverl.checkpoint.checksummed_files.PIECE_BYTES", 7)
    data = bytes(range(100))
    (tmp_path / "file").write_bytes(data)
    found = bytearray(60)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert read_into(file, memoryview(found), 20) == zlib.crc32(data[20:80])
    assert found == data[20:80]
