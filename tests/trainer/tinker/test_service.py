"""The server's state without engines: sessions that end, requests that are sent twice, and the order of the queue."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megaverl.trainer.tinker import service as service_module
from megaverl.trainer.tinker.checkpoints import SavedCheckpoints
from megaverl.trainer.tinker.http_server import TinkerServer
from megaverl.trainer.tinker.messages import CallOutcome, PromptRows, SavedWeights
from megaverl.trainer.tinker.program import (
    QueuedRequest,
    QueuedSamples,
    RequestQueue,
)
from megaverl.trainer.tinker.promises import Promise, RequestFailed
from megaverl.trainer.tinker.service import (
    HttpReply,
    Refusal,
    ServedModel,
    TinkerService,
)
from tests.workers.tokenizers_made import of_bytes

MODEL = ServedModel("base", "base", 320, 64, 4, "adapters of rank 4.")


class Queue(RequestQueue):
    """Queue that keeps what is put into it, in the test's thread."""

    def __init__(self) -> None:
        self.jobs: list[QueuedRequest | QueuedSamples] = []

    def put(self, job: QueuedRequest | QueuedSamples) -> None:
        self.jobs.append(job)


class Client:
    """Requests to a service without HTTP.

    Args:
        seconds: time until a silent session is over.
    """

    def __init__(self, folder: Path, seconds: float = 60.0) -> None:
        self.queue = Queue()
        self.service = TinkerService(
            MODEL,
            of_bytes(),
            self.queue,
            SavedCheckpoints(folder),
            seed=0,
            session_seconds=seconds,
        )
        self.session = self.post("create_session")["session_id"]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.service.answer("POST", path, json.dumps(body).encode())
        assert isinstance(reply.body, dict)
        return reply.body | {"status": reply.status}

    def model(self) -> str:
        lora = {"rank": 4}
        self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=0,
            base_model="base",
            lora_config=lora,
        )
        return f"{self.session}:train:0"

    def sampler(self) -> str:
        name: str = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=0,
            base_model="base",
        )["sampling_session_id"]
        return name

    def sample(self, sampler: str, number: int, **params: Any) -> QueuedSamples:
        self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=number,
            num_samples=2,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            sampling_params=params,
        )
        job = self.queue.jobs[-1]
        assert isinstance(job, QueuedSamples)
        return job


def test_a_silent_session_ends_with_its_models(tmp_path: Path) -> None:
    client = Client(tmp_path, seconds=0.2)
    model = client.model()
    client.post("session_heartbeat", session_id=client.session)
    assert client.service.expired_models() == []
    time.sleep(0.25)
    assert client.service.expired_models() == [model]
    assert client.service.expired_models() == []
    with pytest.raises(Refusal, match="its session is over") as refused:
        client.post("optim_step", model_id=model, seq_id=1, adam_params={})
    assert refused.value.status == 410


def test_a_request_that_is_sent_twice_is_done_once(tmp_path: Path) -> None:
    client = Client(tmp_path)
    model = client.model()
    first, again, next_one = (
        client.post("optim_step", model_id=model, seq_id=seq, adam_params={})
        for seq in (1, 1, 2)
    )
    assert first["request_id"] == again["request_id"] != next_one["request_id"]
    assert len(client.queue.jobs) == 3  # create_model, and two steps


def test_a_client_asks_again_until_there_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "POLL_SECONDS", 0.01)
    client = Client(tmp_path)
    client.model()
    promise = client.queue.jobs[0].promise
    waiting = client.post("retrieve_future", request_id=promise.id)
    assert waiting["status"] == 408 and waiting["type"] == "try_again"
    promise.fail(RequestFailed("no room"))
    failed = client.post("retrieve_future", request_id=promise.id)
    assert (failed["error"], failed["category"]) == ("no room", "user")
    client.post("cancel_future", request_id=promise.id)
    assert promise.is_cancelled


def test_seeds_depend_on_nothing_but_the_request(tmp_path: Path) -> None:
    runs = []
    for folder in ("a", "b"):
        client = Client(tmp_path / folder)
        sampler = client.sampler()
        runs.append(
            [
                client.sample(sampler, 0, max_tokens=3).rows.seeds,
                client.sample(sampler, 1, max_tokens=3).rows.seeds,
                client.sample(sampler, 2, max_tokens=3, seed=7).rows.seeds,
                client.sample(sampler, 3, max_tokens=3, seed=7).rows.seeds,
            ]
        )
    assert runs[0] == runs[1]
    first, second, given, given_again = runs[0]
    assert len({*first, *second, *given}) == 6 and given == given_again


def test_stop_texts_cut_a_response_after_them(tmp_path: Path) -> None:
    client = Client(tmp_path)
    tokenizer = of_bytes()
    tokens = tokenizer.encode("The sum is 3.\n\nUser: What")
    job = client.sample(client.sampler(), 0, max_tokens=40, stop=["\n\nUser:"])
    assert job.rows.ignores_eos == [False, False]
    cut = client.service._stopped(
        CallOutcome(tokens=[tokens], log_probs=[[-1.0] * len(tokens)], stopped=[False]),
        ["\n\nUser:"],
    )
    assert tokenizer.decode(cut.tokens[0]) == "The sum is 3.\n\nUser:"
    assert cut.stopped == [True] and len(cut.log_probs[0]) == len(cut.tokens[0])
    everything = client.sample(client.sampler(), 1, max_tokens=4, stop=[])
    assert everything.rows.ignores_eos == [True, True]


def test_requests_for_the_same_weights_are_taken_together() -> None:
    rows = PromptRows([[1]], [0], [1], [1.0], [1.0], [0], [[]], [False])

    def samples(folder: str) -> QueuedSamples:
        return QueuedSamples(
            Promise(), SavedWeights(folder), rows, None, lambda outcome, scores: {}
        )

    async def taken() -> list[Any]:
        queue = RequestQueue()
        request = QueuedRequest(Promise(), lambda adapters: asyncio.sleep(0))
        put = [samples("x"), request, samples("y"), samples("x")]
        for job in put:
            queue.put(job)
        found = [await queue.take(1.0) for _ in range(3)]
        assert await queue.take(0.01) is None
        return [
            [put.index(job) for job in jobs]
            if isinstance(jobs, list)
            else put.index(jobs)
            for jobs in found
            if jobs is not None
        ]

    assert asyncio.run(taken()) == [[0, 3], 1, [2]]


@pytest.mark.parametrize(
    ("key", "expected"), [("tml-wrong", b"401"), ("tml-right", b"413")]
)
def test_a_body_that_is_not_wanted_is_not_waited_for(key: str, expected: bytes) -> None:
    """A stranger's, and one that is too long: answered from the headers alone, and the connection is closed."""
    server = TinkerServer("127.0.0.1", 0, "tml-right", lambda *call: HttpReply({}))
    try:
        with socket.create_connection(server.server_address[:2], timeout=20) as link:
            link.sendall(
                b"POST /api/v1/forward HTTP/1.1\r\nHost: tinker\r\n"
                b"X-API-Key: " + key.encode() + b"\r\n"
                b"Content-Length: 1000000000\r\n\r\n"
            )
            answer = b""
            while received := link.recv(4096):
                answer += received
    finally:
        server.close()
    assert answer.split()[1] == expected
