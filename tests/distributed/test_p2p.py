"""Messages between ranks go in batches, which share the group's communicator; a fake stands for NCCL's works."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import megaverl
from megaverl.distributed.channels import Channel, PendingSends


class OneForAll:
    """What NCCL gives for a batch: one work."""

    def __init__(self) -> None:
        self.done, self.waits = False, 0

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        self.done = True


class Batches:
    """In place of `dist.batch_isend_irecv`: what each call was given, and its work."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[str, int]], OneForAll]] = []

    def __call__(self, operations: list[dist.P2POp]) -> list[Any]:
        self.calls.append(
            ([(op.op.__name__, op.group_peer) for op in operations], OneForAll())
        )
        return [self.calls[-1][1]]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def channel() -> Channel:
    context: Any = SimpleNamespace(rank=1, timeout=timedelta(seconds=1))
    return Channel(context, "samples")


def test_messages_to_many_ranks_are_one_batch(
    group: dist.ProcessGroup, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches()
    monkeypatch.setattr(dist, "batch_isend_irecv", batches)
    out, into = (
        {peer: torch.ones(size) for peer, size in sizes}
        for sizes in (((0, 2), (2, 0), (3, 1)), ((0, 3),))
    )
    sent = PendingSends()
    sent.add(channel.send(group, out))
    sent.add(channel.send(group, {}))
    (asked, work), *others = batches.calls
    # What is empty does not travel.
    assert asked == [("isend", 0), ("isend", 3)] and not others
    sent.forget_done()
    assert {id(tensor) for batch in sent._under_way for _, tensor in batch.tensors} == {
        id(out[0]),
        id(out[3]),
    }
    sent.wait()
    assert work.waits == 1 and not sent._under_way
    channel.receive(group, into)
    channel.exchange(group, out, into)
    assert [asked for asked, _ in batches.calls[1:]] == [
        [("irecv", 0)],
        [("irecv", 0), ("isend", 0), ("isend", 3)],
    ]
    assert all(work.waits == 1 for _, work in batches.calls)


def test_no_message_goes_alone() -> None:
    """A lone message would get a communicator of its own from NCCL, for each pair of ranks."""
    alone = []
    for path in sorted(Path(megaverl.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in ("isend", "irecv", ".send(", ".recv(")):
            continue
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("dist.isend", "dist.irecv", "dist.send", "dist.recv"):
                alone.append(f"{path}:{node.lineno}")
    assert not alone
