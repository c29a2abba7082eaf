"""Download an image from an allowed host, within limits of size and time."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

# Content types that object stores use for files of unknown type.
PLAIN = ("application/octet-stream", "binary/octet-stream")


def fetch(
    url: str, max_bytes: int, allowed: bool | Sequence[str], seconds: float
) -> bytes:
    """Return the bytes at an http(s) URL.

    Args:
        max_bytes: largest size that is accepted.
        allowed: True allows all hosts with public addresses. Else, names of allowed hosts, whatever their addresses.
            The same applies to redirects. If the environment names a proxy, the proxy resolves addresses and decides
            about them.
        seconds: deadline for the whole download, including redirects.

    Raises:
        ValueError: the host or scheme is not allowed, the content is no image, too large, or incomplete.
        OSError, http.client.HTTPException: the connection failed.
    """
    connections = _Connections(allowed)
    timer = threading.Timer(seconds, connections.end)
    timer.daemon = True
    timer.start()
    try:
        request = urllib.request.Request(url, headers={"Accept": "image/*"})
        connections.check(request)
        with urllib.request.build_opener(*connections.handlers).open(
            request, timeout=seconds
        ) as answer:
            kind = (
                answer.headers.get_content_type()
                if "Content-Type" in answer.headers
                else PLAIN[0]
            )
            if not kind.startswith("image/") and kind not in PLAIN:
                raise ValueError(f"it is {kind}, and no image")
            length = int(answer.headers.get("Content-Length") or 0)
            data = bytes(answer.read(max_bytes + 1)) if length <= max_bytes else b""
        if max(length, len(data)) > max_bytes:
            raise ValueError(f"it is larger than data.images.max_bytes={max_bytes}")
        if len(data) < length:
            raise ValueError(f"it has {length} bytes, and {len(data)} came")
        # Without a length in the header, a download that was cut off looks complete.
        if connections.ended:
            raise ValueError
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The socket's own timeout may expire just before the timer's. urllib gives the
        # cause of a failed connection as `reason`.
        is_late = isinstance(getattr(error, "reason", error), TimeoutError)
        if connections.ended or is_late:
            raise ValueError(f"it was not here within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
        connections.close()
    return data


class _Connections:
    """Opens connections to allowed hosts only, and shuts them all down at the deadline."""

    def __init__(self, allowed: bool | Sequence[str]) -> None:
        self.hosts = (
            None if isinstance(allowed, bool) else {host.lower() for host in allowed}
        )
        self.ended = False
        self._open: list[socket.socket] = []
        outer = self

        class Plain(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> Any:
                return self.do_open(
                    outer.connector(http.client.HTTPConnection, request), request
                )

        class Secure(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> Any:
                return self.do_open(
                    outer.connector(http.client.HTTPSConnection, request), request
                )

        class Redirect(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *args: Any) -> Any:
                redirected = super().redirect_request(*args)
                if redirected is not None:
                    outer.check(redirected)
                return redirected

        self.handlers = [Plain(), Secure(), Redirect()]

    def check(self, request: urllib.request.Request) -> None:
        """Check a request's scheme and host.

        Raises:
            ValueError: downloads from there are not allowed.
        """
        parts = urlsplit(request.full_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"it leads to {request.full_url!r:.80}, and only http and https are followed"
            )
        if self.hosts is not None and parts.hostname not in self.hosts:
            raise ValueError(
                f"{parts.hostname} is not among the hosts of data.images.allow_urls"
            )

    def connector(self, kind: Any, request: urllib.request.Request) -> Any:
        """Return a connection factory for a request, which checks each address once it is resolved, before connecting.

        Checking the resolved address, not the name, protects against names that resolve
        to private addresses.
        """
        parts = urlsplit(request.full_url)
        proxied = (
            request.has_proxy() or getattr(request, "_tunnel_host", None) is not None
        )

        def connect(address: tuple[str, int], *args: Any) -> socket.socket:
            addresses = [
                resolved[4][0]
                for resolved in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            ]
            for resolved in addresses if self.hosts is None and not proxied else ():
                if not ipaddress.ip_address(str(resolved).partition("%")[0]).is_global:
                    raise ValueError(
                        f"{parts.hostname} has the private address {resolved}: name the host in data.images.allow_urls"
                    )
            for number, resolved in enumerate(addresses, 1):
                try:
                    opened = socket.create_connection(
                        (str(resolved), address[1]), *args
                    )
                except OSError:
                    if number == len(addresses):
                        raise
                else:
                    # TLS detaches the socket, so a duplicate is kept for `end`.
                    self._open.append(opened.dup())
                    return opened
            raise OSError(f"{address[0]} has no address")

        def make(host: str, **options: Any) -> Any:
            connection = kind(host, **options)
            connection._create_connection = connect
            return connection

        return make

    def end(self) -> None:
        """Shut down all connections, which wakes up blocked reads."""
        self.ended = True
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            # The connection has closed already.
            except OSError:
                continue

    def close(self) -> None:
        """Close the duplicated sockets that `end` uses."""
        for connection in self._open:
            connection.close()
