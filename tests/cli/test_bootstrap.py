"""The installation: where uv looks for packages, and what happens where uv cannot be had."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
uv_settings = runpy.run_path(str(LAUNCH / "pip_settings.py"))["uv_settings"]
PROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """import shutil

def build_editable(folder, settings=None, metadata=None):
    return shutil.copy("megaverl-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""
BEST = ["--index-strategy", "unsafe-best-match"]


def test_uv_looks_where_pip_does() -> None:
    lines = [
        ":env:.find-links='/own'",
        "global.cert='/ca.crt'",
        "global.constraint='/constraints.txt'",
        "global.default-timeout='60'",
        "global.extra-index-url='https://a.example/index\\nfile:///b/index'",
        "global.find-links='/wheels'",
        "global.index-url='https://own.example/index'",
        "install.trusted-host='own.example'",
        "list.format='columns'",
    ]
    assert list(uv_settings(lines)) == [
        *("SSL_CERT_FILE=/ca.crt", "UV_HTTP_TIMEOUT=60", "--default-index", "https://own.example/index"),
        *("--index", "https://a.example/index", "--index", "file:///b/index"),
        *("--find-links", "/own", "--allow-insecure-host", "own.example", *BEST),
    ], "what the environment says replaces what a file says, as in pip"


@pytest.mark.parametrize(("value", "options"), [("1", ["--no-index"]), ("true", ["--no-index"]), ("0", [])])
def test_no_index(value: str, options: list[str]) -> None:
    assert list(uv_settings([f":env:.no-index='{value}'"])) == [*options, *BEST]


def test_pip_serves_where_uv_cannot_be_had(tmp_path: Path) -> None:
    """A project of one wheel, and no index: uv is not found, and the wheel and the project are installed."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the lock is for Python 3.11")
    wheels, project = tmp_path / "wheels", tmp_path / "project"
    wheels.mkdir()
    write_wheel(wheels / "tiny_thing-1.0-py3-none-any.whl")
    (project / "requirements").mkdir(parents=True)
    (project / "requirements" / "cpu-py311.lock").write_text("tiny-thing==1.0\n")
    write_wheel(project / "megaverl-1.0-py3-none-any.whl")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "backend.py").write_text(BACKEND)
    shutil.copytree(LAUNCH, project / "launch")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "MEGAVERL_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    command = [project / "launch" / "bootstrap.sh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "uv could not be fetched" in done.stderr
    imported = [project / ".venv" / "bin" / "python", "-c", "import tiny_thing, megaverl"]
    assert subprocess.run(imported, cwd=tmp_path).returncode == 0
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert again.returncode == 0 and "installing" not in again.stderr


def write_wheel(path: Path) -> None:
    """The smallest wheel: one module, of its name."""
    name = path.name.split("-")[0]
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
