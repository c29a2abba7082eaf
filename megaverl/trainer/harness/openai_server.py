"""HTTP server with OpenAI's API in front of the run's engines, for harnesses on this machine.

Besides the API it has the paths by which vLLM's server lends its tokenizer, so that a
harness counts tokens as the engine does.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from megaverl.http_server import EmbeddedHandler, EmbeddedServer
from megaverl.outside import read_json
from megaverl.rollout.environments.conversation import CHAT, COMPLETIONS, CallRefused
from megaverl.trainer.harness.openai_calls import CallReader, OpenCall
from megaverl.user_code import describe

logger = logging.getLogger(__name__)

MAX_BYTES = 128 * 2**20  # of the body of a call
TOKENIZE, DETOKENIZE, TOKENIZER_INFO = "tokenize", "detokenize", "tokenizer_info"


class OpenAIServer(EmbeddedServer):
    """HTTP server on a free port of the loopback, running until `close`.

    Args:
        submit: passes a call on to the program, which answers it.

    Attributes:
        token: bearer token that every call must have.
        last_refusal: why the last refused call was refused; "" if none was.

    Example:
        server = OpenAIServer(reader, queue.put)
        print(server.url, server.token)
        server.close()
    """

    token: str

    def __init__(self, reader: CallReader, submit: Callable[[OpenCall], None]) -> None:
        # Calls may arrive as soon as the server listens.
        self.reader, self.submit = reader, submit
        self.last_refusal = ""
        super().__init__("127.0.0.1", 0, _Handler, "openai", secrets.token_urlsafe(24))


class _Handler(EmbeddedHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        self._reply({"v1/models": self._models, TOKENIZER_INFO: self._tokenizer_info})

    def do_POST(self) -> None:
        self._reply(
            {
                f"v1/{CHAT}": lambda: self._call(CHAT),
                f"v1/{COMPLETIONS}": lambda: self._call(COMPLETIONS),
                TOKENIZE: self._tokenize,
                DETOKENIZE: self._detokenize,
            }
        )

    def _reply(self, answers: dict[str, Callable[[], dict[str, Any]]]) -> None:
        try:
            self._check_token()
            path = urlsplit(self.path).path.strip("/")
            if path not in answers:
                raise self.unread(
                    CallRefused(
                        f"there is no {path}; there are {', '.join(answers)}.", 404
                    )
                )
            status, answer = 200, answers[path]()
        except CallRefused as error:
            self.server.last_refusal = str(error)
            status = error.status
            answer = {"error": {"message": str(error), "type": "invalid_request_error"}}
        except Exception as error:
            logger.exception("openai: %s failed", self.path)
            # A bug of the server must not look like one of the harness.
            status = 500
            answer = {"error": {"message": describe(error), "type": "server_error"}}
        self.send_answer(status, json.dumps(answer).encode())

    def _check_token(self) -> None:
        sent = self.headers.get("authorization", "").removeprefix("Bearer ")
        if not self.has_token(sent):
            raise self.unread(
                CallRefused("the call has another token than the run.", 401)
            )

    def _body(self) -> dict[str, Any]:
        if self.body_bytes > MAX_BYTES:
            raise self.unread(
                CallRefused(f"a call has at most {MAX_BYTES} bytes.", 413)
            )
        try:
            body = read_json(self.rfile.read(self.body_bytes) or b"{}")
        except ValueError as error:
            raise CallRefused(f"the call cannot be read as JSON: {error}") from error
        if not isinstance(body, dict):
            raise CallRefused("a call is a JSON object.")
        return body

    def _call(self, kind: str) -> dict[str, Any]:
        body = self._body()
        try:
            call = self.server.reader.read(kind, body)
        except (TypeError, AttributeError, KeyError, ValueError) as problem:
            raise CallRefused(f"unreadable: {describe(problem)}") from problem
        self.server.submit(call)
        return call.answer.result()

    def _models(self) -> dict[str, Any]:
        reader = self.server.reader
        model = {
            "id": reader.model,
            "object": "model",
            "owned_by": "megaverl",
            "max_model_len": reader.most_tokens,
        }
        return {"object": "list", "data": [model]}

    def _tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self.server.reader.tokenizer
        backend = tokenizer.backend
        return {
            "tokenizer_class": type(backend).__name__,
            "eos_token": backend.eos_token,
            "bos_token": backend.bos_token,
            "pad_token": backend.pad_token,
            "chat_template": tokenizer.chat_template,
        }

    def _tokenize(self) -> dict[str, Any]:
        body = self._body()
        text = body.get("prompt")
        if not isinstance(text, str):
            raise CallRefused("prompt is not a text.")
        tokens = self.server.reader.encode(
            text, add_special_tokens=body.get("add_special_tokens", True) is not False
        )
        most = self.server.reader.most_tokens
        return {"tokens": tokens, "count": len(tokens), "max_model_len": most}

    def _detokenize(self) -> dict[str, Any]:
        tokens = self._body().get("tokens")
        if not isinstance(tokens, list) or not all(
            isinstance(token, int) for token in tokens
        ):
            raise CallRefused("tokens is not a list of whole numbers.")
        return {"prompt": self.server.reader.decode(tokens)}
