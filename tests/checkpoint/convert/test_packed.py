"""A folder in a compressed-tensors format has the tensors that quantising each matrix alone gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.checkpoint.convert import packed, run
from megaverl.cli.main import main as megaverl
from megaverl.errors import CheckpointError
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.quantization import compressed_config
from megaverl.weights.transports.quantised import packed_matrix
from tests.checkpoint.convert.folders import converted, make_model

# Layers that vLLM fuses, and that share NVFP4's scale of a whole matrix.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Groups of 64; the down-projection has rows for several slabs of eight rows.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
METHODS = ["int4_g32", "int4_asym_g64", "mxfp8", "nvfp4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    return make_model(folder, "Qwen2ForCausalLM", dtype="bfloat16", **SIZES)


@pytest.mark.parametrize("method", METHODS)
def test_every_matrix_is_quantised_alone(
    folder: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four slabs or more for a matrix.
    monkeypatch.setattr(packed, "ROWS_NUMEL", 64 * 16)
    there = converted(folder, tmp_path / "megatron", "megatron", grid={"tp": 2})
    for source, shard_bytes in ((folder, None), (there, 30_000)):
        target = tmp_path / f"out_{source.name}"
        converted(
            source,
            target,
            "hugging_face",
            quantization=method,
            shard_bytes=shard_bytes,
            verify=True,
        )
        expected = quantised_tensors_of(folder, method)
        files = sorted(target.glob("*.safetensors"))
        assert (len(files) > 1) == (shard_bytes is not None)
        stored: dict[str, torch.Tensor] = {}
        for file in files:
            stored |= load_file(file)
        assert stored.keys() == expected.keys()
        for name, tensor in expected.items():
            assert stored[name].dtype == tensor.dtype, name
            assert torch.equal(bits(stored[name]), bits(tensor)), name
        config = json.loads((target / "config.json").read_text())
        assert config["quantization_config"] == compressed_config(method)
        assert (target / "LICENSE").exists() or source is there


def quantised_tensors_of(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Quantise a folder's linear layers one by one, as llm-compressor stores them."""
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        owner = name.removesuffix(".weight")
        kind = owner.rpartition(".")[2]
        fused = next((each for each in FUSED if kind in each), (kind,))
        peers = [tensors[f"{owner.removesuffix(kind)}{k}.weight"] for k in fused]
        largest = torch.stack([peer.abs().max() for peer in peers]).max().float()
        quantised = packed_matrix(tensor, method, torch.bfloat16, largest)
        stored |= {f"{owner}.{key}": value for key, value in quantised.items()}
    return stored


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_verify_notices_a_flipped_byte(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_items = run.write_items

    def write_and_flip(draft: Path, *arguments: object) -> None:
        write_items(draft, *arguments)  # type: ignore[arg-type]
        file = draft / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.1.mlp.down_proj.weight_packed"
        tensors[name][3, 1] ^= 1
        header = file.read_bytes()[:8]
        length = int.from_bytes(header, "little")
        entry = json.loads(file.read_bytes()[8 : 8 + length])[name]
        with file.open("r+b") as out:
            out.seek(8 + length + entry["data_offsets"][0])
            out.write(bits(tensors[name]).numpy().tobytes())

    monkeypatch.setattr(run, "write_items", write_and_flip)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        converted(
            folder,
            tmp_path / "out",
            "hugging_face",
            quantization="int4_g32",
            verify=True,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("architecture", "arguments", "said"),
    [
        ("Qwen2", ["--quantization=int3"], "unknown; use one of int4_g32"),
        ("Qwen2", ["--quantization=nvfp4", "--to=megatron"], "only for a Hugging"),
        ("Qwen2", ["--quantization=nvfp4", "--logits"], "other logits; leave it out"),
        ("Qwen2", ["--quantization=int4_g128"], "hidden_size=64"),
        ("Mixtral", ["--quantization=mxfp8"], "routed experts"),
    ],
)
def test_what_has_no_place_in_a_format_is_refused(
    folder: Path,
    tmp_path: Path,
    architecture: str,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = folder
    if architecture != "Qwen2":
        source = Path(
            make_tiny_folder(tmp_path / "model", f"{architecture}ForCausalLM")
        )
    arguments = ["--to=hf", *arguments]
    assert megaverl(["convert", str(source), str(tmp_path / "out"), *arguments]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
