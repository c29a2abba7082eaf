"""Export from a real grid, read back by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES
from tests.launcher import Launcher
from tests.references import load_reference
from tests.sharding.specs import UNTIED, expert_tp

GRID = {"tp": 2, "pp": 2}


def logits(folder: Path) -> torch.Tensor:
    """[2, 7, vocab]"""
    model = load_reference(folder, dtype=torch.float32).eval()
    tokens = torch.arange(14).reshape(2, 7) * 7 % 100
    with torch.no_grad():
        return model(tokens).logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_it_with_equal_logits(
    launch: Launcher, tmp_path: Path, architecture: str, tied: bool
) -> None:
    """From TP2 x PP2 with a padded vocabulary; a bucket of 4 KiB, so that tensors come in parts."""
    source = make_tiny_folder(tmp_path / "source", architecture, tie_embeddings=tied)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    target = tmp_path / "export"
    options = {"bucket_bytes": 4096, "shard_bytes": 50_000 if tied else 10**9}
    grid = GRID | expert_tp(architecture)
    results = launch.world(
        4,
        "tests.weights.ranks:load_and_export",
        source=source,
        folder=target,
        grid=grid,
        **options,
    )
    assert results == [""] * 4
    exported, expected = tensors_of(target), tensors_of(source)
    assert exported.keys() == expected.keys()
    assert [
        name
        for name, tensor in expected.items()
        if not torch.equal(exported[name], tensor)
    ] == []
    # Logits of equal weights were seen to differ in the last bits (Qwen2-MoE).
    torch.testing.assert_close(logits(target), logits(source), atol=1e-6, rtol=0)
    names = {path.name for path in target.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    assert ("model.safetensors" in names) == (not tied)
    assert ("model.safetensors.index.json" in names) == tied
    assert ("lm_head.weight" in exported) == (not tied or architecture in UNTIED), (
        "tied embeddings are stored once"
    )
    assert not (tmp_path / "export.tmp").exists()


def test_another_dtype_and_an_older_export(launch: Launcher, tmp_path: Path) -> None:
    source = make_tiny_folder(tmp_path / "source")
    target = tmp_path / "export"
    job = {"source": source, "folder": target, "grid": GRID}
    assert launch.world(4, "tests.weights.ranks:load_and_export", **job) == [""] * 4
    results = launch.world(4, "tests.weights.ranks:load_and_export", **job)
    assert all(
        f"CheckpointError: {target}: exists already" in r.replace("rank 0: ", "")
        for r in results
    )
    results = launch.world(
        4,
        "tests.weights.ranks:load_and_export",
        dtype="bfloat16",
        overwrite=True,
        **job,
    )
    assert results == [""] * 4
    original, exported = (
        load_file(folder / "model.safetensors") for folder in (source, target)
    )
    assert original.keys() == exported.keys()
    assert all(
        torch.equal(original[name].bfloat16(), tensor)
        for name, tensor in exported.items()
    )
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}


def test_a_disk_that_fails_stops_all_ranks_and_leaves_nothing(
    launch: Launcher, tmp_path: Path
) -> None:
    source = make_tiny_folder(tmp_path / "source")
    target = tmp_path / "export"
    results = launch.world(
        4,
        "tests.weights.ranks:load_and_export",
        source=source,
        folder=target,
        grid=GRID,
        fault="disk full",
        bucket_bytes=4096,
    )
    assert all(
        "CheckpointError" in result and "cannot be written" in result
        for result in results
    )
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_folder_without_a_configuration_is_refused(
    launch: Launcher, tmp_path: Path
) -> None:
    source = make_tiny_folder(tmp_path / "source")
    results = launch.world(
        4,
        "tests.weights.ranks:load_and_export",
        source=source,
        folder=source / "config.json" / "inside",
        grid=GRID,
    )
    assert all(
        "CheckpointError" in result and "cannot be written" in result
        for result in results
    )
