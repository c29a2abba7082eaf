"""`megaverl serve reward`: what vLLM's server is started with, and who it answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaverl.cli import serve
from megaverl.cli.options import UsageError
from megaverl.cli.serve import COMMANDS, PER_JOB, TOKEN, JobQueues, server_command
from megaverl.rollout.server_api import RECEIVER


def told(
    *given: str, what: str = "reward", **environment: str
) -> tuple[list[str], dict[str, str]]:
    parser = argparse.ArgumentParser()
    COMMANDS["serve"].add_options(parser)
    return server_command(parser.parse_args([what, *given]), environment)


def test_a_classifier_or_a_judge_at_one_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        serve, "default_arguments", lambda model, given: ["--enforce-eager"]
    )
    command, more = told("runs/rm/hf", "--port", "9", "--vllm=--max-model-len 64")
    at = [
        "--host",
        "127.0.0.1",
        "--port",
        "9",
        "--middleware",
        "megaverl.cli.serve.JobQueues",
    ]
    kind = ["--runner", "pooling", "--convert", "classify"]
    assert command == [
        "serve",
        "runs/rm/hf",
        *kind,
        *at,
        "--enforce-eager",
        "--max-model-len",
        "64",
    ]
    assert more == {PER_JOB: "64"}
    command, more = told(
        "m",
        "--judge",
        "--host",
        "10.0.0.5",
        "--token-env",
        "KEY",
        "--per-job",
        "2",
        KEY="secret",
    )
    assert "pooling" not in command and "secret" not in command
    assert more == {PER_JOB: "2", TOKEN: "secret"}


def test_a_server_for_a_model_with_images_has_a_tokenizer_and_leaves_pixels_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    command, _ = told(str(tmp_path), what="rollout")
    assert "--skip-tokenizer-init" not in command
    assert "--no-mm-device-do-normalize" in command


def test_a_server_that_generates_for_runs() -> None:
    command, more = told("m", "--token-env", "KEY", what="rollout", KEY="secret")
    assert command[:2] == ["serve", "m"] and "secret" not in command
    for option in ("--enable-scale-out", "--skip-tokenizer-init"):
        assert option in command
    values = dict(zip(command, command[1:], strict=False))
    assert (
        values["--logprobs-mode"] == "processed_logprobs"
        and values["--generation-config"] == "vllm"
    )
    assert values["--worker-extension-cls"] == RECEIVER
    own, _ = told(
        "m",
        "--vllm=--worker-extension-cls=my.Own",
        "--token-env",
        "KEY",
        what="rollout",
        KEY="secret",
    )
    assert RECEIVER not in own and "--worker-extension-cls=my.Own" in own
    assert (
        values["--port"] == "8000"
        and values["--middleware"] == "megaverl.cli.serve.TokenGuard"
    )
    assert more == {"VLLM_SERVER_DEV_MODE": "1", TOKEN: "secret"}
    with pytest.raises(UsageError, match="serve reward"):
        told("m", "--judge", what="rollout")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--host", "0.0.0.0", "--token-env", "KEY"], "name one interface"),
        (["--host", "::"], "name one interface"),
        (["--host", "10.0.0.5"], "not the loopback"),
        (["--token-env", "OTHER"], "no variable OTHER"),
        (["--per-job", "0"], "at least 1"),
    ],
)
def test_what_is_not_served(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        told("m", *given, KEY="secret")


def test_the_token_is_wanted_everywhere_and_no_job_takes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv(PER_JOB, "2")

    async def scenario() -> list[int]:
        over = asyncio.Event()

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await over.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        queues, seen = JobQueues(app), []

        async def ask(path: str, job: str | None, token: str = "secret") -> None:
            headers = [(b"Authorization", f"Bearer {token}".encode())]
            headers += [(b"x-megaverl-job", job.encode())] if job else []

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    seen.append(message["status"])
                elif message["body"]:
                    assert "message" in json.loads(message["body"])["error"]

            scope = {
                "type": "http",
                "path": path,
                "headers": headers,
                "client": ("10.0.0.9", 1),
            }
            await queues(scope, None, send)

        await asyncio.gather(
            ask("/classify", "a", token="wrong"), ask("/v1/models", "a", token="")
        )
        assert seen == [401, 401]
        waiting = [
            asyncio.create_task(ask("/classify", job)) for job in ("a", "a", "b", None)
        ]
        await asyncio.sleep(0)
        await asyncio.gather(
            ask("/classify", "a"),
            *(asyncio.create_task(asyncio.sleep(0)) for _ in range(3)),
        )
        assert seen == [401, 401, 429] and queues.running == {
            "a": 2,
            "b": 1,
            "10.0.0.9": 1,
        }
        over.set()
        await asyncio.gather(
            *waiting, ask("/health", None, token=""), ask("/classify", "a")
        )
        assert not queues.running
        return seen

    assert asyncio.run(scenario())[3:] == [200] * 6


def test_the_pool_is_changed_without_torch(tmp_path: Path) -> None:
    """Importing torch takes longer than a step of a small run, and on a busy machine half a minute."""
    (tmp_path / "train.yaml").write_text(
        "rollout: {engine: server, servers: {urls: ['http://127.0.0.1:1']}}"
    )
    code = (
        "import sys; from megaverl.cli.main import main\n"
        "for action in ('add', 'remove'):\n"
        "    assert main(['rollout-pool', action, sys.argv[1], 'http://127.0.0.1:2']) == 0\n"
        "assert main(['rollout-pool', 'list', sys.argv[1]]) == 1\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "127.0.0.1:1, http://127.0.0.1:2" in lines[0] and lines[1].endswith(
        " http://127.0.0.1:1"
    )
    assert lines[-1] == "[]"
