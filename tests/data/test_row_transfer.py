"""Batches between the ranks of different roles, on real gloo worlds."""

from __future__ import annotations

import pytest
import torch

from megaverl.distributed.ragged import RaggedBatch, merge, num_bytes_on_device
from megaverl.errors import DataError
from tests.device_tensors import DEVICE, DeviceTensor
from tests.launcher import Launcher


@pytest.mark.parametrize("through", ["hosts", "devices"])
def test_batches_move_between_two_worlds(launch: Launcher, through: str) -> None:
    """Through the hosts' group, or through the devices', which is gloo as well here: the same to the bit."""
    ended = launch.ranks(
        4,
        "tests.distributed.ranks:batches_move",
        seeds=list(range(20)),
        through=through,
    )
    found = ended.check()
    by_group = {
        name: sum(answer["bytes"][name] for answer in found)
        for name in ("hosts", "devices")
    }
    assert (by_group["devices"] > 1000) == (through == "devices") and by_group[
        "hosts"
    ] > 1000
    assert [answer["wrong"] for answer in found] == [[], [], [], []]
    assert sum(answer["moved"] for answer in found) > 50
    assert [answer["world"] for answer in found] == [1, 1, 5, 5], (
        "an all-reduce stays in its world"
    )
    assert all(answer["reached"] == [0, 1, 2, 3] for answer in found), (
        "the context reaches all"
    )
    assert [answer["env"] for answer in found] == [["0", "2"], ["1", "2"]] * 2
    assert found[0]["roles"] == ["actor", "coordinator"] and found[3]["roles"] == [
        "reward",
        "rollout",
    ]


@pytest.mark.parametrize("how", ["killed", "stalled"])
@pytest.mark.parametrize("after", ["nothing", "headers"])
def test_a_sender_that_is_lost_is_named_within_the_deadline(
    launch: Launcher, how: str, after: str
) -> None:
    ended = launch.ranks(
        3, "tests.distributed.ranks:sender_dies", how=how, after=after, deadline=4.0
    )
    for rank in (1, 2):
        assert ended.codes[rank] == 0, ended.output[rank]
        assert (
            "TrainingStopped: rollouts: rank 0 (reward+rollout, here) died or stalled"
            in ended.results[rank]
        )
        assert "within 1 s" in ended.results[rank]
        assert ended.seconds[rank] < 4


def test_what_a_ragged_batch_holds_comes_back() -> None:
    lengths = torch.tensor([2, 0, 3])
    ragged = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    table = RaggedBatch(
        {
            "a": ragged,
            "flags": torch.tensor([True, False, True]),
            "half": ragged.bfloat16()[:, 0],
        },
        {"a": "R"},
        {"R": lengths},
        {"a": -1.0},
        {"text": ["x", None, {"y": 1}]},
    )
    header, payload, _ = table.pack([2, 1])
    assert payload.numel() == 2 * 8 + 3 * 4 + 2 * 2 + 2, (
        "what is beyond a row's length does not travel"
    )
    back = RaggedBatch.unpack(header, payload, {"a": -1.0})
    assert back.tensors["a"].tolist() == [[8, 9, 10, -1], [-1] * 4]
    assert back.tensors["flags"].tolist() == [True, False] and back.columns["text"] == [
        {"y": 1},
        None,
    ]
    assert back.tensors["half"].dtype == torch.bfloat16
    both = merge(3, [([2], table, [0]), ([0, 1], back, [0, 1])])
    assert both.tensors["a"].tolist() == [[8, 9, 10, -1], [-1] * 4, [0, 1, 2, 3]]
    assert both.lengths["R"].tolist() == [3, 0, 2]


def test_merged_rows_keep_their_fill_values() -> None:
    """A narrower part is filled up with them, also where a part is merged rows itself."""
    lengths = {"R": torch.tensor([1])}
    parts = [
        RaggedBatch(
            {"a": torch.full((1, width), float(width))},
            {"a": "R"},
            lengths,
            {"a": -1.0},
        )
        for width in (1, 3, 4)
    ]
    narrow = merge(2, [([0], parts[0], [0]), ([1], parts[1], [0])])
    assert narrow.tensors["a"].tolist() == [
        [1, -1, -1],
        [3, 3, 3],
    ] and narrow.fills == {"a": -1.0}
    wide = merge(3, [([0, 1], narrow, [0, 1]), ([2], parts[2], [0])])
    assert wide.tensors["a"].tolist() == [
        [1, -1, -1, -1],
        [3, 3, 3, -1],
        [4, 4, 4, 4],
    ] and wide.fills == {"a": -1.0}


@pytest.mark.parametrize("own", ["host", "device"])
def test_what_lies_in_a_gpu_comes_to_one(own: str) -> None:
    """And what lies on the host to the host; lengths are there, as shapes follow from them."""
    ragged, lengths = torch.arange(12).reshape(3, 4), torch.tensor([2, 0, 3])
    axes, sizes = {"a": "R", "c": "R"}, {"R": lengths}
    table = RaggedBatch(
        {"a": DeviceTensor(ragged), "b": lengths.float(), "c": ragged}, axes, sizes
    )
    header, payload, on_device = table.pack([2, 1], DEVICE)
    assert (
        (on_device.device, on_device.numel())
        == (DEVICE, 3 * 8)
        == (DEVICE, num_bytes_on_device(header))
    )
    assert payload.device.type == "cpu" and payload.numel() == 2 * 8 + 3 * 8 + 2 * 4
    arrived = RaggedBatch.unpack(header, payload, {}, on_device)
    assert arrived.on_host().tensors["a"].tolist() == [[8, 9, 10, 0], [0] * 4]
    if own == "host":
        table = table.on_host()
    for parts in (
        [([2], table, [0]), ([0, 1], arrived, [0, 1])],
        [([0, 1], arrived, [0, 1]), ([2], table, [0])],
    ):
        both = merge(3, parts)
        places = {name: tensor.device.type for name, tensor in both.tensors.items()}
        assert places == {"a": "cuda", "b": "cpu", "c": "cpu"} and both.lengths[
            "R"
        ].tolist() == [3, 0, 2]
        for name in ("a", "c"):
            assert both.tensors[name].tolist() == [[8, 9, 10, 0], [0] * 4, [0, 1, 2, 3]]
        assert both.tensors["b"].tolist() == [3, 0, 2]


def test_what_lies_in_a_gpu_goes_over_the_host_where_it_must() -> None:
    table = RaggedBatch({"a": DeviceTensor(torch.arange(3))})
    header, payload, on_device = table.on_host().pack([2, 0])
    assert num_bytes_on_device(header) is None and not on_device.numel()
    assert RaggedBatch.unpack(header, payload, {}).tensors["a"].tolist() == [2, 0]


def test_messages_that_are_damaged_are_refused() -> None:
    header, payload, _ = RaggedBatch({"a": torch.arange(3)}).pack([0, 1])
    for text, data in (
        (header, payload[:-1]),
        (header[:-1], payload),
        (b"{}", payload),
        (header, payload.repeat(2)),
    ):
        with pytest.raises(DataError, match="cannot be read"):
            RaggedBatch.unpack(text, data, {})
    with pytest.raises(DataError, match="because JSON cannot hold it"):
        RaggedBatch({"a": torch.arange(1)}, columns={"c": [object()]}).pack([0])
    with pytest.raises(DataError, match="complex64"):
        RaggedBatch({"a": torch.zeros(1, dtype=torch.complex64)}).pack([0])
    with pytest.raises(DataError, match="differ in what they hold: a, b"):
        merge(
            1,
            [
                ([0], RaggedBatch({"a": torch.arange(1)}), [0]),
                ([], RaggedBatch({"b": torch.arange(1)}), []),
            ],
        )


def test_weights_go_to_separate_engines_over_the_fabric(launch: Launcher) -> None:
    found = launch.ranks(4, "tests.distributed.ranks:weights_move").check()
    assert [answer["wrong"] for answer in found] == [[], [], [], []]
    assert [bool(answer["tensors"]) for answer in found] == [False, False, True, True]
    assert (
        sum(answer["sent"] for answer in found[:2])
        == sum(answer["received"] for answer in found[2:])
        > 0
    )


@pytest.mark.parametrize("through", ["hosts", "devices"])
def test_whatever_a_flow_gives_travels(launch: Launcher, through: str) -> None:
    for found in launch.ranks(
        4, "tests.distributed.ranks:values_travel", through=through
    ).check():
        assert [
            name for name, right in found.items() if not right
        ] == [] and "refused" in found
