"""A small server that speaks SGLang's documented endpoints, with a transformers model behind it; what may befall it.

As python/sglang/srt/entrypoints/http_server.py has them: /health, /get_model_info,
/get_server_info, /generate, /update_weights_from_disk, /update_weight_version,
/flush_cache.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.hf_engine import HFEngine

LOADING = threading.Lock()  # transformers loads one model at a time
Happening = Callable[["SGLangLike"], None]


class SGLangLike:
    """One server, on a port of its own from the start until it is closed or dies.

    Args:
        happenings: what befalls it at the nth request to a path, counted from 1, before that is answered.
        without: paths that an older one does not have.
        facts: what /get_server_info says otherwise.
    """

    def __init__(
        self,
        model: Path,
        *,
        token: str | None = None,
        happenings: dict[tuple[str, int], Happening] | None = None,
        without: tuple[str, ...] = (),
        **facts: Any,
    ) -> None:
        self.model, self.token, self.without, self.happenings = (
            model,
            token,
            without,
            happenings or {},
        )
        self.info = {
            "context_length": 64,
            "enable_deterministic_inference": True,
            "version": "0.5.4",
            **facts,
        }
        self.calls: Counter[str] = Counter()
        self.version, self.dead, self.lock = "default", False, threading.Lock()
        self.engine = self._load(model)
        self.bodies: list[dict[str, Any]] = []
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.speaks = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(
            target=self._http.serve_forever, args=(0.02,), daemon=True
        ).start()

    def __enter__(self) -> SGLangLike:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def die(self) -> None:
        """As if it was killed: nobody listens, and what was asked is never answered."""
        self.dead = True
        self._close()

    def _close(self) -> None:
        self._http.socket.close()
        threading.Thread(target=self._http.shutdown, daemon=True).start()

    def _load(self, folder: Path) -> HFEngine:
        with LOADING:
            return HFEngine(
                folder,
                dtype=torch.float32,
                max_model_len=int(self.info["context_length"]),
            )

    def answer(
        self, method: str, path: str, body: dict[str, Any], token: str | None
    ) -> tuple[int, Any]:
        """Status and JSON."""
        if path in self.without or not hasattr(self, name := path[1:]):
            return 404, {"detail": "Not Found"}
        if (
            self.token is not None
            and path != "/health"
            and token != f"Bearer {self.token}"
        ):
            return 401, {"error": "Unauthorized"}
        with self.lock:
            self.calls[path] += 1
            happening = self.happenings.get((path, self.calls[path]))
        if happening is not None:
            happening(self)
        with self.lock:
            found: tuple[int, Any] = getattr(self, name)(body)
        return found

    def health(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, None

    def get_model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        info = {
            "model_path": str(self.model),
            "tokenizer_path": str(self.model),
            "is_generation": True,
        }
        return 200, {**info, "weight_version": self.version}

    def get_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, self.info

    def update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            self.engine = self._load(Path(body["model_path"]))
        except OSError as error:
            return 400, {"success": False, "message": str(error)}
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, None

    @torch.no_grad()
    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, given = body["input_ids"], dict(body["sampling_params"])
        self.bodies.append(body)
        if max(prompt) >= self.engine.model.config.vocab_size:
            return 400, {"error": {"message": "token out of the vocabulary"}}
        about: dict[str, Any] = {"weight_version": self.version}
        if body.get("logprob_start_len") == 0:
            log_probs = (
                self.engine.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            )
            of_each = zip(log_probs, prompt[1:], strict=True)
            rest = [[float(row[token]), token, None] for row, token in of_each]
            about["input_token_logprobs"] = [[None, prompt[0], None], *rest]
            if body.get("top_logprobs_num"):
                tops = zip(*(part.tolist() for part in log_probs.max(-1)), strict=True)
                pairs = [[[value, token, None]] for value, token in tops]
                about["input_top_logprobs"] = [None, *pairs]
        way = SamplingOptions(
            given["max_new_tokens"],
            given.get("temperature", 1.0),
            given.get("top_p", 1.0),
            given.get("top_k", -1),
            given.get("stop_token_ids"),
        )
        [found] = self.engine.generate([prompt], way, [given.get("sampling_seed", 0)])
        drawn = zip(found.log_probs, found.token_ids, strict=True)
        about["output_token_logprobs"] = [
            [log_prob, token, None] for log_prob, token in drawn
        ]
        about["finish_reason"] = {"type": found.finish_reason}
        return 200, {"text": "", "output_ids": found.token_ids, "meta_info": about}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    speaks: SGLangLike

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone, or this server has died."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(json.loads(text) if text else {})

    def _answer(self, body: dict[str, Any]) -> None:
        speaks = self.server.speaks
        if not speaks.dead:
            status, found = speaks.answer(
                self.command, self.path, body, self.headers.get("Authorization")
            )
        if speaks.dead:  # by what befell it meanwhile, or before
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        data = b"" if found is None else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""
