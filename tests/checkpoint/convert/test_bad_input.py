"""Each mistake gives one message that names it, and nothing is written or left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.cli.main import main as megaverl
from megaverl.weights.torch_dist_index import INDEX_FILE, read_arrays
from tests.checkpoint.convert.folders import (
    as_reward_model,
    converted,
    make_model,
    make_tokenizer,
    nothing_changes,
)


def main(arguments: list[str]) -> int:
    """`megaverl convert`"""
    return megaverl(["convert", *arguments])


Mess = Callable[[Path], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with a tokenizer."""
    folder = make_model(tmp_path_factory.mktemp("models") / "hf", shard_bytes=60_000)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """The same as a distributed checkpoint of four ranks."""
    return converted(
        folder, folder.with_name("megatron"), "megatron", grid={"tp": 2, "pp": 2}
    )


def refused(
    arguments: list[str | Path], capsys: pytest.CaptureFixture[str], within: Path
) -> str:
    """What `megaverl convert` says; it writes nothing below `within`."""
    capsys.readouterr()
    with nothing_changes(within):
        code = main([str(each) for each in (*arguments, "--quiet")])
    said = capsys.readouterr().err
    assert code in (1, 2) and said.startswith("error: ") and "Traceback" not in said
    assert not [file for file in within.rglob("*.partial")]
    return said


def in_shard(change: Callable[[dict[str, torch.Tensor]], object]) -> Mess:
    """Change the tensors of the first file, index included."""

    def mess(folder: Path) -> None:
        file, index = first_shard(folder), folder / "model.safetensors.index.json"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        content = json.loads(index.read_text())
        others = {
            name: each
            for name, each in content["weight_map"].items()
            if each != file.name
        }
        content["weight_map"] = others | dict.fromkeys(tensors, file.name)
        index.write_text(json.dumps(content))

    return mess


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


NORM = "model.layers.0.input_layernorm.weight"
FOLDERS: dict[str, tuple[Mess, str]] = {
    "missing tensor": (
        in_shard(lambda tensors: tensors.pop("model.embed_tokens.weight")),
        "model.embed_tokens.weight: missing, expected with shape [100, 32]",
    ),
    "unexpected tensor": (
        in_shard(lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)})),
        "model.extra.weight: in model-",
    ),
    "another shape": (
        in_shard(
            lambda tensors: tensors.update(
                {"model.embed_tokens.weight": torch.ones(64, 32)}
            )
        ),
        "model.embed_tokens.weight: shape [64, 32] in model-",
    ),
    "truncated file": (lambda folder: cut(first_shard(folder)), "truncated"),
    "missing file": (
        lambda folder: first_shard(folder).unlink(),
        "not found, but model.safetensors.index.json names",
    ),
    "not safetensors": (
        lambda folder: first_shard(folder).write_bytes(b"PK\3\4" + b"x" * 99),
        "not a safetensors",
    ),
    "damaged index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "not a safetensors index",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config.json of another model": (
        lambda folder: write_json(
            folder / "config.json",
            num_hidden_layers=3,
            layer_types=["full_attention"] * 3,
        ),
        "model.layers.3.",
    ),
    "only pickles": (
        lambda folder: [file.unlink() for file in folder.glob("model*")],
        "holds pytorch_model.bin, whose we",
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_hugging_face_folders(
    what: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mess, expected = FOLDERS[what]
    shutil.copytree(folder, tmp_path / "hf")
    mess(tmp_path / "hf")
    said = refused([tmp_path / "hf", tmp_path / "out"], capsys, tmp_path)
    assert expected in said and "hf" in said


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pickles_ran",)


def evil_index(folder: Path) -> None:
    (folder / INDEX_FILE).write_bytes(pickle.dumps(Evil()))


def evil_chunk(folder: Path) -> None:
    """A chunk whose description would run something."""
    chunk = read_arrays(folder)["embedding.word_embeddings.weight"].chunks[0]

    def archive(filling: int) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as writer:
            writer.writestr("archive/data.pkl", pickle.dumps(Evil(), protocol=2))
            writer.writestr("archive/version", b"3\n")
            writer.writestr("archive/data/0", bytes(filling))
        return stream.getvalue()

    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset)
        file.write(archive(chunk.length - len(archive(0))))


def write_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def any_distcp(folder: Path) -> Path:
    return min(folder.glob("*.distcp"))


CHECKPOINTS: dict[str, tuple[Mess, str]] = {
    "truncated file": (
        lambda folder: cut(any_distcp(folder)),
        "damaged: __0_0.distcp has",
    ),
    "missing file": (
        lambda folder: any_distcp(folder).unlink(),
        "damaged: __0_0.distcp is missing",
    ),
    "missing index": (lambda folder: (folder / INDEX_FILE).unlink(), "nor .metadata"),
    "damaged index": (lambda folder: cut(folder / INDEX_FILE), "refused"),
    "a pickle that runs something": (
        evil_index,
        "refused: UnpicklingError: it names posix.system",
    ),
    "a chunk that runs something": (
        evil_chunk,
        "is damaged: it names more than a plain tensor's parts",
    ),
    "another format": (
        lambda folder: write_json(folder / "metadata.json", sharded_backend="zarr"),
        "format 'zarr'",
    ),
    "a newer record": (
        lambda folder: write_json(folder / "conversion.json", format=2),
        "written by a newer megaverl",
    ),
    "another model": (
        lambda folder: write_json(folder / "config.json", intermediate_size=48),
        "decoder.layers.mlp.linear_fc1.weight: shape [4, 128, 32], expected [4, 96, 32]",
    ),
    "another architecture": (
        lambda folder: write_json(
            folder / "config.json",
            architectures=["LlamaForCausalLM"],
            model_type="llama",
        ),
        "not a weight of the model that config.json describes",
    ),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_checkpoints(
    what: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mess, expected = CHECKPOINTS[what]
    shutil.copytree(checkpoint, tmp_path / "megatron")
    mess(tmp_path / "megatron")
    monkeypatch.chdir(tmp_path)
    for to in ("hf", "megatron"):
        said = refused(
            [tmp_path / "megatron", tmp_path / "out", "--to", to], capsys, tmp_path
        )
        assert expected in said and "megatron" in said
    assert not Path("pickles_ran").exists()


def test_paths(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    shutil.copytree(folder, tmp_path / "hf")
    source, out = tmp_path / "hf", tmp_path / "out"
    cases: list[tuple[list[str | Path], str]] = [
        ([file, out], "file: a file, not a folder"),
        ([tmp_path / "nowhere", out], "nowhere: no such folder"),
        ([tmp_path / "empty", out], "empty: holds no model"),
        ([tmp_path / "empty", out, "--tp", "2"], "empty: holds no model"),
        ([tmp_path / "nowhere", out, "--tp", "2"], "nowhere: no such folder"),
        (
            [tmp_path / "pickled", out],
            "holds pytorch_model-00001-of-00002.bin, whose weights are pickled",
        ),
        (
            [tmp_path / "pickled", out, "--tp", "2"],
            "holds pytorch_model-00001-of-00002.bin, whose weights are pickled",
        ),
        ([source, file], "file: a file, not a folder"),
        ([source, file / "below"], "cannot be written"),
        ([source, full], "exists already"),
        ([source, source, "--force"], "would replace the source"),
        ([source, tmp_path, "--force"], "would replace the source"),
        ([source, out, "--model", tmp_path / "empty"], "config.json"),
        ([source, out, "--tokenizer", tmp_path / "empty"], "empty"),
        ([source, out, "--shard-size", "much"], "--shard-size much"),
        (
            [source, out, "--to", "hf", "--tp", "2", "--prefix", "actor."],
            "--tp, --prefix: only for a Megatron target",
        ),
        ([source, out, "--tp", "3"], "tp"),
        (
            [file.with_suffix(".gguf"), out, "--to", "megatron", "--verify"],
            "--to megatron from a .gguf file",
        ),
    ]
    for arguments, expected in cases:
        assert expected in refused(arguments, capsys, tmp_path), arguments


def test_a_tokenizer_that_differs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path / "other", first="x")
    said = refused(
        [folder, tmp_path / "out", "--tokenizer", tmp_path / "other"], capsys, tmp_path
    )
    assert (
        "88 of its ids mean another token, the first is 2: 'x2' instead of 'w2'" in said
    )
    make_tokenizer(tmp_path / "large", words=101)
    said = refused(
        [folder, tmp_path / "out", "--tokenizer", tmp_path / "large"], capsys, tmp_path
    )
    assert "does not fit" in said and "100" in said


def test_two_heads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    in_shard(lambda tensors: tensors.update({"score.weight": torch.ones(1, 32)}))(
        tmp_path / "hf"
    )
    said = refused([tmp_path / "hf", tmp_path / "out"], capsys, tmp_path)
    assert "score.weight" in said


def test_a_second_head_that_is_not_tied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found only while the weights are read: the draft is gone all the same."""
    folder = make_model(tmp_path / "hf", tie_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": torch.ones(100, 32)}, folder / "model.safetensors"
    )
    assert "config.json says that they are tied" in refused(
        [folder, tmp_path / "out"], capsys, tmp_path
    )


def test_a_classifier_of_several_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = as_reward_model(
        make_model(tmp_path / "causal", "LlamaForCausalLM"), tmp_path / "hf"
    )
    write_json(reward / "config.json", num_labels=3)
    assert "a classifier with 3 labels" in refused(
        [reward, tmp_path / "out"], capsys, tmp_path
    )


def test_what_exists_is_replaced_only_when_asked(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    (out / "deep" / "mine").write_text("mine")
    arguments = [str(folder), str(out), "--quiet"]
    with nothing_changes(tmp_path):
        assert main(arguments) == 1
    leftover = tmp_path / ".out.partial"  # of a conversion that was killed
    leftover.mkdir()
    (leftover / "torn").write_text("torn")
    assert main([*arguments, "--force"]) == 0
    assert not (out / "deep").exists() and (out / INDEX_FILE).is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
