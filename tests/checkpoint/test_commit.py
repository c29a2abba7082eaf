"""A checkpoint is whole or it is not one: failures on the way, damage, and what is kept."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaverl.checkpoint import Manifest
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

RANKS = "tests.checkpoint.ranks:"
GRIDS = {"actor": {"tp": 2}}
SMALL: dict[str, Any] = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def saved(
    launch: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run folder with the checkpoints of steps 1 and 2."""
    run = tmp_path_factory.mktemp("run")
    save(launch, folder, run, [1, 2])
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` to damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def save(
    launch: Launcher, folder: Path, run: Path, steps: list[int], **options: Any
) -> None:
    launch.world(
        2,
        RANKS + "save_run",
        folder=folder,
        root=run / "checkpoints",
        grids=GRIDS,
        steps=steps,
        **options,
    )


def resume(
    launch: Launcher, folder: Path, run: Path, resume: str | Path = "auto", **grids: Any
) -> dict[str, Any]:
    """What every rank found; they must agree but for whose error it is."""
    results = launch.world(
        2,
        RANKS + "resume_run",
        folder=folder,
        root=run / "checkpoints",
        grids=grids or GRIDS,
        resume=str(resume),
    )
    if "error" in results[0]:
        assert results[1]["error"] == results[0]["error"]
        assert results[0]["error"] in ("CheckpointError", "DamagedCheckpoint")
        assert (
            results[1]["text"] == "rank 0: " + results[0]["text"]
            or results[1]["text"] == results[0]["text"]
        )
    return results[0]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_resume_finds_the_newest_or_the_given_one(
    launch: Launcher, folder: Path, saved: Path, tmp_path: Path
) -> None:
    root = saved / "checkpoints"
    assert resume(launch, folder, saved)["state"] == {"step": 2}
    assert resume(launch, folder, saved, "never") == {"path": None}
    assert resume(launch, folder, tmp_path) == {"path": None}
    for given, step in ((root / "step_00000001", 1), (root, 2), (saved, 2)):
        assert resume(launch, folder, tmp_path, given)["state"] == {"step": step}


def test_the_manifest_says_what_is_there(saved: Path) -> None:
    folder = saved / "checkpoints" / "step_00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["serial"], manifest["world_size"]) == (2, 2, 2)
    assert manifest["roles"]["actor"]["grid"]["tp"] == 2
    assert manifest["roles"]["actor"]["model"]["hidden_size"] == 32
    assert manifest["versions"]["megatron-core"]
    on_disk = {
        p.name: [p.stat().st_size, f"{zlib.crc32(p.read_bytes()):08x}"]
        for p in folder.iterdir()
        if p.name != "manifest.json"
    }
    assert manifest["files"] == on_disk


@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("write", "rank 1: OSError: [Errno 28] No space left on device"),
        ("random state", "No space left on device"),
        ("commit", "No space left on device"),
        ("full disk", "0.00 GB are free. Free some, lower checkpoint.keep_last_k"),
    ],
)
def test_a_failed_save_leaves_no_checkpoint(
    launch: Launcher,
    folder: Path,
    tmp_path: Path,
    fault: str,
    text: str,
    in_background: bool,
) -> None:
    save(launch, folder, tmp_path, [1])
    root = tmp_path / "checkpoints"
    options = {
        "folder": folder,
        "root": root,
        "grids": GRIDS,
        "fault": fault,
        "in_background": in_background,
    }
    for heard in launch.world(2, RANKS + "failing_save", **options):
        assert heard["error"] == "CheckpointError"
        assert "step_00000002.tmp" in heard["text"] and text in heard["text"]
        assert len(heard["text"]) < 700
        assert Path(heard["latest"]).name == "step_00000001"
    assert set(names(tmp_path)) <= {"step_00000001", "step_00000002.tmp"}
    save(launch, folder, tmp_path, [2])
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert resume(launch, folder, tmp_path)["state"] == {"step": 2}


def truncate(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def lose_a_file(folder: Path) -> None:
    (folder / "random_00001.json").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def tear_the_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:100])


def newer_format(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 7}))


def lie_in_the_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 9}))


def flip_a_bit(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncate, "__1_0.distcp has "),
        (lose_a_file, "random_00001.json is missing"),
        (lose_the_manifest, "it has no manifest.json"),
        (tear_the_manifest, "manifest.json: damaged"),
        (newer_format, "format 7, written by a newer megaverl"),
        (lie_in_the_manifest, "its checksum does not match"),
        (flip_a_bit, "__0_0.distcp: actor."),
    ],
)
def test_damage_is_named_and_the_newest_whole_one_is_used(
    launch: Launcher, folder: Path, run: Path, damage: Callable[[Path], None], text: str
) -> None:
    newest = run / "checkpoints" / "step_00000002"
    damage(newest)
    found = resume(launch, folder, run, newest)
    assert str(newest) in found["text"] and text in found["text"]
    assert resume(launch, folder, run)["state"] == {"step": 1}
    assert resume(launch, folder, run, actor={"tp": 1})["path"].endswith(
        "step_00000001"
    )
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    found = resume(launch, folder, run)
    assert "no checkpoint is intact" in found["text"] and text in found["text"]


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.target),)  # type: ignore[attr-defined]


def test_a_planted_pickle_is_not_run(
    launch: Launcher, folder: Path, run: Path, tmp_path: Path
) -> None:
    newest = run / "checkpoints" / "step_00000002"
    payload = Payload()
    payload.target = tmp_path / "ran"  # type: ignore[attr-defined]
    (newest / ".metadata").write_bytes(pickle.dumps(payload))
    data = (newest / ".metadata").read_bytes()
    manifest = Manifest.read(newest)
    manifest.files[".metadata"] = [len(data), f"{zlib.crc32(data):08x}"]
    manifest.write(newest)
    assert "refused" in resume(launch, folder, run)["text"]
    assert not (tmp_path / "ran").exists()


def test_what_does_not_fit_the_run_is_said(
    launch: Launcher, folder: Path, saved: Path, tmp_path: Path
) -> None:
    found = resume(launch, folder, saved, actor={"tp": 2}, critic={})
    assert "it holds actor, but no critic" in found["text"]
    other = make_tiny_folder(tmp_path / "other", hidden_size=48, **SMALL)
    assert (
        "actor.hidden_size is 32, this run has 48"
        in resume(launch, other, saved)["text"]
    )
    assert (
        "no such folder" in resume(launch, folder, saved, tmp_path / "nowhere")["text"]
    )
    assert (
        "a file, not a folder"
        in resume(launch, folder, saved, other / "config.json")["text"]
    )
    assert "holds no checkpoint" in resume(launch, folder, saved, other)["text"]


def test_the_newest_and_the_best_are_kept(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    save(
        launch,
        folder,
        tmp_path,
        [1, 2, 3, 4, 5],
        retention={"keep_last_k": 2, "milestone_interval": 3},
        best=[1],
    )
    assert names(tmp_path) == [
        "best.json",
        "step_00000001",
        "step_00000003",
        "step_00000004",
        "step_00000005",
    ]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {
        "folder": "step_00000001"
    }
    # a run that went back to step 1: what it saves now is newer than step 5
    save(launch, folder, tmp_path, [3, 2], retention={"keep_last_k": 2}, best=[2])
    assert names(tmp_path) == ["best.json", "step_00000002", "step_00000003"]
    assert resume(launch, folder, tmp_path)["state"] == {"step": 2}
    save(
        launch, folder, tmp_path, [5], retention={"keep_last_k": 1, "keep_best": False}
    )
    assert names(tmp_path) == ["best.json", "step_00000005"]
