"""Models that are named and are nowhere: said before ranks start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.cli.main import main
from tests.checkpoint.convert.hub_server import FakeHub, serving
from tests.config.conftest import write_files

PROGRAM = """
import json, sys
from megaverl.config import load_config
from megaverl.models.hub_lookup import missing_models
found = {}
for name in json.loads(sys.argv[1]):
    config = load_config(None, [*sys.argv[2:], f"model.path={name}", "rollout.engine=hf"])
    found[name] = [str(issue) for issue in missing_models(config)]
print(json.dumps(found))
"""


def ask(
    folder: Path, files: list[str], names: list[str], **environment: str
) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names), *files],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "0",
            **environment,
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_models_are_looked_for_here_and_on_the_hub(tmp_path: Path) -> None:
    """On the hub, not on it; then with the hub gone, and with offline mode."""
    files = [each for each in write_files(tmp_path) if not each.startswith("model")]
    hub = FakeHub({"org/there": tmp_path / "model"})
    hub.refused["org/none"] = (404, "RepoNotFound")
    with serving(hub):
        found = ask(tmp_path, files, ["org/there", "org/none"], HF_ENDPOINT=hub.url)
        url = hub.url
    assert found["org/there"] == []
    [said] = found["org/none"]
    assert (
        said.startswith("model.path (command line): org/none: no such folder in ")
        and "no such model on" in said
    )
    [said] = ask(tmp_path, files, ["org/there"], HF_ENDPOINT=url)["org/there"]
    assert "the hub is not reached" in said and "Correct the path" in said
    [said] = ask(tmp_path, files, ["org/there"], HF_HUB_OFFLINE="1")["org/there"]
    assert "HF_HUB_OFFLINE is set" in said


def test_a_start_refuses_a_missing_folder_before_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    files = [each for each in write_files(tmp_path) if not each.startswith("model")]
    command = [
        "train",
        *files,
        "model.path=models/small",
        "rollout.engine=hf",
        f"run.dir={tmp_path / 'runs'}",
    ]
    assert main(command) == 2
    said = capsys.readouterr()
    assert (
        "model.path" in said.err
        and "models/small: no such folder in" in said.err
        and said.out == ""
    )
    assert not (tmp_path / "runs").exists()
    # Which may be of a recipe for a machine that reaches the hub.
    assert main([*command, "--dry-run"]) == 0
    assert (
        "whether models/small, which is no folder here, is on the hub"
        in capsys.readouterr().out
    )
