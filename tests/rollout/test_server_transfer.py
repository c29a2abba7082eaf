"""Weights that go to a server over NCCL: vLLM's own routes, sender and receiver, with a queue in NCCL's place."""

from __future__ import annotations

import importlib
import queue
import shlex
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout import server_engine
from megaverl.rollout.server_api import ServerLost
from megaverl.rollout.server_engine import VLLMOverNCCL

UNIQUE_ID = bytes(range(128))


def of_vllm(name: str) -> Any:
    """A module of its, imported where it is used: every worker of the suite reads this file."""
    return importlib.import_module(f"vllm.{name}")


def transfer(name: str) -> Any:
    return of_vllm(f"distributed.weight_transfer.{name}")


@dataclass
class Line:
    """Both ends of a communicator: what is sent comes out in the same order."""

    under_way: queue.Queue[torch.Tensor] = field(default_factory=queue.Queue)
    destroyed: threading.Event = field(default_factory=threading.Event)

    def sender(self) -> SimpleNamespace:
        def broadcast(tensor: torch.Tensor, src: int, stream: None) -> None:
            self.under_way.put(tensor.clone())

        return SimpleNamespace(broadcast=broadcast, destroy=self.destroyed.set)

    def receiver(self) -> SimpleNamespace:
        def broadcast(tensor: torch.Tensor, src: int, stream: None) -> None:
            came = self.under_way.get(timeout=30)
            assert (came.shape, came.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(came)

        return SimpleNamespace(broadcast=broadcast)


class Served:
    """What vLLM's routes ask of an engine: one worker, with vLLM's own receiver."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.stalls = threading.Event()
        parallel = SimpleNamespace(
            data_parallel_index=0,
            world_size=1,
            world_size_across_dp=1,
            rank=0,
            data_parallel_rank=0,
        )
        self.vllm_config: Any = SimpleNamespace(
            parallel_config=parallel, model_config=None
        )
        model: Any = SimpleNamespace(load_weights=self._load)
        config: Any = SimpleNamespace(backend="nccl")
        self.worker = transfer("nccl_engine").NCCLWeightTransferEngine(
            config, self.vllm_config, torch.device("cpu"), model
        )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in weights}

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")
        self.worker.init_transfer_engine(
            transfer("nccl_common").NCCLWeightTransferInitInfo(**request.init_info)
        )

    async def shutdown_weight_transfer_engine(self) -> None:
        self.calls.append("shutdown")

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        if self.stalls.is_set():
            raise RuntimeError("a worker is gone")
        self.worker.receive_weights(
            transfer("nccl_engine").NCCLWeightTransferUpdateInfo(**request.update_info)
        )

    async def finish_weight_update(self, weight_version: str | None) -> None:
        self.calls.append("finish")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("model"), tie_embeddings=True)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line()

    def join(
        unique_id: bytes, rank: int, world_size: int, device: object
    ) -> SimpleNamespace:
        assert (unique_id, world_size) == (UNIQUE_ID, 2)
        return line.sender() if rank == 0 else line.receiver()

    unique_id = SimpleNamespace(internal=UNIQUE_ID)
    monkeypatch.setattr(transfer("nccl_common"), "uid_init_process_group", join)
    monkeypatch.setattr(
        of_vllm("distributed.device_communicators.pynccl_wrapper"),
        "NCCLLibrary",
        lambda: SimpleNamespace(ncclGetUniqueId=lambda: unique_id),
        raising=True,
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    # What packs works on streams of a GPU.
    monkeypatch.setattr(VLLMOverNCCL, "packed", False)
    return line


@pytest.fixture
def served() -> Iterator[tuple[Served, str]]:
    engine, app = Served(), FastAPI()
    app.include_router(of_vllm("entrypoints.rl.online.api_router").router)
    app.state.engine_client = engine

    @app.post("/reset_prefix_cache")
    def reset() -> dict[str, bool]:
        return {"success": True}

    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    )
    started = threading.Event()
    startup = server.startup

    async def and_say_so(*arguments: Any, **options: Any) -> None:
        await startup(*arguments, **options)
        started.set()

    server.startup = and_say_so  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield engine, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


def test_all_weights_of_the_folder_come_and_the_line_stays(
    line: Line, served: tuple[Served, str], folder: Path
) -> None:
    engine, url = served
    server = VLLMOverNCCL(url, None, generating=30.0, loading=30.0)
    server.load(str(folder))
    wanted = load_file(folder / "model.safetensors")
    assert engine.weights.keys() == wanted.keys()
    assert all(
        torch.equal(engine.weights[name], tensor) for name, tensor in wanted.items()
    )
    engine.weights.clear()
    server.load(str(folder))
    assert engine.weights.keys() == wanted.keys()
    assert engine.calls == ["init", *["start", "update", "finish"] * 2], "joined once"


def test_a_server_that_fails_is_lost_and_joined_anew(
    line: Line, served: tuple[Served, str], folder: Path
) -> None:
    engine, url = served
    server = VLLMOverNCCL(url, None, generating=30.0, loading=30.0)
    engine.stalls.set()
    with pytest.raises(ServerLost, match=r"answers 500 to POST /update_weights"):
        server.load(str(folder))
    assert line.destroyed.is_set() and engine.calls[-1] == "shutdown"
    engine.stalls.clear()
    line.under_way.queue.clear()
    server.load(str(folder))
    assert engine.calls.count("init") == 2 and len(engine.weights) == len(
        load_file(folder / "model.safetensors")
    )


def test_one_that_takes_nothing_is_lost_in_time(
    line: Line,
    served: tuple[Served, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()
    server = VLLMOverNCCL(served[1], None, generating=30.0, loading=0.2)
    monkeypatch.setattr(
        VLLMOverNCCL, "_send", lambda self, weights, failed: never.wait(30)
    )
    with pytest.raises(
        ServerLost,
        match=r"over NCCL: TimeoutError.*0.2 s \(rollout.servers.load_timeout_seconds\)",
    ):
        server.load(str(folder))
    never.set()


def test_one_that_will_not_join_is_told_at_once(
    line: Line,
    served: tuple[Served, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This end waits in NCCL meanwhile, for one that does not come."""
    never = threading.Event()
    monkeypatch.setattr(
        transfer("nccl_common"), "uid_init_process_group", lambda *given: never.wait(30)
    )
    monkeypatch.setattr(served[0], "init_weight_transfer_engine", None)
    server = VLLMOverNCCL(served[1], None, generating=30.0, loading=20.0)
    with pytest.raises(
        ServerLost, match=r"answers 500 to POST /init_weight_transfer_engine"
    ):
        server.load(str(folder))
    never.set()


def test_without_a_gpu_or_the_servers_own_half_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = VLLMOverNCCL("http://127.0.0.1:1", None, generating=1.0, loading=1.0)
    info = {"vllm_config": {"weight_transfer_config": None}}
    monkeypatch.setattr(server_engine.VLLMServer, "problems", lambda self, expected: [])
    monkeypatch.setattr(server, "ask", lambda method, path, timeout: info)
    gpu, own = server.problems(None)  # type: ignore[arg-type]
    # It can be typed as it stands.
    words = shlex.split(own.partition("Start it with: ")[2].removesuffix("."))
    given = shlex.split(words[-1].removeprefix("--vllm="))
    assert given == ["--weight-transfer-config", '{"backend": "nccl"}']
    assert "needs a GPU" in gpu and "--weight-transfer-config" in own
    info["vllm_config"]["weight_transfer_config"] = {"backend": "nccl"}  # type: ignore[assignment]
    assert server.problems(None) == [gpu]  # type: ignore[arg-type]
