"""A real server on two ranks, as a command starts it, and clients of the real package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launcher import free_port
from tests.trainer.conftest import environment

RANK = 4
KEY = "tml-secret"
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_embeddings": True,
}
SETTINGS = f"""
run: {{name: server, nproc: 2}}
model: {{dtype: float32}}
actor: {{tp: 2, lora: {{rank: {RANK}, alpha: 8}}}}
data: {{max_prompt_tokens: 300, prompts_per_step: 16}}
rollout: {{sampling: {{max_tokens: 100}}}}
tinker: {{token_env: TEST_TINKER_KEY, session_minutes: 1}}
"""


def make_model(folder: Path) -> Path:
    """Write a tiny model with a tokenizer of all bytes, which any text can be written with."""
    from megaverl.models.tiny import make_tiny_folder
    from tests.workers.tokenizers_made import of_bytes

    tokenizer = of_bytes()
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(folder, "Qwen3ForCausalLM", **MODEL, **special)
    tokenizer.save(folder)
    return folder


class Server:
    """A running server.

    Attributes:
        url: its address.
        model: folder of the base model.
        saved: folder of what clients save.
    """

    def __init__(self, folder: Path, model: Path, *more: str) -> None:
        self.model = model
        self.folder = folder
        self.saved = folder / "runs" / "server" / "tinker"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "server.yaml").write_text(SETTINGS)
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"

    def arguments(self) -> list[str]:
        """Return the arguments of `megaverl`."""
        return [
            *("serve", "tinker", str(self.folder / "server.yaml")),
            f"model.path={self.model}",
            f"run.dir={self.folder / 'runs'}",
            f"tinker.port={self._port}",
            *self._more,
        ]

    def start(self, seconds: float = 150.0) -> None:
        """Start the server, and wait until it listens."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megaverl.cli.main", *self.arguments()],
                env=environment(TEST_TINKER_KEY=KEY),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds
        while "serving " not in self.output():
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def output(self) -> str:
        """Return what the command has printed."""
        return self._log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal to the command, or to all its processes if it kills, and return the exit code."""
        process = self._process
        assert process is not None
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        try:
            return process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None

    def client(self, key: str = KEY) -> Any:
        """Return a new ServiceClient."""
        import tinker

        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def adapter(self, path: str) -> Path:
        """Return the folder with the adapters of a checkpoint, in peft's format."""
        return self.saved.joinpath(
            *path.removeprefix("tinker://").split("/"), "adapter"
        )


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Any:
    """Return tokens with inputs of a loss. The target of each token is the next one."""
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            **{name: list(values) for name, values in inputs.items()},
        },
    )
