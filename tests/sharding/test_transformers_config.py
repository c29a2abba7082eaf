"""A config.json that is read in a child process without torch, once for each configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.errors import ModelError
from megaverl.sharding import transformers_config
from megaverl.sharding.transformers_config import read_by_transformers

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
PROGRAM = """
import json, sys, subprocess
from megaverl.sharding.transformers_config import read_by_transformers
children = []
run = subprocess.run
def counted(command, **more):
    children.append(command)
    return run(command, **more)
subprocess.run = counted
found = [read_by_transformers("llama", json.loads(each)) for each in sys.argv[1:]]
assert "torch" not in sys.modules
print(json.dumps([len(children), *found]))
"""


def read(cache: Path, *configs: dict[str, object]) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(json.dumps, configs)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_configuration_is_read_once(tmp_path: Path) -> None:
    """By a second process from the cache, with the same result; other values are read anew."""
    children, first = read(tmp_path, LLAMA)
    assert children == 1 and first == json.loads(
        json.dumps(read_by_transformers("llama", LLAMA), default=str)
    )
    children, again, other = read(tmp_path, LLAMA, {**LLAMA, "hidden_size": 128})
    assert children == 1 and again == first
    assert isinstance(other, dict) and other["hidden_size"] == 128
    assert len(list((tmp_path / "megaverl" / "configurations").iterdir())) == 2


def test_another_transformers_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the kept answer depends on the files that made it."""
    package = tmp_path / "transformers"
    (package / "models" / "llama").mkdir(parents=True)
    for file in (
        "__init__.py",
        "configuration_utils.py",
        "models/llama/configuration_llama.py",
    ):
        (package / file).write_text("")
    spec = type("Spec", (), {"origin": str(package / "__init__.py")})
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: spec)
    names = {transformers_config._cache_file("llama", "{}")}
    (package / "models" / "llama" / "configuration_llama.py").write_text("changed")
    names.add(transformers_config._cache_file("llama", "{}"))
    names.add(transformers_config._cache_file("llama", '{"a": 1}'))
    assert len(names) == 3


def test_what_transformers_refuses_is_not_kept(tmp_path: Path) -> None:
    code = (
        "from megaverl.sharding.transformers_config import read_by_transformers as "
        "r; r('llama', {'hidden_size': 'x'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        check=False,
    )
    assert ModelError.__name__ in done.stderr
    assert not (tmp_path / "megaverl").exists()
