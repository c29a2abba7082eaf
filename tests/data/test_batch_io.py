from __future__ import annotations

import pytest
import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_io import load, save, to_bytes
from megaverl.errors import DataError


@pytest.fixture
def batch() -> RolloutBatch:
    tensors = {
        "input_ids": torch.tensor([[1, 2], [3, 0]]),
        "prompt_lengths": torch.tensor([2, 1]),
        "generated_ids": torch.tensor([[2**40], [5]]),
        "response_mask": torch.tensor([[True], [False]]),
        "values": torch.tensor([[float("nan")], [1e-45]]),
        "rewards": torch.tensor([0.1, -float("inf")]),
    }
    return RolloutBatch(tensors, {"extra": [{"level": 1}, None], "prompt": ["ä\n", ""]})


def assert_equal(one: RolloutBatch, other: RolloutBatch) -> None:
    assert set(one) == set(other) and one.columns == other.columns
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert one[name].shape == other[name].shape
        # Bits, so NaN too.
        assert one[name].numpy().tobytes() == other[name].numpy().tobytes(), name


def test_file_brings_back_every_bit(batch, tmp_path):
    save(batch, tmp_path / "batch.safetensors")
    save(batch, tmp_path / "batch.safetensors")  # over the old one
    assert_equal(load(tmp_path / "batch.safetensors"), batch)
    assert (tmp_path / "batch.safetensors").read_bytes() == to_bytes(batch)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_what_is_not_a_batch_is_named(batch, tmp_path):
    path = tmp_path / "batch.safetensors"
    with pytest.raises(DataError, match=r"batch\.safetensors is not a batch"):
        load(path)
    save(batch, path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"batch\.safetensors is not a batch"):
        load(path)


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(batch, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        save(batch, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_column_that_json_cannot_hold_is_named(batch, tmp_path):
    odd = batch.with_columns(tool=[object(), None])
    with pytest.raises(DataError, match="column 'tool' cannot be written as JSON"):
        save(odd, tmp_path / "batch.safetensors")
    assert not list(tmp_path.iterdir())
