"""tools/mutation_score.py on a module of a few lines: what is killed, what survives, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path, PurePath

import psutil
import pytest

from tests.launcher import ROOT
from tools.mutation_score import TARGETS

MODULE = """
def limit(value: int | None, most: int) -> int:
    while value is not None and value > most:
        value -= 1
    return value or 0
"""
TESTS = """
from toy.module import limit

def test_limit():
    assert limit(5, 3) == 3 and limit(2, 3) == 2
"""
# In a process of its own: it forks, and takes what its children leave behind.
HAND_MADE = """
import sys
from pathlib import Path
from tools import mutation_score as m

root = Path(sys.argv[1])
source = (root / "toy/module.py").read_text()
changes = [("value > most", "value >= most"), ("value -= 1", "value -= 0"), ("or 0", "or 1"), ("def limit", "def l")]
m.SECONDS, m.IMPORTED = 3.0, ("pytest",)
mutants = [m.Mutant("toy/module.py", source.replace(*change), 3, change[1], ("tests",)) for change in changes]
m.report(m.score(root, mutants, 2))
"""


def test_the_documented_modules_exist() -> None:
    """Those of the table of survivors, of `TARGETS`, and of the examples."""
    table = (ROOT / "tools" / "mutation_score.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"^\| (\S+\.py)", table, re.MULTILINE))
    targets = {pattern for target in TARGETS for pattern in target.modules}
    assert modules and modules <= targets
    for module in targets:
        assert (ROOT / "megaverl" / module).is_file(), module
    for page in ("CONTRIBUTING.md", "tools/mutation_score.py"):
        (pattern,) = re.findall(
            r"--only '([^']+)'", (ROOT / page).read_text(encoding="utf-8")
        )
        assert any(PurePath(target).match(pattern) for target in targets), (
            f"{page}: --only {pattern!r} matches nothing"
        )


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in (
        ("toy/__init__.py", ""),
        ("toy/module.py", MODULE),
        ("tests/test_toy.py", TESTS),
    ):
        (tmp_path / "tree" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "scratch").mkdir()
    return tmp_path / "tree"


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    environment = (
        os.environ | {"TMPDIR": str(Path(arguments[0]).parent / "scratch")}
        if arguments
        else None
    )
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(code, *arguments)
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def nothing_is_left(toy: Path) -> bool:
    here = [
        process
        for process in psutil.process_iter(["cwd"])
        if str(toy.parent) in (process.info["cwd"] or "")
    ]
    # What was killed may not have ended yet.
    _, alive = psutil.wait_procs(here, timeout=10)
    return not alive and not list((toy.parent / "scratch").iterdir())


def test_each_mutant_is_killed_survives_or_takes_too_long(toy: Path) -> None:
    done = run(HAND_MADE, str(toy))
    assert done.returncode == 0, done.stderr
    assert "all                3 of    4 killed, 75.0 %" in done.stdout
    assert done.stdout.partition("survivors:\n")[2] == "  toy/module.py:3: or 1\n"
    words = {
        line.split()[1]: line.rpartition(": ")[2]
        for line in done.stderr.splitlines()
        if "toy/module.py" in line
    }
    assert words["timeout"] == "value -= 0" and words["SURVIVED"] == "or 1"
    assert (toy / "toy/module.py").read_text() == MODULE, (
        "the tree itself is never changed"
    )
    assert nothing_is_left(toy)


def test_nothing_is_left_of_a_run_that_is_ended(toy: Path) -> None:
    process = start(HAND_MADE.replace("= 3.0,", "= 300.0,"), str(toy))
    assert process.stderr is not None
    # Then the mutants after it run, one of them for ever.
    while "killed" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 143 and nothing_is_left(toy)


def test_tests_that_fail_unchanged_are_shown_and_the_end(toy: Path) -> None:
    (toy / "tests/test_toy.py").write_text(TESTS.replace("== 2", "== 1"))
    done = run(HAND_MADE, str(toy))
    assert done.returncode == 1
    assert (
        "without any mutation: tests: failed" in done.stderr
        and "assert (3 == 3 and 2 == 1)" in done.stdout
    )


def test_mutants_are_drawn_by_seed_and_never_in_annotations(toy: Path) -> None:
    pytest.importorskip(
        "cosmic_ray", reason="without it no mutants: pip install cosmic-ray"
    )
    from tools.mutation_score import Target, list_mutants

    targets = [Target(("*.py",), ("tests",))]
    mutants = list_mutants(toy / "toy", targets, 100, seed=1)
    assert mutants == list_mutants(toy / "toy", targets, 100, seed=1)
    assert mutants != list_mutants(toy / "toy", targets, 100, seed=2)
    assert mutants[:2] == list_mutants(toy / "toy", targets, 2, seed=1)
    assert list_mutants(toy / "toy", targets, 100, seed=1, only="other.py") == []
    assert {mutant.line for mutant in mutants} == {3, 4, 5}, (
        "none in the line of the signature"
    )
    assert all(mutant.source.count("\n") == MODULE.count("\n") for mutant in mutants)


def test_without_cosmic_ray_one_line_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['cosmic_ray'] = None\nfrom tools.mutation_score import main\nmain()"
    done = run(code)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "cosmic-ray is missing. Run: pip install --target DIR cosmic-ray, and give --cosmic-ray DIR.",
    )
