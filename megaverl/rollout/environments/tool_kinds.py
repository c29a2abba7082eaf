"""Tools beyond plain functions: Python programs, search in documents, and MCP servers.

Each tool has a method `call(name, arguments)`, which returns an `Answer` whatever
happens, and is thread-safe.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megaverl.errors import DataError, EpisodeError
from megaverl.outside import read_json
from megaverl.rewards.sandbox import ConfinedProgram, Sandbox, SandboxLimits

START_SECONDS = 60.0
WORD = re.compile(r"\w+", re.UNICODE)
MOST_WORDS = 32  # words of a query that are used


@dataclass(frozen=True)
class Answer:
    """Answer of a tool.

    Attributes:
        text: the result, or the error message.
        ok: whether `text` is a result.
        is_fault: whether the call failed through no fault of its caller. `text` then says why.
    """

    text: str
    ok: bool
    is_fault: bool = False


class ToolProvider(Protocol):
    """Provider of one or several tools."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer: ...

    def close(self) -> None: ...


class PythonTool:
    """Runs its argument `code`, a whole program, confined (see `Sandbox`). The program's output is the result."""

    def __init__(
        self, seconds: float, memory_mb: int, max_characters: int, workers: int
    ) -> None:
        self._box = Sandbox.shared(SandboxLimits(seconds, memory_mb), workers)
        self._longest = max_characters

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) != 1:
            return Answer(f"{name} takes code, a program as text", False)
        outcome = self._box.run(ConfinedProgram(code))
        if not outcome.passed:
            return Answer(
                f"{outcome.output[: self._longest]}{outcome.reason}"[: self._longest],
                False,
            )
        return Answer(
            outcome.output.rstrip("\n")[: self._longest] or "(it printed nothing)", True
        )

    def close(self) -> None:
        """Do nothing: the sandbox is shared and ends with the process."""


class SearchTool:
    """Finds passages for a `query` with SQLite's full-text index (FTS5), ordered by BM25.

    Args:
        path: a JSONL file whose rows have `text` and optionally `title`, which is indexed in memory; or an SQLite file
            with such an index (`write_index`), which is opened read-only.

    Raises:
        DataError: the file does not exist, or is neither.
    """

    def __init__(
        self, path: str, results: int, seconds: float, max_characters: int
    ) -> None:
        self._results, self._seconds, self._longest = results, seconds, max_characters
        self._lock = threading.Lock()
        file = Path(path)
        if not file.is_file():
            raise DataError(
                f"{path}: no such file to search in. Name a JSONL file of documents, or an index of them."
            )
        try:
            if file.suffix == ".jsonl":
                self._index = sqlite3.connect(":memory:", check_same_thread=False)
                _fill(self._index, file)
            else:
                uri = f"{file.resolve().as_uri()}?mode=ro"
                self._index = sqlite3.connect(uri, uri=True, check_same_thread=False)
                self._index.execute("SELECT title, text FROM documents LIMIT 1")
        except sqlite3.Error as error:
            raise DataError(
                f"{path}: no index of documents with title and text ({error}). Make it anew."
            ) from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        query = arguments.get("query")
        if not isinstance(query, str) or len(arguments) != 1:
            return Answer(f"{name} takes query, words as text", False)
        # Quote every word, so that FTS5 does not read one such as NOT as an operator.
        words = " OR ".join(f'"{word}"' for word in WORD.findall(query)[:MOST_WORDS])
        if not words:
            return Answer("the query has no words", False)
        end = time.monotonic() + self._seconds
        with self._lock:
            self._index.set_progress_handler(lambda: time.monotonic() > end, 10_000)
            try:
                sql = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?"
                rows = self._index.execute(sql, (words, self._results)).fetchall()
            except sqlite3.Error as error:
                late = time.monotonic() > end
                return Answer(
                    f"{name} took longer than {self._seconds:g} s"
                    if late
                    else f"{name}: {error}",
                    False,
                )
        if not rows:
            return Answer("nothing was found", True)
        return Answer(
            "\n\n".join(f"{title}\n{text}".strip() for title, text in rows)[
                : self._longest
            ],
            True,
        )

    def close(self) -> None:
        self._index.close()


def write_index(documents: str | Path, path: str | Path) -> Path:
    """Write an index for `SearchTool` from a JSONL file, for collections that are too large to index at each start."""
    part = Path(f"{path}.part")
    part.unlink(missing_ok=True)
    with sqlite3.connect(part) as index:
        _fill(index, Path(documents))
    index.close()
    return part.replace(path)


def _fill(index: sqlite3.Connection, documents: Path) -> None:
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
    with documents.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = read_json(line)
                index.execute(
                    "INSERT INTO documents VALUES (?, ?)",
                    (str(row.get("title", "")), str(row["text"])),
                )
            except (ValueError, KeyError, AttributeError) as error:
                wanted = '{"title": ..., "text": ...}'
                raise DataError(
                    f"{documents}, line {number}: expected {wanted} ({error!r}). Correct it."
                ) from error
    index.commit()


class MCPTools:
    """The tools of a Model Context Protocol server, each under its own name.

    Args:
        server: a command, which is started and spoken to over its standard streams, or a URL (streamable HTTP).
        seconds: time limit of one call.
        late_is_fault: whether a call that takes longer is a fault of the server. Otherwise the model reads it.

    Raises:
        EpisodeError: the package is missing, or the server does not start.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        seconds: float,
        max_characters: int,
        *,
        late_is_fault: bool = True,
    ) -> None:
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            raise EpisodeError(
                "tools of an MCP server need the package mcp, 2 or newer: pip install mcp."
            ) from error
        self._name = server if isinstance(server, str) else " ".join(server)
        self._seconds, self._longest = seconds, max_characters
        self._late_is_fault = late_is_fault

        def make() -> Client:
            if isinstance(server, str):
                return Client(server)
            return Client(
                stdio_client(
                    StdioServerParameters(command=server[0], args=list(server[1:]))
                )
            )

        self._make = make
        self._connecting = threading.Lock()
        self._client: Any = None
        self.tools: list[str] = []
        self._connect()
        if self._client is None:
            raise EpisodeError(
                f"the MCP server {self._name} does not answer ({self._problem or 'no word of it'})."
            )

    def _connect(self) -> None:
        """Start a thread that connects to the server; return when it has, or has failed."""
        self._loop = asyncio.new_event_loop()
        self._ends: asyncio.Event | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        self._ready.wait(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stay())
        except BaseException as error:
            # Errors of the transport or the server arrive as an exception group.
            self._problem = _first(error)
            self._client = None
        self._ready.set()

    async def _stay(self) -> None:
        """Stay connected until `close`. The task that opens the connection must also be the one that closes it."""
        self._ends = asyncio.Event()
        async with self._make() as client:
            cursor, tools = None, list[str]()
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += [tool.name for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    break
            self.tools, self._client = tools, client
            self._ready.set()
            await self._ends.wait()
        self._client = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        with self._connecting:
            # A server that was lost may be back, or be started again.
            if self._client is None:
                self._connect()
            client = self._client
        if client is None:
            return Answer(f"{name}: its server is gone", False, is_fault=True)
        future = asyncio.run_coroutine_threadsafe(
            client.call_tool(name, dict(arguments)), self._loop
        )
        try:
            result = future.result(self._seconds)
        except FutureTimeout:
            future.cancel()
            text = f"{name} took longer than {self._seconds:g} s"
            return Answer(text, False, self._late_is_fault)
        except Exception as error:
            # The model reads errors of the protocol, such as those of a wrong argument.
            first = _first(error)
            is_lost = _is_lost_connection(first)
            if is_lost:
                # The next call connects anew.
                self._client = None
            return Answer(f"{name}: {first}"[: self._longest], False, is_lost)
        text = "\n".join(
            part.text if part.type == "text" else f"({part.type})"
            for part in result.content
        )
        return Answer(text[: self._longest], not result.is_error)

    def close(self) -> None:
        if self._ends is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join(5.0)


def _first(error: BaseException) -> BaseException:
    """Return the first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Code of the protocol's error for a connection that was closed.
CONNECTION_CLOSED = -32000


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a call failed because the server is gone."""
    code = getattr(getattr(error, "error", None), "code", None)
    package = type(error).__module__.partition(".")[0]
    transports = ("anyio", "httpx", "httpcore")
    return (
        isinstance(error, OSError) or code == CONNECTION_CLOSED or package in transports
    )
