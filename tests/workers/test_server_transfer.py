"""Which servers a delivery leaves out, and which are served again. The link: tests/weights/test_server_link.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist

from megaverl.errors import ReshardError, RolloutError
from megaverl.rollout import server_api
from megaverl.rollout.server_api import RECEIVER, ServerLost, VLLMShardServer
from megaverl.weights.server_link import FAILED, LinkAddress
from megaverl.workers.server_transfer import DeliveryBoard, ShardTransfer
from megaverl.workers.vllm_receiver import ShardReceiver

Answer = Callable[[], list[dict[str, Any]]]
BYTES, LEFT = [{"bytes": 8}], [{"error": "rank 1 died or stalled", "own": False}]


class Server(VLLMShardServer):
    """One that answers as it is told, once for each delivery, the last answer again and again."""

    def __init__(
        self, name: str, *answers: list[dict[str, Any]] | RolloutError, workers: int = 1
    ) -> None:
        super().__init__(f"http://127.0.0.1:{name}", None, generating=1.0, loading=1.0)
        self.answers, self.num_workers = list(answers), workers
        self.calls: list[tuple[LinkAddress, int]] = []
        self.forgot = 0

    def receive(self, link: Mapping[str, Any], first_rank: int) -> list[dict[str, Any]]:
        self.calls.append((LinkAddress(**link), first_rank))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RolloutError):
            raise answer
        return answer

    def forget_cached(self) -> None:
        self.forgot += 1


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def board(store: dist.Store) -> DeliveryBoard:
    return DeliveryBoard(store, "run")


def deliver(
    board: DeliveryBoard,
    servers: list[Server],
    *,
    sender_errors: tuple[str | None, ...] = (),
    live: bool = True,
) -> tuple[ShardTransfer, dict[str, RolloutError]]:
    """Deliver with an actor of one rank, which answers each delivery at once."""
    transfer = ShardTransfer(board, 1, "gloo", 5.0)
    over = threading.Event()

    def send() -> None:
        errors, number = list(sender_errors), 0
        while not over.wait(0.01):
            if board.announced(number) is not None:
                board.done(number, errors.pop(0) if errors else None)
                number += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return transfer, transfer.deliver(servers, live=live)
    finally:
        over.set()
        thread.join()


def test_all_servers_are_in_one_link(board: DeliveryBoard) -> None:
    one, two = Server("1", BYTES * 2, workers=2), Server("2", BYTES)
    transfer, errors = deliver(board, [one, two])
    assert errors == {} and transfer.bytes_received == 24
    [(address, first)], [(same, second)] = one.calls, two.calls
    assert address == same and (address.num_senders, address.size) == (1, 4)
    assert (first, second) == (1, 3) and (one.forgot, two.forgot) == (1, 1)
    announced = board.announced(0)
    assert (
        announced is not None and announced.live and announced.link == address.to_json()
    )


def test_a_link_is_kept_until_the_servers_or_the_senders_tensors_change(
    board: DeliveryBoard,
) -> None:
    one, two = Server("1", BYTES), Server("2", BYTES)
    transfer, _ = deliver(board, [one, two])
    first = transfer._address([one, two], live=True)
    assert first == one.calls[0][0]
    late = transfer._address([one, two], live=False)
    assert (
        late.name != first.name
        and transfer._address([one], live=False).name != late.name
    )


@pytest.mark.parametrize(
    "fault",
    [
        ServerLost("http://127.0.0.1:1: no answer"),
        [{"error": "no memory", "own": True}],
    ],
)
def test_who_fails_is_left_out_and_the_others_are_served_again(
    board: DeliveryBoard, fault: Any
) -> None:
    """Whoever only noticed that another one left is not to blame."""
    fails, other = Server("1", fault), Server("2", LEFT, BYTES)
    transfer, errors = deliver(
        board, [fails, other], sender_errors=("rank 0 of the actor: rank 1 died",)
    )
    assert list(errors) == [fails.url] and isinstance(errors[fails.url], ServerLost)
    assert (len(fails.calls), len(other.calls)) == (1, 2) and (
        fails.forgot,
        other.forgot,
    ) == (0, 1)
    (broken, _), (again, first) = other.calls
    assert broken.name != again.name and (again.size, first) == (2, 1)
    assert transfer.bytes_received == 8


def test_a_lost_server_ends_the_others_waits(board: DeliveryBoard) -> None:
    lost = Server("1", ServerLost("gone"))
    transfer, _ = deliver(board, [lost])
    assert transfer._store is not None and transfer._store.get(FAILED) == b"gone"


def test_an_actor_that_cannot_send_ends_the_run_but_no_late_server_does(
    board: DeliveryBoard, store: dist.Store
) -> None:
    said = ("rank 0 of the actor: no such tensor",)
    with pytest.raises(ReshardError, match="could not send .* no such tensor"):
        deliver(board, [Server("1", LEFT)], sender_errors=said)
    late = Server("1", LEFT)
    _, errors = deliver(
        DeliveryBoard(store, "late"), [late], sender_errors=said, live=False
    )
    assert "no such tensor" in str(errors[late.url])


def test_servers_that_cannot_receive_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = VLLMShardServer("http://127.0.0.1:1", None, generating=1.0, loading=1.0)
    parallel: dict[str, Any] = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "worker_extension_cls": "",
    }
    monkeypatch.setattr(server_api.VLLMServer, "problems", lambda self, expected: [])
    monkeypatch.setattr(
        server, "server_info", lambda: {"vllm_config": {"parallel_config": parallel}}
    )
    unable, split = server.problems(None)  # type: ignore[arg-type]
    assert (
        f"--worker-extension-cls {RECEIVER}" in unable
        and "pipeline-parallel size 2" in split
    )
    parallel |= {"pipeline_parallel_size": 1, "worker_extension_cls": RECEIVER}
    assert server.problems(None) == [] and server.num_workers == 4  # type: ignore[arg-type]


def test_a_worker_answers_with_its_error_instead_of_raising() -> None:
    """vLLM's executor would leave the other workers' answers to the next call."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    address = LinkAddress("127.0.0.1", store.port, "tried", 1, 2, "gloo", 5.0)
    answer = ShardReceiver().megaverl_receive(
        json.dumps({"link": address.to_json(), "first_rank": 1})
    )
    assert answer["own"] and "vllm_config" in answer["error"]
    assert store.get(FAILED).decode() == answer["error"]
