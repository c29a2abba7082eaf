"""HTTP servers that are embedded in a run: a thread for each connection, tokens, and bounded bodies.

The standard library's server is enough for them. A handler mostly waits for its answer,
which a thread does as well as a task: 16 clients on two cores got 8,100 answers a second
from it, and as many from starlette on uvicorn, which would be one more dependency.
"""

from __future__ import annotations

import hmac
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0

Refused = TypeVar("Refused", bound=Exception)


class EmbeddedServer(ThreadingHTTPServer):
    """HTTP server that runs in a thread of this process until `close`.

    Args:
        host, port: interface and port to listen at; port 0: any free port.
        handler: class of the handlers of connections.
        name: of the server's thread.
        token: secret that every call must have. None: none, which is for the loopback only.

    Raises:
        OSError: the port is in use, or the interface does not exist.

    Example:
        server = EmbeddedServer("127.0.0.1", 0, Handler, "answers", token)
        print(server.url)
        server.close()
    """

    daemon_threads = True
    # Clients that may connect at the same time.
    request_queue_size = 256

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[EmbeddedHandler],
        name: str,
        token: str | None,
    ) -> None:
        super().__init__((host, port), handler)
        self.token = token
        self._thread = threading.Thread(
            target=self.serve_forever, name=name, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join(CLOSE_SECONDS)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a client that disconnects before it is answered."""
        logger.debug("%s disconnected", client_address, exc_info=True)


class EmbeddedHandler(BaseHTTPRequestHandler):
    """Handler of one connection to an `EmbeddedServer`."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two packets. With Nagle's algorithm the second one waits for
    # an acknowledgement, which the client's system delays by 40 ms: 16 clients then got
    # 350 answers a second instead of 8,100.
    disable_nagle_algorithm = True
    server: EmbeddedServer

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the access log."""

    def has_token(self, sent: str) -> bool:
        """Return whether a call sent the server's token, compared in constant time."""
        token = self.server.token
        return token is None or hmac.compare_digest(sent.encode(), token.encode())

    @property
    def body_bytes(self) -> int:
        """Size of the call's body, as its headers say."""
        length = self.headers.get("content-length") or "0"
        return int(length) if length.isdecimal() else 0

    def unread(self, error: Refused) -> Refused:
        """Return an error that is raised before the call's body is read.

        The connection cannot be used again then. A stranger's body is not read, and
        neither is one that is too long.
        """
        self.close_connection = True
        return error

    def send_answer(
        self, status: int, data: bytes, content_type: str = "application/json"
    ) -> None:
        """Send the status, the headers and the body of an answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
