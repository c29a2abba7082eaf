"""A hub on 127.0.0.1: the endpoints that `huggingface_hub` asks, for models and data sets that lie in folders."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The hub's state, which tests change.

    Attributes:
        models: `org/name` -> the folder with its files; of a data set `datasets/org/name`.
        refused: `org/name` -> (status, code of the error): every request is answered so.
        hidden: files that are listed, but answered by 404.
        broken: file -> after how many bytes the connection is cut, once.
        short: file -> how many bytes of it are sent, as if these were all.
        held: file -> sent only when this is set.
        asked: file -> set when it is asked for.
        log: the requests, such as `GET config.json`.
    """

    models: dict[str, Path]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    held: dict[str, threading.Event] = field(default_factory=dict)
    asked: dict[str, threading.Event] = field(
        default_factory=lambda: defaultdict(threading.Event)
    )
    log: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    """Answers from `hub`, which `serving` sets in a class of its own."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        self.asked_paths = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.partition("?")[0].strip("/"))
        api = path.startswith("api/")
        parts = path.removeprefix("api/").removeprefix("models/").split("/")
        length = 3 if parts[0] == "datasets" else 2
        name, rest = "/".join(parts[:length]), parts[length:]
        if name in self.hub.refused:
            status, code = self.hub.refused[name]
            return self._send(
                status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, body
            )
        if name not in self.hub.models:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        folder = self.hub.models[name]
        if rest and rest[1:] and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if api:
            return self._list(folder, name, rest, body)
        file = folder / "/".join(rest[2:])
        self.hub.log.append(f"{'GET' if body else 'HEAD'} {file.name}")
        if not file.is_file() or file.name in self.hub.hidden:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        self._send_file(file, body)

    def _list(self, folder: Path, name: str, rest: list[str], body: bool) -> None:
        self.hub.log.append(f"list {name}")
        names = sorted(file.name for file in folder.iterdir() if file.is_file())
        content: Any = {
            "id": name,
            "sha": COMMIT,
            "siblings": [{"rfilename": each} for each in names],
        }
        if rest[:1] == ["paths-info"]:
            names = [
                each
                for each in names
                if each in parse_qs(self.asked_paths).get("paths", [])
            ]
        if rest[:1] in (["tree"], ["paths-info"]):
            content = [
                {
                    "type": "file",
                    "path": each,
                    "size": (folder / each).stat().st_size,
                    "oid": _etag(folder / each),
                }
                for each in names
            ]
        self._send(
            200,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
            body,
        )

    def _send_file(self, file: Path, body: bool) -> None:
        data, status = file.read_bytes(), 200
        headers = {
            "ETag": f'"{_etag(file)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range")
        if asked and body:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if body:
            self.hub.asked[file.name].set()
            data = data[: self.hub.short.get(file.name, len(data))]
        if body and file.name in self.hub.held:
            self.hub.held[file.name].wait()
        if body and file.name in self.hub.broken:
            self._head(status, headers | {"Content-Length": str(len(data))})
            self.wfile.write(data[: self.hub.broken.pop(file.name)])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._send(status, data, headers, body)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], body: bool
    ) -> None:
        self._head(status, headers | {"Content-Length": str(len(data))})
        if body:
            self.wfile.write(data)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at `hub.log`."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, listening at `hub.url`."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})
    )
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
