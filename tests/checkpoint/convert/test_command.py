"""The command: verification that can fail, progress, memory, writing that fails, and torchrun."""

from __future__ import annotations

import io
import os
import re
import resource
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megaverl.checkpoint.convert import bar
from megaverl.checkpoint.convert.run import compare_bytes, compare_logits, process_group
from megaverl.checkpoint.convert.source import open_source
from megaverl.cli.main import main as megaverl
from megaverl.errors import CheckpointError
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.torch_dist_index import read_arrays
from tests.checkpoint.convert.folders import assert_same_files, converted, make_model
from tests.launcher import ROOT, Launcher
from tests.terminals import read_to_the_end


def main(arguments: list[str]) -> int:
    """`megaverl convert`"""
    return megaverl(["convert", *arguments])


MB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hf", tie_embeddings=True)


def test_the_scripts_and_the_command_are_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, on, back = (str(tmp_path / name) for name in ("there", "on", "back"))
    assert main([str(folder), there, "--tp=2", "--verify"]) == 0
    assert (
        main([there, on, "--to=megatron", "--pp=4", "--prefix=actor.", "--verify"]) == 0
    )
    assert main([on, back, "--logits"]) == 0
    said = capsys.readouterr()
    assert f"{on} -> {back}" in said.out
    assert "compared" in said.err and "logits agree" in said.err
    assert_same_files(folder, Path(back))
    for name in ("hf_to_megatron", "megatron_to_hf", "megatron_to_megatron"):
        assert (
            "from megaverl.cli.main import main"
            in (ROOT / "tools" / f"convert_{name}.py").read_text()
        )


def test_verify_names_what_differs(folder: Path, tmp_path: Path) -> None:
    there = converted(folder, tmp_path / "there", "megatron")
    back = converted(there, tmp_path / "back", "hugging_face")
    tensors = load_file(back / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = -0.0
    tensors["model.norm.weight"][:2] += 1
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    source, written = open_source(there), open_source(back)
    expected = (
        r"mlp.up_proj.weight: 1 of 2048 elements; model.norm.weight: 2 of 32 elements"
    )
    with (
        StoredArrayReader(source.arrays) as reader,
        StoredArrayReader(written.arrays) as again,
        process_group(),
    ):
        with pytest.raises(CheckpointError, match=expected):
            compare_bytes(source, reader, written, again, shown=False)
        with pytest.raises(
            CheckpointError,
            match="gives different outputs: at .sample, position, output.",
        ):
            compare_logits(source, written, shown=False)


def test_a_flipped_byte_of_a_checkpoint_is_found(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = converted(folder, tmp_path / "there", "megatron")
    chunk = read_arrays(there)["decoder.final_layernorm.weight"].chunks[0]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset + chunk.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert main([str(there), str(tmp_path / "back"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert (
        "bytes were changed" in said
        and "__0_0.distcp: decoder.final_layernorm.weight" in said
    )
    assert not (tmp_path / "back").exists()


def test_a_terminal_sees_bytes_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with bar("converted", 8_000_000, shown=True) as count:
            for _ in range(4):
                count(2_000_000)
    text = read_to_the_end(screen)
    assert "8.0/8.0 MB" in text and re.search(r"\d (MB|GB|kB|bytes)/s", text)
    assert re.search(r"converted: 0.008 GB in [\d.]+ s \([\d.]+ GB/s\)", text)


def test_no_bar_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with bar("converted", 8_000_000, shown=True) as count:
        count(8_000_000)
    assert len(sys.stderr.getvalue().splitlines()) == 1  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with bar("converted", 8_000_000, shown=False) as count:
        count(8_000_000)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="needs Linux's peak of resident memory",
)
def test_memory_holds_two_shards_at_most(launch: Launcher, tmp_path: Path) -> None:
    """In a process of its own: what other tests left with the allocator would count with it."""
    shard = 20 * MB
    target = "tests.checkpoint.convert.peak:growths"
    [growth] = launch.ranks(1, target, folder=tmp_path, shard_bytes=shard).check()
    assert list(growth) == ["there", "on", "back"]
    assert max(growth.values()) < 2 * shard, growth
    assert_same_files(tmp_path / "hf", tmp_path / "back")


def test_a_disk_that_is_full_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may grow beyond 64 KiB: the system refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        code = main([str(folder), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert code == 1 and said.startswith("error: ")
    assert "cannot be written" in said and "File too large" in said
    assert not list(tmp_path.iterdir())
