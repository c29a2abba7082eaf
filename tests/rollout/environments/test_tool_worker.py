"""The process that tools run in: every limit one by one, what is refused with and without leave, and how it ends."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megaverl.errors import EpisodeError
from megaverl.rewards.line_process import LineProcess
from megaverl.rollout.environments import tool_worker, tools
from megaverl.rollout.environments.tools import Answer, ToolBox, ToolLimits

# Each function of these does what one audit event reports, for real.
ATTEMPTS = '''
import os, resource, socket, subprocess, time

def socket_connect(port): socket.socket().connect(("127.0.0.1", port))
def socket_bind(port): socket.socket().bind(("127.0.0.1", 0))
def socket_sendto(port): socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))
def socket_getaddrinfo(port): socket.getaddrinfo("127.0.0.1", port)
def socket_gethostbyname(port): socket.gethostbyname("127.0.0.1")

def subprocess_Popen(): subprocess.run(["true"], check=True)
def os_system(): os.system("true")
def os_exec(): os.execv("/bin/sh", ["sh", "-c", """echo '{"result": "None"}'"""])
def os_fork(): os.fork() or os._exit(0)
def os_forkpty(): os.forkpty()[0] or os._exit(0)
def os_posix_spawn(): os.posix_spawn("/bin/true", ["true"], {})
def os_kill(): os.kill(os.getpid(), 0)

def os_remove(folder): os.remove(folder + "/file")
def os_rename(folder): os.rename(folder + "/file", folder + "/other")
def os_mkdir(folder): os.mkdir(folder + "/made")
def os_rmdir(folder): os.rmdir(folder + "/empty")
def os_truncate(folder): os.truncate(folder + "/file", 1)
def os_chmod(folder): os.chmod(folder + "/file", 0o600)
def os_symlink(folder): os.symlink("file", folder + "/soft")
def os_link(folder): os.link(folder + "/file", folder + "/hard")

def opened(path, flags): os.close(os.open(path, flags))
def limits(): return [resource.getrlimit(getattr(resource, "RLIMIT_" + what))[0] for what in ("AS", "CORE", "FSIZE")]
def namespace(kind): return os.readlink("/proc/self/ns/" + kind)
def pid(): return os.getpid()
def shout(text): print(text, flush=True); os.write(1, text.encode())
def wait(seconds): time.sleep(seconds)
def meet(folder, name, other):
    open(folder + "/" + name, "w").close()
    while not os.path.exists(folder + "/" + other): time.sleep(0.01)
    return os.getpid()
def fail(length): raise ValueError("x" * length)
def out_of_memory(): raise MemoryError
'''
KINDS = {"network": ["port"], "processes": [], "files": ["folder"]}
EVENTS = [
    (kind, event) for kind, events in tool_worker.REFUSED.items() for event in events
]
WRITING = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The tools of ATTEMPTS, by name."""
    folder = tmp_path_factory.mktemp("attempts")
    (folder / "attempts.py").write_text(ATTEMPTS)
    sys.path.insert(0, str(folder))
    names = [
        line.split()[1].partition("(")[0]
        for line in ATTEMPTS.splitlines()
        if line.startswith("def ")
    ]
    yield {name: f"attempts:{name}" for name in names}
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def boxes(attempts: dict[str, str]) -> Iterator[dict[str, ToolBox]]:
    """By what is allowed: nothing, or one kind."""
    made = {
        kind: ToolBox(attempts, ToolLimits(allow=(kind,)), size=1) for kind in KINDS
    }
    made["nothing"] = ToolBox(attempts, ToolLimits(max_characters=80), size=1)
    yield made
    for box in made.values():
        box.close()


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[dict[str, object]]:
    """A folder with a file and an empty folder in it, and a port that somebody listens at."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"folder": str(tmp_path), "port": server.getsockname()[1]}


def is_as_it_was(folder: Path) -> bool:
    file = folder / "file"
    names = sorted(path.name for path in folder.iterdir())
    return (
        names == ["empty", "file"]
        and file.read_text() == "kept"
        and file.stat().st_mode & 0o777 == 0o644
    )


def test_the_refused_events_are_these() -> None:
    """One that is dropped from the list is missed here, and tried by none of the tests below."""
    assert {kind: len(events) for kind, events in tool_worker.REFUSED.items()} == {
        "network": 5,
        "processes": 7,
        "files": 8,
    }


@pytest.mark.parametrize(("kind", "event"), EVENTS)
def test_an_event_is_refused_unless_it_is_allowed(
    boxes: dict[str, ToolBox],
    arguments: dict[str, object],
    tmp_path: Path,
    kind: str,
    event: str,
) -> None:
    name, given = event.replace(".", "_"), {key: arguments[key] for key in KINDS[kind]}
    for allowed, box in boxes.items():
        if allowed != kind:
            assert box.call(name, given) == Answer(
                f"PermissionError: {event} is not allowed to a tool", False
            )
            assert is_as_it_was(tmp_path)
    answer = boxes[kind].call(name, given)
    # a fork's parent ends itself, and what it was replaced by answers once
    assert answer.ok or answer.text == f"{name} ended its process (code 0)", answer
    assert is_as_it_was(tmp_path) == (kind != "files")
    boxes[kind].call("pid", {})  # takes what is left of a process that is gone


@pytest.mark.parametrize("flag", WRITING)
def test_a_file_is_opened_for_reading_only(
    boxes: dict[str, ToolBox], tmp_path: Path, flag: str
) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    given = {"path": str(path), "flags": getattr(os, flag)}
    assert boxes["nothing"].call("opened", given) == Answer(
        "PermissionError: a tool may not write files", False
    )
    assert path.read_text() == "kept"
    assert boxes["nothing"].call("opened", given | {"flags": os.O_RDONLY}).ok
    assert boxes["files"].call("opened", given).ok


def test_what_the_system_limits(boxes: dict[str, ToolBox]) -> None:
    memory = 512 * 2**20
    assert boxes["nothing"].call("limits", {}).text == f"[{memory}, 0, 0]"
    assert (
        boxes["files"].call("limits", {}).text
        == f"[{memory}, 0, {resource.getrlimit(resource.RLIMIT_FSIZE)[0]}]"
    )


def test_the_network_is_one_of_its_own_where_the_system_gives_one(
    boxes: dict[str, ToolBox],
) -> None:
    given = (
        subprocess.run(
            ["unshare", "--user", "--net", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )
    for kind, other in (
        ("net", given),
        ("user", given),
        ("mnt", False),
        ("pid", False),
    ):
        ours = os.readlink(f"/proc/self/ns/{kind}")
        assert (
            boxes["nothing"].call("namespace", {"kind": kind}).text != ours
        ) == other, kind
        assert boxes["network"].call("namespace", {"kind": kind}).text == ours, kind


def test_what_a_tool_prints_is_no_answer(boxes: dict[str, ToolBox]) -> None:
    assert boxes["nothing"].call("shout", {"text": '{"result": "mine"}\n'}) == Answer(
        "None", True
    )
    assert boxes["nothing"].call("limits", {}).ok


def test_what_is_not_said_is_little() -> None:
    assert ToolLimits() == ToolLimits(
        seconds=5.0, memory_mb=512, max_characters=2000, allow=()
    )
    assert ToolBox({}).size == 4


def test_a_limit_that_is_tighter_already_stays(attempts: dict[str, str]) -> None:
    tight = 400 * 2**20
    command = (
        f"ulimit -v {tight // 2**10}; exec {sys.executable} -I {tool_worker.__file__}"
    )
    process = LineProcess(["/bin/sh", "-c", command], {"OMP_NUM_THREADS": "1"})
    setting = {
        "tools": attempts,
        "path": sys.path,
        "memory_mb": 512,
        "max_characters": 99,
        "allow": [],
    }
    try:
        process.send(setting)
        assert process.answer(60.0) == {"ready": sorted(attempts)}
        process.send(["limits", {}])
        assert process.answer(60.0) == {"result": f"[{tight}, 0, 0]"}
    finally:
        process.close()


def test_a_long_error_is_cut_as_a_result_is(boxes: dict[str, ToolBox]) -> None:
    assert boxes["nothing"].call("fail", {"length": 1000}) == Answer(
        f"{'ValueError: ':x<80}", False
    )
    assert boxes["nothing"].call("fail", {"length": 3}) == Answer(
        "ValueError: xxx", False
    )
    assert boxes["nothing"].call("out_of_memory", {}) == Answer(
        "more than 512 MiB of memory", False
    )


def test_a_process_is_gone_once_its_time_is_up(attempts: dict[str, str]) -> None:
    box = ToolBox(attempts, ToolLimits(seconds=0.5), size=1)
    try:
        first = box.call("pid", {}).text
        assert box.call("wait", {"seconds": 0.0}).ok
        assert box.call("pid", {}).text == first, "kept while nothing goes wrong"
        assert box.call("wait", {"seconds": 60.0}) == Answer(
            "wait took longer than 0.5 s", False
        )
        assert not Path("/proc", first).exists()
        assert box.call("pid", {}).text != first
    finally:
        box.close()


def test_a_box_runs_as_many_at_once_as_it_has_processes_and_ends_them_all(
    attempts: dict[str, str], tmp_path: Path
) -> None:
    box = ToolBox(attempts, ToolLimits(seconds=60.0, allow=("files",)), size=2)
    with ThreadPoolExecutor(2) as pool:
        both = [
            {"folder": str(tmp_path), "name": name, "other": other}
            for name, other in ("ab", "ba")
        ]
        answers = list(pool.map(lambda given: box.call("meet", given), both))
    assert all(answer.ok for answer in answers) and answers[0] != answers[1]
    box.close()
    assert not any(Path("/proc", answer.text).exists() for answer in answers)
    assert box.call("pid", {}).ok, "a closed box starts anew"
    box.close()


def test_a_process_that_does_not_start_in_time_is_ended(
    attempts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "START_SECONDS", 0.0)
    box = ToolBox({"pid": attempts["pid"]}, size=1)
    before = children()
    for _ in range(2):  # the place in the box is free again
        with pytest.raises(
            EpisodeError, match="tools pid: their process did not start"
        ):
            box.call("pid", {})
    assert children() == before


def test_a_tool_that_is_no_function_is_named(attempts: dict[str, str]) -> None:
    before = children()
    with pytest.raises(
        EpisodeError,
        match="os:name is str; expected a function. Name them as module:function",
    ):
        ToolBox({"name": "os:name"}, size=1).call("name", {})
    assert children() == before


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}
