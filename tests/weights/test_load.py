"""Reading folders: only a rank's own slices, and one clear message for whatever is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.tiny import make_tiny_folder, make_tiny_vision_folder
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.weights.load import ArrivingFolder, load_folder
from megaverl.weights.transports import viewed
from tests.published import stack_experts
from tests.sharding.specs import expert_tp
from tests.weights.ranks import empty_tensors

PADDED = 128


def load(
    folder: Path, shape: GridShape | None = None, dtype: torch.dtype = torch.float32
) -> list[tuple[Layout, dict[str, torch.Tensor]]]:
    """The tensors of every rank of a grid."""
    shape = shape or GridShape()
    spec = ModelSpec.from_folder(folder)
    weights = weights_of(spec)
    layouts = megatron_layouts(weights, spec, shape, padded_vocab_size=PADDED)
    ranks = []
    for rank in range(shape.world_size):
        tensors = empty_tensors(layouts(rank), dtype)
        assert load_folder(folder, layouts(rank), tensors, weights=weights) == []
        ranks.append((layouts(rank), tensors))
    return ranks


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in folder.glob("*.safetensors")
        for name, t in load_file(file).items()
    }


def check(
    layout: Layout, tensors: Mapping[str, torch.Tensor], stored: dict[str, torch.Tensor]
) -> None:
    tensors = viewed(layout, tensors)
    for piece in layout.pieces:
        found = tensors[piece.local][piece.local_box.slices]
        wanted = stored[piece.tensor][piece.box.slices].reshape(found.shape)
        assert torch.equal(found, wanted.to(found.dtype)), piece


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_rank_gets_its_slices(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """One file untied, several with an index tied; vocabulary padding becomes zero."""
    folder = make_tiny_folder(
        tmp_path,
        architecture,
        tie_embeddings=tied,
        shard_bytes=40_000 if tied else None,
    )
    assert (folder / "model.safetensors.index.json").is_file() == tied
    stored = stored_tensors(folder)
    for grid in (GridShape(), GridShape(tp=2, pp=2, **expert_tp(architecture))):
        for layout, tensors in load(folder, grid):
            check(layout, tensors, stored)
            assert not any(tensor.isnan().any() for tensor in tensors.values())
    assert (load(folder)[0][1]["embedding.word_embeddings.weight"][100:] == 0).all()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As GLM-4.5 and DeepSeek-V3 come, behind the last layer, Ernie 4.5 and MiMo; if config.json says so."""
    folder = make_tiny_folder(tmp_path, "Glm4MoeForCausalLM")
    stored = stored_tensors(folder)
    further = {
        "model.layers.4.eh_proj.weight": torch.ones(3),
        "model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(2),
        "model.mtp_emb_norm.0.weight": torch.ones(2),
        "model.mtp_layers.0.input_proj.weight": torch.ones(2),
    }
    save_file(
        {**stored, **further}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(
        ModelError,
        match=r"model\.layers\.4\.eh_proj\.weight: in model.safetensors, but config.json",
    ):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": 1})
    )
    check(*load(folder)[0], stored)


def test_qwen3_nexts_predictors_are_left_out(tmp_path: Path) -> None:
    """Which its config.json does not count."""
    folder = make_tiny_folder(tmp_path, "Qwen3NextForCausalLM")
    stored = stored_tensors(folder)
    save_file(
        {**stored, "mtp.fc.weight": torch.ones(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    check(*load(folder)[0], stored)


def test_nemotron_hs_further_predictors_are_left_out(tmp_path: Path) -> None:
    folder = make_tiny_folder(
        tmp_path, "NemotronHForCausalLM", num_nextn_predict_layers=1
    )
    stored = stored_tensors(folder)
    further = {"mtp.layers.0.norm.weight": torch.ones(3)}
    save_file(
        {**stored, **further}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    check(*load(folder)[0], stored)


def published(folder: Path, *, shards: bool = False) -> Path:
    """A tiny Qwen3.5 with experts in the form of its published folders."""
    make_tiny_vision_folder(folder, "qwen3_5_moe")
    return stack_experts(folder, shards=shards, predictors=True)


def test_experts_that_files_hold_in_one_array(tmp_path: Path) -> None:
    """Each rank reads its parts of its experts, whether the files come at once or one by one."""
    separate = make_tiny_vision_folder(tmp_path / "separate", "qwen3_5_moe")
    stored = stored_tensors(separate)
    shape = GridShape(tp=2, dp=2, ep=2, etp=1)
    for shards in (False, True):
        folder = published(tmp_path / f"stacked{shards}", shards=shards)
        assert not any(".experts.0." in name for name in stored_tensors(folder))
        for layout, tensors in load(folder, shape):
            check(layout, tensors, stored)
    spec = ModelSpec.from_folder(folder)
    weights = weights_of(spec)
    layout = megatron_layouts(weights, spec, shape, padded_vocab_size=PADDED)(1)
    tensors = empty_tensors(layout)
    arriving = ArrivingFolder(folder, layout, tensors, weights=weights)
    for part in sorted(folder.glob("*.safetensors")):
        arriving.read(part)
    assert arriving.finish() == []
    check(layout, tensors, stored)


def test_arrays_of_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = published(tmp_path / "model")
    block = "model.language_model.layers.1.mlp.experts."
    name = f"{block}down_proj"
    right = stored_tensors(folder)[name]
    change(folder, **{name: right[:3].clone()})
    with pytest.raises(
        ModelError, match=r"down_proj has the shape \[3, 64, 32\], expected \[4, 64, 32"
    ):
        load(folder)
    change(folder, **{name: right, f"{block}2.down_proj.weight": right[2].clone()})
    with pytest.raises(ModelError, match="down_proj: in model.safetensors, but"):
        load(folder)


def test_the_dtype_is_converted_on_the_way(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, dtype="bfloat16")
    layout, tensors = load(folder, dtype=torch.float32)[0]
    check(layout, tensors, stored_tensors(folder))
    assert tensors["decoder.final_layernorm.weight"].dtype == torch.float32


def test_a_critic_starts_from_a_folder_without_its_head(tmp_path: Path) -> None:
    """The language-model head is not read, `score.weight` is reported and left alone."""
    folder = make_tiny_folder(tmp_path)
    spec = ModelSpec.from_folder(folder)
    weights = weights_of(spec, value_head=True)
    layout = megatron_layouts(weights, spec, GridShape(), padded_vocab_size=PADDED)(0)
    tensors = {
        name: torch.full(shape, 7.0) for name, shape in layout.local_shapes.items()
    }
    absent = load_folder(
        folder, layout, tensors, weights=weights, optional=["score.weight"]
    )
    assert absent == ["score.weight"]
    assert (tensors["output_layer.weight"] == 7.0).all()
    with pytest.raises(ModelError, match="score.weight: missing"):
        load_folder(folder, layout, tensors, weights=weights)


def test_a_tied_model_may_store_its_head_twice(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, tie_embeddings=True)
    stored = stored_tensors(folder)
    again = stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(again, folder / "model.safetensors", {"format": "pt"})
    check(*load(folder)[0], stored)


def remove_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_shard(folder: Path) -> None:
    make_tiny_folder(folder, shard_bytes=40_000)
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-*")).unlink()


def index_of_another(folder: Path) -> None:
    remove_file(folder)
    make_tiny_folder(folder, shard_bytes=40_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.q.weight"] = next(
        folder.glob("model-00002-*")
    ).name
    index.write_text(json.dumps(content))


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncate_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"\xff" * 12
    file.write_bytes(bytes(data))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = stored_tensors(folder)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_tensor(folder: Path) -> None:
    change(folder, model__layers__1__self_attn__q_proj__bias=None)


def reshape_tensor(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(31))


def add_tensor(folder: Path) -> None:
    change(folder, model__layers__4__input_layernorm__weight=torch.ones(32))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (remove_file, ["neither model.safetensors nor model.safetensors.index.json"]),
        (
            remove_shard,
            ["model-00002-of-", "not found, but model.safetensors.index.json names it"],
        ),
        (
            index_of_another,
            ["model-00002-of-", "has no tensor model.layers.9.q.weight"],
        ),
        (damage_index, ["model.safetensors.index.json", "not a safetensors index"]),
        (truncate, ["model.safetensors", "truncated", "bytes found", "download"]),
        (truncate_header, ["model.safetensors", "truncated"]),
        (empty, ["model.safetensors", "0 bytes"]),
        (damage_header, ["model.safetensors", "header is damaged"]),
        (
            lose_tensor,
            ["model.layers.1.self_attn.q_proj.bias: missing, expected with shape [32]"],
        ),
        (
            reshape_tensor,
            ["model.norm.weight: shape [31] in model.safetensors, expected [32]"],
        ),
        (
            add_tensor,
            [
                "model.layers.4.input_layernorm.weight: in model.safetensors, but config.json"
            ],
        ),
    ],
)
def test_whatever_is_wrong_is_named(
    tiny_folder: Path, tmp_path: Path, damage: Callable[[Path], None], parts: list[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(ModelError) as error:
        load(folder)
    assert str(folder) in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_parameters_that_are_not_the_layouts_are_named(tiny_folder: Path) -> None:
    spec = ModelSpec.from_folder(tiny_folder)
    weights = weights_of(spec)
    layout = megatron_layouts(weights, spec, GridShape(), padded_vocab_size=PADDED)(0)
    tensors = empty_tensors(layout)
    tensors["decoder.final_layernorm.weight"] = torch.zeros(5)
    del tensors["output_layer.weight"]
    both = r"no such parameter: output_layer.weight; shape \[5\], the layout says .*final_layernorm.weight"
    with pytest.raises(ModelError, match=both):
        load_folder(tiny_folder, layout, tensors, weights=weights)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")
