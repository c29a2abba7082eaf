"""Programs behind each boundary that this machine gives: what they can do, and 70 that try to do more."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megaverl.errors import RewardError
from megaverl.rewards.sandbox import (
    MECHANISMS,
    ConfinedProgram,
    Sandbox,
    SandboxLimits,
    pool,
)
from tests.rewards.hostile_programs import SCRIPTS, TESTED


def _gives(name: str) -> bool:
    box = Sandbox(size=1, mechanism=name)
    try:
        return box.run(ConfinedProgram("pass")).passed
    except RewardError:
        return False
    finally:
        box.close()


GIVEN = [name for name in MECHANISMS if _gives(name)]


@pytest.fixture(params=GIVEN)
def mechanism(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=GIVEN)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    box = Sandbox(
        SandboxLimits(seconds=20.0, preload=("numpy",)), size=2, mechanism=request.param
    )
    yield box
    box.close()


def test_this_machine_gives_a_boundary() -> None:
    assert GIVEN, (
        "neither namespaces nor Landlock: the reward `code` refuses to run here"
    )


def test_hostile_programs_are_contained(
    mechanism: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-secret")
    folder = tmp_path_factory.mktemp("outside")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o777)
    file = folder / "file"
    file.write_text("ESCAPED: a file was read")
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        values = {
            "port": listener.getsockname()[1],
            "parent": os.getpid(),
            "file": file,
            "folder": folder,
        }

        def filled(source: str) -> str:
            for name, value in values.items():
                source = source.replace(f"{{{name}}}", str(value))
            return source

        box = Sandbox(SandboxLimits(seconds=0.5), size=2, mechanism=mechanism)
        names = [*SCRIPTS, *TESTED]
        tasks = [ConfinedProgram(filled(source)) for source in SCRIPTS.values()]
        tasks += [
            ConfinedProgram(source, test=test) for source, test in TESTED.values()
        ]
        assert len(tasks) >= 70
        outcomes = dict(zip(names, box.run_all(tasks), strict=True))
        workers = {
            process.pid for process in psutil.Process().children(recursive=True)
        } - others
        still = box.run(ConfinedProgram("print(6 * 7)"))
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    table = "\n".join(
        f"{name:35} {outcome.code:4} {outcome.reason[:90]}"
        for name, outcome in outcomes.items()
    )
    print(table)
    assert [name for name in TESTED if outcomes[name].passed] == [], table
    shown = [
        n
        for n in SCRIPTS
        if any(word in outcomes[n].output for word in ("ESCAPED", "sk-secret", "42"))
    ]
    assert shown == [], table
    assert all(outcome.reason or outcome.code == 0 for outcome in outcomes.values())
    assert (sorted(os.listdir(folder)), file.read_text()) == (
        ["file"],
        "ESCAPED: a file was read",
    )
    assert not os.path.exists("/dev/shm/escaped")
    assert max(outcome.memory_mb for outcome in outcomes.values()) < 600
    assert still.output == "42\n", "the workers go on"
    assert len(workers) <= 4, (
        "two workers, each with one process outside of its namespace: nothing else is left"
    )
    box.close()
    assert {
        process.pid for process in psutil.Process().children(recursive=True)
    } - others == set()


@pytest.mark.parametrize(
    ("source", "given", "output"),
    [
        ("print(int(input()) * 2)\n", "21\n", "42\n"),
        (
            "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
            "1 2 3\n" * 50_000,
            "300000\n",
        ),
        (
            "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
            "ab\ncd\n",
            "ba\ndc\n",
        ),
        (
            "def main():\n  print(N)\nN = 3\nif __name__ == '__main__':\n  main()",
            "",
            "3\n",
        ),
        ("import numpy as np\nprint(np.arange(4).reshape(2, 2).sum())", "", "6\n"),
        (
            "import asyncio\nasync def f():\n  await asyncio.sleep(0)\n  print('é')\nasyncio.run(f())",
            "",
            "é\n",
        ),
        (
            "import heapq, random\nprint(heapq.nsmallest(1, [3, 1]), random.random() < 2)",
            "",
            "[1] True\n",
        ),
        ("import atexit\natexit.register(print, 'end')\nraise SystemExit", "", "end\n"),
        ("x = [0] * 10 ** 7\nprint(len(x))", "", "10000000\n"),
    ],
)
def test_a_script_computes(
    sandbox: Sandbox, source: str, given: str, output: str
) -> None:
    outcome = sandbox.run(ConfinedProgram(source, given))
    assert (outcome.code, outcome.output, outcome.passed) == (0, output, True), (
        outcome.errors
    )


def test_a_python_whose_folder_is_a_link(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv's and Homebrew's are."""
    (tmp_path / "python").symlink_to(sys.base_prefix)
    monkeypatch.setattr(
        sys,
        "executable",
        f"{tmp_path}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}",
    )
    box = Sandbox(size=1, mechanism=mechanism)
    outcome = box.run(
        ConfinedProgram("import asyncio, json.tool\nprint(asyncio.__file__)")
    )
    box.close()
    assert outcome.output.startswith(f"{tmp_path}/python/lib"), outcome


def test_threads_where_the_kernel_counts_them(sandbox: Sandbox) -> None:
    source = "import threading\nt = threading.Thread(target=print, args=('in a thread',))\nt.start()\nt.join()"
    outcome = sandbox.run(ConfinedProgram(source))
    counted = sandbox.mechanism == "namespaces" or (
        sandbox.mechanism == "user_namespaces" and os.getuid() != 0
    )
    assert outcome.output == ("in a thread\n" if counted else ""), outcome.errors


def test_a_failing_script_says_why(sandbox: Sandbox) -> None:
    outcome = sandbox.run(ConfinedProgram("raise ValueError('no such thing')"))
    assert (outcome.code, outcome.passed) == (1, False)
    assert outcome.reason == "it ended with code 1: ValueError: no such thing"
    assert sandbox.run(ConfinedProgram("import sys; sys.exit(3)")).code == 3


RESPONSE = """
import math, collections
LIMIT = 7
Pair = collections.namedtuple("Pair", "a b")
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __iter__(self): return iter(self.items)
    def __str__(self): return f"Stack({self.items})"
def add(a, b=1): return a + b
def fails(): raise KeyError("k")
def sort(x): x.sort()
def numbers():
    yield 1
    yield 2
def apply(f, xs): return [f(x) for x in xs]
def kinds(): return (1, "a", None, True, 1.5, b"x", {1: (2,)}, {3}, frozenset({4}), 1j, Pair(1, 2))
def nan(): return float("nan")
def big(): return 2 ** 100
"""
PASSING = """
add(1) == 2 and add(1, b=3) == 4 and add("a", "b") == "ab"
math.isclose(add(0.1, 0.2), 0.3)
LIMIT == 7
kinds() == (1, "a", None, True, 1.5, b"x", {1: (2,)}, {3}, frozenset({4}), 1j, (1, 2))
nan() != nan() and big() == 2 ** 100
list(numbers()) == [1, 2] and next(iter(numbers())) == 1
apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(len, ["ab"]) == [2]
Stack().push(1).push(2).pop() == 2 and len(Stack().push(1)) == 1
Stack().push(1) == Stack().push(1) and list(Stack().push(3)) == [3]
str(Stack().push(1)) == "Stack([1])"
"""


@pytest.mark.parametrize(
    "test",
    [
        *[f"assert {line}" for line in PASSING.strip().split("\n")],
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "try: fails()\nexcept KeyError as error: assert 'k' in str(error)\nelse: assert False",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(add(1), 2)\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
        "def check(candidate):\n  assert candidate(1) == 2\ncheck(add)",
    ],
)
def test_a_test_sees_the_response_as_if_it_were_there(
    sandbox: Sandbox, test: str
) -> None:
    outcome = sandbox.run(ConfinedProgram(RESPONSE, test={"code": test}))
    assert outcome.passed, outcome.reason
    assert not sandbox.run(
        ConfinedProgram(RESPONSE, test={"code": f"{test}\nassert add(1) == 3"})
    ).passed


@pytest.mark.parametrize(
    ("source", "test", "passes"),
    [
        (
            "def f(a, b): return [a, b]",
            {"call": "f", "args": [1, 2], "expected": [1, 2]},
            True,
        ),
        (
            "def f(a, b): return a, b",
            {"call": "f", "args": [1], "kwargs": {"b": 2}, "expected": [1, 2]},
            True,
        ),
        ("def f(): return {1: 2}", {"call": "f", "expected": {"1": 2}}, True),
        ("def f(): return 0.1 + 0.2", {"call": "f", "expected": 0.3}, False),
        (
            "def f(): return 0.1 + 0.2",
            {"call": "f", "expected": 0.3, "tolerance": 1e-9},
            True,
        ),
        (
            "class Solution:\n  def f(self, x): return x",
            {"call": "f", "args": [1], "expected": 1},
            True,
        ),
        ("def g(): return 1", {"call": "f", "expected": 1}, False),
        ("def f(): return [1]", {"call": "f", "expected": [1, 2]}, False),
        (
            "import numpy\ndef f(): return numpy.arange(2)",
            {"call": "f", "expected": [0, 1]},
            True,
        ),
    ],
)
def test_a_call(
    sandbox: Sandbox, source: str, test: dict[str, object], passes: bool
) -> None:
    outcome = sandbox.run(ConfinedProgram(source, test=test))
    assert outcome.passed is passes, outcome.reason


def test_a_run_gives_the_same_as_before_and_knows_nothing_of_it(
    sandbox: Sandbox,
) -> None:
    source = "import random, sys\nprint(random.random(), list({'a', 'b', 'c'}), hasattr(sys, 'seen'))\nsys.seen = 1"
    assert (
        len(
            {
                outcome.output
                for outcome in sandbox.run_all([ConfinedProgram(source)] * 8)
            }
        )
        == 1
    )
    assert "True" not in sandbox.run(ConfinedProgram(source)).output


def test_a_worker_that_died_is_replaced(mechanism: str) -> None:
    box = Sandbox(size=1, mechanism=mechanism)
    assert box.run(ConfinedProgram("print(1)")).passed
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "worker.py" in " ".join(process.cmdline()):
                process.kill()
    assert box.run(ConfinedProgram("print(1)")).passed
    box.close()


REFUSING = """
import runpy, sys
sys.path.insert(0, {root!r})
from megaverl.rewards.sandbox.confinement import ALLOW, EQUAL, LOAD, NUMBER, REFUSE, RETURN, _line, install_filter
lines = [_line(LOAD, NUMBER)]
for call in (272 if {x86_64} else 97, 444):  # unshare, landlock_create_ruleset
    lines += [_line(EQUAL, call, 0, 1), _line(RETURN, REFUSE | 1)]
install_filter(b"".join([*lines, _line(RETURN, ALLOW)]))
runpy.run_path({worker!r}, run_name="__main__")
"""


def test_where_the_kernel_gives_nothing_it_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "refusing.py"
    root = str(pool.WORKER.parents[3])
    path.write_text(
        REFUSING.format(
            root=root, worker=str(pool.WORKER), x86_64=platform.machine() == "x86_64"
        )
    )
    monkeypatch.setattr(pool, "WORKER", path)
    with pytest.raises(
        RewardError,
        match="namespaces: .*Operation not permitted.*landlock.*Allow one of them",
    ):
        Sandbox(size=1).run(ConfinedProgram("print(1)"))
