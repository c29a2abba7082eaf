"""The command: verification that can fail, progress, memory, writing that fails, and torchrun."""

from __future__ import annotations

import io
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.cli.convert import main
from megaverl.convert.logits import compare_logits
from megaverl.convert.progress import bar
from megaverl.convert.run import process_group
from megaverl.convert.source import open_source
from megaverl.convert.verify import compare_bytes
from megaverl.errors import CheckpointError
from megaverl.models.architectures import weights_of
from megaverl.models.spec import ModelSpec
from megaverl.reshard.safetensors_writer import FolderWriter
from megaverl.reshard.stored import Reader
from megaverl.reshard.torch_dist import read_index
from tests.convert.folders import assert_same_files, converted, make_model
from tests.terminals import read_to_the_end
from tests.worlds import ROOT

MB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hf", tie_embeddings=True)


def test_the_scripts_and_the_command_are_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, on, back = (str(tmp_path / name) for name in ("there", "on", "back"))
    assert main([str(folder), there, "--tp=2", "--verify"]) == 0
    assert main([there, on, "--to=megatron", "--pp=4", "--prefix=actor.", "--verify"]) == 0
    assert main([on, back, "--logits"]) == 0
    said = capsys.readouterr()
    assert f"{on} -> {back}" in said.out
    assert "compared" in said.err and "logits agree" in said.err
    assert_same_files(folder, Path(back))
    for name in ("hf_to_megatron", "megatron_to_hf", "megatron_to_megatron"):
        assert "from megaverl.cli.convert import main" in (ROOT / "tools" / f"convert_{name}.py").read_text()


def test_verify_names_what_differs(folder: Path, tmp_path: Path) -> None:
    there = converted(folder, tmp_path / "there", "megatron")
    back = converted(there, tmp_path / "back", "hugging_face")
    tensors = load_file(back / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = -0.0
    tensors["model.norm.weight"][:2] += 1
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    source, written = open_source(there), open_source(back)
    expected = r"mlp.up_proj.weight: 1 of 2048 elements; model.norm.weight: 2 of 32 elements"
    with Reader(source.arrays) as reader, Reader(written.arrays) as again, process_group():
        with pytest.raises(CheckpointError, match=expected):
            compare_bytes(source, reader, written, again, shown=False)
        with pytest.raises(CheckpointError, match="computes something else: at .sample, position, output."):
            compare_logits(source, written, shown=False)


def test_a_flipped_byte_of_a_checkpoint_is_found(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = converted(folder, tmp_path / "there", "megatron")
    chunk = read_index(there)["decoder.final_layernorm.weight"].chunks[0]
    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset + chunk.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert main([str(there), str(tmp_path / "back"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert "bytes were changed" in said and "__0_0.distcp: decoder.final_layernorm.weight" in said
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


def make_large(folder: Path, num_layers: int, shard_bytes: int) -> int:
    """A model of some size, without transformers; returns its bytes."""
    small = make_model(folder, num_hidden_layers=1, hidden_size=512, intermediate_size=2048, dtype="bfloat16")
    config = (small / "config.json").read_text().replace('"num_hidden_layers": 1', f'"num_hidden_layers": {num_layers}')
    (small / "config.json").write_text(config)
    (small / "model.safetensors").unlink()
    weights = weights_of(ModelSpec.from_folder(small))
    with FolderWriter(small, weights, torch.bfloat16, shard_bytes, writes=True) as writer:
        for number, weight in enumerate(weights):
            writer.write([torch.full(weight.shape, number, dtype=torch.bfloat16)])
        assert writer.finish() is None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grew at most during `work`."""

    def status(key: str) -> int:
        return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of resident memory")
def test_memory_holds_two_shards_at_most(tmp_path: Path) -> None:
    shard = 20 * MB
    assert make_large(tmp_path / "hf", 28, shard) > 10 * shard
    # what is imported only then
    warm = converted(make_model(tmp_path / "warm"), tmp_path / "warm_up", "megatron", verify=True)
    converted(warm, tmp_path / "warm_back", "hugging_face", verify=True)
    steps = {
        "there": lambda: converted(tmp_path / "hf", tmp_path / "there", "megatron", grid={"tp": 2}, verify=True),
        "on": lambda: converted(tmp_path / "there", tmp_path / "on", "megatron", grid={"tp": 4, "pp": 2}),
        "back": lambda: converted(tmp_path / "on", tmp_path / "back", "hugging_face", verify=True),
    }
    for name, step in steps.items():
        assert peak_growth(step) < 2 * shard, name
    assert_same_files(tmp_path / "hf", tmp_path / "back")


def test_a_disk_that_is_full_leaves_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
