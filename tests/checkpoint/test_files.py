"""The files that make a checkpoint one: the order in which they reach the disk, what is read of them, what goes."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaverl.checkpoint import (
    FORMAT_VERSION,
    Manifest,
    checkpoint_folders,
    folder_of,
    newest_first,
    newest_whole,
    partial_name,
    read_json,
    readable,
)
from megaverl.checkpoint.commit import (
    Committer,
    Retention,
    best_name,
    commit,
    job_name,
    prepare_folder,
    prune,
    remove,
)
from megaverl.errors import CheckpointError, DamagedCheckpoint

ROLES = {
    "actor": {
        "model": {"hidden_size": 32, "num_layers": 2},
        "value_head": False,
        "grid": {"tp": 2},
    }
}
Event = tuple[str, ...]


def manifest(step: int = 1, **fields: Any) -> Manifest:
    return replace(Manifest(FORMAT_VERSION, 0, step, 2, "", ROLES, {}, {}), **fields)


def write(
    root: Path,
    step: int,
    files: dict[str, bytes] | None = None,
    *,
    inside: bool = False,
    **fields: Any,
) -> Path:
    """A committed checkpoint of these files."""
    folder, best = folder_of(root, step, inside=inside), fields.pop("best", False)
    partial_name(folder).mkdir(parents=True)
    records = {}
    for name, data in (files or {"a": b"one"}).items():
        (partial_name(folder) / name).write_bytes(data)
        records[name] = [len(data), f"{zlib.crc32(data):08x}"]
    commit(
        folder, manifest(step, files=records, **fields), best=best, phase=lambda _: None
    )
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What is put on the disk, renamed and removed, in order, by names; all of it also happens."""
    seen: list[Event] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def seen_fsync(file: int) -> None:
        seen.append(("fsync", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        fsync(file)

    def seen_rename(source: Any, target: Any) -> None:
        seen.append(("rename", Path(source).name, Path(target).name))
        rename(source, target)

    def seen_rmtree(path: Any) -> None:
        seen.append(("remove", Path(path).name))
        rmtree(path)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    monkeypatch.setattr(shutil, "rmtree", seen_rmtree)
    return seen


BEST = [
    ("fsync", "best.json.tmp"),
    ("rename", "best.json.tmp", "best.json"),
    ("fsync", "checkpoints"),
]


@pytest.mark.parametrize("best", [False, True])
def test_a_checkpoint_has_its_name_after_all_of_it_is_on_the_disk(
    tmp_path: Path, events: list[Event], best: bool
) -> None:
    root = tmp_path / "checkpoints"
    folder = root / "step_00000001"
    partial_name(folder).mkdir(parents=True)
    phases: list[tuple[str, int]] = []
    commit(
        folder,
        manifest(),
        best=best,
        phase=lambda name: phases.append((name, len(events))),
    )
    assert events == [
        ("fsync", "manifest.json"),
        ("fsync", "step_00000001.tmp"),
        ("rename", "step_00000001.tmp", "step_00000001"),
        ("fsync", "checkpoints"),
        *(BEST if best else []),
    ]
    assert phases == [
        ("checkpoint_manifest", 0),
        ("checkpoint_rename", 2),
        ("checkpoint_marked", 4),
    ]
    assert best_name(root) == ("step_00000001" if best else None)


@pytest.mark.parametrize("best", [False, True])
def test_an_old_one_of_the_same_name_stays_whole_until_the_new_one_has_it(
    tmp_path: Path, events: list[Event], best: bool
) -> None:
    root = tmp_path / "checkpoints"
    folder = write(root, 1, {"a": b"old"}, best=True)
    partial_name(folder).mkdir()
    (partial_name(folder) / "a").write_bytes(b"new")
    events.clear()
    commit(folder, manifest(), best=best, phase=lambda _: None)
    assert events == [
        ("fsync", "manifest.json"),
        ("fsync", "step_00000001.tmp"),
        ("rename", "step_00000001", "step_00000001.old"),
        ("rename", "step_00000001.tmp", "step_00000001"),
        ("fsync", "checkpoints"),
        *(BEST if best else []),
        ("rename", "step_00000001.old", "step_00000001.old.removed.tmp"),
        ("remove", "step_00000001.old.removed.tmp"),
    ]
    assert (folder / "a").read_bytes() == b"new"
    # the best one was replaced by another, of which nobody said that it is the best
    assert best_name(root) == ("step_00000001" if best else None)
    assert names(root) == (["best.json"] if best else []) + ["step_00000001"]


def test_the_best_of_another_step_stays_when_one_is_written_again(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, best=True)
    write(tmp_path, 2)
    write(tmp_path, 2)
    assert best_name(tmp_path) == "step_00000001"
    write(tmp_path, 2, best=True)
    assert best_name(tmp_path) == "step_00000002"
    remove(tmp_path / "step_00000002")
    assert best_name(tmp_path) is None, "marked, and gone"


def test_serials_count_on_whatever_the_step(tmp_path: Path) -> None:
    for step in (5, 3, 5, 4):
        write(tmp_path, step)
    assert [(folder.name, found.serial) for folder, found in readable(tmp_path)] == [
        ("step_00000003", 2),
        ("step_00000005", 3),
        ("step_00000004", 4),
    ]


def test_what_a_failed_move_left_does_not_stop_the_next_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for rest in ("step_00000001.old", "step_00000001.removed.tmp"):
        (tmp_path / rest).mkdir()
        (tmp_path / rest / "left").write_text("")
    write(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001", "step_00000001.removed.tmp"]
    remove(tmp_path / "step_00000001")
    assert names(tmp_path) == []


def test_one_that_cannot_be_removed_is_said_and_the_others_go(
    tmp_path: Path, caplog: Any
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_00000001.removed.tmp").write_text("a file, not a folder")
    prune(tmp_path, Retention(keep_last_k=1))
    assert names(tmp_path) == [
        "step_00000001",
        "step_00000001.removed.tmp",
        "step_00000003",
    ]
    assert "step_00000001: an old checkpoint could not be removed" in caplog.text


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"keep_last_k": 1}, ["1", "5"]),
        ({"keep_last_k": 1, "keep_best": False}, ["5"]),
        ({"keep_last_k": 2}, ["1", "4", "5"]),
        ({"keep_last_k": 9}, ["1", "2", "3", "4", "5"]),
        ({"keep_last_k": 1, "milestone_interval": 2}, ["1", "2", "4", "5"]),
    ],
)
def test_which_are_kept(
    tmp_path: Path, fields: dict[str, Any], kept: list[str]
) -> None:
    for step in range(1, 6):
        write(tmp_path, step, best=step == 1)
    prune(tmp_path, Retention(**fields))
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == [
        f"step_{step:0>8}" for step in kept
    ]


def test_one_inside_a_step_is_kept_until_the_next(tmp_path: Path) -> None:
    """And never as a milestone, even of a step that is one."""
    for step, inside in ((2, False), (2, True), (3, True)):
        write(tmp_path, step, inside=inside)
    retention = Retention(keep_last_k=1, milestone_interval=2)
    prune(tmp_path, retention)
    assert names(tmp_path) == ["step_00000002", "step_00000003_inside"]
    write(tmp_path, 3)
    prune(tmp_path, retention)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    for step in (4, 5, 6, 7):
        write(tmp_path, step, inside=True)
    prune(tmp_path, retention)
    assert names(tmp_path) == ["step_00000002", "step_00000007_inside"]


def test_none_kept_is_refused() -> None:
    with pytest.raises(CheckpointError, match="checkpoint.keep_last_k=0: at least 1"):
        Retention(keep_last_k=0)


def test_a_partial_one_is_no_checkpoint_and_is_removed_by_the_next(
    tmp_path: Path,
) -> None:
    whole = write(tmp_path, 1)
    for partial in ("step_00000002.tmp", "step_00000001.removed.tmp"):
        shutil.copytree(whole, tmp_path / partial)
    (tmp_path / "other.tmp").mkdir()
    assert [folder for folder, _ in readable(tmp_path)] == [whole]
    prepare_folder(
        tmp_path, tmp_path / "step_00000003.tmp", shutil.disk_usage(tmp_path).free // 2
    )
    assert names(tmp_path) == ["other.tmp", "step_00000001", "step_00000003.tmp"]


def test_a_disk_without_room_is_said_with_both_sizes(tmp_path: Path) -> None:
    whole, partial = write(tmp_path, 1), tmp_path / "step_00000002.tmp"
    needed = 10 * shutil.disk_usage(tmp_path).total
    with pytest.raises(CheckpointError) as error:
        prepare_folder(tmp_path, partial, needed)
    free = shutil.disk_usage(tmp_path).free
    assert f"the checkpoint needs {needed / 1e9:.2f} GB and " in str(error.value)
    said = float(str(error.value).partition("GB and ")[2].split()[0])
    assert said == pytest.approx(free / 1e9, rel=0.2)
    assert not partial.exists() and whole.exists()
    with pytest.raises(CheckpointError, match="was not written: .*File exists"):
        prepare_folder(tmp_path, whole, 0)


def test_a_disk_that_is_filled_exactly_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    prepare_folder(tmp_path, tmp_path / "step_00000001.tmp", usage.free)
    with pytest.raises(CheckpointError, match="are free"):
        prepare_folder(tmp_path, tmp_path / "step_00000002.tmp", usage.free + 1)


def test_a_manifest_comes_back_and_every_change_of_it_is_seen(tmp_path: Path) -> None:
    written = manifest(3, files={"a": [3, "00"]}, job="j", versions={"torch": "2"})
    written.write(tmp_path)
    assert Manifest.read(tmp_path) == written
    content = json.loads((tmp_path / "manifest.json").read_text())
    for key in content:
        lacking = {other: value for other, value in content.items() if other != key}
        for changed in (lacking, content | {key: "other"}):
            (tmp_path / "manifest.json").write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match="manifest.json: damaged"):
                Manifest.read(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="it has no manifest.json. Take another"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            FORMAT_VERSION + 1,
            "written by a newer .* that `versions` in it names, or a later one",
        ),
        (FORMAT_VERSION - 1, "written by an older .* that `versions` in it names[.]"),
    ],
)
def test_another_format_is_said_with_what_reads_it(
    tmp_path: Path, version: int, said: str
) -> None:
    replace(manifest(), format=version).write(tmp_path)
    with pytest.raises(CheckpointError, match=f"format {version}, {said}"):
        Manifest.read(tmp_path)


def test_files_that_are_missing_or_of_another_size_or_other_bytes(
    tmp_path: Path,
) -> None:
    data = {"long": b"x" * 9, "short": b"y", "__0_0.distcp": b"zzz"}
    folder = write(tmp_path, 1, data)
    found = Manifest.read(folder)
    assert found.wrong_sizes(folder) == found.wrong_bytes(folder) == []
    found.check_files(folder)
    for name in data:
        path = folder / name
        path.write_bytes(b"?" * len(data[name]))
        assert found.wrong_sizes(folder) == []
        crcs = f"{zlib.crc32(path.read_bytes()):08x} instead of {zlib.crc32(data[name]):08x}"
        assert found.wrong_bytes(folder) == [
            f"{name} has the checksum {crcs}: its bytes were changed"
        ]
        assert bool(found.wrong_bytes(folder, tensors=False)) == (
            name != "__0_0.distcp"
        )
        path.write_bytes(data[name])
    (folder / "long").write_bytes(b"x" * 8)
    (folder / "short").unlink()
    wrong = ["long has 8 bytes instead of 9", "short is missing"]
    assert found.wrong_sizes(folder) == wrong
    with pytest.raises(
        DamagedCheckpoint, match=f"{folder}: damaged: {'; '.join(wrong)}"
    ):
        found.check_files(folder)
    assert [text.partition(" (")[0] for text in found.wrong_bytes(folder)][1:] == [
        "short cannot be read"
    ]


def test_several_ranks_read_every_file_once_and_about_as_much_each(
    tmp_path: Path,
) -> None:
    sizes = {"a": 5, "b": 9, "c": 1, "d": 7, "e": 5}
    folder = write(tmp_path, 1, {name: b"x" * size for name, size in sizes.items()})
    found = Manifest.read(folder)
    for path in folder.iterdir():
        path.unlink()
    read = [
        [text.split()[0] for text in found.wrong_bytes(folder, share, 2)]
        for share in range(2)
    ]
    assert read == [["b", "a", "c"], ["d", "e"]]
    assert len(found.wrong_bytes(folder)) == 5


def test_what_a_run_cannot_take_is_listed(tmp_path: Path) -> None:
    saved = manifest()
    saved.check_roles(tmp_path, {"actor": ROLES["actor"] | {"grid": {"tp": 4}}})
    saved.check_roles(tmp_path, {})

    def said(wanted: dict[str, Any]) -> str:
        with pytest.raises(CheckpointError) as error:
            saved.check_roles(tmp_path, wanted)
        return str(error.value)

    actor = ROLES["actor"]
    several = said(
        {"critic": {}, "actor": actor | {"model": {"hidden_size": 48, "num_layers": 3}}}
    )
    for part in (
        f"{tmp_path}: was saved with another model",
        "it holds actor, but no critic",
        "actor.hidden_size is 32, this run has 48",
        "actor.num_layers is 2, this run has 3",
    ):
        assert part in several
    assert "actor.value_head is False, this run has True" in said(
        {"actor": actor | {"value_head": True}}
    )
    # a dimension that only a later version writes down is not compared, with either
    # one's being the later
    for model in (
        {"hidden_size": 32},
        {"hidden_size": 32, "num_layers": 2, "later": 4},
    ):
        saved.check_roles(tmp_path, {"actor": actor | {"model": model}})
    experts = manifest(
        roles={"actor": actor | {"model": {"moe": {"num_experts": 4, "top_k": 2}}}}
    )
    for moe, words in (
        ({"num_experts": 8, "top_k": 2}, "actor.moe.num_experts is 4, this run has 8"),
        (None, "None"),
    ):
        with pytest.raises(CheckpointError, match=words):
            experts.check_roles(tmp_path, {"actor": actor | {"model": {"moe": moe}}})
    assert "actor.lora is None, this run has {'rank': 4}" in said(
        {"actor": actor | {"lora": {"rank": 4}}}
    )
    with pytest.raises(
        CheckpointError, match="actor.lora is {'rank': 4}, this run has None"
    ):
        manifest(roles={"actor": actor | {"lora": {"rank": 4}}}).check_roles(
            tmp_path, {"actor": actor}
        )
    with pytest.raises(CheckpointError, match="it holds nothing, but no actor"):
        manifest(roles={}).check_roles(tmp_path, {"actor": actor})


def test_the_newest_is_that_written_last_by_this_job(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) == newest_whole(tmp_path / "none") == (None, [])
    first, second, third = (
        write(tmp_path, step, job=job) for step, job in ((9, "j"), (4, ""), (2, "j"))
    )
    assert newest_first(tmp_path) == ([third, second, first], [])
    assert newest_first(tmp_path, job="j") == ([third, first], [])
    (third / "a").unlink()
    (first / "manifest.json").write_text("{")
    found, problems = newest_whole(tmp_path)
    assert found == second and len(problems) == 2
    assert [folder for folder, _ in readable(tmp_path)] == [second, third], (
        "a manifest is read, its files are not"
    )
    shutil.rmtree(second)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)no checkpoint is whole.\n.*a is missing.*\n.*damaged",
    ):
        newest_whole(tmp_path)


def test_json_that_is_damaged_or_missing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for content in (None, "{"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(CheckpointError, match="some.json: cannot be read"):
            read_json(path)


def test_folders_are_named_by_their_steps(tmp_path: Path) -> None:
    assert folder_of(tmp_path, 12).name == "step_00000012"
    assert folder_of(tmp_path, 12, inside=True).name == "step_00000012_inside"
    (tmp_path / "step_00000001").write_text("a file")
    assert checkpoint_folders(tmp_path) == []


def test_the_job_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_name() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    assert job_name() == f"run7.{os.getppid()}"


def test_without_a_coordinator_the_first_rank_of_one_world_commits() -> None:
    assert Committer() == Committer(group=None, planner=0)
