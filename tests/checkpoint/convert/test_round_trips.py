"""Hugging Face -> Megatron -> Megatron -> Hugging Face gives the same bytes, for every model and grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.checkpoint.convert.source import CONVERSION_FILE, open_source
from megaverl.errors import CheckpointError
from megaverl.models.tiny import FAMILIES, make_tiny_vision_folder
from megaverl.sharding.model_spec import ARCHITECTURES
from megaverl.weights.torch_dist_index import read_arrays
from tests.checkpoint.convert.folders import (
    as_reward_model,
    assert_same_files,
    converted,
    make_model,
    make_tokenizer,
)
from tests.published import stack_experts
from tests.sharding.specs import NEMOTRON_EXPERTS, expert_tp, make_spec

WITH_EXPERTS = [name for name in ARCHITECTURES if make_spec(name).moe]
EMBEDDING = "embedding.word_embeddings.weight"


def grids_of(architecture: str, tied: bool) -> list[dict[str, int]]:
    """Tied embeddings are on the first and on the last stage, and stages may come in turn."""
    experts = {"ep": 2, "dp": 2} if architecture in WITH_EXPERTS else {}
    experts |= expert_tp(architecture)
    cut = {"tp": 2, "pp": 2, **experts}
    return [{}, {**cut, "vpp": 2}] if tied else [cut]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tied", "dtype", "shard_bytes"),
    [(True, "bfloat16", 40_000), (False, "float32", None)],
)
def test_the_same_bytes_come_back(
    architecture: str, tied: bool, dtype: str, shard_bytes: int | None, tmp_path: Path
) -> None:
    folder = make_model(
        tmp_path / "hf",
        architecture,
        tie_embeddings=tied,
        dtype=dtype,
        shard_bytes=shard_bytes,
        seed=3,
    )
    for number, grid in enumerate(grids_of(architecture, tied)):
        there = converted(folder, tmp_path / f"there{number}", "megatron", grid=grid)
        on = converted(
            there,
            tmp_path / f"on{number}",
            "megatron",
            grid={
                "pp": 4,
                **({"ep": 4, "dp": 4} if architecture in WITH_EXPERTS else {}),
            },
            prefix="actor." if number else "",
            transformer_engine=number == 0,
        )
        back = converted(on, tmp_path / f"back{number}", "hugging_face", verify=True)
        assert_same_files(folder, back)


def test_layers_of_experts_alone_come_back(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "NemotronHForCausalLM", **NEMOTRON_EXPERTS)
    grid = {"tp": 2, "pp": 2, "ep": 2, "dp": 2}
    there = converted(folder, tmp_path / "there", "megatron", grid=grid)
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    assert_same_files(folder, back)


def test_layers_that_predict_further_tokens_do_not_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MiMo's: they are named when they are left out. All else keeps its bytes."""
    config = {"num_nextn_predict_layers": 1}
    folder = make_model(tmp_path / "hf", "MiMoForCausalLM", **config)
    further = {f"model.mtp_layers.0.{name}.weight": torch.ones(3) for name in "ab"}
    stored = load_file(folder / "model.safetensors")
    save_file(stored | further, folder / "model.safetensors", metadata={"format": "pt"})
    there = converted(folder, tmp_path / "there", "megatron", quiet=False)
    said = capsys.readouterr().err
    assert "skipped: 2 arrays of layers that predict further tokens (model.mtp_" in said
    assert "not weights" not in said
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    come_back = load_file(back / "model.safetensors")
    assert come_back.keys() == stored.keys()
    assert all(torch.equal(come_back[name], x) for name, x in stored.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_images_comes_back(family: str, tmp_path: Path) -> None:
    """Its tower too, and its logits of text do not change. Qwen3-VL stores a tied output layer as well."""
    tied = family != "qwen2_5_vl"
    folder = make_tiny_vision_folder(tmp_path / "hf", family, tie_embeddings=tied)
    if family == "qwen3_vl":
        file = folder / "model.safetensors"
        stored = load_file(file)
        head = stored["model.language_model.embed_tokens.weight"].clone()
        save_file(stored | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    grid = {"tp": 2, "pp": 2}
    there = converted(folder, tmp_path / "there", "megatron", grid=grid, logits=True)
    tower = {key for key in read_arrays(there) if key.startswith("embedding.visual.")}
    assert len(tower) > 20
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    assert_same_files(folder, back)


@pytest.mark.parametrize("shards", [False, True])
def test_experts_in_one_array_come_back(shards: bool, tmp_path: Path) -> None:
    """As Qwen3.5's published folders have them. Other file sizes hold a matrix of each expert."""
    folder = make_tiny_vision_folder(tmp_path / "hf", "qwen3_5_moe", dtype="bfloat16")
    separate = load_file(folder / "model.safetensors")
    stack_experts(folder, shards=shards)
    grid = {"tp": 2, "pp": 2, "ep": 2, "dp": 2}
    there = converted(folder, tmp_path / "there", "megatron", grid=grid, verify=True)
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    assert_same_files(folder, back)
    files = converted(
        there, tmp_path / "files", "hugging_face", shard_bytes=100_000_000, verify=True
    )
    assert_same_tensors(files, separate)


def test_experts_in_one_array_come_back_without_predictors(tmp_path: Path) -> None:
    """Their files cannot be written again, and hold a matrix of each expert instead."""
    folder = make_tiny_vision_folder(tmp_path / "hf", "qwen3_5_moe")
    separate = load_file(folder / "model.safetensors")
    stack_experts(folder, predictors=True)
    there = converted(folder, tmp_path / "there", "megatron")
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    assert_same_tensors(back, separate)


def assert_same_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """A folder of one file has these tensors."""
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_checkpoint_of_others_whose_experts_have_another_order_is_refused(
    tmp_path: Path,
) -> None:
    """gpt-oss's: gates first there, in turn here; what tells them apart is the record of a conversion or of a run."""
    there = converted(
        make_model(tmp_path / "hf", "GptOssForCausalLM"), tmp_path / "there", "megatron"
    )
    (there / "conversion.json").unlink()
    with pytest.raises(
        CheckpointError,
        match="gates first; GptOssForCausalLM alternates gate and up rows",
    ):
        open_source(there)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_reward_model_comes_back(architecture: str, tmp_path: Path) -> None:
    causal = make_model(tmp_path / "causal", architecture)
    folder = as_reward_model(causal, tmp_path / "hf")
    there = converted(
        folder, tmp_path / "there", "megatron", grid={"tp": 2, "pp": 2}, verify=True
    )
    assert read_arrays(there)["output_layer.weight"].shape == (1, 32)
    assert_same_files(
        folder, converted(there, tmp_path / "back", "hugging_face", verify=True)
    )


def test_a_critic_under_its_backbones_config_becomes_a_reward_model(
    tmp_path: Path,
) -> None:
    """As a run's critic is: config.json says ForCausalLM, the weights have a value head."""
    causal = make_model(tmp_path / "causal", "Qwen3ForCausalLM", tie_embeddings=True)
    reward = as_reward_model(causal, tmp_path / "reward")
    (reward / "config.json").write_bytes((causal / "config.json").read_bytes())
    there = converted(reward, tmp_path / "there", "megatron", grid={"tp": 2})
    back = converted(there, tmp_path / "back", "hugging_face", verify=True, logits=True)
    config = json.loads((back / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert len(config["id2label"]) == 1
    assert torch.equal(
        load_file(back / "model.safetensors")["score.weight"],
        load_file(reward / "model.safetensors")["score.weight"],
    )
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(back)
    assert torch.equal(
        model.score.weight, load_file(reward / "model.safetensors")["score.weight"]
    )


def test_the_vocabulary_is_padded_for_megatron_and_not_for_hugging_face(
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path / "hf", vocab_size=101)
    there = converted(folder, tmp_path / "there", "megatron", grid={"tp": 4, "pp": 1})
    index, source = read_arrays(there), open_source(there)
    rows = index[EMBEDDING].shape[0]
    assert (
        rows > 101 and rows % 4 == 0 and index["output_layer.weight"].shape[0] == rows
    )
    assert {weight.shape[0] for weight in source.weights if weight.shape[0] > 100} >= {
        101
    }
    back = converted(there, tmp_path / "back", "hugging_face")
    assert load_file(back / "model.safetensors")["lm_head.weight"].shape[0] == 101
    assert_same_files(folder, back)


def test_tokenizer_chat_template_and_generation_config_go_along(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf")
    make_tokenizer(folder)
    there = converted(folder, tmp_path / "there", "megatron")
    back = converted(there, tmp_path / "back", "hugging_face")
    for output in (there, back):
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ):
            assert (output / name).read_bytes() == (folder / name).read_bytes()
        assert (output / "LICENSE").is_file()
        assert not (output / "pytorch_model.bin").exists()


def test_another_tokenizer_may_be_carried(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf")
    make_tokenizer(folder)
    make_tokenizer(tmp_path / "longer", words=95)
    back = converted(
        converted(folder, tmp_path / "there", "megatron"),
        tmp_path / "back",
        "hugging_face",
        tokenizer=tmp_path / "longer",
    )
    assert (back / "tokenizer.json").read_bytes() == (
        tmp_path / "longer" / "tokenizer.json"
    ).read_bytes()
    assert (back / "generation_config.json").read_bytes() == (
        folder / "generation_config.json"
    ).read_bytes()


def test_a_stored_copy_of_a_tied_head_and_buffers_are_restored(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", tie_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    there = converted(folder, tmp_path / "there", "megatron")
    assert "output_layer.weight" not in read_arrays(there)
    assert_same_files(folder, converted(there, tmp_path / "back", "hugging_face"))

    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    there = converted(folder, tmp_path / "with_buffer", "megatron")
    assert_same_files(folder, converted(there, tmp_path / "with", "hugging_face"))
    narrower = converted(
        there, tmp_path / "without", "hugging_face", dtype=torch.bfloat16
    )
    assert set(tensors) - set(load_file(narrower / "model.safetensors")) == {
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    }
    record = json.loads((there / CONVERSION_FILE).read_text())
    del record["buffers"]  # as earlier releases wrote it
    (there / CONVERSION_FILE).write_text(json.dumps(record))
    assert "lm_head.weight" not in load_file(
        converted(there, tmp_path / "old", "hugging_face") / "model.safetensors"
    )


def test_weights_of_several_dtypes_keep_them(tmp_path: Path) -> None:
    """As DeepSeek's folders: a router's bias in float32 among bfloat16."""
    folder = make_model(tmp_path / "hf", "DeepseekV3ForCausalLM", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors |= {name: tensors[name].float() + 1e-4 for name in biases}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    there = converted(
        folder,
        tmp_path / "there",
        "megatron",
        grid={"pp": 2, "ep": 2, "dp": 2},
        verify=True,
    )
    back = converted(there, tmp_path / "back", "hugging_face", verify=True)
    found = load_file(back / "model.safetensors")
    assert biases and all(found[name].dtype == torch.float32 for name in biases)
    assert_same_files(folder, back)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"shard_bytes": 30_000}], ids=str
)
def test_dtype_and_file_size_may_be_chosen(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "hf")
    there = converted(
        folder, tmp_path / "there", "megatron", grid={"tp": 2}, verify=True, **options
    )
    back = converted(there, tmp_path / "back", "hugging_face", verify=True, **options)
    before = load_file(folder / "model.safetensors")
    after = {
        name: tensor
        for file in back.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    wanted = options.get("dtype", torch.float32)
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[name], tensor.to(wanted)) for name, tensor in before.items()
    )
    if "shard_bytes" in options:
        assert all(file.stat().st_size < 35_000 for file in back.glob("*.safetensors"))
        assert all(file.stat().st_size < 35_000 for file in there.glob("*.distcp"))
    else:
        assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
