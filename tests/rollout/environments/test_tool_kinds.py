"""Tools that are more than a function: confined programs, a search in documents, servers that speak MCP. All real."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.errors import ConfigError, DataError, EpisodeError
from megaverl.processes import free_port
from megaverl.rollout.environments import Codec
from megaverl.rollout.environments.tool_kinds import (
    Answer,
    MCPTools,
    SearchTool,
    write_index,
)
from megaverl.rollout.environments.tools import ToolLimits, ToolSet, ToolUse
from tests.rollout.environments.test_episodes import Letters

CODEC = Codec(Letters(), chat=False)
DOCUMENTS = [
    {"title": "Otters", "text": "An otter swims, and holds a paw while it sleeps."},
    {"title": "Bears", "text": "A bear sleeps through the winter."},
    {"text": "Rivers flow to the sea."},
]
SERVER = """
import sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def fail(text: str) -> str:
    raise ToolError(text)

@server.tool()
async def wait() -> str:
    import anyio
    await anyio.sleep(60)
    return "at last"

@server.tool()
def leave() -> str:
    import os
    os._exit(3)

if __name__ == "__main__":
    server.run("stdio") if len(sys.argv) == 1 else server.run("streamable-http", port=int(sys.argv[1]))
"""


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    return path


def test_a_search_finds_the_best_first(documents: Path) -> None:
    index = write_index(documents, documents.with_suffix(".sqlite"))
    for path in (documents, index):
        tool = SearchTool(str(path), results=2, seconds=5.0, max_characters=200)
        found = tool.call("look", {"query": "where does an otter sleep, and sleeps?"})
        assert (
            found.ok
            and found.text.startswith("Otters\nAn otter")
            and "Bears\nA bear" in found.text
        )
        assert tool.call("look", {"query": "sea"}) == Answer(
            "Rivers flow to the sea.", True
        )
        assert tool.call("look", {"query": "volcano"}) == Answer(
            "nothing was found", True
        )
        # what would be operators of the index are words
        assert (
            tool.call("look", {"query": 'title:x" OR NEAR( * ^ - {'}).text
            == "nothing was found"
        )
        assert tool.call("look", {"query": "?!"}) == Answer(
            "the query has no words", False
        )
        assert tool.call("look", {"words": "sea"}) == Answer(
            "look takes query, words as text", False
        )
        assert (
            tool.call("look", {"query": "'; DROP TABLE documents; --"}).ok
            and tool.call("a", {"query": "sea"}).ok
        )
        tool.close()
    short = SearchTool(str(documents), results=3, seconds=5.0, max_characters=4)
    assert short.call("look", {"query": "sleeps"}) == Answer("Bear", True)


def test_what_cannot_be_searched(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"title": "no text"}\n')
    (tmp_path / "bad.sqlite").write_text("no database")
    for name, said in (
        ("bad.jsonl", "line 1: expected"),
        ("bad.sqlite", "no index of"),
        ("gone.jsonl", "no such file"),
    ):
        with pytest.raises(DataError, match=said):
            SearchTool(str(tmp_path / name), 3, 1.0, 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tools(server: Path) -> Iterator[MCPTools]:
    made = MCPTools([sys.executable, str(server)], seconds=20.0, max_characters=50)
    yield made
    made.close()


def test_a_server_over_its_standard_streams(tools: MCPTools) -> None:
    assert tools.tools == ["add", "fail", "wait", "leave"]
    assert tools.call("add", {"a": 2, "b": 3}) == Answer("5", True)
    wrong = tools.call("fail", {"text": "x" * 100})
    assert not wrong.ok and wrong.text.endswith("x") and len(wrong.text) == 50
    assert not tools.call("add", {"a": "two"}).ok, "arguments that do not fit are told"
    assert not tools.call("none", {}).ok
    tools._seconds = 0.2
    assert tools.call("wait", {}) == Answer("wait took longer than 0.2 s", False, True)
    tools._seconds = 20.0
    assert tools.call("add", {"a": 2, "b": 4}) == Answer("6", True)
    left = tools.call("leave", {})
    assert not left.ok and left.is_fault
    assert tools.call("add", {"a": 1, "b": 1}) == Answer("2", True), "started again"


def test_a_server_over_http(server: Path) -> None:
    """In a thread of this process, as a service elsewhere would be."""
    uvicorn = pytest.importorskip("uvicorn", reason="comes with vllm")
    namespace: dict[str, Any] = {"__name__": "server"}
    exec(server.read_text(), namespace)
    port = free_port()
    web = uvicorn.Server(
        uvicorn.Config(
            namespace["server"].streamable_http_app(), port=port, log_level="error"
        )
    )
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        thread.join(0.05)
    tools = MCPTools(f"http://127.0.0.1:{port}/mcp", seconds=20.0, max_characters=50)
    assert tools.call("add", {"a": 20, "b": 3}) == Answer("23", True)
    tools.close()
    web.should_exit = True
    thread.join(20)


def test_a_server_that_does_not_start_is_named() -> None:
    with pytest.raises(EpisodeError, match=r"the MCP server .*no-such-command"):
        MCPTools(["no-such-command"], 1.0, 100)
    with pytest.raises(EpisodeError, match="the MCP server http://127.0.0.1:"):
        MCPTools(f"http://127.0.0.1:{free_port()}/mcp", 1.0, 100)


def turn(*calls: tuple[str, dict[str, Any]]) -> list[int]:
    texts = (
        json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls
    )
    return [
        ord(letter)
        for letter in " ".join(f"<tool_call>{text}</tool_call>" for text in texts) + "$"
    ]


def test_tools_of_every_kind_side_by_side_each_with_its_limits(
    documents: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (documents.parent / "limited_tools.py").write_text(
        "import socket\ndef hold(mb): return len(bytearray(mb * 2**20))\n"
        "def listen(): socket.socket().bind(('127.0.0.1', 0))\n"
    )
    monkeypatch.syspath_prepend(str(documents.parent))
    tools = {
        "little": {"function": "limited_tools:hold", "memory_mb": 256},
        "much": {"function": "limited_tools:hold"},
        "inside": {"function": "limited_tools:listen"},
        "outside": {"function": "limited_tools:listen", "allow": ["network"]},
        "calculator": {
            "function": "megaverl.rollout.environments.tools:calculate",
            "seconds": 0.5,
        },
        "plus": "calculator",
        "run": {"python": True, "seconds": 2.0, "max_characters": 12},
        "look": {"search": str(documents), "results": 1},
        "server": {"mcp": [sys.executable, str(server)]},
    }
    ToolUse.check(tools=tools, calls=3)
    environment = ToolUse(
        CODEC,
        tools=tools,
        calls=3,
        memory_mb=1024,
        seconds=30.0,
        call_reward=0.5,
        error_reward=-1.0,
    )
    outcome = environment.step(
        turn(
            ("run", {"code": "print(6 * 7)"}),
            ("look", {"query": "bear"}),
            ("add", {"a": 1, "b": 1}),
            ("plus", {"expression": "1"}),
        )
    )
    # the fourth is one too many
    assert (
        CODEC.decode(outcome.token_ids)
        == "42\nBears\nA bear sleeps through the winter.\n2"
    )
    assert (outcome.reward, outcome.done) == (0.5, False)
    outcome = environment.step(
        turn(
            ("calculator", {"expression": "9**9**9**9"}), ("plus", {"expression": "1"})
        )
    )
    assert (
        CODEC.decode(outcome.token_ids) == "error: calculator took longer than 0.5 s\n1"
    )
    assert outcome.reward == -1.0
    for code, said in (
        ("print('x' * 100)", "x" * 12),
        ("1 / 0", "error: it ended wit"),
        ("open('/etc/passwd')", "error: it ended wit"),
        ("pass", "(it printed nothing)"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
            "error: it ended wit",
        ),
    ):
        assert (
            CODEC.decode(environment.step(turn(("run", {"code": code}))).token_ids)
            == said
        )
    for name, arguments, answer in (
        ("little", {"mb": 300}, "error: more than 256 MiB of memory"),
        ("much", {"mb": 300}, str(300 * 2**20)),
        ("inside", {}, "error: PermissionError: socket.bind is not allowed to a tool"),
        ("outside", {}, "None"),
        ("run", {"code": "bytearray(3 * 2**30)"}, "error: it ended wit"),
    ):
        assert (
            CODEC.decode(environment.step(turn((name, arguments))).token_ids) == answer
        ), name
    assert "run takes code" in CODEC.decode(
        environment.step(turn(("run", {"program": "1"}))).token_ids
    )
    environment.box.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"tools": ["pyhton"]},
            "no built-in tool 'pyhton'; there are: calculator, python",
        ),
        (
            {"tools": {"a": {"seconds": 1}}},
            "a has seconds; expected one of function, python, search, mcp",
        ),
        (
            {"tools": {"a": {"search": "x", "mcp": "y"}}},
            "a has search, mcp; expected one of",
        ),
        (
            {"tools": {"a": {"mcp": "y", "results": 2}}},
            "a has mcp, results; expected one of",
        ),
        ({"tools": {"a": {"mcp": []}}}, "mcp is a URL, or a command as a list"),
        ({"tools": {"a": "none"}}, "a: name each as module:function"),
        (
            {"tools": {"a": {"function": "m:f", "allow": ["all"]}}},
            "allow knows network, files, processes; found all",
        ),
        ({"calls": 0}, "calls is 0"),
    ],
)
def test_what_no_tool_is_made_of(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ToolUse.check(**options)


def test_one_set_serves_all_episodes() -> None:
    first, second = (ToolSet.shared(["calculator"], ToolLimits(), 2) for _ in range(2))
    assert first is second and first is not ToolSet.shared(
        ["calculator"], ToolLimits(1.0), 2
    )
    assert first is not ToolSet.shared(["calculator"], ToolLimits(), 1)
    assert first is not ToolSet.shared({"sums": "builtins:sum"}, ToolLimits(), 2)
    assert (
        first.call("calcluator", {}).text
        == "there is no tool 'calcluator'; there are: calculator"
    )
