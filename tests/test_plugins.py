"""Parts of the user's own, by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from megaverl.errors import ConfigError
from megaverl.plugins import load_object

SLOW = """
from tests.test_plugins import begun, go_on
begun.set()
assert go_on.wait(30)
class Late: ...
"""
begun, go_on = threading.Event(), threading.Event()


def test_a_file_that_another_thread_is_still_importing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load_object, f"{tmp_path / 'slow.py'}:Late", "key")
        assert begun.wait(30)
        second = threads.submit(load_object, f"{tmp_path / 'slow.py'}:Late", "key")
        wait([second], timeout=0.2)  # without the lock it has failed by now
        go_on.set()
        assert first.result() is second.result()


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class Mine: ...", "Mien", r"has no 'Mien' \(did you mean 'Mine'\?\); it has Mine"),
        ("import no_such_thing", "Mine", "cannot be imported: ModuleNotFoundError.*Is it installed"),
        ("import megaverl.environments", "Mine", r"megaverl.environments is now megaverl.rollout.environments\.$"),
        ("1 / 0", "Mine", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text(source)
    for _ in range(2):  # one that failed is not taken for imported
        with pytest.raises(ConfigError, match=f"^rewards.0: .*{message}"):
            load_object(f"{tmp_path / 'own.py'}:{name}", "rewards.0")


@pytest.mark.parametrize("name", ["", "no_colon", "module:", ":object", "module:not a name"])
def test_a_name_written_badly(name: str) -> None:
    with pytest.raises(ConfigError, match="expected module:object"):
        load_object(name, "key")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.py is not there"):
        load_object(f"{tmp_path / 'absent.py'}:Mine", "key")
