"""HTTP server in front of `TinkerService`. Each connection has a thread, which mostly waits for a result."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from megaverl.errors import ConfigError
from megaverl.http_server import EmbeddedHandler, EmbeddedServer
from megaverl.trainer.tinker.service import PROTOBUF, HttpReply, Refusal

logger = logging.getLogger(__name__)

API = "/api/v1/"
MAX_BYTES = 512 * 2**20
# (method, path below the API's, body) -> answer.
Answer = Callable[[str, str, bytes], HttpReply]


class TinkerServer(EmbeddedServer):
    """HTTP server of the API, running until `close`.

    Args:
        host, port: interface and port to listen at; port 0: any free port.
        token: API key that every request must have; None: any key, for the loopback only.

    Raises:
        ConfigError: the port is in use, or the interface does not exist.

    Example:
        server = TinkerServer("127.0.0.1", 0, None, service.answer)
        print(server.url)
        server.close()
    """

    def __init__(self, host: str, port: int, token: str | None, answer: Answer) -> None:
        # Calls may arrive as soon as the server listens.
        self.answer = answer
        try:
            super().__init__(host, port, _Handler, "tinker", token)
        except OSError as error:
            raise ConfigError(
                f"tinker.port: {host}:{port} cannot be listened at ({error}). Name another port."
            ) from error


class _Handler(EmbeddedHandler):
    server: TinkerServer

    def do_GET(self) -> None:
        self._reply("GET")

    def do_POST(self) -> None:
        self._reply("POST")

    def do_DELETE(self) -> None:
        self._reply("DELETE")

    def _reply(self, method: str) -> None:
        try:
            reply = self._answer(method)
        except Refusal as error:
            reply = HttpReply({"detail": str(error)}, error.status)
        except Exception as error:
            logger.exception("tinker: %s %s failed", method, self.path)
            # A bug of the server must not look like one of the client.
            reply = HttpReply({"detail": f"{type(error).__name__}: {error}"}, 500)
        body = reply.body
        is_json = isinstance(body, dict)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_answer(
            reply.status, data, "application/json" if is_json else PROTOBUF
        )

    def _answer(self, method: str) -> HttpReply:
        if not self.has_token(self.headers.get("x-api-key", "")):
            raise self.unread(
                Refusal(401, "the API key is not the server's (tinker.token_env).")
            )
        if self.body_bytes > MAX_BYTES:
            raise self.unread(Refusal(413, f"a request has at most {MAX_BYTES} bytes."))
        data = self.rfile.read(self.body_bytes)
        path = unquote(urlsplit(self.path).path)
        if not path.startswith(API):
            raise Refusal(404, f"there is no {path}: paths begin with {API}.")
        return self.server.answer(method, path.removeprefix(API), data)
