"""HTTP server in front of `TinkerService`. Each connection has a thread, which mostly waits for a result.

The standard library's server is enough, as for the gateway (`rollout/environments/gateway.py`):
a thread waits as well as a task does, and nothing further needs to be installed.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from megaverl.errors import ConfigError
from megaverl.trainer.tinker.service import PROTOBUF, HttpReply, Refusal

logger = logging.getLogger(__name__)

API = "/api/v1/"
MAX_BYTES = 512 * 2**20
# (method, path below the API's, body) -> answer.
Answer = Callable[[str, str, bytes], HttpReply]


class TinkerServer(ThreadingHTTPServer):
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

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, token: str | None, answer: Answer) -> None:
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"tinker.port: {host}:{port} cannot be listened at ({error}). Name another port."
            ) from error
        self.answer = answer
        self.token = token
        self._thread = threading.Thread(
            target=self.serve_forever, name="tinker", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address for clients, as TINKER_BASE_URL."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a client that disconnects before it is answered."""
        logger.debug("tinker: %s disconnected", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two packets. Nagle's algorithm would delay the second one by
    # 40 ms.
    disable_nagle_algorithm = True
    server: TinkerServer

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the access log."""

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
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json" if is_json else PROTOBUF)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, method: str) -> HttpReply:
        token = self.server.token
        sent = self.headers.get("x-api-key", "")
        if token is not None and not hmac.compare_digest(sent.encode(), token.encode()):
            # A stranger's body is not read, so the connection cannot be used again.
            self.close_connection = True
            raise Refusal(401, "the API key is not the server's (tinker.token_env).")
        length = self.headers.get("content-length") or "0"
        size = int(length) if length.isdecimal() else 0
        if size > MAX_BYTES:
            # The body is not read, so the connection cannot be used again.
            self.close_connection = True
            raise Refusal(413, f"a request has at most {MAX_BYTES} bytes.")
        data = self.rfile.read(size)
        path = unquote(urlsplit(self.path).path)
        if not path.startswith(API):
            raise Refusal(404, f"there is no {path}: paths begin with {API}.")
        return self.server.answer(method, path.removeprefix(API), data)
