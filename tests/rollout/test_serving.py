"""`megaverl serve`: arguments that fit the machine, and a small server in real processes that is watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from megaverl.errors import MegaverlError
from megaverl.rollout import serving
from tests.launcher import free_port

GIB = 2**30
# It shares memory with other processes, as vLLM's engine does.
ENGINE = """
import time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=64)
print(shared.name, flush=True)
time.sleep(600)
"""
# Answers /health with 200, then with 503, as vLLM's server does when its engine has
# died. Its child is the engine.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

engine = subprocess.Popen([sys.executable, "-c", {engine!r}], stdout=subprocess.PIPE, text=True)
print("engine", engine.pid, engine.stdout.readline().strip(), flush=True)
statuses = iter([200, 200, {after}])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(next(statuses, {after}))
        self.end_headers()

HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
LOG = """\
(APIServer pid=1) WARNING 11-26 01:28:25 [utils.py:255] This can cause errors like `OSError: [Errno 24] Too many`.
(VllmWorker-0 pid=3) ERROR 11-26 01:28:26 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=3) ERROR 11-26 01:28:26 [multiproc_executor.py:953] ValueError: Available memory is less than desired.
(EngineCore pid=2) ERROR 11-26 01:28:26 [core.py:1510] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above.
"""
INVALID = """\
Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (128) is greater than the derived max_model_len
"""


def run(log: Path, after: int, told: list[str], on_ready: object = None) -> int:
    port = free_port()

    def ready() -> None:
        told.append("ready")
        if on_ready is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    command = [
        sys.executable,
        "-c",
        SERVER.format(port=port, after=after, engine=ENGINE),
    ]
    return serving.watch_server(command, os.environ, log, "127.0.0.1", port, ready)


def wait_until_engine_ends(log: Path) -> None:
    """Wait for a process that was killed, which nobody may be there to reap. Its shared memory is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        engine = psutil.Process(int(log.read_text().split()[1]))
        while engine.status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
    assert not Path("/dev/shm", log.read_text().split()[2]).exists()


def test_a_server_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HEALTH_SECONDS", 0.05)
    told: list[str] = []
    with pytest.raises(MegaverlError, match="the server ended: "):
        run(tmp_path / "log", 503, told)
    assert told == ["ready"]
    wait_until_engine_ends(tmp_path / "log")


def test_a_signal_ends_server_and_engine(tmp_path: Path) -> None:
    told: list[str] = []
    assert run(tmp_path / "new" / "log", 200, told, on_ready="signal") == 0
    assert told == ["ready"]
    wait_until_engine_ends(tmp_path / "new" / "log")


def test_an_engine_ends_whose_number_another_process_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of processes start again after 32,768 of them."""
    end_group = serving.end_group

    def end_after_reuse(group: int) -> None:
        number = int((tmp_path / "log").read_text().split()[1])
        before = psutil.Process(number)
        before._ident = (number, 1.0)
        list(psutil.process_iter())
        monkeypatch.setitem(psutil._pmap, number, before)
        end_group(group)

    monkeypatch.setattr(serving, "end_group", end_after_reuse)
    assert run(tmp_path / "log", 200, [], on_ready="signal") == 0
    wait_until_engine_ends(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (LOG, "ValueError: Available memory is less than desired."),
        (
            INVALID,
            "1 validation error for ModelConfig: Value error, User-specified max_model_len (128) is greater",
        ),
        (
            "usage: vllm serve\nvllm serve: error: unrecognized arguments: --foo\n",
            "unrecognized arguments: --foo.",
        ),
        ("Killed\n", "It names no error."),
    ],
)
def test_the_cause_is_one_line(text: str, cause: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert cause in serving.why_ended(log) and "\n" not in serving.why_ended(log)


def test_a_server_that_fails_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ValueError('no such dtype')"]
    with pytest.raises(
        MegaverlError, match=r"did not start: ValueError: no such dtype. Its log: "
    ):
        serving.watch_server(
            command,
            os.environ,
            tmp_path / "log",
            "127.0.0.1",
            free_port(),
            lambda: None,
        )


def test_what_fits_is_taken() -> None:
    assert serving.cache_bytes(free=20 * GIB, weights=GIB) == serving.MAX_CACHE_BYTES
    assert serving.cache_bytes(free=4 * GIB, weights=GIB) == GIB // 2
    assert serving.cache_bytes(free=GIB, weights=GIB) == serving.MIN_CACHE_BYTES
    assert serving.gpu_share([(70_000, 80_000), (80_000, 80_000)]) == pytest.approx(
        0.83, abs=0.01
    )
    assert serving.gpu_share([(80_000, 80_000)]) == serving.GPU_SHARE


def test_defaults_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    names = serving.default_arguments("m", [])[::2]
    assert serving.default_arguments("m", ["--dtype=bfloat16"])[
        0
    ] == "--enforce-eager" and "--dtype" not in (
        serving.default_arguments("m", ["--dtype=bfloat16"])
    )
    assert "--kv-cache-memory-bytes" not in serving.default_arguments(
        "m", ["--gpu-memory-utilization", "0.5"]
    )
    assert names[0] == "--enforce-eager"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(serving, "gpu_memory", lambda: [(40_000, 80_000)])
    assert serving.default_arguments("m", []) == ["--gpu-memory-utilization", "0.47"]


@pytest.mark.parametrize("is_scaled", [None, True, False])
def test_a_server_scales_queries_as_the_folder_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_scaled: bool | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = {"model_type": "llama4_text", "attn_temperature_tuning": is_scaled}
    if is_scaled is None:
        del config["attn_temperature_tuning"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = serving.default_arguments(str(tmp_path), [])
    place = arguments.index("--override-generation-config")
    assert json.loads(arguments[place + 1]) == {
        "attn_temperature_tuning": is_scaled is not False
    }


def test_what_would_fail_late_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(MegaverlError, match="no config.json"):
        serving.check_start(str(tmp_path), "127.0.0.1", free_port())
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MegaverlError, match="Choose another --port"):
            serving.check_start(str(tmp_path), "127.0.0.1", taken.getsockname()[1])
    serving.check_start("org/name", "127.0.0.1", free_port())
