"""tools/inspect_checkpoint.py: what a checkpoint holds, without torch, and what is wrong with one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megaverl.errors import CheckpointError
from megaverl.models.tiny import make_tiny_folder
from megaverl.weights.torch_dist_index import read_index
from tests.launcher import ROOT, Launcher

GRIDS = {"actor": {"tp": 2}, "critic": {"pp": 2}}


@pytest.fixture(scope="module")
def run(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 and 2, the first the best."""
    run = tmp_path_factory.mktemp("run")
    model = make_tiny_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    launch.world(
        2,
        "tests.checkpoint.ranks:save_run",
        folder=model,
        root=run / "checkpoints",
        grids=GRIDS,
        steps=[1, 2],
        best=[1],
    )
    return run


def inspect(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """With torch out of reach: neither it nor anything that needs it may be imported."""
    script = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(ROOT / "tools" / "inspect_checkpoint.py"),
        *map(str, arguments),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_checkpoints_of_a_run(run: Path) -> None:
    done = inspect(run)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[1:]
    assert first.split()[:3] == ["step_00000001", "step", "1"] and first.endswith(
        "best"
    )
    assert second.split()[:3] == ["step_00000002", "step", "2"] and second.endswith(
        "actor tp2  critic pp2"
    )


def test_what_one_holds(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000002"
    done = inspect(folder, "--verify", "--tensors", "actor.*embedding*")
    assert done.returncode == 0, done.stderr
    for said in (
        "written by 2 ranks; format 2",
        "num_layers 2, hidden_size 32",
        "on tp2",
        "on pp2",
        "value head",
    ):
        assert said in done.stdout
    assert (
        "checksums agree" in done.stdout
        and "checksums not compared" in inspect(folder).stdout
    )
    assert (
        "actor.optimizer.state.exp_avg.embedding.word_embeddings.weight" in done.stdout
    )
    assert "critic.embedding" not in done.stdout


def test_shapes_are_those_that_torch_finds(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000002"
    found = read_index(folder)
    metadata = FileSystemReader(folder).read_metadata()
    stored = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    assert {
        name: (tensor.shape, f"torch.{tensor.dtype}")
        for name, tensor in found.arrays.items()
    } == {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in stored.items()
    }
    assert set(found.objects) == metadata.state_dict_metadata.keys() - stored.keys()


def test_without_a_manifest_it_is_any_megatron_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "megatron"
    folder.mkdir()
    for file in (run / "checkpoints" / "step_00000002").iterdir():
        if file.name != "manifest.json":
            (folder / file.name).write_bytes(file.read_bytes())
    done = inspect(folder)
    assert done.returncode == 0, done.stderr
    assert (
        "Megatron distributed checkpoint, torch_dist 1" in done.stdout
        and "it has no checksums" in done.stdout
    )
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    done = inspect(folder)
    assert (
        done.returncode == 1
        and "__1_0.distcp has " in done.stderr
        and "the index names some up to" in done.stderr
    )


def test_damage_is_named(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000002"
    folder.mkdir()
    for file in (run / "checkpoints" / "step_00000002").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[1000] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    assert inspect(folder).returncode == 0, "the sizes are right"
    done = inspect(folder, "--verify")
    assert done.returncode == 1 and "__0_0.distcp has the checksum" in done.stderr
    assert "no such folder" in inspect(tmp_path / "nowhere").stderr
    (folder / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match=r"refused: .*names builtins.print"):
        read_index(folder)
